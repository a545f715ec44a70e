//! The latent rows of a layer, made from the projections of its input: the queries' row normed, the window's row stored, and the
//! compressed rows of completed groups pooled and stored. One launch, since each part of a decode step is a few blocks that wait.
//!
//! Blocks: for each compressor one a row, then one a row for the norm, then one for every WINDOW_ROWS rows of the window.
//! Norm: RMSNorm with a weight, rounded to bf16. Window: norm with a weight, rotation, FP8 in groups of 64, bf16 for the rotary
//! columns. Group: a softmax over the group's rows for each column, norm, rotation at the group's first position, the row stored in
//! its block; indexer keys get a Hadamard rotation and E2M1 codes. Raw rows of the run itself come from the step's products,
//! earlier ones from the slot's ring.
//! Bound: bytes; 6 QR a row, 4 DH + 584 a row, 8 CW a token (twice where groups overlap) and 584 / ratio; in a decode step latency.
#include "common/row.h"

constexpr u32 N_THREADS = 512, WINDOW_ROWS = 16;
/// Threads that take part in a norm: the order of its sum is theirs.
constexpr u32 NORM_THREADS = 256;

/// The latent row of the queries.
struct NormArgs {
    const float* x;       // [T, N] f32, or null: not done
    const float* weight;  // [N] f32
    u16* out;             // [T, N] bf16
    u32 n_cols, pad;
};
static_assert(sizeof(NormArgs) == 32, "NormArgs mirrors src/ops/latent/norm.rs");

/// The row of the window.
struct WindowArgs {
    const float* x;       // [T, DH] f32, or null: not done
    const float* weight;  // [DH] f32
    u8* rows;             // [T, 584]
};
static_assert(sizeof(WindowArgs) == 24, "WindowArgs mirrors src/ops/latent/window.rs");

/// The compressed rows of one compressor.
struct GroupArgs {
    const float* a;     // [T, CW] f32
    const float* s;     // [T, CW] f32
    const float* ape;   // [ratio, CW] f32
    const float* norm;  // [RD] f32
    const u8* ring;     // slot 0's [n_ring, 2*CW] f32
    u64 blocks;         // block 0's [256/ratio, row_bytes] u8
    u32 row_dim, n_ring, row_bytes, is_index, n_cols, pad;
};
static_assert(sizeof(GroupArgs) == 72, "GroupArgs mirrors src/ops/latent/group.rs");

struct LatentArgs {
    Step step;
    NormArgs norm;
    WindowArgs window;
    GroupArgs groups[2];
    const float* freqs;  // [32] f32
    u64 slot_stride_bytes, block_stride_bytes;
    u32 n_rows, n_groups, ratio;
    float eps;
};
static_assert(sizeof(LatentArgs) == 272, "LatentArgs mirrors src/ops/latent.rs");

/// The norm's sum runs over a thread's columns ascending, then over lanes, then over waves; the other threads add zeros at its end.
DEVICE void norm_latent(const LatentArgs& args, u32 t, float* scratch) {
    const NormArgs& p = args.norm;
    if (!p.x || !step_row(args.step, t)) return;
    u32 first = thread() < NORM_THREADS ? thread() : p.n_cols;
    const float* x = p.x + (u64)t * p.n_cols;
    float sum = 0.0f;
    for (u32 col = first; col < p.n_cols; col += NORM_THREADS) sum = fma(x[col], x[col], sum);
    float r = rsqrt_(block_sum(sum, scratch) / (float)p.n_cols + args.eps);
    u16* out = p.out + (u64)t * p.n_cols;
    for (u32 col = first; col < p.n_cols; col += NORM_THREADS) out[col] = f32_to_bf16(x[col] * r * p.weight[col]);
}

/// One wave a row, one after the other where there are fewer waves.
DEVICE void store_window(const LatentArgs& args, u32 first) {
    const WindowArgs& p = args.window;
    for (u32 i = wave(); p.x && i < WINDOW_ROWS; i += n_waves()) {
        u32 t = first + i;
        const StepRow* row = step_row(args.step, t);
        if (!row) return;
        WaveRow v;
        load_row(v, p.x + (u64)t * KV_DIMS);
        norm_row(v, p.weight, args.eps);
        rotate_row(v, row->position, args.freqs);
        store_kv_row(v, p.rows + (u64)t * KV_ROW_BYTES);
    }
}

/// What a block pools.
struct Pool {
    const LatentArgs& args;
    const GroupArgs& p;
    const StepRun& run;
    u32 group;
};

/// Column `column` of row i of the pool: the first halves of the group before come first where groups overlap.
DEVICE void pool_row(const Pool& pool, u32 i, u32 column, float* value, float* gate) {
    const GroupArgs& p = pool.p;
    u32 ratio = pool.args.ratio, first = pool.group * ratio;
    bool overlaps = ratio == 4;
    // Group 0 has none before it.
    u32 position = (overlaps && pool.group > 0 ? first - ratio : first) + i;
    u32 col = overlaps && position >= first ? p.row_dim + column : column;
    if (position >= pool.run.first_pos) {
        u64 at = (u64)(pool.run.first_row + position - pool.run.first_pos) * p.n_cols + col;
        *value = p.a[at];
        *gate = p.s[at] + p.ape[position % ratio * p.n_cols + col];
    } else {
        const u8* ring = p.ring + pool.run.slot * pool.args.slot_stride_bytes;
        const float* row = (const float*)ring + (u64)(position % p.n_ring) * 2 * p.n_cols;
        *value = row[col];
        *gate = row[p.n_cols + col];
    }
}

/// Softmax of the gates times the values: the maximum, then both sums in the order of the rows, then one division.
DEVICE float pool_column(const Pool& pool, u32 n_rows, u32 column) {
    float top = from_bits(0xFF800000u), value, gate;
#pragma unroll 4
    for (u32 i = 0; i < n_rows; i++) {
        pool_row(pool, i, column, &value, &gate);
        top = gate > top ? gate : top;  // a NaN is passed over here and reaches the sums
    }
    float sum = 0.0f, total = 0.0f;
#pragma unroll 4
    for (u32 i = 0; i < n_rows; i++) {
        pool_row(pool, i, column, &value, &gate);
        float p = exp_(gate - top);
        total = total + p;
        sum = fma(p, value, sum);
    }
    return sum / total;
}

/// A pooled indexer row of one wave becomes a stored key.
DEVICE void store_key(const LatentArgs& args, const GroupArgs& p, const float* pooled, u32 position, u8* out) {
    float v[INDEX_COLS], sum = 0.0f;
    u32 col = lane() * INDEX_COLS;
#pragma unroll
    for (u32 i = 0; i < INDEX_COLS; i++) v[i] = pooled[col + i], sum = fma(v[i], v[i], sum);
    float r = rsqrt_(wave_sum(sum) / (float)INDEX_DIMS + args.eps);
#pragma unroll
    for (u32 i = 0; i < INDEX_COLS; i++) v[i] = v[i] * r * p.norm[col + i];
    const u32 first = INDEX_DIMS - ROPE_DIMS;
    if (col >= first) rotate<INDEX_COLS>(v, col - first, position, args.freqs, 1.0f);
    hadamard(v);
    u32 byte = index_scale_byte(v);
    float inverse = inverse_scale(byte);
#pragma unroll
    for (u32 i = 0; i < INDEX_COLS; i += 2) {
        out[(col + i) / 2] = (u8)(f32_to_e2m1_down(v[i] * inverse) | f32_to_e2m1_down(v[i + 1] * inverse) << 4);
    }
    if (col % INDEX_GROUP == 0) out[INDEX_SCALES_AT + col / INDEX_GROUP] = (u8)byte;
}

/// A thread pools one column, then the first wave finishes the row. Rows that complete no group leave at once.
DEVICE void store_group(const LatentArgs& args, const GroupArgs& p, u32 t, float* pooled) {
    const StepRow* row = step_row(args.step, t);
    if (!row || (row->position + 1) % args.ratio != 0) return;
    const StepRun& run = args.step.runs[row->run];
    u32 group = row->position / args.ratio, n_rows = args.ratio == 4 && group > 0 ? 2 * args.ratio : args.ratio;
    Pool pool{args, p, run, group};
    for (u32 col = thread(); col < p.row_dim; col += n_threads()) pooled[col] = pool_column(pool, n_rows, col);
    barrier();  // the pooled row before the first wave reads it
    if (wave() != 0) return;
    u8* out = (u8*)group_row(args.step, run, p.blocks, args.block_stride_bytes, args.ratio, p.row_bytes, group);
    u32 position = group * args.ratio;
    if (p.is_index) return store_key(args, p, pooled, position, out);
    WaveRow v;
    load_row(v, pooled);
    norm_row(v, p.norm, args.eps);
    rotate_row(v, position, args.freqs);
    store_kv_row(v, out);
}

KERNEL(latent, LatentArgs, N_THREADS) {
    SHARED(float, scratch, KV_DIMS);
    u32 part = block_x() / args.n_rows, t = block_x() % args.n_rows;
    if (part < args.n_groups) return store_group(args, args.groups[part], t, scratch);
    if (part == args.n_groups) return norm_latent(args, t, scratch);
    store_window(args, (block_x() - (args.n_groups + 1) * args.n_rows) * WINDOW_ROWS);
}
