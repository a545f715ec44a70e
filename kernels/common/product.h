//! A block's product of repacked weight rows and token rows, for few tokens (K split over waves) and for many (tokens staged).
//!
//! Both forms give the same bits: see weight_tile.h for the order of sums. Nothing is written for a token row that does not
//! exist: few tokens read the first in its place, many read zeros. The columns of a matrix instruction are independent, so a row reaches no other row's result.
#pragma once
#include "swiglu.h"
#include "weight_tile.h"

/// What a block of threads works on. Token i of the block reads `row_at(rows, i, row tile)` and writes y + i * y_stride.
struct Product {
    const u8* codes;
    const u8* scales;
    void* y;  // [n_tokens, y_stride] f32, or bf16
    u64 y_stride;
    u32 n_rows, n_cols, n_tokens, splits;
    u32 first_row_tile;
    bool is_rounded;  // y is bf16
};

/// A second matrix of a product's shape and input, and what becomes of both results: p.y takes swiglu(result, second result), bf16.
struct Pair {
    const u8* codes;
    const u8* scales;
    const float* weights;  // [n_tokens] f32
    float limit;
};

/// Writes one result of a pair.
DEVICE void write_activation(const Product& p, const Pair& pair, u32 token, u32 row, float gate, float up) {
    ((u16*)p.y)[token * p.y_stride + row] = f32_to_bf16(swiglu_of(gate, up, pair.limit, pair.weights[token]));
}

/// Writes one result.
DEVICE void write_result(const Product& p, u32 token, u32 row, float sum) {
    u64 at = token * p.y_stride + row;
    if (p.is_rounded) {
        ((u16*)p.y)[at] = f32_to_bf16(sum);
    } else {
        ((float*)p.y)[at] = sum;
    }
}

// Few tokens ---------------------------------------------------------------------------------------

/// Floats from one token of a wave's partial sums to the next: 16 rows and 4 more, so that lanes meet in no bank.
constexpr u32 PARTIAL_STRIDE = 20;

/// Floats of shared memory that `multiply_few` wants for a number of token tiles.
DEVICE constexpr u32 n_partials(u32 n_tiles) { return PRODUCT_WAVES * n_tiles * TILE_N * PARTIAL_STRIDE; }

/// Units of one request, four loads of codes a lane: a step of FP8, two or four of MXFP4, half a step or a whole one of BF16.
constexpr u32 AHEAD = 4 / LANE_ROWS;

/// What is asked for before it is used: codes, the scale of FP8, and the columns of few tokens, except for MXFP4, whose would be too many.
template <u32 FORMAT, u32 N_TILES> struct Request {
    static constexpr u32 BLOCKS = AHEAD * UnitOf<FORMAT>::BLOCKS, PER_STEP = UnitOf<FORMAT>::PER_STEP;
    static constexpr bool HAS_X = N_TILES == 1 && FORMAT != FORMAT_MXFP4;
    Unit units[AHEAD];
    U4 x[HAS_X ? BLOCKS : 1];
    float scales[AHEAD > PER_STEP ? AHEAD / PER_STEP : 1];  // of its steps
};

/// One wave's walk over the steps of one row tile.
template <u32 N_TILES> struct Walk {
    RowTile tile;
    const u16* rows[N_TILES];
    u32 n_cols, own_column;
    u32 end;  // the unit after the last
    FragC part[N_TILES], acc[N_TILES];
};

template <u32 FORMAT, u32 N_TILES> DEVICE void request_codes(const Walk<N_TILES>& w, u32 first, Request<FORMAT, N_TILES>& r) {
    constexpr u32 PER_STEP = UnitOf<FORMAT>::PER_STEP;
    if (first >= w.end) return;
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) {
        // A range of whole steps ends inside a request of several only.
        if (AHEAD > PER_STEP && first + i >= w.end) break;
        load_unit<FORMAT, true>(r.units[i], w.tile, first + i);
        if (i % PER_STEP == 0) r.scales[i / PER_STEP] = step_scale<FORMAT>(w.tile, (first + i) / PER_STEP);
    }
}

/// Block b of a request's columns of a token tile.
template <u32 FORMAT, u32 N_TILES> DEVICE U4 load_block(const Walk<N_TILES>& w, u32 first, u32 b, u32 token_tile) {
    return load_row8(w.rows[token_tile], first * UnitOf<FORMAT>::COLS + b * BLOCK_COLS + w.own_column, w.n_cols);
}

template <u32 FORMAT, u32 N_TILES> DEVICE void request_x(const Walk<N_TILES>& w, u32 first, Request<FORMAT, N_TILES>& r) {
    if constexpr (Request<FORMAT, N_TILES>::HAS_X) {
        if (first >= w.end) return;
#pragma unroll
        for (u32 b = 0; b < r.BLOCKS; b++) r.x[b] = load_block<FORMAT, N_TILES>(w, first, b, 0);
    }
}

/// Adds the products of one request. With eight token tiles blocks are not unrolled: the loads of several would not fit.
template <u32 FORMAT, u32 N_TILES> DEVICE void multiply_request(Walk<N_TILES>& w, u32 first, const Request<FORMAT, N_TILES>& r) {
    constexpr u32 PER_STEP = UnitOf<FORMAT>::PER_STEP, UNIT_BLOCKS = UnitOf<FORMAT>::BLOCKS;
    [[maybe_unused]] constexpr u32 UNROLL = N_TILES < 8 ? 8 : 1;
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) {
        if (first + i >= w.end) break;
        if ((first + i) % PER_STEP == 0) clear<N_TILES>(w.part);
#pragma unroll UNROLL
        for (u32 b = 0; b < UNIT_BLOCKS; b++) {
            U4 x[N_TILES];
#pragma unroll
            for (u32 t = 0; t < N_TILES; t++) {
                if constexpr (Request<FORMAT, N_TILES>::HAS_X) x[t] = r.x[i * UNIT_BLOCKS + b];
                else x[t] = load_block<FORMAT, N_TILES>(w, first, i * UNIT_BLOCKS + b, t);
            }
            FragA a[2];
            expand_block<FORMAT>(r.units[i], b, a);
            multiply_block<N_TILES>(a, x, w.part);
        }
        if ((first + i) % PER_STEP == PER_STEP - 1) add_step<N_TILES>(w.acc, w.part, r.scales[i / PER_STEP]);
    }
}

/// acc = a range of steps of one row tile. The next request goes out before the present one is used, the first of all before anything
/// that says where the tokens are.
template <u32 FORMAT, u32 N_TILES, class Rows>
DEVICE void multiply_range(
    const Product& p, const RowTile& t, const Rows& x_rows, u32 tile, u32 first_step, u32 end_step, Walk<N_TILES>& w) {
    constexpr u32 PER_STEP = UnitOf<FORMAT>::PER_STEP, N = AHEAD;
    w.tile = t;
    w.n_cols = p.n_cols;
    w.own_column = opaque(quarter_of(lane()) * 8);  // to be kept, not found again
    w.end = end_step * PER_STEP;
    u32 unit = first_step * PER_STEP;
    Request<FORMAT, N_TILES> even, odd;
    request_codes<FORMAT, N_TILES>(w, unit, even);
#pragma unroll
    for (u32 i = 0; i < N_TILES; i++) {
        u32 token = i * TILE_N + b_col(lane(), 0);
        w.rows[i] = row_at(x_rows, token < p.n_tokens ? token : 0, tile);
    }
    request_x<FORMAT, N_TILES>(w, unit, even);
    clear<N_TILES>(w.acc);
#pragma unroll 1
    for (; unit < w.end; unit += 2 * N) {
        request_codes<FORMAT, N_TILES>(w, unit + N, odd);
        request_x<FORMAT, N_TILES>(w, unit + N, odd);
        multiply_request<FORMAT, N_TILES>(w, unit, even);
        request_codes<FORMAT, N_TILES>(w, unit + 2 * N, even);
        request_x<FORMAT, N_TILES>(w, unit + 2 * N, even);
        multiply_request<FORMAT, N_TILES>(w, unit + N, odd);
    }
}

/// One wave's range of K of one row tile and at most N_TILES * TILE_N tokens, to the wave's place in `partial`.
template <u32 FORMAT, u32 N_TILES, class Rows>
DEVICE void multiply_split(const Product& p, const u8* codes, const u8* scales, u32 tile, const Rows& x_rows, float* partial) {
    constexpr u32 TOKENS = N_TILES * TILE_N;
    u32 n_steps = ceil_div(p.n_cols, STEP_COLS), split = wave() & (p.splits - 1);
    u32 first = first_step_of(split, p.splits, n_steps), end = first_step_of(split + 1, p.splits, n_steps);
    Walk<N_TILES> walk;
    multiply_range<FORMAT, N_TILES>(p, row_tile<FORMAT>(codes, scales, tile, n_steps), x_rows, tile, first, end, walk);
#pragma unroll
    for (u32 i = 0; i < N_TILES; i++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 token = i * TILE_N + c_col(lane(), j);
            partial[(wave() * TOKENS + token) * PARTIAL_STRIDE + c_row(lane(), j)] = walk.acc[i].v[j];
        }
    }
}

/// The sum over the ranges of one element of the block's row tile `slot`.
DEVICE float sum_of_splits(const float* partial, u32 n_tokens, u32 splits, u32 slot, u32 token, u32 row_in_tile) {
    float sum = 0.0f;
    for (u32 s = 0; s < splits; s++) {
        sum = sum + partial[((slot * splits + s) * n_tokens + token) * PARTIAL_STRIDE + row_in_tile];
    }
    return sum;
}

/// Row tiles first_row_tile .. + PRODUCT_WAVES / splits of at most N_TILES * TILE_N tokens. Waves that share a row tile take a range of
/// K each; their sums meet in `partial`, shared, [n_partials(N_TILES)].
template <u32 FORMAT, u32 N_TILES, class Rows> DEVICE void multiply_few(const Product& p, const Rows& x_rows, float* partial) {
    constexpr u32 TOKENS = N_TILES * TILE_N;
    u32 tile = p.first_row_tile + (wave() >> log2_of(p.splits));
    if (tile < ceil_div(p.n_rows, TILE_M)) multiply_split<FORMAT, N_TILES>(p, p.codes, p.scales, tile, x_rows, partial);
    // Orders the waves' partial sums before the sums over ranges.
    barrier();
    u32 n_elements = (PRODUCT_WAVES >> log2_of(p.splits)) * TOKENS * TILE_M;
    for (u32 e = thread(); e < n_elements; e += n_threads()) {
        u32 row_in_tile = e % TILE_M, token = e / TILE_M % TOKENS, slot = e / (TILE_M * TOKENS);
        u32 row = (p.first_row_tile + slot) * TILE_M + row_in_tile;
        if (row >= p.n_rows || token >= p.n_tokens) continue;
        write_result(p, token, row, sum_of_splits(partial, TOKENS, p.splits, slot, token, row_in_tile));
    }
}

/// Row tiles of a block of `multiply_few_pair`.
DEVICE constexpr u32 pair_tiles(u32 splits) { return splits < PRODUCT_WAVES ? (PRODUCT_WAVES >> log2_of(splits)) / 2 : 1; }
/// Floats of shared memory that it wants for a number of token tiles: as `multiply_few`, and room for a row tile's results.
DEVICE constexpr u32 n_pair_partials(u32 n_tiles) { return n_partials(n_tiles) + n_tiles * TILE_N * PARTIAL_STRIDE; }

/// As `multiply_few`, for a pair: row tiles first_row_tile .. + pair_tiles(splits) of both matrices, side by side on the block's waves, or one
/// after the other where K is split over all of them. `partial` is shared, [n_pair_partials(N_TILES)].
template <u32 FORMAT, u32 N_TILES, class Rows>
DEVICE void multiply_few_pair(const Product& p, const Pair& pair, const Rows& x_rows, float* partial) {
    constexpr u32 TOKENS = N_TILES * TILE_N;
    bool takes_turns = p.splits == PRODUCT_WAVES;
    u32 slot = wave() >> log2_of(p.splits);
    float* gates = partial + n_partials(N_TILES);  // [TOKENS, PARTIAL_STRIDE], where they take turns
#pragma unroll 1
    for (u32 turn = 0; turn < (takes_turns ? 2 : 1); turn++) {
        bool is_second = takes_turns ? turn == 1 : slot % 2 == 1;
        u32 tile = p.first_row_tile + (takes_turns ? 0 : slot / 2);
        if (tile < ceil_div(p.n_rows, TILE_M)) {
            const u8 *codes = is_second ? pair.codes : p.codes, *scales = is_second ? pair.scales : p.scales;
            multiply_split<FORMAT, N_TILES>(p, codes, scales, tile, x_rows, partial);
        }
        // Orders the waves' partial sums before the sums over ranges.
        barrier();
        if (!takes_turns || is_second) break;
        for (u32 e = thread(); e < TOKENS * TILE_M; e += n_threads()) {
            u32 at = e / TILE_M * PARTIAL_STRIDE + e % TILE_M;
            gates[at] = sum_of_splits(partial, TOKENS, p.splits, 0, e / TILE_M, e % TILE_M);
        }
        // Orders the reads of the first matrix's partial sums before the second's take their place.
        barrier();
    }
    for (u32 e = thread(); e < pair_tiles(p.splits) * TOKENS * TILE_M; e += n_threads()) {
        u32 row_in_tile = e % TILE_M, token = e / TILE_M % TOKENS, local = e / (TILE_M * TOKENS);
        u32 row = (p.first_row_tile + local) * TILE_M + row_in_tile;
        if (row >= p.n_rows || token >= p.n_tokens) continue;
        float gate = takes_turns ? gates[token * PARTIAL_STRIDE + row_in_tile]
                                 : sum_of_splits(partial, TOKENS, p.splits, 2 * local, token, row_in_tile);
        float up = sum_of_splits(partial, TOKENS, p.splits, takes_turns ? 0 : 2 * local + 1, token, row_in_tile);
        write_activation(p, pair, token, row, gate, up);
    }
}

// Many tokens --------------------------------------------------------------------------------------

/// Tokens and row tiles of a block of `multiply_many`: waves stand 4 (rows) by 2 (tokens), each with two row tiles and 32 tokens.
constexpr u32 MANY_TOKENS = 64, MANY_ROW_TILES = 8, MANY_PAIR_TILES = MANY_ROW_TILES / 2;
/// Pieces of 16 bytes from one staged token to the next; the pad spreads the lanes of a load over all banks.
constexpr u32 STAGE_STRIDE = STEP_COLS / 8 + (WAVE == 64 ? 1 : 4);
constexpr u32 STAGE_PIECES = MANY_TOKENS * STAGE_STRIDE;

/// Row tiles first_row_tile .. + MANY_ROW_TILES of at most MANY_TOKENS tokens. `stage` is shared, [2 * STAGE_PIECES]. A wave walks all
/// ranges of K one after the other and adds their sums in the order in which `multiply_few` adds its waves'. With a pair a wave's two row
/// tiles are one of each matrix, first_row_tile .. + MANY_PAIR_TILES.
template <u32 FORMAT, bool IS_PAIR, class Rows>
DEVICE void multiply_many(const Product& p, const Pair& pair, const Rows& x_rows, U4* stage) {
    constexpr u32 N_TILES = 32 / TILE_N, TILES = 2, PER_STEP = UnitOf<FORMAT>::PER_STEP, BLOCKS = UnitOf<FORMAT>::BLOCKS;
    constexpr u32 N_THREADS = PRODUCT_WAVES * WAVE, N_OWN = MANY_TOKENS * 16 / N_THREADS;
    u32 n_steps = ceil_div(p.n_cols, STEP_COLS), n_row_tiles = ceil_div(p.n_rows, TILE_M);
    u32 first_tile = p.first_row_tile + wave() % 4 * (IS_PAIR ? 1 : TILES), first_token = wave() / 4 * 32;
    bool is_active = first_tile < n_row_tiles && first_token < p.n_tokens;

    // What this thread stages of every step: piece thread % 16 of N_OWN tokens.
    const u16* sources[N_OWN];
    U4 staged[N_OWN];
    u32 own_column = thread() % 16 * 8;
#pragma unroll
    for (u32 i = 0; i < N_OWN; i++) {
        u32 token = (thread() + i * N_THREADS) / 16;
        sources[i] = token < p.n_tokens ? row_at(x_rows, token, p.first_row_tile) : nullptr;
        staged[i] = load_x8(sources[i], own_column, p.n_cols);
    }

    RowTile tiles[TILES];
    Unit next[TILES];
    FragC total[TILES][N_TILES], acc[TILES][N_TILES];
#pragma unroll
    for (u32 r = 0; r < TILES; r++) {
        // A row tile past the end is not read: the last one is computed twice and written once.
        u32 tile = min_(first_tile + (IS_PAIR ? 0 : r), n_row_tiles - 1);
        bool is_second = IS_PAIR && r == 1;
        tiles[r] = row_tile<FORMAT>(is_second ? pair.codes : p.codes, is_second ? pair.scales : p.scales, tile, n_steps);
        if (is_active && n_steps > 0) load_unit<FORMAT, false>(next[r], tiles[r], 0);
        clear<N_TILES>(total[r]);
        clear<N_TILES>(acc[r]);
    }

    u32 split = 0;
    for (u32 step = 0; step < n_steps; step++) {
        U4* buffer = stage + step % 2 * STAGE_PIECES;
#pragma unroll
        for (u32 i = 0; i < N_OWN; i++) buffer[(thread() + i * N_THREADS) / 16 * STAGE_STRIDE + thread() % 16] = staged[i];
        // Orders this step's tokens before their readers. The other buffer was last read before this barrier, so the next step may fill it.
        barrier();
#pragma unroll
        for (u32 i = 0; i < N_OWN; i++) staged[i] = load_x8(sources[i], (step + 1) * STEP_COLS + own_column, p.n_cols);
        if (!is_active) continue;
        FragC part[TILES][N_TILES];
#pragma unroll
        for (u32 r = 0; r < TILES; r++) clear<N_TILES>(part[r]);
#pragma unroll
        for (u32 u = 0; u < PER_STEP; u++) {
            Unit now[TILES];
            u32 unit = step * PER_STEP + u + 1;
#pragma unroll
            for (u32 r = 0; r < TILES; r++) {
                now[r] = next[r];
                if (unit < n_steps * PER_STEP) load_unit<FORMAT, false>(next[r], tiles[r], unit);
            }
#pragma unroll
            for (u32 b = 0; b < BLOCKS; b++) {
                U4 x[N_TILES];
#pragma unroll
                for (u32 i = 0; i < N_TILES; i++) {
                    u32 token = first_token + i * TILE_N + b_col(lane(), 0);
                    x[i] = buffer[token * STAGE_STRIDE + (u * BLOCKS + b) * 4 + quarter_of(lane())];
                }
#pragma unroll
                for (u32 r = 0; r < TILES; r++) {
                    FragA a[2];
                    expand_block<FORMAT>(now[r], b, a);
                    multiply_block<N_TILES>(a, x, part[r]);
                }
            }
        }
        bool ends_range = step + 1 == first_step_of(split + 1, p.splits, n_steps);
        split += ends_range;
#pragma unroll
        for (u32 r = 0; r < TILES; r++) {
            add_step<N_TILES>(acc[r], part[r], step_scale<FORMAT>(tiles[r], step));
            if (!ends_range) continue;
            // total + acc * 1 is total + acc.
            add_step<N_TILES>(total[r], acc[r], 1.0f);
            clear<N_TILES>(acc[r]);
        }
    }
    if (!is_active) return;
#pragma unroll
    for (u32 i = 0; i < N_TILES; i++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 token = first_token + i * TILE_N + c_col(lane(), j), row = first_tile * TILE_M + c_row(lane(), j);
            if (token >= p.n_tokens) continue;
            if constexpr (IS_PAIR) {
                if (row < p.n_rows) write_activation(p, pair, token, row, total[0][i].v[j], total[1][i].v[j]);
            } else {
                if (row < p.n_rows) write_result(p, token, row, total[0][i].v[j]);
                if (row + TILE_M < p.n_rows) write_result(p, token, row + TILE_M, total[1][i].v[j]);
            }
        }
    }
}
