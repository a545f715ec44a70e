//! Sequences of random tokens on an executor: their steps as plans, timed on the host from launch to the sampled token.

use std::time::Instant;

use crate::device::{DeviceError, LaunchTime};
use crate::ids::{BlockId, SlotIdx, TokenId};
use crate::model::batch::{Batch, Executor, RowKind, Run, SampleRow, StepPlan, TokenSource};
use crate::model::cache::BLOCK_TOKENS;
use crate::model::device::runner::DeviceRunner;
use crate::model::shape::ModelShape;
use crate::ops::case::data::Noise;

/// The executor and the sequences in its slots.
pub(super) struct Driver {
    runner: DeviceRunner,
    tokens: Noise,
    vocab_size: u32,
    /// Tokens of each slot's sequence that are in the caches.
    n_tokens: Vec<usize>, // [n_sequences]
    blocks_each: usize,
}

/// Some sequences' next rows: `(sequence, rows)` each.
pub(super) type Rows = [(usize, usize)];

impl Driver {
    pub fn new(runner: DeviceRunner, shape: &ModelShape, seed: u64) -> Self {
        let vocab_size = shape.vocab_size as u32;
        Self { runner, tokens: Noise::new(seed), vocab_size, n_tokens: Vec::new(), blocks_each: 0 }
    }

    /// Forgets all sequences and starts `n` new ones of at most `max_tokens`.
    pub fn start(&mut self, n: usize, max_tokens: usize) {
        self.n_tokens = vec![0; n];
        self.blocks_each = max_tokens.div_ceil(BLOCK_TOKENS);
    }

    /// As if the sequences had this many tokens: rows without pattern stand for those of real ones.
    pub fn pretend(&mut self, n_tokens: usize) -> Result<(), DeviceError> {
        self.n_tokens.fill(n_tokens);
        self.runner.fill_caches()
    }

    /// Runs prompts of `n_tokens` random tokens in all sequences, some at once; milliseconds of each step.
    pub fn prefill(&mut self, n_tokens: usize) -> Result<Vec<f64>, DeviceError> {
        let max_rows = self.runner.capacity().max_rows;
        let mut times = Vec::new();
        loop {
            let mut n_left = max_rows;
            let mut rows = Vec::new();
            for (sequence, n_done) in self.n_tokens.iter().enumerate() {
                let n_rows = (n_tokens - n_done).min(n_left);
                n_left -= n_rows;
                rows.extend((n_rows > 0).then_some((sequence, n_rows)));
            }
            if rows.is_empty() {
                return Ok(times);
            }
            times.push(self.step(&rows, RowKind::Prefill)?);
        }
    }

    /// One decode step of the first sequences; milliseconds.
    pub fn decode(&mut self, n_streams: usize) -> Result<f64, DeviceError> {
        self.step(&one_each(n_streams), RowKind::Decode)
    }

    /// How many different experts each layer takes in a step of these rows. The sequences stay as they are.
    pub fn distinct_experts(&mut self, rows: &Rows, kind: RowKind) -> Result<Vec<usize>, DeviceError> {
        let plan = self.plan(rows, kind);
        self.runner.distinct_experts(&plan)
    }

    /// Times of every launch of a step of these rows. The sequences stay as they are.
    pub fn profile(&mut self, rows: &Rows, kind: RowKind) -> Result<Vec<LaunchTime>, DeviceError> {
        let plan = self.plan(rows, kind);
        self.runner.profile(plan)
    }

    /// Rows of the largest step.
    pub fn max_rows(&self) -> usize {
        self.runner.capacity().max_rows
    }

    fn step(&mut self, rows: &Rows, kind: RowKind) -> Result<f64, DeviceError> {
        let plan = self.plan(rows, kind);
        let started = Instant::now();
        self.runner.launch(plan)?;
        self.runner.finish()?;
        let ms = started.elapsed().as_secs_f64() * 1e3;
        for &(sequence, n_rows) in rows {
            self.n_tokens[sequence] += n_rows;
        }
        Ok(ms)
    }

    /// The plan of some rows: each sequence's last one is sampled, greedily. The ids are random all the same, so that streams
    /// never come to say the same.
    fn plan(&mut self, rows: &Rows, kind: RowKind) -> StepPlan {
        let (mut batch, mut samples) = (Batch::default(), Vec::new());
        for (run_idx, &(sequence, n_rows)) in rows.iter().enumerate() {
            let (start, first_block) = (batch.token_ids.len(), batch.block_ids.len());
            batch.token_ids.extend((0..n_rows).map(|_| TokenId(self.tokens.below(self.vocab_size))));
            let own = sequence * self.blocks_each..(sequence + 1) * self.blocks_each;
            batch.block_ids.extend(own.map(|block| BlockId(block as u32)));
            let first_pos = self.n_tokens[sequence];
            batch.runs.push(Run {
                slot: SlotIdx(sequence as u32),
                first_pos,
                n_rows,
                kind,
                tokens: TokenSource::Host { start },
                blocks: first_block..batch.block_ids.len(),
                logit_rows: n_rows - 1..n_rows,
            });
            samples.push(SampleRow { run_idx, row: n_rows - 1, position: first_pos + n_rows });
        }
        StepPlan { batch, samples, ..StepPlan::default() }
    }
}

/// One row of each of the first sequences.
pub(super) fn one_each(n_streams: usize) -> Vec<(usize, usize)> {
    (0..n_streams).map(|sequence| (sequence, 1)).collect()
}
