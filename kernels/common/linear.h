//! One product of `linear`, and a block of it for few tokens: for the kernels that have such a product among others.
#pragma once
#include "product.h"

struct LinearProblem {
    const u8* codes;   // repacked, [N, K]
    const u8* scales;  // repacked; none for BF16
    const u16* x;      // [T, x_stride] bf16, 16-byte aligned rows
    void* y;           // [T, y_stride] f32, or bf16
    u32 n_rows, n_cols, x_stride, y_stride;
    u32 group_rows;         // rows of one group; group g reads x from column g * n_cols
    u32 format;             // FORMAT_*
    u32 first_tile;         // the first block_x of this problem
    u16 rows_count_source;  // 0: counts.n_rows, 1: counts.n_logit_rows
    u16 is_rounded;         // 1: y is bf16
};
static_assert(sizeof(LinearProblem) == 64, "LinearProblem mirrors src/ops/linear/device.rs");

/// The rows of x that a block's tokens are.
struct LinearRows {
    const u16* x;
    u64 stride;
    u32 n_cols, group_row_tiles;
};

DEVICE const u16* row_at(const LinearRows& r, u32 token, u32 row_tile) {
    return r.x + token * r.stride + row_tile / r.group_row_tiles * r.n_cols;
}

/// The part of a problem that `n_tokens` tokens from `first_token` on are; its row tiles are the caller's to set.
DEVICE Product product_of(const LinearProblem& p, u32 first_token, u32 n_tokens, u32 splits) {
    Product product;
    product.codes = p.codes;
    product.scales = p.scales;
    product.y = (u8*)p.y + (u64)first_token * p.y_stride * (p.is_rounded ? 2 : 4);
    product.y_stride = p.y_stride;
    product.n_rows = p.n_rows;
    product.n_cols = p.n_cols;
    product.n_tokens = n_tokens;
    product.splits = splits;
    product.first_row_tile = 0;
    product.is_rounded = p.is_rounded;
    return product;
}

DEVICE LinearRows rows_of(const LinearProblem& p, u32 first_token) {
    return {p.x + (u64)first_token * p.x_stride, p.x_stride, p.n_cols, ceil_div(p.group_rows, TILE_M)};
}

/// Block `block` of a product of the given format for `n_tokens` tokens from `first_token` on, of which there are more than that.
template <u32 FORMAT, u32 N_TILES>
DEVICE void linear_block(const LinearProblem& p, u32 block, u32 first_token, u32 n_tokens, float* partial) {
    u32 splits = n_splits(ceil_div(p.n_rows, TILE_M), ceil_div(p.n_cols, STEP_COLS), 1);
    Product product = product_of(p, first_token, min_(n_tokens - first_token, N_TILES * TILE_N), splits);
    product.first_row_tile = block * (PRODUCT_WAVES / splits);
    multiply_few<FORMAT, N_TILES>(product, rows_of(p, first_token), partial);
}
