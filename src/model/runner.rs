//! The CPU executor: runs step plans in order, from token ids in slots to sampled tokens.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::device::DeviceError;
use crate::device::cpu::Cpu;
use crate::ids::{SlotIdx, TokenId};
use crate::model::batch::{Batch, Capacity, Executor, Run, StepOutput, StepPlan, TokenSource};
use crate::model::cache::{BLOCK_TOKENS, Cache, CacheLayout, CachePlaces, CacheShape};
use crate::model::forward::{Forward, Rounding};
use crate::model::shape::ModelShape;
use crate::model::weights::Weights;
use crate::sample::params::SlotInit;
use crate::sample::sampler::{SlotSampler, score};

/// What a [`CpuRunner`] is built from.
#[derive(Debug)]
pub struct CpuRunnerSpec {
    /// The checkpoint.
    pub weights: Arc<Weights>,
    /// Its shape.
    pub shape: ModelShape,
    /// Which roundings the arithmetic contains; also decides how cache rows are stored.
    pub rounding: Rounding,
    /// The processor.
    pub cpu: Cpu,
    /// Places.
    pub places: RunnerPlaces,
}

/// How many places a [`CpuRunner`] has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerPlaces {
    /// Sequences that run at once.
    pub n_slots: usize,
    /// Memory for KV blocks and checkpoints together.
    pub kv_bytes: usize,
    /// Checkpoints.
    pub n_checkpoints: usize,
    /// Rows a step may have.
    pub max_rows: usize,
    /// Longest sequence in tokens.
    pub max_tokens: usize,
}

/// A [`CpuRunner`] can't be built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunnerError {
    /// One sequence of the longest length would not fit.
    #[error(
        "kv_bytes is {got_bytes}, but {n_checkpoints} checkpoints and one sequence of {max_tokens} tokens need {want_bytes}"
    )]
    KvTooSmall {
        /// What would do.
        want_bytes: usize,
        /// What was given.
        got_bytes: usize,
        /// Checkpoints asked for.
        n_checkpoints: usize,
        /// The longest sequence.
        max_tokens: usize,
    },
    /// A number that must be at least 1, or no more than the model allows.
    #[error("{field} is {got}; want {min} to {max}")]
    Range {
        /// The field of [`RunnerPlaces`].
        field: &'static str,
        /// Its value.
        got: usize,
        /// Least value.
        min: usize,
        /// Greatest value.
        max: usize,
    },
}

/// Runs steps on the CPU, each to its end inside `launch`.
#[derive(Debug)]
pub struct CpuRunner {
    forward: Forward,
    cache: Cache,
    capacity: Capacity,
    slots: Vec<Slot>,
    /// Steps done and not yet brought home.
    finished: VecDeque<StepOutput>,
    /// Set by the first failure; nothing runs after it.
    lost: Option<DeviceError>,
    token_ids: Vec<TokenId>,
    bad_runs: Vec<bool>,
}

#[derive(Debug, Default)]
struct Slot {
    sampler: Option<SlotSampler>,
    last_token: TokenId,
    drafts: Vec<TokenId>,
}

impl CpuRunner {
    /// Allocates the caches and makes the executor.
    ///
    /// # Errors
    /// [`RunnerError`] when the places don't hold one sequence of `max_tokens`.
    pub fn new(spec: CpuRunnerSpec) -> Result<Self, RunnerError> {
        let places = spec.places;
        check_range("n_slots", places.n_slots, usize::MAX)?;
        check_range("max_rows", places.max_rows, usize::MAX)?;
        check_range("max_tokens", places.max_tokens, spec.shape.max_position_embeddings)?;
        let layout = CacheLayout::new(CacheShape::new(&spec.shape, spec.rounding.row_format()));
        let checkpoint_bytes = places.n_checkpoints * layout.max_checkpoint_bytes();
        // A model without compression keeps nothing in blocks, but the scheduler still counts them.
        let block_bytes = layout.block_bytes().max(1);
        let want_bytes = checkpoint_bytes + places.max_tokens.div_ceil(BLOCK_TOKENS) * block_bytes;
        if places.kv_bytes < want_bytes {
            let RunnerPlaces { kv_bytes: got_bytes, n_checkpoints, max_tokens, .. } = places;
            return Err(RunnerError::KvTooSmall { want_bytes, got_bytes, n_checkpoints, max_tokens });
        }
        // More blocks than all slots can fill are of use to the prefix cache alone; ids are 32 bits.
        let n_blocks = ((places.kv_bytes - checkpoint_bytes) / block_bytes).min(u32::MAX as usize);
        let capacity = Capacity {
            n_slots: places.n_slots,
            n_blocks,
            n_checkpoints: places.n_checkpoints,
            max_rows: places.max_rows,
            max_tokens: places.max_tokens,
            vocab_size: spec.shape.vocab_size,
        };
        let cache_places = CachePlaces { n_blocks, n_slots: places.n_slots, n_checkpoints: places.n_checkpoints };
        Ok(Self {
            forward: Forward::new(spec.weights, spec.shape, spec.rounding, spec.cpu),
            cache: Cache::new(layout, cache_places),
            capacity,
            slots: (0..places.n_slots).map(|_| Slot::default()).collect(),
            finished: VecDeque::new(),
            lost: None,
            token_ids: Vec::new(),
            bad_runs: Vec::new(),
        })
    }

    /// Gives a slot the drafted tokens of its next Verify run.
    pub fn set_drafts(&mut self, slot: SlotIdx, drafts: &[TokenId]) {
        let own = &mut self.slots[slot.index()].drafts;
        own.clear();
        own.extend_from_slice(drafts);
    }

    fn run_step(&mut self, plan: &StepPlan) -> StepOutput {
        for (slot, init) in &plan.binds {
            self.bind(*slot, init);
        }
        for &(from, to) in &plan.copies {
            self.cache.copy_block(from, to);
        }
        for &(checkpoint, slot) in &plan.restores {
            self.cache.restore(checkpoint, slot);
        }
        self.gather_token_ids(&plan.batch);
        self.forward.run(&plan.batch, &self.token_ids, &mut self.cache);
        let output = self.sample_and_score(plan);
        for save in &plan.saves {
            self.cache.save(save.slot, save.checkpoint, save.n_tokens);
        }
        output
    }

    fn bind(&mut self, slot: SlotIdx, init: &SlotInit) {
        let state = &mut self.slots[slot.index()];
        state.sampler = Some(SlotSampler::new(init, self.capacity.vocab_size));
        let last = init.output.last().or(init.prompt.last());
        state.last_token = last.copied().unwrap_or_default();
        state.drafts.clear();
    }

    /// Fills `token_ids` with the id of every row. A run with an id outside the vocabulary must never reach a table: its rows
    /// run as token 0 and the run is marked, so that its sequence fails alone.
    fn gather_token_ids(&mut self, batch: &Batch) {
        self.token_ids.clear();
        self.bad_runs.clear();
        for run in &batch.runs {
            let start = self.token_ids.len();
            match run.tokens {
                TokenSource::Host { start } => {
                    self.token_ids.extend(&batch.token_ids[start..start + run.n_rows]);
                }
                TokenSource::Slot => {
                    let slot = &self.slots[run.slot.index()];
                    self.token_ids.push(slot.last_token);
                    self.token_ids.extend(&slot.drafts[..run.n_rows - 1]);
                }
            }
            let mut is_bad = false;
            for id in &mut self.token_ids[start..] {
                if id.index() >= self.capacity.vocab_size {
                    (*id, is_bad) = (TokenId(0), true);
                }
            }
            self.bad_runs.push(is_bad);
        }
    }

    fn sample_and_score(&mut self, plan: &StepPlan) -> StepOutput {
        let mut output = StepOutput::default();
        let not_a_number = [f32::NAN];
        for sample in &plan.samples {
            let is_bad = self.bad_runs[sample.run_idx];
            let logits = if is_bad { &not_a_number } else { self.forward.logits(sample.run_idx, sample.row) };
            let slot = &mut self.slots[plan.batch.runs[sample.run_idx].slot.index()];
            let vocab_size = self.capacity.vocab_size;
            let sampler = slot.sampler.get_or_insert_with(|| SlotSampler::new(&unbound(), vocab_size));
            let sampled = sampler.sample(logits, sample.position);
            if let Ok(sampled) = &sampled {
                slot.last_token = sampled.token;
            }
            output.sampled.push(sampled);
        }
        for row in &plan.scores {
            let is_bad = self.bad_runs[row.run_idx];
            let logits = if is_bad { &not_a_number } else { self.forward.logits(row.run_idx, row.row) };
            output.scores.push(score(logits, row.target, row.n_top));
        }
        output
    }

    /// The first thing about a plan that would reach outside a table.
    fn check(&self, plan: &StepPlan) -> Result<(), String> {
        let capacity = &self.capacity;
        let n_rows: usize = plan.batch.runs.iter().map(|run| run.n_rows).sum();
        if n_rows > capacity.max_rows {
            return Err(format!("a step of {n_rows} rows; at most {}", capacity.max_rows));
        }
        let mut is_taken = vec![false; capacity.n_slots];
        for run in &plan.batch.runs {
            check_run(run, &plan.batch, capacity)?;
            if std::mem::replace(&mut is_taken[run.slot.index()], true) {
                return Err(format!("slot {} stands twice in a step", run.slot));
            }
            if run.tokens == TokenSource::Slot && self.slots[run.slot.index()].drafts.len() + 1 < run.n_rows {
                return Err(format!("slot {} has fewer drafts than its run has rows", run.slot));
            }
        }
        let slots = plan.binds.iter().map(|b| b.0).chain(plan.restores.iter().map(|r| r.1));
        for slot in slots.chain(plan.saves.iter().map(|s| s.slot)) {
            in_range("slot", slot.index(), capacity.n_slots)?;
        }
        for checkpoint in plan.restores.iter().map(|r| r.0).chain(plan.saves.iter().map(|s| s.checkpoint)) {
            in_range("checkpoint", checkpoint.index(), capacity.n_checkpoints)?;
        }
        for block in plan.copies.iter().flat_map(|c| [c.0, c.1]) {
            in_range("block", block.index(), capacity.n_blocks)?;
        }
        let rows =
            plan.samples.iter().map(|s| (s.run_idx, s.row)).chain(plan.scores.iter().map(|s| (s.run_idx, s.row)));
        for (run_idx, row) in rows {
            if !plan.batch.runs.get(run_idx).is_some_and(|run| run.logit_rows.contains(&row)) {
                return Err(format!("row {row} of run {run_idx} is read but has no logits"));
            }
        }
        Ok(())
    }
}

impl Executor for CpuRunner {
    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn launch(&mut self, plan: StepPlan) -> Result<(), DeviceError> {
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        let outcome = match self.check(&plan) {
            Ok(()) => catch_unwind(AssertUnwindSafe(|| self.run_step(&plan))).map_err(|panic| panic_text(&*panic)),
            Err(reason) => Err(reason),
        };
        match outcome {
            Ok(output) => {
                self.finished.push_back(output);
                Ok(())
            }
            Err(reason) => {
                let error = DeviceError::Step { device: "cpu".to_owned(), reason };
                self.lost = Some(error.clone());
                Err(error)
            }
        }
    }

    fn finish(&mut self) -> Result<StepOutput, DeviceError> {
        self.finished.pop_front().ok_or_else(|| {
            let nothing = || DeviceError::Step { device: "cpu".to_owned(), reason: "no step is in flight".to_owned() };
            self.lost.clone().unwrap_or_else(nothing)
        })
    }
}

fn check_range(field: &'static str, got: usize, max: usize) -> Result<(), RunnerError> {
    if (1..=max).contains(&got) { Ok(()) } else { Err(RunnerError::Range { field, got, min: 1, max }) }
}

fn check_run(run: &Run, batch: &Batch, capacity: &Capacity) -> Result<(), String> {
    in_range("slot", run.slot.index(), capacity.n_slots)?;
    let end = run.first_pos + run.n_rows;
    if run.n_rows == 0 || end > capacity.max_tokens {
        return Err(format!("a run of {} rows up to position {end}; at most {}", run.n_rows, capacity.max_tokens));
    }
    let blocks = batch.block_ids.get(run.blocks.clone()).ok_or("a block table outside block_ids")?;
    if blocks.len() < end.div_ceil(BLOCK_TOKENS) {
        return Err(format!("a block table of {} for {end} tokens", blocks.len()));
    }
    blocks.iter().try_for_each(|block| in_range("block", block.index(), capacity.n_blocks))?;
    if run.logit_rows.start > run.logit_rows.end || run.logit_rows.end > run.n_rows {
        return Err(format!("logits of rows {:?} in a run of {}", run.logit_rows, run.n_rows));
    }
    match run.tokens {
        TokenSource::Host { start } if start + run.n_rows > batch.token_ids.len() => {
            Err(format!("ids {start}..{} of {}", start + run.n_rows, batch.token_ids.len()))
        }
        _ => Ok(()),
    }
}

fn in_range(what: &str, idx: usize, n: usize) -> Result<(), String> {
    if idx < n { Ok(()) } else { Err(format!("{what} {idx} of {n}")) }
}

/// Greedy sampling for a slot that was never bound.
fn unbound() -> SlotInit {
    SlotInit {
        sampling: crate::sample::params::SamplingParams { temperature: 0.0, ..Default::default() },
        choice: 0,
        prompt: Arc::new([]),
        output: Vec::new(),
        banned_until_min: Vec::new(),
        min_tokens: 0,
        n_logprobs: None,
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a step panicked".to_owned())
}
