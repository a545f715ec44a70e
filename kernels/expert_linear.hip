//! y = W x for the routed experts, MXFP4: every row with the matrix of its expert, one or two matrices of one input in one launch.
//!
//! The work items (expert, first row) are made on the device by `dispatch`; the grid is their upper bound and blocks past n_items
//! leave at once. Rows are sorted by expert, so an item's rows are consecutive in y.
//!
//! Bound: decode reads N K / 2 bytes of codes and N K / 32 of scales for each expert that has a row; prefill does 2 N K flops a row.
//! Layout, order of sums and scales: common/weight_tile.h. The split of K counts eight experts at work at once, whatever their number is.
#include "common/product.h"
#include "common/step.h"

namespace expert_linear_op {

struct ExpertLinearArgs {
    Step step;
    const u8* codes;   // repacked, base of expert 0; an expert's n_matrices matrices lie one after the other
    const u8* scales;  // as codes
    u64 code_stride_bytes, scale_stride_bytes;  // from one expert to the next
    const u16* x;             // [*, K] bf16, 16-byte aligned rows
    float* y;                 // [T * top_k, N] f32: the first matrix
    float* y2;                // as y: the second matrix
    const u32* row_token;     // [T * top_k]: the row of x that a row reads; none: its own
    const u32* items;         // [n_items, 2]: expert, first row
    const u32* n_items;       // [1]
    const u32* expert_first;  // [E + 1]
    u32 n_rows, n_cols, n_matrices, rows_per_item;
};
static_assert(sizeof(ExpertLinearArgs) == 136, "ExpertLinearArgs mirrors src/ops/expert_linear.rs");

/// The rows of x that an item's rows read.
struct ExpertRows {
    const u16* x;
    const u32* row_token;
    u32 first, n_cols;
};

DEVICE const u16* row_at(const ExpertRows& r, u32 row, u32) {
    u32 source = r.row_token ? r.row_token[r.first + row] : r.first + row;
    return r.x + (u64)source * r.n_cols;
}

struct ExpertBlock {
    Product product;
    ExpertRows rows;
    bool has_work;
};

/// What this block does; `row_tiles` of them, or as many as one split leaves, of one matrix of one item.
DEVICE ExpertBlock block_of(const ExpertLinearArgs& args, bool is_many) {
    ExpertBlock b;
    b.has_work = block_y() < *args.n_items;
    if (!b.has_work) return b;
    u32 expert = args.items[2 * block_y()], first = args.items[2 * block_y() + 1];
    u32 row_tiles = ceil_div(args.n_rows, TILE_M), n_steps = ceil_div(args.n_cols, STEP_COLS);
    Product& p = b.product;
    p.splits = n_splits(row_tiles, n_steps, 8);
    u32 block_tiles = is_many ? MANY_ROW_TILES : PRODUCT_WAVES / p.splits;
    u32 blocks = ceil_div(row_tiles, block_tiles), matrix = block_x() / blocks;
    u64 tile_bytes = (u64)matrix * row_tiles * n_steps;
    p.codes = args.codes + expert * args.code_stride_bytes + tile_bytes * UNIT_BYTES;
    p.scales = args.scales + expert * args.scale_stride_bytes + tile_bytes * 64;
    p.y = (matrix == 0 ? args.y : args.y2) + (u64)first * args.n_rows;
    p.y_stride = args.n_rows;
    p.n_rows = args.n_rows;
    p.n_cols = args.n_cols;
    p.n_tokens = min_(args.expert_first[expert + 1] - first, args.rows_per_item);
    p.first_row_tile = block_x() % blocks * block_tiles;
    b.rows = {args.x, args.row_token, first, args.n_cols};
    return b;
}

/// Entry for items of up to so many rows.
#define EXPERT_LINEAR_FEW(name, tokens)                                                        \
    KERNEL(name, ExpertLinearArgs, PRODUCT_WAVES * WAVE) {                                     \
        constexpr u32 N_TILES = tokens > TILE_N ? tokens / TILE_N : 1;                         \
        SHARED(float, partial, n_partials(N_TILES));                                           \
        ExpertBlock b = block_of(args, false);                                                 \
        if (b.has_work) multiply_few<FORMAT_MXFP4, N_TILES>(b.product, b.rows, partial);       \
    }
EXPERT_LINEAR_FEW(expert_linear_8, 8)
EXPERT_LINEAR_FEW(expert_linear_16, 16)
EXPERT_LINEAR_FEW(expert_linear_32, 32)

KERNEL(expert_linear_many, ExpertLinearArgs, PRODUCT_WAVES * WAVE) {
    SHARED(U4, stage, 2 * STAGE_PIECES);
    ExpertBlock b = block_of(args, true);
    if (b.has_work) multiply_many<FORMAT_MXFP4>(b.product, b.rows, stage);
}

}  // namespace expert_linear_op
