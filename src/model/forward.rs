//! The forward pass: one ragged batch through all layers, one line an operation.
//!
//! The logits of a row are a pure function of the tokens up to it. Nothing depends on how a sequence was cut into chunks, on the
//! other rows of the batch, or on threads: every operation computes a row from that row's inputs alone, in a fixed order.

use std::borrow::Cow;
use std::sync::Arc;

use crate::device::SimWave;
use crate::device::cpu::Cpu;
use crate::device::cpu::tile::ThreadSums;
use crate::ids::{BlockId, LayerIdx, SlotIdx, TokenId};
use crate::model::attention::{self, AttentionScratch};
use crate::model::batch::Batch;
use crate::model::cache::{Cache, RING_SLACK, RowFormat};
use crate::model::hyper::{self, HyperScratch};
use crate::model::moe::{self, MoeScratch};
use crate::model::shape::{HC_MULT, ModelShape, ROPE_HEAD_DIM};
use crate::model::weights::Weights;
use crate::ops::embed::embed;
use crate::ops::linear::{LinearParams, linear_batch, linear_in_tiles};
use crate::ops::rms_norm::{RmsNormParams, rms_norm};
use crate::ops::rope::{RopeParams, RopeTable, Rotation, YarnParams};
use crate::ops::round_fp8::{round_activations, round_to_bf16};

/// Which roundings the arithmetic contains beyond the weights' own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// None.
    Exact,
    /// Cache rows are rounded as they are stored, the indexer's queries too.
    Kvq,
    /// The caches as in `Kvq`, and the inputs of FP8 and MXFP4 products to FP8, as the published reference implementation does.
    Official,
    /// The caches as in `Kvq` with rotary dims in BF16, and the inputs of all products but the hyper-connections' to BF16, and sums
    /// in the order of the kernels of GPUs at a wave width: for comparing with them closely.
    Device(SimWave),
}

/// A place in the forward pass whose values can be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TracePoint {
    /// Output of a layer's attention, `[T, D]`.
    Attention(LayerIdx),
    /// Output of a layer's experts, `[T, D]`.
    Experts(LayerIdx),
    /// The residual after a layer, `[T, HC, D]`.
    Residual(LayerIdx),
}

/// Gets the values at every [`TracePoint`].
pub type Trace<'a> = &'a mut (dyn FnMut(TracePoint, &[f32]) + Send);

/// The trunk, ready to run.
#[derive(Debug)]
pub struct Forward {
    weights: Arc<Weights>,
    shape: ModelShape,
    rounding: Rounding,
    cpu: Cpu,
    ropes: Ropes,
    scratch: Scratch,
    logits: Vec<f32>, // [n_logit_rows, V] f32
    first_logit_row: Vec<usize>,
}

/// The two sets of rotary frequencies.
#[derive(Debug)]
pub(super) struct Ropes {
    window_only: RopeTable,
    compressed: RopeTable,
}

#[derive(Debug, Default)]
struct Scratch {
    residual: Vec<f32>, // [T, HC, D] f32
    normed: Vec<f32>,   // [T, D] f32
    output: Vec<f32>,   // [T, D] f32
    hyper: HyperScratch,
    attention: AttentionScratch,
    moe: MoeScratch,
}

/// What every sublayer of a step reads.
pub(super) struct Step<'a> {
    pub cpu: &'a Cpu,
    pub shape: &'a ModelShape,
    pub rounding: Rounding,
    pub runs: Vec<StepRun<'a>>,
    pub token_ids: Cow<'a, [TokenId]>, // [T]
    /// Positions and rotations of all rows.
    pub positions: Vec<usize>, // [T]
    run_of: Vec<usize>,                // [T]
    rotations_window_only: Vec<Rotation>, // [T]
    rotations_compressed: Vec<Rotation>, // [T]
    ropes: &'a Ropes,
}

/// One run: its rows are `first_row .. first_row + n_rows` of the step.
#[derive(Clone, Copy)]
pub(super) struct StepRun<'a> {
    pub slot: SlotIdx,
    pub first_pos: usize,
    pub first_row: usize,
    pub n_rows: usize,
    pub blocks: &'a [BlockId],
}

/// The rows of a step that want logits, as a step of their own: all that the last layer's queries and experts are computed for.
pub(super) struct Asked<'a> {
    pub step: Step<'a>,
    /// The row of the whole step that each one is, ascending.
    pub rows: Vec<usize>,
}

impl Rounding {
    /// How the caches store rows.
    #[must_use]
    pub const fn row_format(self) -> RowFormat {
        match self {
            Self::Exact => RowFormat::Exact,
            Self::Kvq | Self::Official | Self::Device(_) => RowFormat::Kvq,
        }
    }

    /// Whether cache rows and indexer queries are rounded.
    #[must_use]
    pub const fn rounds_caches(self) -> bool {
        !matches!(self, Self::Exact)
    }

    /// Whether the inputs of FP8 and MXFP4 products are rounded.
    #[must_use]
    pub const fn rounds_activations(self) -> bool {
        matches!(self, Self::Official | Self::Device(_))
    }

    /// Whose kernels' roundings and order of sums are taken, if any's.
    #[must_use]
    pub const fn wave(self) -> Option<SimWave> {
        match self {
            Self::Device(wave) => Some(wave),
            _ => None,
        }
    }

    /// Whether what goes into products is BF16, as in the kernels of GPUs.
    #[must_use]
    pub const fn is_device(self) -> bool {
        self.wave().is_some()
    }
}

impl Forward {
    /// The trunk of `weights`, which the binder has checked against `shape`.
    #[must_use]
    pub fn new(weights: Arc<Weights>, shape: ModelShape, rounding: Rounding, cpu: Cpu) -> Self {
        let ropes = Ropes::new(&shape);
        let (scratch, logits, first_logit_row) = (Scratch::default(), Vec::new(), Vec::new());
        Self { weights, shape, rounding, cpu, ropes, scratch, logits, first_logit_row }
    }

    /// Runs a batch: the caches take its rows, and [`Forward::logits`] has the logits of every row that wants them.
    /// `token_ids` are the ids of all rows in order, each below `vocab_size`.
    pub fn run(&mut self, batch: &Batch, token_ids: &[TokenId], cache: &mut Cache) {
        self.run_traced(batch, token_ids, cache, None);
    }

    /// As [`Forward::run`], showing what happens inside.
    pub fn run_traced(&mut self, batch: &Batch, token_ids: &[TokenId], cache: &mut Cache, trace: Option<Trace<'_>>) {
        let Self { weights, shape, rounding, cpu, ropes, scratch, logits, first_logit_row } = self;
        let step = Step::new(cpu, shape, *rounding, batch, token_ids, ropes);
        // Who looks inside sees every row of every layer.
        let asked = if trace.is_none() { Asked::new(&step, batch) } else { None };
        cpu.install(|| {
            trunk(&step, asked.as_ref(), weights, cache, scratch, trace);
            head(&step, asked.as_ref(), batch, weights, scratch, logits, first_logit_row);
        });
    }

    /// The logits `[V]` of a row of the last batch that asked for them. `row` counts from the start of the run.
    #[must_use]
    pub fn logits(&self, run_idx: usize, row: usize) -> &[f32] {
        let vocab_size = self.shape.vocab_size;
        // `first_logit_row` is where row 0 of the run would lie, so that rows before the wanted ones wrap below zero.
        let at = self.first_logit_row[run_idx].wrapping_add(row) * vocab_size;
        &self.logits[at..at + vocab_size]
    }
}

impl Ropes {
    /// Those of a model.
    pub fn new(shape: &ModelShape) -> Self {
        let scaling = &shape.rope_scaling;
        let yarn = YarnParams {
            factor: scaling.factor as f32,
            beta_fast: scaling.beta_fast as f32,
            beta_slow: scaling.beta_slow as f32,
            original_max_position_embeddings: scaling.original_max_position_embeddings,
        };
        let table = |theta: f64, yarn| RopeTable::new(&RopeParams { n_dims: ROPE_HEAD_DIM, theta: theta as f32, yarn });
        Self { window_only: table(shape.rope_theta, None), compressed: table(shape.compress_rope_theta, Some(yarn)) }
    }

    /// Radians a position: of layers without compressed rows, then of those with.
    pub fn freqs(&self) -> [&[f32]; 2] {
        [self.window_only.freqs(), self.compressed.freqs()]
    }
}

impl<'a> Step<'a> {
    fn new(
        cpu: &'a Cpu,
        shape: &'a ModelShape,
        rounding: Rounding,
        batch: &'a Batch,
        token_ids: &'a [TokenId],
        ropes: &'a Ropes,
    ) -> Self {
        let (mut runs, mut positions, mut run_of) = (Vec::new(), Vec::new(), Vec::new());
        for (run_idx, run) in batch.runs.iter().enumerate() {
            run_of.resize(positions.len() + run.n_rows, run_idx);
            let first_row = positions.len();
            positions.extend(run.first_pos..run.first_pos + run.n_rows);
            let blocks = &batch.block_ids[run.blocks.clone()];
            runs.push(StepRun { slot: run.slot, first_pos: run.first_pos, first_row, n_rows: run.n_rows, blocks });
        }
        assert!(positions.len() == token_ids.len(), "{} rows, {} ids", positions.len(), token_ids.len());
        let rotations_window_only = positions.iter().map(|&p| ropes.window_only.rotation(p)).collect();
        let rotations_compressed = positions.iter().map(|&p| ropes.compressed.rotation(p)).collect();
        Self {
            cpu,
            shape,
            rounding,
            runs,
            token_ids: Cow::Borrowed(token_ids),
            positions,
            run_of,
            rotations_window_only,
            rotations_compressed,
            ropes,
        }
    }

    /// Some rows alone.
    fn with_rows(&self, rows: &[usize], runs: Vec<StepRun<'a>>, run_of: Vec<usize>) -> Self {
        fn pick<T: Clone>(values: &[T], rows: &[usize]) -> Vec<T> {
            rows.iter().map(|&row| values[row].clone()).collect()
        }
        Self {
            runs,
            token_ids: Cow::Owned(pick(&self.token_ids, rows)),
            positions: pick(&self.positions, rows),
            run_of,
            rotations_window_only: pick(&self.rotations_window_only, rows),
            rotations_compressed: pick(&self.rotations_compressed, rows),
            ..*self
        }
    }

    /// Rows of the step (T).
    pub fn n_rows(&self) -> usize {
        self.positions.len()
    }

    /// The run of a row.
    pub fn run_of(&self, t: usize) -> &StepRun<'a> {
        &self.runs[self.run_of[t]]
    }

    /// Every row's rotation in a layer of this compression ratio.
    pub fn rotations(&self, ratio: usize) -> &[Rotation] {
        if ratio == 0 { &self.rotations_window_only } else { &self.rotations_compressed }
    }

    /// The rotation of a compressed row that begins at `position`.
    pub fn compressed_rotation(&self, position: usize) -> Rotation {
        self.ropes.compressed.rotation(position)
    }

    /// The input of an FP8 or MXFP4 product: `x` itself, or a rounded copy where the mode asks for one.
    pub fn product_input<'b>(&self, x: &'b [f32], n_cols: usize, rounded: &'b mut Vec<f32>) -> &'b [f32] {
        if !self.rounding.rounds_activations() {
            return x;
        }
        let rounded = fit(rounded, x.len());
        rounded.copy_from_slice(x);
        let is_device = self.rounding.is_device();
        self.cpu.par_chunks(rounded, n_cols, 8, |_, row| {
            if is_device { round_to_bf16(row) } else { round_activations(row, n_cols) }
        });
        rounded
    }

    /// Computes products; their inputs are rounded where the mode wants it.
    pub fn products(&self, products: Vec<LinearParams<'_>>) {
        match self.rounding.wave() {
            None => linear_batch(self.cpu, products),
            Some(wave) => products.into_iter().for_each(|p| linear_in_tiles(self.cpu, wave, p, 1)),
        }
    }

    /// How the 256 threads of a kernel's block add up a row, `run` columns a thread in turn; none where the mode is not that of GPUs.
    pub fn block_sums(&self, run: usize) -> Option<ThreadSums> {
        self.rounding.wave().map(|wave| ThreadSums { n_threads: 256, run, wave: wave.n_lanes() as usize })
    }

    /// How one wave adds up a row, four columns a lane in turn, or its share of a row that has fewer; none as for a block.
    pub fn wave_sums(&self, n_cols: usize) -> Option<ThreadSums> {
        let n_lanes = self.rounding.wave()?.n_lanes() as usize;
        Some(ThreadSums { n_threads: n_lanes, run: (n_cols / n_lanes).clamp(1, 4), wave: n_lanes })
    }

    /// Rounds values that only go into products, where the mode is that of GPUs.
    pub fn round_if_device(&self, x: &mut [f32], n_cols: usize) {
        if self.rounding.is_device() {
            self.cpu.par_chunks(x, n_cols, 8, |_, row| round_to_bf16(row));
        }
    }
}

impl<'a> Asked<'a> {
    /// None when every row is asked for, or a row so far before the end of its run that the rings, once the run is in them, have
    /// lost a part of its window.
    fn new(step: &Step<'a>, batch: &Batch) -> Option<Self> {
        let are_late =
            batch.runs.iter().all(|run| run.logit_rows.is_empty() || run.n_rows - run.logit_rows.start <= RING_SLACK);
        let n_rows: usize = batch.runs.iter().map(|run| run.logit_rows.len()).sum();
        (are_late && n_rows < step.n_rows()).then(|| {
            let mut rows = Vec::with_capacity(n_rows);
            let mut runs = Vec::new();
            let mut run_of = Vec::with_capacity(n_rows);
            for (run, whole) in batch.runs.iter().zip(&step.runs).filter(|(run, _)| !run.logit_rows.is_empty()) {
                let (start, n) = (run.logit_rows.start, run.logit_rows.len());
                run_of.resize(rows.len() + n, runs.len());
                runs.push(StepRun { first_pos: whole.first_pos + start, first_row: rows.len(), n_rows: n, ..*whole });
                rows.extend(whole.first_row + start..whole.first_row + start + n);
            }
            Self { step: step.with_rows(&rows, runs, run_of), rows }
        })
    }
}

/// Moves the given rows of `width` elements, which ascend, to the front.
pub(super) fn gather_rows<T: Copy>(values: &mut [T], width: usize, rows: &[usize]) {
    for (to, &from) in rows.iter().enumerate().filter(|(to, from)| to != *from) {
        values.copy_within(from * width..(from + 1) * width, to * width);
    }
}

/// The first `n` elements of a scratch buffer, which grows and never shrinks; they hold anything.
pub(super) fn fit<T: Copy + Default>(buffer: &mut Vec<T>, n: usize) -> &mut [T] {
    if buffer.len() < n {
        buffer.resize(n, T::default());
    }
    &mut buffer[..n]
}

/// All layers. The residual of every row is left in `scratch`, or that of the asked rows alone.
fn trunk(
    step: &Step<'_>,
    asked: Option<&Asked<'_>>,
    weights: &Weights,
    cache: &mut Cache,
    scratch: &mut Scratch,
    mut trace: Option<Trace<'_>>,
) {
    let (n_rows, n_cols) = (step.n_rows(), step.shape.hidden_size);
    let Scratch { residual, normed, output, hyper, attention, moe } = scratch;
    let residual = fit(residual, n_rows * HC_MULT * n_cols);
    let (normed, output) = (fit(normed, n_rows * n_cols), fit(output, n_rows * n_cols));
    let mut look = |point: TracePoint, values: &[f32]| {
        if let Some(trace) = &mut trace {
            trace(point, values);
        }
    };
    embed(step.cpu, &weights.embed, &step.token_ids, normed);
    hyper::expand(normed, n_cols, residual);
    for (layer, w) in (0..).map(LayerIdx).zip(&weights.layers) {
        let asked = if layer.index() + 1 == weights.layers.len() { asked } else { None };
        hyper::enter(step, &w.hc_attn, &w.attn_norm, residual, hyper, normed);
        attention::run((step, asked), layer, &w.attn, normed, cache, attention, output);
        let step = asked.map_or(step, |asked| {
            gather_rows(residual, HC_MULT * n_cols, &asked.rows);
            hyper.gather(&asked.rows);
            &asked.step
        });
        let n_rows = step.n_rows();
        let (residual, normed) = (&mut residual[..n_rows * HC_MULT * n_cols], &mut normed[..n_rows * n_cols]);
        let output = &mut output[..n_rows * n_cols];
        look(TracePoint::Attention(layer), output);
        hyper::leave(step, output, hyper, residual);
        hyper::enter(step, &w.hc_ffn, &w.ffn_norm, residual, hyper, normed);
        moe::run(step, &w.ffn, normed, moe, output);
        look(TracePoint::Experts(layer), output);
        hyper::leave(step, output, hyper, residual);
        look(TracePoint::Residual(layer), residual);
    }
}

/// Logits of the wanted rows.
fn head(
    step: &Step<'_>,
    asked: Option<&Asked<'_>>,
    batch: &Batch,
    weights: &Weights,
    scratch: &mut Scratch,
    logits: &mut Vec<f32>,
    first_logit_row: &mut Vec<usize>,
) {
    let (n_cols, n_copies) = (step.shape.hidden_size, HC_MULT * step.shape.hidden_size);
    first_logit_row.clear();
    let (mut n_wanted, mut rows) = (0usize, Vec::new());
    // Wanted rows move to the front of the residual, which is not needed any more; asked ones are there.
    for (run, step_run) in batch.runs.iter().zip(&step.runs) {
        first_logit_row.push(n_wanted.wrapping_sub(run.logit_rows.start));
        n_wanted += run.logit_rows.len();
        rows.extend(run.logit_rows.clone().map(|row| step_run.first_row + row));
    }
    if asked.is_none() {
        gather_rows(&mut scratch.residual, n_copies, &rows);
    }
    let row = &mut scratch.normed[..n_wanted * n_cols];
    hyper::finish(step, &weights.hc_head, &scratch.residual[..n_wanted * n_copies], &mut scratch.hyper, row);
    let (eps, sums) = (step.shape.rms_norm_eps, step.block_sums(1));
    rms_norm(step.cpu, RmsNormParams { x: row, n_cols, weight: Some(&weights.norm), eps, sums });
    step.round_if_device(row, n_cols);
    let logits = fit(logits, n_wanted * step.shape.vocab_size);
    step.products(vec![LinearParams::dense(row, &weights.head, n_wanted, logits)]);
}
