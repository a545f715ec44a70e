//! y = W x for up to eight stored matrices in one launch: the projections of one input, or the groups of wo_a.
//!
//! Bound: decode reads every code once (N K bytes of FP8, N K / 2 of MXFP4, 2 N K of BF16) and beside it, from caches, 2 K bytes a
//! token and row tile; prefill does 2 N K T flops. Layout, order of sums and scales: common/weight_tile.h.
//!
//! A result is rounded to bf16 on request, after the last addition.
//!
//! Forms: `linear_8` .. `linear_64` give a block's eight waves n_splits ranges of K and that many tokens; `linear_many` gives a wave all of K
//! for 32 rows and 32 of 64 tokens, staged in shared memory. All five give the same bits.
//!
//! Measured on an H200 with an event on each side of a launch (some 3.5 us of it), one row, 33.5 MB of FP8 in 512 blocks: 18.6 us with
//! codes alone requested ahead, 17.3 with scales and columns too. Failed for `linear_many`: 16 rows and 64 tokens a wave in 128 registers.
#include "common/linear.h"
#include "common/step.h"

namespace linear_op {

constexpr u32 MAX_PROBLEMS = 8;

struct LinearArgs {
    Step step;
    LinearProblem problems[MAX_PROBLEMS];
    u32 n_problems, n_tiles_total;
};
static_assert(sizeof(LinearArgs) == 552, "LinearArgs mirrors src/ops/linear/device.rs");

/// The problem of this block.
DEVICE const LinearProblem& problem_of(const LinearArgs& args) {
    u32 i = 0;
    while (i + 1 < args.n_problems && args.problems[i + 1].first_tile <= block_x()) i++;
    return args.problems[i];
}

DEVICE u32 n_tokens_of(const LinearArgs& args, const LinearProblem& p) {
    return p.rows_count_source == 0 ? args.step.counts->n_rows : args.step.counts->n_logit_rows;
}

template <u32 N_TILES> DEVICE void linear_few(const LinearArgs& args, float* partial) {
    const LinearProblem& p = problem_of(args);
    u32 n_tokens = n_tokens_of(args, p), first_token = block_y() * N_TILES * TILE_N, block = block_x() - p.first_tile;
    if (first_token >= n_tokens) return;
    if (p.format == FORMAT_FP8) linear_block<FORMAT_FP8, N_TILES>(p, block, first_token, n_tokens, partial);
    if (p.format == FORMAT_MXFP4) linear_block<FORMAT_MXFP4, N_TILES>(p, block, first_token, n_tokens, partial);
    if (p.format == FORMAT_BF16) linear_block<FORMAT_BF16, N_TILES>(p, block, first_token, n_tokens, partial);
}

/// Entry for a number of tokens a block, at least one tile of the target's.
#define LINEAR_FEW(name, tokens)                                                      \
    KERNEL(name, LinearArgs, PRODUCT_WAVES * WAVE) {                                  \
        constexpr u32 N_TILES = tokens > TILE_N ? tokens / TILE_N : 1;                \
        SHARED(float, partial, n_partials(N_TILES));                                  \
        linear_few<N_TILES>(args, partial);                                           \
    }
LINEAR_FEW(linear_8, 8)
LINEAR_FEW(linear_16, 16)
LINEAR_FEW(linear_32, 32)
LINEAR_FEW(linear_64, 64)

KERNEL(linear_many, LinearArgs, PRODUCT_WAVES * WAVE) {
    SHARED(U4, stage, 2 * STAGE_PIECES);
    const LinearProblem& p = problem_of(args);
    u32 n_tokens = n_tokens_of(args, p), first_token = block_y() * MANY_TOKENS;
    if (first_token >= n_tokens) return;
    u32 splits = n_splits(ceil_div(p.n_rows, TILE_M), ceil_div(p.n_cols, STEP_COLS), 1);
    Product product = product_of(p, first_token, min_(n_tokens - first_token, MANY_TOKENS), splits);
    // A block's rows are of one group, since they share the staged tokens.
    u32 group_row_tiles = ceil_div(p.group_rows, TILE_M), blocks = ceil_div(group_row_tiles, MANY_ROW_TILES);
    u32 block = block_x() - p.first_tile, group = block / blocks;
    product.first_row_tile = group * group_row_tiles + block % blocks * MANY_ROW_TILES;
    product.n_rows = min_(p.n_rows, (group + 1) * group_row_tiles * TILE_M);
    LinearRows rows = rows_of(p, first_token);
    if (p.format == FORMAT_FP8) multiply_many<FORMAT_FP8, false>(product, {}, rows, stage);
    if (p.format == FORMAT_MXFP4) multiply_many<FORMAT_MXFP4, false>(product, {}, rows, stage);
    if (p.format == FORMAT_BF16) multiply_many<FORMAT_BF16, false>(product, {}, rows, stage);
}

}  // namespace linear_op
