//! Attention of one row and up to 16 heads over its window rows, then its compressed rows, both ascending, with a sink.
//!
//! Rows are taken in tiles of 64 from the start of the list. A tile's stored rows lie in shared memory as they are (37 KB) and are
//! expanded into operands when read: heads are the M operand; for the scores rows are the N operand and columns K, for the sums
//! rows are K and columns N. Order: a score is the sum of two halves of 256 columns, each walked in spans of 64 by steps of 16 (four
//! columns of each quarter of 16); times scale; p = exp(s - running maximum, which starts at the sink) rounded to bf16; the
//! denominator is rescaled and takes the tile's sum of the same p (four rows in pairs, then pairs of sixteen lanes), the sums are rescaled and take 16 rows a step.
//! The sink joins at the end; sums / denominator, rotated back, bf16. So a head depends on its query and its list, nothing else.
//! Bound: 4 * 512 flops a head and row; bytes, 584 a row for every 16 heads (mostly from L2), which a decode step of few streams
//! pays in latency: one block walks the whole list.
#include "common/row.h"

constexpr u32 HEADS = 16, ROWS = 64, N_THREADS = 256, N_WAVES = N_THREADS / WAVE;
/// Bytes from a row to the next in shared memory: a multiple of 16.
constexpr u32 ROW_STRIDE = 592;
/// Score waves: the parity says which half of the columns, the rest which rows.
constexpr u32 SCORE_ROWS = ROWS / (N_WAVES / 2), SCORE_TILES = SCORE_ROWS / TILE_N, HALF_SPANS = KV_DIMS / 2 / 64;
/// Columns of the sums that a wave holds: groups of four tiles, so that a lane reads four consecutive columns at once.
constexpr u32 GROUP_COLS = 4 * TILE_N, GROUPS = KV_DIMS / N_WAVES / GROUP_COLS;
/// Elements between heads, padded against bank conflicts.
constexpr u32 SCORE_STRIDE = ROWS + 4, P_STRIDE = ROWS + 8;
static_assert(HEADS == TILE_M && SCORE_TILES == 2 && GROUPS == 2 && N_THREADS == 16 * HEADS, "the shape the phases count on");
static_assert(ROWS * ROW_STRIDE + 8 * HEADS * SCORE_STRIDE + 2 * HEADS * P_STRIDE + 4 * HEADS <= 48 * 1024, "shared memory");

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
    u32 n_heads, head_dim, window, n_ring, ratio, k;
    float scale;
    u32 pad;
};
static_assert(sizeof(AttentionArgs) == 144, "AttentionArgs mirrors src/ops/attention/device.rs");

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

/// Copies the tile's stored rows, one wave a row; rows past the end become zeros, which no later step takes for NaN.
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

/// A span of 64 columns of the queries as operands; heads past the last are zeros. They are read again for every tile, from the
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

/// Half-dots of the wave's rows of the tile with all heads, to parts[half][head][row].
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

/// The running maximum and denominator of one head, the same in its sixteen threads.
struct Softmax {
    float top, total;
};

/// One thread's four rows of one head: p to shared memory, and what the sums so far are rescaled by.
DEVICE void softmax_tile(const float* parts, float scale, u32 n_valid, Softmax& state, u16* p, float* rescale) {
    u32 head = thread() / 16, first = thread() % 16 * 4;
    const float *low = parts + head * SCORE_STRIDE + first, *high = low + HEADS * SCORE_STRIDE;
    float s[4], top = state.top;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        s[i] = first + i < n_valid ? (low[i] + high[i]) * scale : from_bits(0xFF800000u);
        top = s[i] > top ? s[i] : top;  // a NaN is passed over here and reaches the sums through p
    }
#pragma unroll
    for (u32 mask = 1; mask < 16; mask *= 2) {
        float other = shuffle_xor(top, mask);
        top = other > top ? other : top;
    }
    float v[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) v[i] = first + i < n_valid ? round_bf16(exp_(s[i] - top)) : 0.0f;
    float sum = (v[0] + v[1]) + (v[2] + v[3]);
#pragma unroll
    for (u32 mask = 1; mask < 16; mask *= 2) sum = sum + shuffle_xor(sum, mask);
    float factor = exp_(state.top - top);
    state.total = fma(state.total, factor, sum);
    state.top = top;
    u32* out = (u32*)(p + head * P_STRIDE + first);
    out[0] = bf16_pair_exact(v[0], v[1]);
    out[1] = bf16_pair_exact(v[2], v[3]);
    if (first == 0) rescale[head] = factor;
}

/// The wave's columns of the sums of all heads: column of element i of tile u in group g is group_col(g) + u.
struct Sums {
    FragC c[GROUPS][4];
};
DEVICE u32 group_col(u32 group, u32 i) { return (wave() * GROUPS + group) * GROUP_COLS + 4 * c_col(lane(), i); }

DEVICE void add_tile(const u16* p, const u8* rows, const float* rescale, Sums& sums) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        float factor = rescale[c_row(lane(), i)];
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
#pragma unroll
            for (u32 u = 0; u < 4; u++) sums.c[g][u].v[i] = sums.c[g][u].v[i] * factor;
        }
    }
#pragma unroll 1
    for (u32 first = 0; first < ROWS; first += TILE_K) {
        FragA a;
#pragma unroll
        for (u32 j = 0; j < A_REGS; j++) {
            a.v[j] = *(const u32*)(p + a_row(lane(), 2 * j) * P_STRIDE + first + a_k(lane(), 2 * j));
        }
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            u32 col = (wave() * GROUPS + g) * GROUP_COLS + 4 * b_col(lane(), 0);
            float v[4][4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) expand4(rows + (first + b_k(lane(), i)) * ROW_STRIDE, col, v[i]);
#pragma unroll
            for (u32 u = 0; u < 4; u++) {
                FragB b = {{bf16_pair_exact(v[0][u], v[1][u]), bf16_pair_exact(v[2][u], v[3][u])}};
                mma(sums.c[g][u], a, b);
            }
        }
    }
}

/// Divides, rotates back and stores.
DEVICE void store_heads(const AttentionArgs& args, u32 t, u32 position, u32 first_head, const float* totals, const Sums& sums) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 head = c_row(lane(), i);
        if (first_head + head >= args.n_heads) continue;
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            u32 col = group_col(g, i);
            float v[4];
#pragma unroll
            for (u32 u = 0; u < 4; u++) v[u] = sums.c[g][u].v[i] / totals[head];
            if (col >= KV_FP8_DIMS) rotate<4>(v, col - KV_FP8_DIMS, position, args.freqs, -1.0f);
            u32* out = (u32*)(args.out + ((u64)t * args.n_heads + first_head + head) * KV_DIMS + col);
            out[0] = bf16_pair(v[0], v[1]);
            out[1] = bf16_pair(v[2], v[3]);
        }
    }
}

/// Block (heads, row).
KERNEL(attention, AttentionArgs, N_THREADS) {
    SHARED(u8, rows, ROWS * ROW_STRIDE);
    SHARED(float, parts, 2 * HEADS * SCORE_STRIDE);
    SHARED(u16, p, HEADS * P_STRIDE);
    SHARED(float, rescale, HEADS);
    u32 t = block_y(), first_head = block_x() * HEADS;
    const StepRow* row = step_row(args.step, t);
    if (!row) return;
    List list = list_of(args, t, *row);
    u32 head = first_head + thread() / 16;
    float sink = head < args.n_heads ? args.sink[head] : 0.0f;
    Softmax state = {sink, 0.0f};
    Sums sums = {};
    for (u32 first = 0; first < list.n_rows; first += ROWS) {
        barrier();  // all have read the tile before, p and the factors
        load_tile(args, list, first, rows);
        barrier();  // the tile is there before anyone reads it
        half_scores(args, t, first_head, rows, parts);
        barrier();  // both halves of every score before they are added
        softmax_tile(parts, args.scale, min_(list.n_rows - first, ROWS), state, p, rescale);
        barrier();  // p and the factors before the sums take them
        add_tile(p, rows, rescale, sums);
    }
    float total = state.total + exp_(sink - state.top);
    barrier();  // the factors have been read
    if (thread() % 16 == 0) rescale[thread() / 16] = total;
    barrier();  // every head's denominator before anyone divides
    store_heads(args, t, row->position, first_head, rescale, sums);
}
