//! Rows of f32 rounded to bf16, as the input of the next matrix product. Contract: src/ops/to_bf16.rs.
#include "common/device.h"
#include "common/formats.h"
#include "common/step.h"

struct ToBf16Args {
    Step step;
    const float* x;  // [T, N] f32
    u16* out;        // [T, N] bf16
    u32 n_cols, pad;
};
static_assert(sizeof(ToBf16Args) == 56, "ToBf16Args mirrors src/ops/to_bf16.rs");

/// A thread rounds four columns of a row.
KERNEL(to_bf16, ToBf16Args, 256) {
    u32 row = block_y(), column = (block_x() * n_threads() + thread()) * 4;
    if (row >= args.step.counts->n_rows || args.step.rows[row].run == NO_RUN || column >= args.n_cols) return;
    u64 at = (u64)row * args.n_cols + column;
    U4 x = load16(args.x + at);
    u32* out = (u32*)(args.out + at);
    out[0] = bf16_pair(from_bits(x.x), from_bits(x.y));
    out[1] = bf16_pair(from_bits(x.z), from_bits(x.w));
}
