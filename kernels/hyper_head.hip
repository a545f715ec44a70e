//! Hyper-connection at the head, for the rows whose logits are wanted: the copies become one row, which is normed and rounded to bf16.
//!
//! g[c] = sigmoid((mix[c] . x) * rsqrt(mean(x^2) + norm_eps) * scale + base[c]) + hc_eps; row = sum over c of g[c] x[c], in the order of c;
//! y = row * rsqrt(mean(row^2) + norm_eps) * norm. One block a row, always 256 threads: the order of its sums is the same everywhere
//! with one width of waves. Bound: HC^2 D f32 of mix and HC D of x a row, from L2; the row is computed twice rather than kept.
#include "common/formats.h"
#include "common/math.h"
#include "common/step.h"

namespace hyper_head_op {

constexpr u32 HC = 4, HEAD_THREADS = 256;

struct HyperHeadArgs {
    Step step;
    const u32* logit_rows;  // [R]: rows of the step
    const float* residual;  // [T, HC, D] f32
    const float* mix;       // [HC, HC * D] f32
    const float* base;      // [HC] f32
    const float* scale;     // [1] f32
    const float* norm;      // [D] f32
    u16* y;                 // [R, D] bf16
    u32 n_cols;
    float norm_eps, hc_eps;
    u32 pad;
};
static_assert(sizeof(HyperHeadArgs) == 104, "HyperHeadArgs mirrors src/ops/hyper_head.rs");

/// The copies' weights.
DEVICE void head_weights(const HyperHeadArgs& args, const float* x, float* scratch, float g[HC]) {
    u32 n = HC * args.n_cols;
    float squares = 0.0f, dots[HC] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 i = thread(); i < n; i += n_threads()) {
        float v = x[i];
        squares = fma(v, v, squares);
        for (u32 c = 0; c < HC; c++) dots[c] = fma(v, args.mix[(u64)c * n + i], dots[c]);
    }
    float inverse = rsqrt_(block_sum(squares, scratch) / (float)n + args.norm_eps);
    for (u32 c = 0; c < HC; c++) {
        g[c] = sigmoid(block_sum(dots[c], scratch) * inverse * *args.scale + args.base[c]) + args.hc_eps;
    }
}

/// Column i of the mixed row.
DEVICE float mixed(const HyperHeadArgs& args, const float* x, const float g[HC], u32 i) {
    float sum = g[0] * x[i];
    for (u32 c = 1; c < HC; c++) sum = fma(g[c], x[(u64)c * args.n_cols + i], sum);
    return sum;
}

KERNEL(hyper_head, HyperHeadArgs, HEAD_THREADS) {
    SHARED(float, scratch, HEAD_THREADS / 32);
    if (block_x() >= args.step.counts->n_logit_rows) return;
    const float* x = args.residual + (u64)args.logit_rows[block_x()] * HC * args.n_cols;
    float g[HC], squares = 0.0f;
    head_weights(args, x, scratch, g);
    for (u32 i = thread(); i < args.n_cols; i += n_threads()) {
        float v = mixed(args, x, g, i);
        squares = fma(v, v, squares);
    }
    float inverse = rsqrt_(block_sum(squares, scratch) / (float)args.n_cols + args.norm_eps);
    for (u32 i = thread(); i < args.n_cols; i += n_threads()) {
        args.y[(u64)block_x() * args.n_cols + i] = f32_to_bf16(mixed(args, x, g, i) * inverse * args.norm[i]);
    }
}

}  // namespace hyper_head_op
