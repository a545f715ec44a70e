//! The way out of a sublayer: each new copy is post[j] times the output plus the old copies weighed by column j of comb.
//!
//! The last sublayer of a step ends with it; between two, `hyper_dots` and `hyper_mix` do the same on their way.
//! Bound: bytes, 4 D (2 HC + 1) a row (at D = 4096 and 2,048 rows 302 MB: 63 us at 4.8 TB/s); 2 HC (HC + 1) D flops a row.
#include "common/hyper.h"

struct HyperPostArgs {
    Step step;
    const float* output;   // [T, D] f32
    const float* weights;  // [T, MIXES] f32
    float* residual;       // [T, HC, D] f32
    u32 n_cols, pad;
};
static_assert(sizeof(HyperPostArgs) == 64, "HyperPostArgs mirrors src/ops/hyper_post/device.rs");

/// Block (chunk, row): a thread updates four columns of every copy.
KERNEL(hyper_post, HyperPostArgs, 256) {
    u32 t = block_y(), d = args.n_cols, col = 4 * (block_x() * n_threads() + thread());
    if (!step_row(args.step, t) || col >= d) return;
    const float* weights = args.weights + (u64)t * MIXES;
    float* h = args.residual + (u64)t * HC * d + col;
    float o[4], old[HC][4];
    load4(args.output + (u64)t * d + col, o);
#pragma unroll
    for (u32 c = 0; c < HC; c++) load4(h + c * d, old[c]);
#pragma unroll
    for (u32 j = 0; j < HC; j++) {
        float v[4];
        renew_copy(weights, j, o, old, v);
        store4(h + j * d, v);
    }
}
