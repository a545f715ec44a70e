//! Adds up each row's experts in the order of its choice, then the shared expert, from +0.
//!
//! Bound: (K + 1) rows of D f32 read and one written. One block a row and 1,024 columns.
#include "common/step.h"

namespace combine_op {

constexpr u32 COMBINE_THREADS = 256, COMBINE_COLS = 4 * COMBINE_THREADS;

struct CombineArgs {
    Step step;
    const float* routed;  // [T * K, D] f32, sorted rows
    const u32* row_of;    // [T, K]
    const float* shared;  // [T, D] f32
    float* out;           // [T, D] f32
    u32 n_cols, top_k;
};
static_assert(sizeof(CombineArgs) == 72, "CombineArgs mirrors src/ops/combine.rs");

KERNEL(combine, CombineArgs, COMBINE_THREADS) {
    u32 row = block_x();
    if (row >= args.step.counts->n_rows) return;
    const u32* row_of = args.row_of + (u64)row * args.top_k;
    u32 end = min_((block_y() + 1) * COMBINE_COLS, args.n_cols);
    for (u32 i = block_y() * COMBINE_COLS + thread(); i < end; i += n_threads()) {
        float sum = 0.0f;
        for (u32 k = 0; k < args.top_k; k++) sum = sum + args.routed[(u64)row_of[k] * args.n_cols + i];
        args.out[(u64)row * args.n_cols + i] = sum + args.shared[(u64)row * args.n_cols + i];
    }
}

}  // namespace combine_op
