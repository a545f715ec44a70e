//! Queries of the indexer: rotation of the last 64 columns, Hadamard, rounding to E2M1 with a scale for 32, exact in bf16.
//!
//! Bound: bytes, 6 ID a head (at 64 heads and 2,048 rows 101 MB: 21 us at 4.8 TB/s).
#include "common/row.h"

constexpr u32 HEADS_PER_BLOCK = 8;

struct IndexQueryArgs {
    Step step;
    const float* x;      // [T, IH, ID] f32
    u16* out;            // [T, IH, ID] bf16
    const float* freqs;  // [32] f32
    u32 n_heads, head_dim;
};
static_assert(sizeof(IndexQueryArgs) == 64, "IndexQueryArgs mirrors src/ops/index_query.rs");

/// Block (heads, row): one wave a head, one after the other where there are fewer waves.
KERNEL(index_query, IndexQueryArgs, 256) {
    u32 t = block_y();
    const StepRow* row = step_row(args.step, t);
    if (!row) return;
    for (u32 h = wave(); h < HEADS_PER_BLOCK; h += n_waves()) {
        u32 head = block_x() * HEADS_PER_BLOCK + h, col = lane() * INDEX_COLS;
        if (head >= args.n_heads) return;
        u64 at = ((u64)t * args.n_heads + head) * INDEX_DIMS + col;
        float v[INDEX_COLS];
#pragma unroll
        for (u32 i = 0; i < INDEX_COLS; i++) v[i] = args.x[at + i];
        const u32 first = INDEX_DIMS - ROPE_DIMS;
        if (col >= first) rotate<INDEX_COLS>(v, col - first, row->position, args.freqs, 1.0f);
        hadamard(v);
        u32 byte = index_scale_byte(v);
        float inverse = inverse_scale(byte), scale = e8m0_to_f32(byte);
#pragma unroll
        for (u32 i = 0; i < INDEX_COLS; i += 2) {
            float low = e2m1_to_f32(f32_to_e2m1_down(v[i] * inverse)) * scale;
            float high = e2m1_to_f32(f32_to_e2m1_down(v[i + 1] * inverse)) * scale;
            ((u32*)(args.out + at))[i / 2] = bf16_pair_exact(low, high);
        }
    }
}
