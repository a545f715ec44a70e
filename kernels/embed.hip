//! Resolves each row's token and expands its embedding to every copy of the residual.
//!
//! Bound: bytes, 2 D read and 4 HC D written a row (at D = 4096 and 2,048 rows 151 MB: 32 us at 4.8 TB/s); no arithmetic.
#include "common/row.h"

constexpr u32 HC = 4;

struct EmbedArgs {
    Step step;
    const u32* slot_tokens;  // [n_slots]
    const u16* table;        // [V, D] bf16
    u32* ids_out;            // [T]
    float* residual;         // [T, HC, D] f32
    u32 n_cols, vocab_size;
};
static_assert(sizeof(EmbedArgs) == 72, "EmbedArgs mirrors src/ops/embed/device.rs");

/// One block a row.
KERNEL(embed, EmbedArgs, 256) {
    u32 t = block_x();
    const StepRow* row = step_row(args.step, t);
    if (!row) return;
    u32 token = row->token_id == TOKEN_OF_SLOT ? args.slot_tokens[row->slot] : row->token_id;
    if (token >= args.vocab_size) token = 0;
    if (thread() == 0) args.ids_out[t] = token;
    const u16* from = args.table + (u64)token * args.n_cols;
    float* to = args.residual + (u64)t * HC * args.n_cols;
    for (u32 col = thread(); col < args.n_cols; col += n_threads()) {
        float value = bf16_to_f32(from[col]);
#pragma unroll
        for (u32 copy = 0; copy < HC; copy++) to[copy * args.n_cols + col] = value;
    }
}
