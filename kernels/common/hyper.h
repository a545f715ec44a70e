//! Hyper-connections: the new copies of the residual, for the kernel that writes them and for those that first look at them.
#pragma once
#include "row.h"

/// Copies of the residual, and weights of a row: pre, post, comb.
constexpr u32 HC = 4, MIXES = 2 * HC + HC * HC;

/// Column by column the new copy j: post[j] times the sublayer's output plus the old copies weighed by column j of comb.
DEVICE void renew_copy(const float* weights, u32 j, const float o[4], const float old[HC][4], float out[4]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        float v = weights[HC + j] * o[i];
#pragma unroll
        for (u32 c = 0; c < HC; c++) v = fma(weights[2 * HC + HC * c + j], old[c][i], v);
        out[i] = v;
    }
}

/// Four columns from `col` on of a row's experts: the routed ones in the order of choice, then the shared one, from +0. `row_of` is the
/// row's.
DEVICE void add_experts(const float* routed, const u32* row_of, u32 top_k, const float* shared, u64 n_cols, u32 col, float out[4]) {
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f}, x[4];
#pragma unroll 4
    for (u32 k = 0; k < top_k; k++) {
        load4(routed + row_of[k] * n_cols + col, x);
#pragma unroll
        for (u32 i = 0; i < 4; i++) v[i] = v[i] + x[i];
    }
    load4(shared + col, x);
#pragma unroll
    for (u32 i = 0; i < 4; i++) out[i] = v[i] + x[i];
}
