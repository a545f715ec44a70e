//! Queries from their projections: attention's heads normed without a weight, rotated and rounded to bf16; the indexer's heads rotated,
//! Hadamard-rotated and rounded to E2M1 with a scale for 32, exact in bf16. Both rotate their last 64 columns.
//!
//! Bound: bytes, 6 DH or 6 ID a head (at 64 heads of each and 2,048 rows 504 MB: 105 us at 4.8 TB/s).
#include "common/row.h"

constexpr u32 HEADS_PER_BLOCK = 8;

struct QueryArgs {
    Step step;
    const float* q;      // [T, H, DH] f32
    u16* out;            // [T, H, DH] bf16
    const float* iq;     // [T, IH, ID] f32
    u16* index_out;      // [T, IH, ID] bf16
    const float* freqs;  // [32] f32
    u32 n_heads, head_dim, n_index_heads, index_head_dim;
    float eps;
    u32 pad;
};
static_assert(sizeof(QueryArgs) == 96, "QueryArgs mirrors src/ops/query.rs");

/// One head of the wave's.
DEVICE void finish_head(const QueryArgs& args, u64 head, u32 position) {
    WaveRow v;
    load_row(v, args.q + head * KV_DIMS);
    norm_row(v, nullptr, args.eps);
    rotate_row(v, position, args.freqs);
#pragma unroll
    for (u32 j = 0; j < N_QUADS; j++) {
        u32* out = (u32*)(args.out + head * KV_DIMS + quad_col(j));
        out[0] = bf16_pair(v.v[j][0], v.v[j][1]);
        out[1] = bf16_pair(v.v[j][2], v.v[j][3]);
    }
}

/// One head of the indexer.
DEVICE void finish_index_head(const QueryArgs& args, u64 head, u32 position) {
    u32 col = lane() * INDEX_COLS;
    float v[INDEX_COLS];
#pragma unroll
    for (u32 i = 0; i < INDEX_COLS; i++) v[i] = args.iq[head * INDEX_DIMS + col + i];
    const u32 first = INDEX_DIMS - ROPE_DIMS;
    if (col >= first) rotate<INDEX_COLS>(v, col - first, position, args.freqs, 1.0f);
    hadamard(v);
    u32 byte = index_scale_byte(v);
    float inverse = inverse_scale(byte), scale = e8m0_to_f32(byte);
    u32* out = (u32*)(args.index_out + head * INDEX_DIMS + col);
#pragma unroll
    for (u32 i = 0; i < INDEX_COLS; i += 2) {
        float low = e2m1_to_f32(f32_to_e2m1_down(v[i] * inverse)) * scale;
        float high = e2m1_to_f32(f32_to_e2m1_down(v[i + 1] * inverse)) * scale;
        out[i / 2] = bf16_pair_exact(low, high);
    }
}

/// Block (heads, row), the indexer's heads last: one wave a head, one after the other where there are fewer waves.
KERNEL(query, QueryArgs, 256) {
    u32 t = block_y(), n_blocks = ceil_div(args.n_heads, HEADS_PER_BLOCK);
    const StepRow* row = step_row(args.step, t);
    if (!row) return;
    bool is_index = block_x() >= n_blocks;
    u32 first = (is_index ? block_x() - n_blocks : block_x()) * HEADS_PER_BLOCK;
    u32 n_heads = is_index ? args.n_index_heads : args.n_heads;
    for (u32 i = wave(); i < HEADS_PER_BLOCK && first + i < n_heads; i += n_waves()) {
        u64 head = (u64)t * n_heads + first + i;
        if (is_index) {
            finish_index_head(args, head, row->position);
        } else {
            finish_head(args, head, row->position);
        }
    }
}
