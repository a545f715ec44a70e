//! The contract between scheduler and model: one step's work as plain data, and the trait that runs it.
//!
//! A plan never contains ids sampled by the step before it: decode rows read them from their slot, so that a step may be
//! launched before the last one has come home. Everything is flat arrays and indices, fit to be staged in device memory.

use std::ops::Range;
use std::sync::Arc;

use crate::ids::{BlockId, CheckpointId, SlotIdx, TokenId};
use crate::sample::params::{RowError, Sampled, SlotInit, TokenLogprobs};

/// What a run of rows is for; the arithmetic is the same for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// A chunk of known tokens (a prompt, or a preempted sequence being recomputed).
    Prefill,
    /// One row: the last sampled token.
    Decode,
    /// The last sampled token followed by drafted tokens, some of which may be rejected afterwards: their window rows are
    /// then overwritten, and no compressed row of a group with an uncommitted token becomes visible.
    Verify,
}

/// Where the token ids of a run come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// `Batch::token_ids[start .. start + n_rows]`.
    Host {
        /// First id's index in `Batch::token_ids`.
        start: usize,
    },
    /// The slot's last sampled token (and, for Verify, its drafts).
    Slot,
}

/// Consecutive rows of one sequence in a step. A slot appears at most once in a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The sequence's slot.
    pub slot: SlotIdx,
    /// Position of the first row: the number of tokens of the sequence already in the caches.
    pub first_pos: usize,
    /// Rows, at least 1.
    pub n_rows: usize,
    /// What the rows are for.
    pub kind: RowKind,
    /// Where their ids come from.
    pub tokens: TokenSource,
    /// The sequence's block table in `Batch::block_ids`; entry i holds positions 256 i .. 256 (i + 1) and must exist for
    /// every position up to `first_pos + n_rows - 1`.
    pub blocks: Range<usize>,
    /// Rows (relative to the run) whose logits are wanted.
    pub logit_rows: Range<usize>,
}

/// The ragged batch of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Runs in the scheduler's order. Results never depend on it.
    pub runs: Vec<Run>,
    /// Ids of all `TokenSource::Host` rows.
    pub token_ids: Vec<TokenId>,
    /// Block tables of all runs.
    pub block_ids: Vec<BlockId>,
}

/// One token to sample after the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleRow {
    /// Index of the run in `Batch::runs`.
    pub run_idx: usize,
    /// Row relative to the run; inside its `logit_rows`.
    pub row: usize,
    /// Position the sampled token will have (`first_pos + row + 1`): a word of the noise counter.
    pub position: usize,
}

/// A prompt row whose log-probabilities are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreRow {
    /// Index of the run in `Batch::runs`.
    pub run_idx: usize,
    /// Row relative to the run; inside its `logit_rows`.
    pub row: usize,
    /// The token that stands at the next position.
    pub target: TokenId,
    /// How many of the most likely tokens to return with it.
    pub n_top: u32,
}

/// A copy of a slot's window state to be kept after the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveCheckpoint {
    /// Whose state.
    pub slot: SlotIdx,
    /// Where to.
    pub checkpoint: CheckpointId,
    /// Tokens of the sequence in the caches after the step; the state describes exactly these.
    pub n_tokens: usize,
}

/// Everything one step does, in this order: bind, copy blocks, restore, forward, sample and score, save.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// Slots taken by a new (or resumed) sequence.
    pub binds: Vec<(SlotIdx, Arc<SlotInit>)>,
    /// Blocks to copy (from, to): a partly filled cached block that a new sequence goes on writing.
    pub copies: Vec<(BlockId, BlockId)>,
    /// Window states to put back (from, into).
    pub restores: Vec<(CheckpointId, SlotIdx)>,
    /// The rows.
    pub batch: Batch,
    /// Tokens to sample; each also becomes its slot's last token.
    pub samples: Vec<SampleRow>,
    /// Prompt positions to score.
    pub scores: Vec<ScoreRow>,
    /// Window states to keep.
    pub saves: Vec<SaveCheckpoint>,
}

/// What a step brings home; both lists are parallel to the plan's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// One for each of `StepPlan::samples`; an error fails that sequence alone (a row of NaN).
    pub sampled: Vec<Result<Sampled, RowError>>,
    /// One for each of `StepPlan::scores`.
    pub scores: Vec<TokenLogprobs>,
}

/// Places an executor has; fixed for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Sequences that run at once.
    pub n_slots: usize,
    /// KV blocks.
    pub n_blocks: usize,
    /// Checkpoints.
    pub n_checkpoints: usize,
    /// Rows a step may have.
    pub max_rows: usize,
    /// Longest sequence in tokens (max_model_len).
    pub max_tokens: usize,
    /// Vocabulary entries.
    pub vocab_size: usize,
}

/// A device that runs steps in the order in which they were launched.
pub trait Executor: Send {
    /// Its places.
    fn capacity(&self) -> Capacity;

    /// Starts a step. It may return before the step is done; at most `lag + 1` steps are in flight.
    ///
    /// # Errors
    /// [`crate::device::DeviceError`] when the device is lost; nothing can be launched after it.
    fn launch(&mut self, plan: StepPlan) -> Result<(), crate::device::DeviceError>;

    /// Waits for the oldest step in flight.
    ///
    /// # Errors
    /// As for `launch`; every sequence of the step fails.
    fn finish(&mut self) -> Result<StepOutput, crate::device::DeviceError>;
}
