//! Attention of one row and up to 16 heads over its window rows, then its compressed rows, both ascending, with a sink.
//!
//! The list is cut into chunks of 64 rows from its start, so that the cuts follow from the row's position alone. A chunk's stored rows
//! lie in shared memory as they are (37 KB) and are expanded into operands when read: heads are the M operand; for the scores rows are
//! the N operand and columns K, for the sums rows are K and columns N. Order: a score is the sum of two halves of 256 columns, each
//! walked in spans of 64 by steps of 16 (four columns of each quarter of 16); times scale. e^score = m 2^n, and a row's weight is m rounded
//! to bf16, times 2 to the power of n less the chunk's largest n. A chunk's total is the sum of its weights (four rows in pairs, then
//! pairs of sixteen lanes), its sums take 16 rows a step from zero. Chunks are merged in ascending order: with `top` the largest n so
//! far, which starts at the sink's, and `now` the larger of it and the chunk's, both sides are scaled by powers of two to `now`, which is
//! exact, and added. The sink's e^sink joins at the end; sums / total, rotated back, bf16. So a head depends on its query and its list.
//!
//! Forms with the same bits: `attention` walks a row's chunks in one block; for few rows `attention_chunks` gives every chunk a block, and
//! `attention_merge` merges their parts, while other blocks of it store the step's rows in the rings, which no query needs any more.
//! Bound: 4 * 512 flops a head and row; bytes, 584 a row for every 16 heads (mostly from L2), and 2 * 2,048 a head and chunk where
//! parts are merged: as much again, so many rows take the first form.
#include "common/ring.h"
#include "common/row.h"

constexpr u32 HEADS = 16, ROWS = 64, N_THREADS = 256, N_WAVES = N_THREADS / WAVE;
/// Bytes from a row to the next in shared memory: a multiple of 16.
constexpr u32 ROW_STRIDE = 592;
/// Score waves: the parity says which half of the columns, the rest which rows.
constexpr u32 SCORE_ROWS = ROWS / (N_WAVES / 2), SCORE_TILES = SCORE_ROWS / TILE_N, HALF_SPANS = KV_DIMS / 2 / 64;
/// Columns of the sums that a wave holds: groups of four tiles, so that a lane reads four consecutive columns at once.
constexpr u32 GROUP_COLS = 4 * TILE_N, GROUPS = KV_DIMS / N_WAVES / GROUP_COLS;
/// Heads of a block of the merge, a thread for four columns.
constexpr u32 MERGE_HEADS = N_THREADS / (KV_DIMS / 4);
/// Elements between heads, padded against bank conflicts.
constexpr u32 SCORE_STRIDE = ROWS + 4, P_STRIDE = ROWS + 8;
static_assert(HEADS == TILE_M && SCORE_TILES == 2 && GROUPS == 2 && N_THREADS == 16 * HEADS, "the shape the phases count on");
static_assert(ROWS * ROW_STRIDE + 8 * HEADS * SCORE_STRIDE + 2 * HEADS * P_STRIDE + 8 * HEADS <= 48 * 1024, "shared memory");

/// Below every exponent: what the largest of a chunk starts from.
constexpr float LEAST = -3.40282347e38f;

struct AttentionArgs {
    Step step;
    const u16* q;           // [T, H, DH] bf16
    const float* sink;      // [H] f32
    u64 own_rows;           // [T, 584] u8
    u64 window_ring;        // slot 0's [n_ring, 584] u8
    u64 slot_stride_bytes;
    u64 blocks;             // block 0's [256/ratio, 584] u8
    u64 block_stride_bytes;
    const u32* chosen;      // [T, k], or null
    const float* freqs;     // [32] f32
    u16* out;               // [T, H, DH] bf16
    float* parts;           // [T, n_chunks, H, DH] f32: each chunk's sums
    float* part_totals;     // [T, n_chunks, H, 2] f32: each chunk's largest exponent and total
    u32 n_heads, head_dim, window, n_ring, ratio, k;
    float scale;
    u32 n_chunks;
};
static_assert(sizeof(AttentionArgs) == 160, "AttentionArgs mirrors src/ops/attention/device.rs");

/// What a row attends to.
struct List {
    u32 t, run, first_pos, first_window, n_window, n_rows;
    const u32* chosen;  // this row's groups, or null: groups 0, 1, ..
};

DEVICE List list_of(const AttentionArgs& args, u32 t, const StepRow& row) {
    List list;
    list.t = t;
    list.run = row.run;
    list.first_pos = args.step.runs[row.run].first_pos;
    list.first_window = row.position + 1 > args.window ? row.position + 1 - args.window : 0;
    list.n_window = row.position + 1 - list.first_window;
    u32 n_groups = visible_groups(row.position, args.ratio);
    bool is_choice = args.chosen && n_groups > args.k;
    list.chosen = is_choice ? args.chosen + (u64)t * args.k : nullptr;
    list.n_rows = list.n_window + (is_choice ? args.k : n_groups);
    return list;
}

/// Address of the list's row i: own rows of the step, the slot's ring, or a block.
DEVICE u64 list_row(const AttentionArgs& args, const List& list, u32 i) {
    const StepRun& run = args.step.runs[list.run];
    if (i >= list.n_window) {
        u32 group = list.chosen ? list.chosen[i - list.n_window] : i - list.n_window;
        return group_row(args.step, run, args.blocks, args.block_stride_bytes, args.ratio, KV_ROW_BYTES, group);
    }
    u32 position = list.first_window + i;
    if (position >= list.first_pos) {
        return args.own_rows + (u64)(run.first_row + position - list.first_pos) * KV_ROW_BYTES;
    }
    return args.window_ring + run.slot * args.slot_stride_bytes + (u64)(position % args.n_ring) * KV_ROW_BYTES;
}

/// Copies a chunk's stored rows, one wave a row; rows past the end become zeros, which no later step takes for NaN.
DEVICE void load_tile(const AttentionArgs& args, const List& list, u32 first, u8* rows) {
    constexpr u32 WORDS = KV_ROW_BYTES / 8;
#pragma unroll 4
    for (u32 r = wave(); r < ROWS; r += N_WAVES) {
        const u64* from = first + r < list.n_rows ? (const u64*)list_row(args, list, first + r) : nullptr;
        u64* to = (u64*)(rows + r * ROW_STRIDE);
#pragma unroll
        for (u32 i = 0; i < ceil_div(WORDS, WAVE); i++) {
            u32 word = i * WAVE + lane();
            if (word < WORDS) to[word] = from ? from[word] : 0;
        }
    }
}

/// Columns col .. col + 16 (a multiple of 16) of a stored row as eight bf16 pairs.
DEVICE void expand16(const u8* row, u32 col, u32 pairs[8]) {
    if (col >= KV_FP8_DIMS) {
        const u64* from = (const u64*)(row + KV_ROPE_AT + 2 * (col - KV_FP8_DIMS));
#pragma unroll
        for (u32 i = 0; i < 4; i++) pairs[2 * i] = (u32)from[i], pairs[2 * i + 1] = (u32)(from[i] >> 32);
        return;
    }
    float scale = e8m0_to_f32(row[KV_SCALES_AT + col / KV_GROUP]);
    U4 codes = load16(row + KV_CODES_AT + col);
    const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        float v[4];
        expand_f8x4(words[i], scale, v);
        pairs[2 * i] = bf16_pair_exact(v[0], v[1]);
        pairs[2 * i + 1] = bf16_pair_exact(v[2], v[3]);
    }
}

/// Columns col .. col + 4 (a multiple of 4) of a stored row.
DEVICE void expand4(const u8* row, u32 col, float v[4]) {
    if (col >= KV_FP8_DIMS) {
        u64 four = *(const u64*)(row + KV_ROPE_AT + 2 * (col - KV_FP8_DIMS));
        v[0] = pair_low((u32)four), v[1] = pair_high((u32)four);
        v[2] = pair_low((u32)(four >> 32)), v[3] = pair_high((u32)(four >> 32));
        return;
    }
    expand_f8x4(*(const u32*)(row + KV_CODES_AT + col), e8m0_to_f32(row[KV_SCALES_AT + col / KV_GROUP]), v);
}

/// A span of 64 columns of the queries as operands; heads past the last are zeros. They are read again for every chunk, from the
/// nearest cache: held in registers (64 of them on sm_90) they would halve the blocks that run side by side.
DEVICE void load_queries(const AttentionArgs& args, u32 t, u32 first_head, u32 col, FragA out[4]) {
    constexpr u32 LANE_ROWS = A_ELEMS / 4;  // rows of a tile that a lane holds
#pragma unroll
    for (u32 r = 0; r < LANE_ROWS; r++) {
        u32 head = first_head + a_row(lane(), 2 * r);
        const u16* q = args.q + ((u64)t * args.n_heads + head) * KV_DIMS + col + quarter() * 16;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            U4 v = {};
            if (head < args.n_heads) v = load16(q + 8 * half);
            FragA *even = &out[2 * half], *odd = &out[2 * half + 1];
            // A lane's registers alternate between its rows, then go on in K.
            even->v[r] = v.x, even->v[LANE_ROWS + r] = v.y;
            odd->v[r] = v.z, odd->v[LANE_ROWS + r] = v.w;
        }
    }
}

/// Half-dots of the wave's rows of the chunk with all heads, to parts[half][head][row].
DEVICE void half_scores(const AttentionArgs& args, u32 t, u32 first_head, const u8* rows, float* parts) {
    u32 half = wave() % 2, first_row = wave() / 2 * SCORE_ROWS;
    FragC c[SCORE_TILES] = {};
#pragma unroll 1
    for (u32 span = 0; span < HALF_SPANS; span++) {
        u32 col = half * (KV_DIMS / 2) + span * 64;
        FragA q[4];
        load_queries(args, t, first_head, col, q);
#pragma unroll
        for (u32 tile = 0; tile < SCORE_TILES; tile++) {
            u32 pairs[8];
            expand16(rows + (first_row + tile * TILE_N + b_col(lane(), 0)) * ROW_STRIDE, col + quarter() * 16, pairs);
#pragma unroll
            for (u32 step = 0; step < 4; step++) {
                FragB b = {{pairs[2 * step], pairs[2 * step + 1]}};
                mma(c[tile], q[step], b);
            }
        }
    }
    float* out = parts + half * HEADS * SCORE_STRIDE + first_row;
#pragma unroll
    for (u32 tile = 0; tile < SCORE_TILES; tile++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) out[c_row(lane(), i) * SCORE_STRIDE + tile * TILE_N + c_col(lane(), i)] = c[tile].v[i];
    }
}

/// The largest exponent of some rows of one head, and the total of their weights relative to it; the same in its sixteen threads.
struct Softmax {
    float top, total;
};

/// What the sums so far and those of a chunk are scaled by when they meet.
struct Factors {
    float before, chunk;
};

/// Merges a chunk into what came before.
DEVICE Factors merge(Softmax& state, const Softmax& chunk) {
    float now = chunk.top > state.top ? chunk.top : state.top;
    Factors factors = {exp2_int(state.top - now), exp2_int(chunk.top - now)};
    state.total = fma(chunk.total, factors.chunk, state.total * factors.before);
    state.top = now;
    return factors;
}

/// One thread's four rows of one head of a chunk: their weights to shared memory.
DEVICE Softmax softmax_chunk(const float* parts, float scale, u32 n_valid, u16* p) {
    u32 head = thread() / 16, first = thread() % 16 * 4;
    const float *low = parts + head * SCORE_STRIDE + first, *high = low + HEADS * SCORE_STRIDE;
    ExpParts e[4];
    float top = LEAST;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        e[i] = exp_parts((low[i] + high[i]) * scale);
        // A NaN is passed over here and reaches the sums through its weight.
        if (first + i < n_valid && e[i].exponent > top) top = e[i].exponent;
    }
#pragma unroll
    for (u32 mask = 1; mask < 16; mask *= 2) {
        float other = shuffle_xor(top, mask);
        top = other > top ? other : top;
    }
    float v[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        v[i] = first + i < n_valid ? round_bf16(e[i].mantissa) * exp2_int(e[i].exponent - top) : 0.0f;
    }
    float sum = (v[0] + v[1]) + (v[2] + v[3]);
#pragma unroll
    for (u32 mask = 1; mask < 16; mask *= 2) sum = sum + shuffle_xor(sum, mask);
    u32* out = (u32*)(p + head * P_STRIDE + first);
    out[0] = bf16_pair_exact(v[0], v[1]);
    out[1] = bf16_pair_exact(v[2], v[3]);
    return {top, sum};
}

/// Four consecutive columns of all heads: column of element i of tile u is group_col(g, i) + u.
struct Sums {
    FragC c[4];
};
DEVICE u32 group_col(u32 group, u32 i) { return (wave() * GROUPS + group) * GROUP_COLS + 4 * c_col(lane(), i); }

/// A chunk's sums of one of the wave's groups of columns.
DEVICE Sums chunk_sums(const u16* p, const u8* rows, u32 group) {
    Sums sums = {};
    u32 col = (wave() * GROUPS + group) * GROUP_COLS + 4 * b_col(lane(), 0);
#pragma unroll 1
    for (u32 first = 0; first < ROWS; first += TILE_K) {
        FragA a;
#pragma unroll
        for (u32 j = 0; j < A_REGS; j++) {
            a.v[j] = *(const u32*)(p + a_row(lane(), 2 * j) * P_STRIDE + first + a_k(lane(), 2 * j));
        }
        float v[4][4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) expand4(rows + (first + b_k(lane(), i)) * ROW_STRIDE, col, v[i]);
#pragma unroll
        for (u32 u = 0; u < 4; u++) {
            FragB b = {{bf16_pair_exact(v[0][u], v[1][u]), bf16_pair_exact(v[2][u], v[3][u])}};
            mma(sums.c[u], a, b);
        }
    }
    return sums;
}

/// Divides four columns of a head, rotates them back and stores them.
DEVICE void store_columns(const AttentionArgs& args, u32 t, u32 head, u32 col, u32 position, float total, float v[4]) {
#pragma unroll
    for (u32 u = 0; u < 4; u++) v[u] = v[u] / total;
    if (col >= KV_FP8_DIMS) rotate<4>(v, col - KV_FP8_DIMS, position, args.freqs, -1.0f);
    u32* out = (u32*)(args.out + ((u64)t * args.n_heads + head) * KV_DIMS + col);
    out[0] = bf16_pair(v[0], v[1]);
    out[1] = bf16_pair(v[2], v[3]);
}

/// Block (heads, row).
KERNEL(attention, AttentionArgs, N_THREADS) {
    SHARED(u8, rows, ROWS * ROW_STRIDE);
    SHARED(float, parts, 2 * HEADS * SCORE_STRIDE);
    SHARED(u16, p, HEADS * P_STRIDE);
    SHARED(Factors, factors, HEADS);
    u32 t = block_y(), first_head = block_x() * HEADS;
    const StepRow* row = step_row(args.step, t);
    if (!row) return;
    List list = list_of(args, t, *row);
    u32 own_head = first_head + thread() / 16;
    ExpParts sink = exp_parts(own_head < args.n_heads ? args.sink[own_head] : 0.0f);
    Softmax state = {sink.exponent, 0.0f};
    Sums sums[GROUPS] = {};
    for (u32 first = 0; first < list.n_rows; first += ROWS) {
        u32 n_valid = min_(list.n_rows - first, ROWS);
        barrier();  // all have read the chunk before, p and the factors
        load_tile(args, list, first, rows);
        barrier();  // the chunk is there before anyone reads it
        half_scores(args, t, first_head, rows, parts);
        barrier();  // both halves of every score before they are added
        Factors own = merge(state, softmax_chunk(parts, args.scale, n_valid, p));
        if (thread() % 16 == 0) factors[thread() / 16] = own;
        barrier();  // p and the factors before the sums take them
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            Sums chunk = chunk_sums(p, rows, g);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                Factors f = factors[c_row(lane(), i)];
#pragma unroll
                for (u32 u = 0; u < 4; u++) {
                    sums[g].c[u].v[i] = fma(chunk.c[u].v[i], f.chunk, sums[g].c[u].v[i] * f.before);
                }
            }
        }
    }
    float total = state.total + sink.mantissa * exp2_int(sink.exponent - state.top);
    barrier();  // the factors have been read
    if (thread() % 16 == 0) factors[thread() / 16].before = total;
    barrier();  // every head's total before anyone divides
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 head = c_row(lane(), i);
        if (first_head + head >= args.n_heads) continue;
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            float v[4] = {sums[g].c[0].v[i], sums[g].c[1].v[i], sums[g].c[2].v[i], sums[g].c[3].v[i]};
            store_columns(args, t, first_head + head, group_col(g, i), row->position, factors[head].before, v);
        }
    }
}

/// Block (chunk and heads, row): one chunk's part.
KERNEL(attention_chunks, AttentionArgs, N_THREADS) {
    SHARED(u8, rows, ROWS * ROW_STRIDE);
    SHARED(float, parts, 2 * HEADS * SCORE_STRIDE);
    SHARED(u16, p, HEADS * P_STRIDE);
    u32 n_head_blocks = ceil_div(args.n_heads, HEADS), chunk = block_x() / n_head_blocks;
    u32 t = block_y(), first_head = block_x() % n_head_blocks * HEADS, first = chunk * ROWS;
    const StepRow* row = step_row(args.step, t);
    if (!row) return;
    List list = list_of(args, t, *row);
    if (first >= list.n_rows) return;
    load_tile(args, list, first, rows);
    barrier();  // the chunk is there before anyone reads it
    half_scores(args, t, first_head, rows, parts);
    barrier();  // both halves of every score before they are added
    Softmax state = softmax_chunk(parts, args.scale, min_(list.n_rows - first, ROWS), p);
    u64 part = ((u64)t * args.n_chunks + chunk) * args.n_heads + first_head;
    if (thread() % 16 == 0 && first_head + thread() / 16 < args.n_heads) {
        float* out = args.part_totals + 2 * (part + thread() / 16);
        out[0] = state.top, out[1] = state.total;
    }
    barrier();  // p before the sums take it
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++) {
        Sums sums = chunk_sums(p, rows, g);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 head = c_row(lane(), i);
            if (first_head + head >= args.n_heads) continue;
            U4 four = {bits(sums.c[0].v[i]), bits(sums.c[1].v[i]), bits(sums.c[2].v[i]), bits(sums.c[3].v[i])};
            store16(args.parts + (part + head) * KV_DIMS + group_col(g, i), four);
        }
    }
}

struct AttentionMergeArgs {
    AttentionArgs attention;
    RingStoreArgs rings;
};
static_assert(sizeof(AttentionMergeArgs) == 304, "AttentionMergeArgs mirrors src/ops/attention/device.rs");

/// Block (heads, row), a thread four columns of one head; the last block of a row stores it in the rings.
KERNEL(attention_merge, AttentionMergeArgs, N_THREADS) {
    const AttentionArgs& a = args.attention;
    u32 t = block_y(), head = block_x() * MERGE_HEADS + thread() / (KV_DIMS / 4), col = thread() % (KV_DIMS / 4) * 4;
    const StepRow* row = step_row(a.step, t);
    if (!row) return;
    if (block_x() == ceil_div(a.n_heads, MERGE_HEADS)) return store_in_rings(args.rings, t, *row);
    if (head >= a.n_heads) return;
    u32 n_chunks = ceil_div(list_of(a, t, *row).n_rows, ROWS);
    u64 part = (u64)t * a.n_chunks * a.n_heads + head;
    ExpParts sink = exp_parts(a.sink[head]);
    float sums[4] = {};
    Softmax state = {sink.exponent, 0.0f};
#pragma unroll 4
    for (u32 chunk = 0; chunk < n_chunks; chunk++) {
        u64 at = part + (u64)chunk * a.n_heads;
        float v[4];
        load4(a.parts + at * KV_DIMS + col, v);
        Factors f = merge(state, {a.part_totals[2 * at], a.part_totals[2 * at + 1]});
#pragma unroll
        for (u32 u = 0; u < 4; u++) sums[u] = fma(v[u], f.chunk, sums[u] * f.before);
    }
    float total = state.total + sink.mantissa * exp2_int(sink.exponent - state.top);
    store_columns(a, t, head, col, row->position, total, sums);
}
