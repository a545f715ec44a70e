//! The experts' activation: silu(min(gate, limit)) * clamp(up, -limit, limit) * routing weight, rounded to bf16.
//!
//! Bound: 8 bytes read and 2 written an element. One block a row and 1,024 columns; a NaN stays a NaN.
#include "common/formats.h"
#include "common/math.h"

namespace swiglu_op {

constexpr u32 SWIGLU_THREADS = 256, SWIGLU_COLS = 4 * SWIGLU_THREADS;

struct SwigluArgs {
    const float* gate;    // [R, F] f32
    const float* up;      // [R, F] f32
    const float* weight;  // [R] f32, or none: 1
    u16* out;             // [R, F] bf16
    const u32* n_rows;    // [1]
    u32 multiplier;       // rows are *n_rows * multiplier
    u32 n_cols;           // F
    float limit;
    u32 pad;
};
static_assert(sizeof(SwigluArgs) == 56, "SwigluArgs mirrors src/ops/swiglu.rs");

KERNEL(swiglu, SwigluArgs, SWIGLU_THREADS) {
    u32 row = block_x();
    if (row >= *args.n_rows * args.multiplier) return;
    float weight = args.weight ? args.weight[row] : 1.0f;
    u64 first = (u64)row * args.n_cols;
    u32 end = min_((block_y() + 1) * SWIGLU_COLS, args.n_cols);
    for (u32 i = block_y() * SWIGLU_COLS + thread(); i < end; i += n_threads()) {
        float gate = min_(args.gate[first + i], args.limit);
        float up = min_(max_(args.up[first + i], -args.limit), args.limit);
        args.out[first + i] = f32_to_bf16(silu(gate) * up * weight);
    }
}

}  // namespace swiglu_op
