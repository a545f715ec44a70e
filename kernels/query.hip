//! Queries of the attention: each head's norm without a weight, rotation of its last 64 columns, rounded to bf16.
//!
//! Bound: bytes, 6 DH a head (at 64 heads and 2,048 rows 403 MB: 84 us at 4.8 TB/s).
#include "common/row.h"

constexpr u32 HEADS_PER_BLOCK = 8;

struct QueryArgs {
    Step step;
    const float* q;      // [T, H, DH] f32
    u16* out;            // [T, H, DH] bf16
    const float* freqs;  // [32] f32
    u32 n_heads, head_dim;
    float eps;
    u32 pad;
};
static_assert(sizeof(QueryArgs) == 72, "QueryArgs mirrors src/ops/query.rs");

/// Block (heads, row): one wave a head, one after the other where there are fewer waves.
KERNEL(query, QueryArgs, 256) {
    u32 t = block_y();
    const StepRow* row = step_row(args.step, t);
    if (!row) return;
    for (u32 i = wave(); i < HEADS_PER_BLOCK; i += n_waves()) {
        u32 head = block_x() * HEADS_PER_BLOCK + i;
        if (head >= args.n_heads) return;
        u64 at = ((u64)t * args.n_heads + head) * KV_DIMS;
        WaveRow v;
        load_row(v, args.q + at);
        norm_row(v, nullptr, args.eps);
        rotate_row(v, row->position, args.freqs);
#pragma unroll
        for (u32 j = 0; j < N_QUADS; j++) {
            u32* out = (u32*)(args.out + at + quad_col(j));
            out[0] = bf16_pair(v.v[j][0], v.v[j][1]);
            out[1] = bf16_pair(v.v[j][2], v.v[j][3]);
        }
    }
}
