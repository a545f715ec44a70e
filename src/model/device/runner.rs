//! The executor of a device with kernels: step plans in order, sampled tokens home.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::device::plan::{KvRequest, MemoryPlan, Needs};
use crate::device::{Buffer, Device, DeviceError, Graph};
use crate::ids::{SlotIdx, TokenId};
use crate::model::batch::{Capacity, Executor, StepOutput, StepPlan};
use crate::model::device::cache::{DeviceCache, DeviceLayout};
use crate::model::device::forward::Pass;
use crate::model::device::sampling::Sampling;
use crate::model::device::step::{GraphShape, LogitTile, StagedStep, Staging};
use crate::model::device::weights::{DeviceWeights, Dims, WeightBytes, WeightSource};
use crate::model::device::workspace::{LOGIT_TILE, Workspace, WorkspaceSpec};
use crate::model::forward::{Ropes, Trace, TracePoint};
use crate::model::plan_check::check;
use crate::model::runner::{RunnerError, RunnerPlaces, panic_text};
use crate::model::shape::{HC_MULT, ModelShape};
use crate::model::slots::{RowTokens, Slots};
use crate::model::weights::Weights;
use crate::ops::copy::{self, CopyArgs, CopyItem};
use crate::ops::sample::device as sample;

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
    sampling: Sampling,
    slot_tokens: Buffer, // [n_slots] u32
    copies: Buffer,      // [COPIES_PER_LAUNCH] CopyItem
    /// Recorded steps; `None`: steps are always launched.
    graphs: Option<HashMap<GraphShape, Graph>>,
    capacity: Capacity,
    slots: Slots,
    rows: RowTokens,
    logits: HomeLogits,
    /// The logits of all wanted rows come home.
    keeps_logits: bool,
    /// Steps done and not yet brought home.
    finished: VecDeque<StepOutput>,
    /// Set by the first failure; nothing runs after it.
    lost: Option<DeviceError>,
}

/// The logits of a step that were brought home.
#[derive(Debug, Default)]
struct HomeLogits {
    /// Which of the step's logit rows, ascending.
    rows: Vec<usize>,
    values: Vec<f32>, // [rows.len(), V] f32
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
        let sampling = Sampling::new(&device, &capacity)?;
        let slot_tokens = device.alloc(capacity.n_slots * size_of::<u32>())?;
        // The token of a slot that was never bound.
        device.fill(&slot_tokens, 0, slot_tokens.n_bytes(), 0)?;
        let copies = device.alloc(COPIES_PER_LAUNCH * size_of::<CopyItem>())?;
        let of_all = bytes.n_bytes();
        let progress = |done| progress(done, of_all);
        let weights = DeviceWeights::load(&device, weights, source, &ropes.freqs(), &bytes, &progress)?;
        Ok(Self {
            slots: Slots::new(capacity.n_slots, shape.vocab_size),
            logits: HomeLogits { vocab_size: shape.vocab_size, ..HomeLogits::default() },
            keeps_logits: false,
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
            sampling,
            slot_tokens,
            copies,
            capacity,
        })
    }

    /// Gives a slot the drafted tokens of its next Verify run.
    pub fn set_drafts(&mut self, slot: SlotIdx, drafts: &[TokenId]) {
        self.slots.set_drafts(slot, drafts);
    }

    /// From now on the logits of all wanted rows come home with a step; else only those that the host samples from.
    pub const fn keep_logits(&mut self) {
        self.keeps_logits = true;
    }

    /// The logits `[V]` of a wanted row of the last step, after [`DeviceRunner::keep_logits`]. `row` counts from the start
    /// of the run.
    #[must_use]
    pub fn logits(&self, run_idx: usize, row: usize) -> &[f32] {
        self.logits.row(self.sampling.logit_row(run_idx, row))
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
        self.sampling.stage(&self.device, plan, &self.rows, &mut self.slots)?;
        self.forward(plan, trace)?;
        let logits = &self.logits;
        let output = self.sampling.finish(&self.device, plan, &mut self.slots, |row| logits.row(row))?;
        list.clear();
        for save in &plan.saves {
            self.cache.save(save.slot, save.checkpoint, save.n_tokens, &mut list);
        }
        self.copy(&list)?;
        Ok(output)
    }

    /// Runs the batch and samples; logits come home where the host wants them.
    fn forward(&mut self, plan: &StepPlan, trace: Option<Trace<'_>>) -> Result<(), DeviceError> {
        let n_logit_rows = self.sampling.n_logit_rows();
        let home = if self.keeps_logits { (0..n_logit_rows).collect() } else { self.sampling.host_rows(plan) };
        self.logits.start(home);
        if plan.batch.runs.is_empty() {
            return Ok(());
        }
        let RowTokens { token_ids, bad_runs } = &self.rows;
        let staged = self.staging.stage(&self.device, &plan.batch, token_ids, bad_runs)?;
        let is_traced = trace.is_some();
        let shape = self.graphs.as_ref().filter(|_| !is_traced).and_then(|_| staged.graph_shape());
        if let Some(shape) = shape {
            self.replay(shape, &staged)?;
            return self.logits.download(&self.device, &self.workspace, 0);
        }
        match trace {
            Some(trace) => self.trunk_traced(&staged, trace)?,
            None => self.pass(&staged).trunk()?,
        }
        for (tile_idx, tile) in staged.logit_tiles.iter().enumerate() {
            self.head_and_sample(&self.pass(&staged), tile_idx, tile)?;
            self.logits.download(&self.device, &self.workspace, tile_idx)?;
        }
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

    fn head_and_sample(&self, pass: &Pass<'_>, tile_idx: usize, tile: &LogitTile) -> Result<(), DeviceError> {
        pass.head(tile)?;
        let (logits, n_vocab) = (self.workspace.at.head.logits, self.shape.vocab_size as u32);
        let args = self.sampling.args(tile_idx, tile, logits, self.slot_tokens.address(), n_vocab);
        sample::launch(&self.device, &args, tile.n_rows as u32)
    }

    /// Runs a small step from its graph, which is recorded when the shape is first seen.
    fn replay(&mut self, shape: GraphShape, staged: &StagedStep) -> Result<(), DeviceError> {
        if self.graphs.as_ref().is_some_and(|graphs| !graphs.contains_key(&shape)) {
            let recorded = staged.recorded(&self.staging, shape);
            let pass = self.pass(&recorded);
            let graph = self.device.capture(|| {
                pass.trunk()?;
                let tiles = recorded.logit_tiles.iter().enumerate();
                tiles.into_iter().try_for_each(|(tile_idx, tile)| self.head_and_sample(&pass, tile_idx, tile))
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

    /// Gives the device the last tokens that it did not draw itself.
    fn upload_slot_tokens(&mut self) -> Result<(), DeviceError> {
        for (slot_idx, token) in self.slots.take_stale() {
            self.device.upload(&self.slot_tokens, 4 * slot_idx, bytemuck::bytes_of(&token.0))?;
        }
        Ok(())
    }

    fn failed(&self, reason: String) -> DeviceError {
        DeviceError::Step { device: self.device.label().to_owned(), reason }
    }
}

impl HomeLogits {
    /// Makes room for some of the step's logit rows, ascending.
    fn start(&mut self, rows: Vec<usize>) {
        self.values.resize(rows.len() * self.vocab_size, 0.0);
        self.rows = rows;
    }

    /// Brings home those that lie in a tile, which has just been computed.
    fn download(&mut self, device: &Device, workspace: &Workspace, tile_idx: usize) -> Result<(), DeviceError> {
        let start = self.rows.partition_point(|row| row / LOGIT_TILE < tile_idx);
        let end = self.rows.partition_point(|row| row / LOGIT_TILE <= tile_idx);
        let mut values = &mut self.values[start * self.vocab_size..];
        for together in self.rows[start..end].chunk_by(|a, b| a + 1 == *b) {
            let (part, rest) = values.split_at_mut(together.len() * self.vocab_size);
            let offset_bytes = 4 * (together[0] % LOGIT_TILE * self.vocab_size) as u64;
            workspace.download(device, workspace.at.head.logits + offset_bytes, part)?;
            values = rest;
        }
        Ok(())
    }

    /// A row's logits; a row that is not there is an error of the caller.
    fn row(&self, logit_row: usize) -> &[f32] {
        let at = self.rows.partition_point(|row| *row < logit_row);
        assert!(self.rows.get(at) == Some(&logit_row), "the logits of row {logit_row} were not kept");
        &self.values[at * self.vocab_size..(at + 1) * self.vocab_size]
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
        + Sampling::n_bytes(capacity)
        + COPIES_PER_LAUNCH * size_of::<CopyItem>();
    Needs {
        weights_bytes: bytes.n_bytes() as u64,
        state_bytes: state_bytes as u64,
        workspace_bytes: (workspace_bytes + bytes.staging) as u64,
        graphs_bytes: 0,
        kv: KvRequest::Exactly((capacity.n_blocks * layout.rows().block_bytes()) as u64),
    }
}
