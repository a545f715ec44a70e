//! The experts' activation, for the kernels that end with it.
#pragma once
#include "formats.h"
#include "math.h"

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
static_assert(sizeof(SwigluArgs) == 56, "SwigluArgs mirrors src/ops/swiglu/device.rs");

/// Columns of a row that one block takes.
constexpr u32 SWIGLU_COLS = 1024;

/// silu(min(gate, limit)) * clamp(up, -limit, limit) * weight; a NaN stays a NaN.
DEVICE float swiglu_of(float gate, float up, float limit, float weight) {
    return silu(min_(gate, limit)) * min_(max_(up, -limit), limit) * weight;
}

/// Some columns of one row, those of `chunk`, by all threads of a block.
DEVICE void swiglu_row(const SwigluArgs& args, u32 row, u32 chunk) {
    if (row >= *args.n_rows * args.multiplier) return;
    float weight = args.weight ? args.weight[row] : 1.0f;
    u64 first = (u64)row * args.n_cols;
    u32 end = min_((chunk + 1) * SWIGLU_COLS, args.n_cols);
    for (u32 i = chunk * SWIGLU_COLS + thread(); i < end; i += n_threads()) {
        args.out[first + i] = f32_to_bf16(swiglu_of(args.gate[first + i], args.up[first + i], args.limit, weight));
    }
}
