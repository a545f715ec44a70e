//! The CPU executor: runs step plans in order, from token ids in slots to sampled tokens.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::device::DeviceError;
use crate::device::cpu::Cpu;
use crate::device::plan::PlanError;
use crate::ids::{SlotIdx, TokenId};
use crate::model::batch::{Capacity, Executor, StepOutput, StepPlan};
use crate::model::cache::{BLOCK_TOKENS, Cache, CacheLayout, CachePlaces, CacheShape};
use crate::model::forward::{Forward, Rounding};
use crate::model::plan_check::check;
use crate::model::shape::ModelShape;
use crate::model::slots::{RowTokens, Slots};
use crate::model::weights::Weights;

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

/// How many places an executor has.
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

/// An executor can't be built.
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
    /// The device failed, or has not enough memory.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Codes or scales of the checkpoint that stand for no number.
    #[error("{n_refused} codes or scales of the weights are NaN or out of range; the checkpoint is damaged")]
    Weights {
        /// How many.
        n_refused: u32,
    },
    /// The device's memory does not suffice.
    #[error(transparent)]
    Memory(#[from] PlanError),
}

/// Runs steps on the CPU, each to its end inside `launch`.
#[derive(Debug)]
pub struct CpuRunner {
    forward: Forward,
    cache: Cache,
    capacity: Capacity,
    slots: Slots,
    rows: RowTokens,
    /// Steps done and not yet brought home.
    finished: VecDeque<StepOutput>,
    /// Set by the first failure; nothing runs after it.
    lost: Option<DeviceError>,
}

impl RunnerPlaces {
    /// The places of an executor whose blocks and checkpoints have these sizes.
    ///
    /// # Errors
    /// [`RunnerError`] when they don't hold one sequence of `max_tokens`.
    pub(super) fn capacity(
        self,
        shape: &ModelShape,
        block_bytes: usize,
        checkpoint_bytes: usize,
    ) -> Result<Capacity, RunnerError> {
        check_range("n_slots", self.n_slots, usize::MAX)?;
        check_range("max_rows", self.max_rows, usize::MAX)?;
        check_range("max_tokens", self.max_tokens, shape.max_position_embeddings)?;
        let Self { n_slots, kv_bytes, n_checkpoints, max_rows, max_tokens } = self;
        // A model without compression keeps nothing in blocks, but the scheduler still counts them.
        let block_bytes = block_bytes.max(1);
        let checkpoint_bytes = n_checkpoints * checkpoint_bytes;
        let want_bytes = checkpoint_bytes + max_tokens.div_ceil(BLOCK_TOKENS) * block_bytes;
        if kv_bytes < want_bytes {
            return Err(RunnerError::KvTooSmall { want_bytes, got_bytes: kv_bytes, n_checkpoints, max_tokens });
        }
        // More blocks than all slots can fill are of use to the prefix cache alone; ids are 32 bits.
        let n_blocks = ((kv_bytes - checkpoint_bytes) / block_bytes).min(u32::MAX as usize);
        Ok(Capacity { n_slots, n_blocks, n_checkpoints, max_rows, max_tokens, vocab_size: shape.vocab_size })
    }
}

impl CpuRunner {
    /// Allocates the caches and makes the executor.
    ///
    /// # Errors
    /// [`RunnerError`] when the places don't hold one sequence of `max_tokens`.
    pub fn new(spec: CpuRunnerSpec) -> Result<Self, RunnerError> {
        let places = spec.places;
        let layout = CacheLayout::new(CacheShape::new(&spec.shape, spec.rounding.row_format()));
        let capacity = places.capacity(&spec.shape, layout.block_bytes(), layout.max_checkpoint_bytes())?;
        let cache_places =
            CachePlaces { n_blocks: capacity.n_blocks, n_slots: places.n_slots, n_checkpoints: places.n_checkpoints };
        let slots = Slots::new(places.n_slots, spec.shape.vocab_size);
        Ok(Self {
            forward: Forward::new(spec.weights, spec.shape, spec.rounding, spec.cpu),
            cache: Cache::new(layout, cache_places),
            capacity,
            slots,
            rows: RowTokens::default(),
            finished: VecDeque::new(),
            lost: None,
        })
    }

    /// Gives a slot the drafted tokens of its next Verify run.
    pub fn set_drafts(&mut self, slot: SlotIdx, drafts: &[TokenId]) {
        self.slots.set_drafts(slot, drafts);
    }

    fn run_step(&mut self, plan: &StepPlan) -> StepOutput {
        for (slot, init) in &plan.binds {
            self.slots.bind(*slot, init);
        }
        for &(from, to) in &plan.copies {
            self.cache.copy_block(from, to);
        }
        for &(checkpoint, slot) in &plan.restores {
            self.cache.restore(checkpoint, slot);
        }
        self.slots.gather_token_ids(&plan.batch, &mut self.rows);
        self.forward.run(&plan.batch, &self.rows.token_ids, &mut self.cache);
        let forward = &self.forward;
        let output = self.slots.sample_and_score(plan, &self.rows, |run_idx, row| forward.logits(run_idx, row));
        for save in &plan.saves {
            self.cache.save(save.slot, save.checkpoint, save.n_tokens);
        }
        output
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
        let outcome = match check(&plan, &self.capacity, &self.slots) {
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

/// What a panic said.
pub(super) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a step panicked".to_owned())
}
