//! A step's metadata on the device: which rows there are and where each run's blocks lie. Mirrors src/ops/step.rs.
#pragma once
#include "device.h"

/// `StepRow::token_id`: the token is the one that the slot's last step chose, in slot_tokens[slot].
constexpr u32 TOKEN_OF_SLOT = 0xFFFFFFFFu;
/// `StepRow::run`: a padding row of a graph's bucket; nothing is written for it.
constexpr u32 NO_RUN = 0xFFFFFFFFu;

/// One row (token) of the step.
struct StepRow {
    u32 token_id, position, run, slot;
};
static_assert(sizeof(StepRow) == 16, "StepRow mirrors src/ops/step.rs");

/// Consecutive rows of one sequence. Its blocks are block_ids[first_block .. first_block + n_blocks], from position 0.
struct StepRun {
    u32 slot, first_pos, first_row, n_rows, first_block, n_blocks, pad0, pad1;
};
static_assert(sizeof(StepRun) == 32, "StepRun mirrors src/ops/step.rs");

struct StepCounts {
    u32 n_rows, n_runs, n_logit_rows, pad;
};
static_assert(sizeof(StepCounts) == 16, "StepCounts mirrors src/ops/step.rs");

/// The buffers that hold them; grids are sized for the bucket, so kernels check the counts.
struct Step {
    const StepRow* rows;
    const StepRun* runs;
    const u32* block_ids;
    const StepCounts* counts;
};
static_assert(sizeof(Step) == 32, "Step mirrors src/ops/step.rs");
