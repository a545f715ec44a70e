//! What every kernel knows of the step it works for: rows, runs of consecutive rows, block tables and counts.
//!
//! The structs are uploaded as they are into buffers that stay at one address, so that a captured graph reads each step's own
//! numbers; kernels/common/step.h holds the same fields in the same order.

use bytemuck::{Pod, Zeroable};

/// `StepRow::token_id` of a row whose token is the slot's last one on the device.
pub const TOKEN_OF_SLOT: u32 = u32::MAX;
/// `StepRow::run` of a row that only fills a graph's bucket; no kernel writes anything for it.
pub const NO_RUN: u32 = u32::MAX;

/// One row of the step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct StepRow {
    /// Token, or [`TOKEN_OF_SLOT`].
    pub token_id: u32,
    /// Position in its sequence.
    pub position: u32,
    /// Its run, or [`NO_RUN`].
    pub run: u32,
    /// Its slot.
    pub slot: u32,
}

/// Consecutive rows of one sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct StepRun {
    /// Slot of the sequence.
    pub slot: u32,
    /// Position of its first row.
    pub first_pos: u32,
    /// Its first row in the step.
    pub first_row: u32,
    /// Its rows.
    pub n_rows: u32,
    /// Where its block table begins in the step's block ids.
    pub first_block: u32,
    /// Blocks of the table.
    pub n_blocks: u32,
    /// Zero.
    pub pad: [u32; 2],
}

/// Sizes of the step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct StepCounts {
    /// Rows that are real; those after them fill the bucket.
    pub n_rows: u32,
    /// Runs.
    pub n_runs: u32,
    /// Rows whose logits are wanted.
    pub n_logit_rows: u32,
    /// Zero.
    pub pad: u32,
}

/// Device addresses of the step's buffers, a part of most kernels' arguments.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct Step {
    /// The rows.
    pub rows: u64, // [T] StepRow
    /// The runs.
    pub runs: u64, // [n_runs] StepRun
    /// The runs' block tables, one after the other.
    pub block_ids: u64, // [n_block_ids] u32
    /// The sizes.
    pub counts: u64, // [1] StepCounts
}

const _: () = assert!(size_of::<StepRow>() == 16 && size_of::<StepRun>() == 32);
const _: () = assert!(size_of::<StepCounts>() == 16 && size_of::<Step>() == 32);
