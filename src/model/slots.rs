//! What the host keeps of every slot: its sampler, its last token, the drafts of its next Verify run.

use std::sync::Arc;

use crate::ids::{SlotIdx, TokenId};
use crate::model::batch::{Batch, StepOutput, StepPlan, TokenSource};
use crate::sample::params::{RowError, Sampled, SamplingParams, SlotInit};
use crate::sample::sampler::{SlotSampler, score};

/// All slots of an executor.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    vocab_size: usize,
}

/// The ids of a step's rows, each below the vocabulary's size.
#[derive(Debug, Default)]
pub(super) struct RowTokens {
    /// One a row.
    pub token_ids: Vec<TokenId>, // [T]
    /// One a run: it had an id outside the vocabulary, so its sequence fails.
    pub bad_runs: Vec<bool>,
}

#[derive(Debug, Default)]
struct Slot {
    sampler: Option<SlotSampler>,
    last_token: TokenId,
    /// A device that keeps last tokens, too, has another one.
    is_stale: bool,
    drafts: Vec<TokenId>,
}

impl Slots {
    /// Slots that were never bound.
    pub fn new(n_slots: usize, vocab_size: usize) -> Self {
        Self { slots: (0..n_slots).map(|_| Slot::default()).collect(), vocab_size }
    }

    /// Gives a slot the drafted tokens of its next Verify run.
    pub fn set_drafts(&mut self, slot: SlotIdx, drafts: &[TokenId]) {
        let own = &mut self.slots[slot.index()].drafts;
        own.clear();
        own.extend_from_slice(drafts);
    }

    /// Drafts that a slot has.
    pub fn n_drafts(&self, slot: SlotIdx) -> usize {
        self.slots[slot.index()].drafts.len()
    }

    /// Starts a slot for a new or resumed sequence.
    pub fn bind(&mut self, slot: SlotIdx, init: &SlotInit) {
        let state = &mut self.slots[slot.index()];
        state.sampler = Some(SlotSampler::new(init, self.vocab_size));
        let last = init.output.last().or(init.prompt.last());
        state.last_token = last.copied().unwrap_or_default();
        state.is_stale = true;
        state.drafts.clear();
    }

    /// Collects the id of every row. A run with an id outside the vocabulary must never reach a table: its rows run as
    /// token 0 and the run is marked, so that its sequence fails alone.
    pub fn gather_token_ids(&self, batch: &Batch, rows: &mut RowTokens) {
        let RowTokens { token_ids, bad_runs } = rows;
        token_ids.clear();
        bad_runs.clear();
        for run in &batch.runs {
            let start = token_ids.len();
            match run.tokens {
                TokenSource::Host { start } => token_ids.extend(&batch.token_ids[start..start + run.n_rows]),
                TokenSource::Slot => {
                    let slot = &self.slots[run.slot.index()];
                    token_ids.push(slot.last_token);
                    token_ids.extend(&slot.drafts[..run.n_rows - 1]);
                }
            }
            let mut is_bad = false;
            for id in &mut token_ids[start..] {
                if id.index() >= self.vocab_size {
                    (*id, is_bad) = (TokenId(0), true);
                }
            }
            bad_runs.push(is_bad);
        }
    }

    /// Samples and scores a step. `logits` gives those of a row `(run_idx, row)`, `[V]`.
    pub fn sample_and_score<'a>(
        &mut self,
        plan: &StepPlan,
        rows: &RowTokens,
        logits: impl Fn(usize, usize) -> &'a [f32],
    ) -> StepOutput {
        let mut output = StepOutput::default();
        let read = |run_idx: usize, row: usize| {
            if rows.bad_runs[run_idx] { &[f32::NAN] } else { logits(run_idx, row) }
        };
        for sample in &plan.samples {
            let slot = plan.batch.runs[sample.run_idx].slot;
            output.sampled.push(self.sample(slot, read(sample.run_idx, sample.row), sample.position));
        }
        for row in &plan.scores {
            output.scores.push(score(read(row.run_idx, row.row), row.target, row.n_top));
        }
        output
    }

    /// Draws a slot's token for `position` from a row of logits.
    pub fn sample(&mut self, slot: SlotIdx, logits: &[f32], position: usize) -> Result<Sampled, RowError> {
        let sampled = self.sampler(slot).sample(logits, position);
        if let Ok(sampled) = &sampled {
            let state = &mut self.slots[slot.index()];
            (state.last_token, state.is_stale) = (sampled.token, true);
        }
        sampled
    }

    /// Counts a token that a device has drawn for a slot; `is_kept`: the device has it as the slot's last one.
    pub fn record(&mut self, slot: SlotIdx, token: TokenId, is_kept: bool) {
        self.sampler(slot).record(token);
        let state = &mut self.slots[slot.index()];
        (state.last_token, state.is_stale) = (token, !is_kept);
    }

    /// A slot's sampler.
    pub fn sampler(&mut self, slot: SlotIdx) -> &mut SlotSampler {
        let vocab_size = self.vocab_size;
        self.slots[slot.index()].sampler.get_or_insert_with(|| SlotSampler::new(&unbound(), vocab_size))
    }

    /// Entries of the vocabulary.
    pub const fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The last tokens that a device does not have yet; from now on they count as known to it.
    pub fn take_stale(&mut self) -> impl Iterator<Item = (usize, TokenId)> {
        let stale = self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.is_stale);
        stale.map(|(idx, slot)| {
            slot.is_stale = false;
            (idx, slot.last_token)
        })
    }
}

/// Greedy sampling for a slot that was never bound.
fn unbound() -> SlotInit {
    SlotInit {
        sampling: SamplingParams { temperature: 0.0, ..Default::default() },
        choice: 0,
        prompt: Arc::new([]),
        output: Vec::new(),
        banned_until_min: Vec::new(),
        min_tokens: 0,
        n_logprobs: None,
    }
}
