//! Compressed rows: for each row that completes a group, the group is pooled (a softmax for each column), normed, rotated at the
//! group's first position and stored in its block; indexer keys get a Hadamard rotation and E2M1 codes.
//!
//! Raw rows of the run itself come from the step's products, earlier ones from the slot's ring. Bound: bytes, 8 CW a token read
//! (twice where groups overlap) and 584 / ratio written; rows that complete nothing leave at once.
#include "common/row.h"

struct CompressArgs {
    Step step;
    const float* a;      // [T, CW] f32
    const float* s;      // [T, CW] f32
    const float* ape;    // [ratio, CW] f32
    const float* norm;   // [RD] f32
    const float* freqs;  // [32] f32
    const u8* ring;      // slot 0's [n_ring, 2*CW] f32
    u64 blocks;          // block 0's [256/ratio, row_bytes] u8
    u64 slot_stride_bytes, block_stride_bytes;
    u32 ratio, row_dim, n_ring, row_bytes, is_index, n_cols;
    float eps;
    u32 pad;
};
static_assert(sizeof(CompressArgs) == 136, "CompressArgs mirrors src/ops/compress/device.rs");

/// What a block pools.
struct Pool {
    const CompressArgs& args;
    const StepRun& run;
    u32 group;
};

/// Column `column` of row i of the pool: the first halves of the group before come first where groups overlap.
DEVICE void pool_row(const Pool& pool, u32 i, u32 column, float* value, float* gate) {
    const CompressArgs& args = pool.args;
    u32 ratio = args.ratio, first = pool.group * ratio;
    bool overlaps = ratio == 4;
    // Group 0 has none before it.
    u32 position = (overlaps && pool.group > 0 ? first - ratio : first) + i;
    u32 col = overlaps && position >= first ? args.row_dim + column : column;
    if (position >= pool.run.first_pos) {
        u64 at = (u64)(pool.run.first_row + position - pool.run.first_pos) * args.n_cols + col;
        *value = args.a[at];
        *gate = args.s[at] + args.ape[position % ratio * args.n_cols + col];
    } else {
        const u8* ring = args.ring + pool.run.slot * args.slot_stride_bytes;
        const float* row = (const float*)ring + (u64)(position % args.n_ring) * 2 * args.n_cols;
        *value = row[col];
        *gate = row[args.n_cols + col];
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
DEVICE void store_key(const CompressArgs& args, const float* pooled, u32 position, u8* out) {
    float v[INDEX_COLS], sum = 0.0f;
    u32 col = lane() * INDEX_COLS;
#pragma unroll
    for (u32 i = 0; i < INDEX_COLS; i++) v[i] = pooled[col + i], sum = fma(v[i], v[i], sum);
    float r = rsqrt_(wave_sum(sum) / (float)INDEX_DIMS + args.eps);
#pragma unroll
    for (u32 i = 0; i < INDEX_COLS; i++) v[i] = v[i] * r * args.norm[col + i];
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

/// One block a row; a thread pools one column, then the first wave finishes the row.
KERNEL(compress, CompressArgs, 512) {
    SHARED(float, pooled, KV_DIMS);
    const StepRow* row = step_row(args.step, block_x());
    if (!row || (row->position + 1) % args.ratio != 0) return;
    const StepRun& run = args.step.runs[row->run];
    u32 group = row->position / args.ratio, n_rows = args.ratio == 4 && group > 0 ? 2 * args.ratio : args.ratio;
    Pool pool{args, run, group};
    for (u32 col = thread(); col < args.row_dim; col += n_threads()) pooled[col] = pool_column(pool, n_rows, col);
    barrier();  // the pooled row before the first wave reads it
    if (wave() != 0) return;
    u8* out = (u8*)group_row(args.step, run, args.blocks, args.block_stride_bytes, args.ratio, args.row_bytes, group);
    u32 position = group * args.ratio;
    if (args.is_index) return store_key(args, pooled, position, out);
    WaveRow v;
    load_row(v, pooled);
    norm_row(v, args.norm, args.eps);
    rotate_row(v, position, args.freqs);
    store_kv_row(v, out);
}
