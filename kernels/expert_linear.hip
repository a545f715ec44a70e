//! Products of the routed experts, MXFP4: every row with the matrix of its expert; y = W x in f32, or, with two matrices of one input,
//! swiglu(W1 x, W3 x) in bf16, the next product's input.
//!
//! The work items (expert, first row) are made on the device by `dispatch`; the grid is their upper bound and blocks past n_items
//! leave at once. Rows are sorted by expert, so an item's rows are consecutive in y. The first blocks may take a product of FP8 that
//! waits for nothing else (the shared expert's), so that it needs no launch of its own.
//!
//! Bound: decode reads N K / 2 bytes of codes and N K / 32 of scales for each expert that has a row; prefill does 2 N K flops a row.
//! Layout, order of sums and scales: common/weight_tile.h. The split of K counts sixteen matrices at work at once, whatever their number is.
#include "common/linear.h"
#include "common/step.h"

namespace expert_linear_op {

struct ExpertLinearArgs {
    Step step;
    const u8* codes;   // repacked, base of expert 0; an expert's n_matrices matrices lie one after the other
    const u8* scales;  // as codes
    u64 code_stride_bytes, scale_stride_bytes;  // from one expert to the next
    const u16* x;             // [*, K] bf16, 16-byte aligned rows
    void* y;                  // [T * top_k, N] f32, or bf16 of two matrices
    const float* row_weight;  // [T * top_k] f32: of two matrices' results
    const u32* row_token;     // [T * top_k]: the row of x that a row reads; none: its own
    const u32* items;         // [n_items, 2]: expert, first row
    const u32* n_items;       // [1]
    const u32* expert_first;  // [E + 1]
    u32 n_rows, n_cols, n_matrices, rows_per_item;
    float limit;  // of swiglu
    u32 pad;
    LinearProblem beside;  // FP8, of few rows
    u32 n_beside_blocks, pad1;
};
static_assert(sizeof(ExpertLinearArgs) == 216, "ExpertLinearArgs mirrors src/ops/expert_linear.rs");

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
    Pair pair;
    ExpertRows rows;
    bool has_work;
};

/// What block (x, item) does: some row tiles of one item.
DEVICE ExpertBlock block_of(const ExpertLinearArgs& args, u32 item, bool is_many) {
    ExpertBlock b;
    b.has_work = item < *args.n_items;
    if (!b.has_work) return b;
    u32 expert = args.items[2 * item], first = args.items[2 * item + 1];
    u32 row_tiles = ceil_div(args.n_rows, TILE_M), n_steps = ceil_div(args.n_cols, STEP_COLS);
    bool is_pair = args.n_matrices == 2;
    Product& p = b.product;
    p.splits = n_splits(row_tiles, n_steps, 16);
    u32 few_tiles = is_pair ? pair_tiles(p.splits) : (PRODUCT_WAVES >> log2_of(p.splits));
    u32 many_tiles = is_pair ? MANY_PAIR_TILES : MANY_ROW_TILES;
    u64 n_steps_of_all = (u64)row_tiles * n_steps;
    p.codes = args.codes + expert * args.code_stride_bytes;
    p.scales = args.scales + expert * args.scale_stride_bytes;
    p.y = (u8*)args.y + (u64)first * args.n_rows * (is_pair ? 2 : 4);
    p.y_stride = args.n_rows;
    p.n_rows = args.n_rows;
    p.n_cols = args.n_cols;
    p.n_tokens = min_(args.expert_first[expert + 1] - first, args.rows_per_item);
    p.first_row_tile = block_x() * (is_many ? many_tiles : few_tiles);
    p.is_rounded = false;
    b.pair = {p.codes + n_steps_of_all * UNIT_BYTES, p.scales + n_steps_of_all * 64, args.row_weight + first, args.limit};
    b.rows = {args.x, args.row_token, first, args.n_cols};
    return b;
}

template <u32 N_TILES> DEVICE void expert_few(const ExpertLinearArgs& args, float* partial) {
    u32 n_beside = ceil_div(args.n_beside_blocks, grid_x()), block = block_y() * grid_x() + block_x();
    if (block_y() < n_beside) {
        u32 n_tokens = args.step.counts->n_rows;
        if (block < args.n_beside_blocks && n_tokens > 0) linear_block<FORMAT_FP8, N_TILES>(args.beside, block, 0, n_tokens, partial);
        return;
    }
    ExpertBlock b = block_of(args, block_y() - n_beside, false);
    if (!b.has_work) return;
    if (args.n_matrices == 2) {
        multiply_few_pair<FORMAT_MXFP4, N_TILES>(b.product, b.pair, b.rows, partial);
    } else {
        multiply_few<FORMAT_MXFP4, N_TILES>(b.product, b.rows, partial);
    }
}

/// Entry for items of up to so many rows.
#define EXPERT_LINEAR_FEW(name, tokens)                                                        \
    KERNEL(name, ExpertLinearArgs, PRODUCT_WAVES * WAVE) {                                     \
        constexpr u32 N_TILES = tokens > TILE_N ? tokens / TILE_N : 1;                         \
        SHARED(float, partial, n_pair_partials(N_TILES));                                      \
        expert_few<N_TILES>(args, partial);                                                    \
    }
EXPERT_LINEAR_FEW(expert_linear_8, 8)
EXPERT_LINEAR_FEW(expert_linear_16, 16)
EXPERT_LINEAR_FEW(expert_linear_32, 32)

KERNEL(expert_linear_many, ExpertLinearArgs, PRODUCT_WAVES * WAVE) {
    SHARED(U4, stage, 2 * STAGE_PIECES);
    ExpertBlock b = block_of(args, block_y(), true);
    if (!b.has_work) return;
    if (args.n_matrices == 2) {
        multiply_many<FORMAT_MXFP4, true>(b.product, b.pair, b.rows, stage);
    } else {
        multiply_many<FORMAT_MXFP4, false>(b.product, b.pair, b.rows, stage);
    }
}

}  // namespace expert_linear_op
