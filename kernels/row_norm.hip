//! RMSNorm of each row with a weight, rounded to bf16 (the latent row of the queries).
//!
//! Bound: bytes, 6 N a row; in a decode step the latency of one block.
#include "common/row.h"

struct RowNormArgs {
    Step step;
    const float* x;       // [T, N] f32
    const float* weight;  // [N] f32
    u16* out;             // [T, N] bf16
    u32 n_cols;
    float eps;
};
static_assert(sizeof(RowNormArgs) == 64, "RowNormArgs mirrors src/ops/row_norm.rs");

/// One block a row. The sum runs over a thread's columns ascending, then over lanes, then over waves.
KERNEL(row_norm, RowNormArgs, 256) {
    SHARED(float, scratch, 256 / WAVE);
    u32 t = block_x(), n = args.n_cols;
    if (!step_row(args.step, t)) return;
    const float* x = args.x + (u64)t * n;
    float sum = 0.0f;
    for (u32 col = thread(); col < n; col += n_threads()) sum = fma(x[col], x[col], sum);
    float r = rsqrt_(block_sum(sum, scratch) / (float)n + args.eps);
    u16* out = args.out + (u64)t * n;
    for (u32 col = thread(); col < n; col += n_threads()) out[col] = f32_to_bf16(x[col] * r * args.weight[col]);
}
