//! From the scheduler's decisions to a [`StepPlan`], and the ticket that says what its results mean.

use std::sync::Arc;

use super::sequence::{Rank, Running};
use crate::ids::{BlockId, CheckpointId, SlotIdx};
use crate::kv::cache::Hit;
use crate::model::batch::{Batch, RowKind, Run, SampleRow, SaveCheckpoint, ScoreRow, StepPlan, TokenSource};

/// A step under construction.
#[derive(Debug, Default)]
pub struct Stage {
    plan: StepPlan,
    ticket: StepTicket,
}

/// What the rows of a step were for; needed to read its output.
#[derive(Debug, Default)]
pub struct StepTicket {
    /// Parallel to the plan's runs.
    pub runs: Vec<RunTicket>,
    /// Rows of the step.
    pub n_rows: usize,
    /// Those of them that belong to prompts (or to what is recomputed).
    pub n_prefill_rows: usize,
}

/// One run of a step.
#[derive(Clone, Copy, Debug)]
pub struct RunTicket {
    /// Whose.
    pub rank: Rank,
    /// Tokens in the caches after it.
    pub n_tokens: usize,
    /// Rows it scored.
    pub n_scores: usize,
    /// It samples a token.
    pub has_sample: bool,
}

impl Stage {
    /// Binds a slot to a sequence that begins or resumes at `hit`; `copy_to` takes the tail's rows.
    pub fn bind(&mut self, running: &Running, hit: &Hit, copy_to: Option<BlockId>) {
        let slot = running.slot.id();
        self.plan.binds.push((slot, Arc::new(running.seq.slot_init())));
        if let (Some(tail), Some(copy_to)) = (&hit.tail, copy_to) {
            self.plan.copies.push((tail.id(), copy_to));
        }
        if let Some(checkpoint) = hit.checkpoint {
            self.plan.restores.push((checkpoint, slot));
        }
    }

    /// One row for the sequence's last sampled token.
    pub fn decode(&mut self, running: &Running) {
        self.push(running, 1, RowKind::Decode, TokenSource::Slot, 0..1);
        self.sample(running, 0);
    }

    /// The next `n_rows` known tokens, and a sample after the last one when `samples`.
    pub fn prefill(&mut self, running: &Running, n_rows: usize, samples: bool) {
        let start = self.plan.batch.token_ids.len();
        let end = running.n_rows + n_rows;
        running.seq.tokens().append_to(&mut self.plan.batch.token_ids, running.n_rows, end);
        let scored = running.seq.n_scores_planned.max(running.n_rows)..running.seq.n_scores().min(end);
        let logit_rows = match (scored.is_empty(), samples) {
            (false, _) => scored.start - running.n_rows..if samples { n_rows } else { scored.end - running.n_rows },
            (true, true) => n_rows - 1..n_rows,
            (true, false) => 0..0,
        };
        self.push(running, n_rows, RowKind::Prefill, TokenSource::Host { start }, logit_rows);
        self.ticket.n_prefill_rows += n_rows;
        if let Some(n_top) = running.seq.spec.prompt_logprobs {
            self.score(running, scored, n_top);
        }
        if samples {
            self.sample(running, n_rows - 1);
        }
    }

    /// Keeps a slot's window state after the step.
    pub fn save(&mut self, slot: SlotIdx, checkpoint: CheckpointId, n_tokens: usize) {
        self.plan.saves.push(SaveCheckpoint { slot, checkpoint, n_tokens });
    }

    /// Rows so far.
    #[must_use]
    pub const fn n_rows(&self) -> usize {
        self.ticket.n_rows
    }

    /// Those of them that belong to prompts.
    #[must_use]
    pub const fn n_prefill_rows(&self) -> usize {
        self.ticket.n_prefill_rows
    }

    /// The step, unless there is nothing to do.
    #[must_use]
    pub fn finish(self) -> Option<(StepPlan, StepTicket)> {
        let is_empty = self.plan.batch.runs.is_empty() && self.plan.saves.is_empty() && self.plan.binds.is_empty();
        (!is_empty).then_some((self.plan, self.ticket))
    }

    fn push(
        &mut self,
        running: &Running,
        n_rows: usize,
        kind: RowKind,
        tokens: TokenSource,
        logit_rows: std::ops::Range<usize>,
    ) {
        let Batch { runs, block_ids, .. } = &mut self.plan.batch;
        let first_block = block_ids.len();
        block_ids.extend(running.table.ids());
        let blocks = first_block..block_ids.len();
        runs.push(Run { slot: running.slot.id(), first_pos: running.n_rows, n_rows, kind, tokens, blocks, logit_rows });
        let n_tokens = running.n_rows + n_rows;
        self.ticket.n_rows += n_rows;
        self.ticket.runs.push(RunTicket { rank: running.seq.rank, n_tokens, n_scores: 0, has_sample: false });
    }

    fn sample(&mut self, running: &Running, row: usize) {
        let run_idx = self.plan.batch.runs.len() - 1;
        self.plan.samples.push(SampleRow { run_idx, row, position: running.n_rows + row + 1 });
        self.ticket.runs[run_idx].has_sample = true;
    }

    fn score(&mut self, running: &Running, rows: std::ops::Range<usize>, n_top: u32) {
        let run_idx = self.plan.batch.runs.len() - 1;
        self.ticket.runs[run_idx].n_scores = rows.len();
        for position in rows {
            let target = running.seq.spec.prompt[position + 1];
            self.plan.scores.push(ScoreRow { run_idx, row: position - running.n_rows, target, n_top });
        }
    }
}
