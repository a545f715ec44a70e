//! The executor of a device with kernels: step plans in order, logits of the wanted rows home, tokens sampled on the host.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::device::plan::{KvRequest, MemoryPlan, Needs};
use crate::device::{Buffer, Device, DeviceError, Graph};
use crate::ids::{SlotIdx, TokenId};
use crate::model::batch::{Capacity, Executor, StepOutput, StepPlan};
use crate::model::device::cache::{DeviceCache, DeviceLayout};
use crate::model::device::forward::Pass;
use crate::model::device::step::{GraphShape, StagedStep, Staging};
use crate::model::device::weights::{DeviceWeights, Dims, WeightBytes, WeightSource};
use crate::model::device::workspace::{LOGIT_TILE, Workspace, WorkspaceSpec};
use crate::model::forward::{Ropes, Trace, TracePoint};
use crate::model::plan_check::check;
use crate::model::runner::{RunnerError, RunnerPlaces, panic_text};
use crate::model::shape::{HC_MULT, ModelShape};
use crate::model::slots::{RowTokens, Slots};
use crate::model::weights::Weights;
use crate::ops::copy::{self, CopyArgs, CopyItem};

mod measure;

pub use measure::ReadRate;

/// Device memory that is kept for recorded steps: some dozens of shapes of some thousand launches.
const GRAPHS_BYTES: u64 = 256 << 20;

/// Copies that one launch makes.
const COPIES_PER_LAUNCH: usize = 4096;

/// What a [`DeviceRunner`] is built from.
pub struct DeviceRunnerSpec<'a> {
    /// Where it runs.
    pub device: Device,
    /// The checkpoint, which is read once.
    pub weights: &'a Weights,
    /// Where the elements of its matrices come from.
    pub source: WeightSource,
    /// Its shape.
    pub shape: ModelShape,
    /// Places.
    pub places: RunnerPlaces,
    /// Whether steps of few rows are recorded once a shape and replayed. The bits are the same.
    pub use_graphs: bool,
    /// Gets the bytes of every part of the weights that has been loaded, and of how many.
    pub progress: &'a dyn Fn(usize, usize),
}

/// Runs steps on a device, each to its end inside `launch`.
#[derive(Debug)]
pub struct DeviceRunner {
    device: Device,
    shape: ModelShape,
    weights: DeviceWeights,
    cache: DeviceCache,
    workspace: Workspace,
    staging: Staging,
    slot_tokens: Buffer, // [n_slots] u32
    copies: Buffer,      // [COPIES_PER_LAUNCH] CopyItem
    /// Recorded steps; `None`: steps are always launched.
    graphs: Option<HashMap<GraphShape, Graph>>,
    capacity: Capacity,
    slots: Slots,
    rows: RowTokens,
    logits: WantedLogits,
    /// Steps done and not yet brought home.
    finished: VecDeque<StepOutput>,
    /// Set by the first failure; nothing runs after it.
    lost: Option<DeviceError>,
}

/// The logits of a step that were brought home.
#[derive(Debug, Default)]
struct WantedLogits {
    values: Vec<f32>, // [n_logit_rows, V] f32
    /// Where row 0 of each run would lie, so that rows before the wanted ones wrap below zero.
    first_row: Vec<usize>,
    vocab_size: usize,
}

/// Bytes of device memory of a step's scratch, before the places are known to the last block.
#[must_use]
pub fn workspace_bytes(shape: &ModelShape, max_rows: usize, max_tokens: usize) -> usize {
    Workspace::n_bytes(WorkspaceSpec { shape, max_rows, max_tokens })
}

impl DeviceRunner {
    /// Allocates everything, loads the weights and makes the executor.
    ///
    /// # Errors
    /// [`RunnerError`] when the places don't hold one sequence of `max_tokens`, or the device has not enough memory.
    pub fn new(spec: DeviceRunnerSpec<'_>) -> Result<Self, RunnerError> {
        let DeviceRunnerSpec { device, weights, source, shape, places, use_graphs, progress } = spec;
        let layout = DeviceLayout::new(&shape);
        let capacity = places.capacity(&shape, layout.rows().block_bytes(), layout.checkpoint_bytes())?;
        let ropes = Ropes::new(&shape);
        let bytes = WeightBytes::count(weights, &ropes.freqs())?;
        let graphs_bytes = if use_graphs { GRAPHS_BYTES } else { 0 };
        let needs = Needs { graphs_bytes, ..needs(&bytes, &layout, &shape, &capacity) };
        MemoryPlan::new(needs, device.memory()?)?;
        // What is small and what grows with the places first: a lack of memory shows before the weights are read.
        let cache = DeviceCache::new(&device, layout, &capacity)?;
        let of_workspace =
            WorkspaceSpec { shape: &shape, max_rows: capacity.max_rows, max_tokens: capacity.max_tokens };
        let workspace = Workspace::new(&device, of_workspace)?;
        let staging = Staging::new(&device, &capacity, shape.index_topk)?;
        let slot_tokens = device.alloc(capacity.n_slots * size_of::<u32>())?;
        let copies = device.alloc(COPIES_PER_LAUNCH * size_of::<CopyItem>())?;
        let of_all = bytes.n_bytes();
        let progress = |done| progress(done, of_all);
        let weights = DeviceWeights::load(&device, weights, source, &ropes.freqs(), &bytes, &progress)?;
        Ok(Self {
            slots: Slots::new(capacity.n_slots, shape.vocab_size),
            logits: WantedLogits { vocab_size: shape.vocab_size, ..WantedLogits::default() },
            rows: RowTokens::default(),
            finished: VecDeque::new(),
            lost: None,
            graphs: use_graphs.then(HashMap::new),
            device,
            shape,
            weights,
            cache,
            workspace,
            staging,
            slot_tokens,
            copies,
            capacity,
        })
    }

    /// Gives a slot the drafted tokens of its next Verify run.
    pub fn set_drafts(&mut self, slot: SlotIdx, drafts: &[TokenId]) {
        self.slots.set_drafts(slot, drafts);
    }

    /// The logits `[V]` of a row of the last step that asked for them. `row` counts from the start of the run.
    #[must_use]
    pub fn logits(&self, run_idx: usize, row: usize) -> &[f32] {
        self.logits.row(run_idx, row)
    }

    /// As [`Executor::launch`], showing what happens inside, as the CPU's forward pass does.
    ///
    /// # Errors
    /// Those of `launch`.
    pub fn launch_traced(&mut self, plan: &StepPlan, trace: Option<Trace<'_>>) -> Result<(), DeviceError> {
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        let outcome = match check(plan, &self.capacity, &self.slots) {
            Ok(()) => catch_unwind(AssertUnwindSafe(|| self.run_step(plan, trace)))
                .unwrap_or_else(|panic| Err(self.failed(panic_text(&*panic)))),
            Err(reason) => Err(self.failed(reason)),
        };
        match outcome {
            Ok(output) => {
                self.finished.push_back(output);
                Ok(())
            }
            Err(error) => {
                self.lost = Some(error.clone());
                Err(error)
            }
        }
    }

    fn run_step(&mut self, plan: &StepPlan, trace: Option<Trace<'_>>) -> Result<StepOutput, DeviceError> {
        for (slot, init) in &plan.binds {
            self.slots.bind(*slot, init);
        }
        self.copy_blocks(plan)?;
        let mut list = Vec::new();
        for &(checkpoint, slot) in &plan.restores {
            self.cache.restore(checkpoint, slot, &mut list);
        }
        self.copy(&list)?;
        self.slots.gather_token_ids(&plan.batch, &mut self.rows);
        self.upload_slot_tokens()?;
        self.forward(plan, trace)?;
        let (slots, logits) = (&mut self.slots, &self.logits);
        let output = slots.sample_and_score(plan, &self.rows, |run_idx, row| logits.row(run_idx, row));
        list.clear();
        for save in &plan.saves {
            self.cache.save(save.slot, save.checkpoint, save.n_tokens, &mut list);
        }
        self.copy(&list)?;
        Ok(output)
    }

    /// Runs the batch and brings the wanted logits home.
    fn forward(&mut self, plan: &StepPlan, trace: Option<Trace<'_>>) -> Result<(), DeviceError> {
        self.logits.start(plan);
        if plan.batch.runs.is_empty() {
            return Ok(());
        }
        let RowTokens { token_ids, bad_runs } = &self.rows;
        let staged = self.staging.stage(&self.device, &plan.batch, token_ids, bad_runs)?;
        let n_tile = LOGIT_TILE * self.shape.vocab_size;
        let is_traced = trace.is_some();
        let shape = self.graphs.as_ref().filter(|_| !is_traced).and_then(|_| staged.graph_shape());
        if let Some(shape) = shape {
            self.replay(shape, &staged)?;
            return self.workspace.download_logits(&self.device, &mut self.logits.values);
        }
        match trace {
            Some(trace) => self.trunk_traced(&staged, trace)?,
            None => self.pass(&staged).trunk()?,
        }
        let mut values = std::mem::take(&mut self.logits.values);
        for (tile, values) in staged.logit_tiles.iter().zip(values.chunks_mut(n_tile)) {
            self.pass(&staged).head(tile)?;
            self.workspace.download_logits(&self.device, values)?;
        }
        self.logits.values = values;
        Ok(())
    }

    /// Runs the trunk and brings home what is at every point.
    fn trunk_traced(&self, staged: &StagedStep, trace: Trace<'_>) -> Result<(), DeviceError> {
        let mut values = Vec::new();
        self.pass(staged).trunk_seen(&mut |point, address| {
            let copies = if matches!(point, TracePoint::Residual(_)) { HC_MULT } else { 1 };
            values.resize(staged.n_rows * copies * self.shape.hidden_size, 0.0);
            self.workspace.download(&self.device, address, &mut values)?;
            trace(point, &values);
            Ok(())
        })
    }

    /// Runs trunk and head of a small step from its graph, which is recorded when the shape is first seen.
    fn replay(&mut self, shape: GraphShape, staged: &StagedStep) -> Result<(), DeviceError> {
        if self.graphs.as_ref().is_some_and(|graphs| !graphs.contains_key(&shape)) {
            let recorded = staged.recorded(&self.staging, shape);
            let pass = self.pass(&recorded);
            let graph = self.device.capture(|| {
                pass.trunk()?;
                recorded.logit_tiles.iter().try_for_each(|tile| pass.head(tile))
            })?;
            self.graphs.get_or_insert_default().insert(shape, graph);
        }
        match self.graphs.as_ref().and_then(|graphs| graphs.get(&shape)) {
            Some(graph) => graph.launch(),
            None => Err(self.failed("a graph was not recorded".to_owned())),
        }
    }

    fn pass<'a>(&'a self, staged: &'a StagedStep) -> Pass<'a> {
        Pass {
            device: &self.device,
            shape: &self.shape,
            dims: Dims::new(&self.shape),
            weights: &self.weights,
            at: &self.workspace.at,
            cache: &self.cache,
            slot_tokens: self.slot_tokens.address(),
            staged,
        }
    }

    /// Copies of blocks; one that reads what another writes waits for it.
    fn copy_blocks(&self, plan: &StepPlan) -> Result<(), DeviceError> {
        let mut list: Vec<CopyItem> = Vec::new();
        for &(from, to) in &plan.copies {
            let item = self.cache.copy_block(from, to);
            if list.iter().any(|other| [item.src, item.dst].contains(&other.dst) || other.src == item.dst) {
                self.copy(&list)?;
                list.clear();
            }
            list.push(item);
        }
        self.copy(&list)
    }

    /// Copies in any order.
    fn copy(&self, list: &[CopyItem]) -> Result<(), DeviceError> {
        for part in list.chunks(COPIES_PER_LAUNCH) {
            self.device.upload(&self.copies, 0, bytemuck::cast_slice(part))?;
            let args = CopyArgs { items: self.copies.address(), n: part.len() as u32, pad: 0 };
            let max_bytes = part.iter().map(|item| item.n_bytes).max().unwrap_or(0);
            copy::launch(&self.device, &args, max_bytes)?;
        }
        Ok(())
    }

    fn upload_slot_tokens(&self) -> Result<(), DeviceError> {
        let tokens: Vec<u32> = self.slots.last_tokens().map(|token| token.0).collect();
        self.device.upload(&self.slot_tokens, 0, bytemuck::cast_slice(&tokens))
    }

    fn failed(&self, reason: String) -> DeviceError {
        DeviceError::Step { device: self.device.label().to_owned(), reason }
    }
}

impl WantedLogits {
    /// Makes room for the wanted rows of a plan.
    fn start(&mut self, plan: &StepPlan) {
        self.first_row.clear();
        let mut n_wanted = 0usize;
        for run in &plan.batch.runs {
            self.first_row.push(n_wanted.wrapping_sub(run.logit_rows.start));
            n_wanted += run.logit_rows.len();
        }
        self.values.resize(n_wanted * self.vocab_size, 0.0);
    }

    fn row(&self, run_idx: usize, row: usize) -> &[f32] {
        let at = self.first_row[run_idx].wrapping_add(row) * self.vocab_size;
        &self.values[at..at + self.vocab_size]
    }
}

impl Executor for DeviceRunner {
    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn launch(&mut self, plan: StepPlan) -> Result<(), DeviceError> {
        self.launch_traced(&plan, None)
    }

    fn finish(&mut self) -> Result<StepOutput, DeviceError> {
        self.finished
            .pop_front()
            .ok_or_else(|| self.lost.clone().unwrap_or_else(|| self.failed("no step is in flight".to_owned())))
    }
}

/// Device memory by purpose.
fn needs(bytes: &WeightBytes, layout: &DeviceLayout, shape: &ModelShape, capacity: &Capacity) -> Needs {
    let workspace_bytes = workspace_bytes(shape, capacity.max_rows, capacity.max_tokens);
    let state_bytes = capacity.n_slots * (layout.slot_bytes() + size_of::<u32>())
        + capacity.n_checkpoints * layout.checkpoint_bytes()
        + Staging::n_bytes(capacity)
        + COPIES_PER_LAUNCH * size_of::<CopyItem>();
    Needs {
        weights_bytes: bytes.n_bytes() as u64,
        state_bytes: state_bytes as u64,
        workspace_bytes: (workspace_bytes + bytes.staging) as u64,
        graphs_bytes: 0,
        kv: KvRequest::Exactly((capacity.n_blocks * layout.rows().block_bytes()) as u64),
    }
}
