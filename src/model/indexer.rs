//! The indexer: which compressed rows the queries of an overlapping (ratio-4) layer attend to.

use crate::ids::{BlockId, LayerIdx};
use crate::model::cache::{Cache, RingKind, RowFormat, is_overlapping};
use crate::model::compressor::{self, CompressorScratch};
use crate::model::forward::{Step, StepRun, fit, gather_rows};
use crate::model::pool::{Visible, visible_groups};
use crate::model::weights::IndexerWeights;
use crate::ops::hadamard::hadamard;
use crate::ops::index_score::{IndexScoreParams, Keys, index_score};
use crate::ops::linear::LinearParams;
use crate::ops::round_fp4::round_fp4;
use crate::ops::top_k::top_k as top_k_indices;

/// Heads that a thread finishes at a time.
const HEAD_TILE: usize = 32;
/// Queries that are scored at a time, which bounds the scores held to these times the keys.
const QUERY_TILE: usize = 64;
/// Queries whose best rows a thread finds at a time.
const CHOICE_TILE: usize = 4;

#[derive(Debug, Default)]
pub(super) struct IndexerScratch {
    pub(super) compressor: CompressorScratch,
    head_weights: Vec<f32>, // [T, IH] f32
    queries: Vec<f32>,      // [T, IH, ID] f32
    keys: GatheredKeys,
    scores: Vec<f32>, // [QUERY_TILE, n_keys] f32
    chosen: Vec<u32>, // [T, index_topk]
}

/// The keys of one sequence in a row.
#[derive(Debug, Default)]
struct GatheredKeys {
    values: Vec<f32>, // [n, ID] f32
    packed: Vec<u8>,  // [n, row_bytes]
    is_packed: bool,
    row_bytes: usize,
    head_dim: usize,
}

impl IndexerScratch {
    /// Rows that go on alone move to the front.
    pub fn gather(&mut self, step: &Step<'_>, rows: &[usize]) {
        gather_rows(&mut self.head_weights, step.shape.index_n_heads, rows);
    }

    /// What query t of a layer attends to; choices are those of the layer that ran last.
    pub fn visible(&self, step: &Step<'_>, layer: LayerIdx, t: usize) -> Visible<'_> {
        let (n_groups, top_k) = (visible_groups(step, layer, t), step.shape.index_topk);
        if is_choosing(step, layer, t) {
            Visible::Chosen(&self.chosen[t * top_k..(t + 1) * top_k])
        } else {
            Visible::All(n_groups)
        }
    }
}

/// The products of the layer's input that the indexer needs.
pub(super) fn projections<'a>(
    step: &Step<'_>,
    w: &'a IndexerWeights,
    y: &'a [f32], // [T, D] f32
    s: &'a mut IndexerScratch,
) -> impl Iterator<Item = LinearParams<'a>> {
    let head_weights = fit(&mut s.head_weights, step.n_rows() * w.weights_proj.n_rows);
    let own = LinearParams::dense(y, &w.weights_proj, step.n_rows(), head_weights);
    compressor::projections(step, &w.compressor, y, &mut s.compressor).into_iter().chain([own])
}

/// Stores the keys of completed groups.
pub(super) fn add_keys(
    step: &Step<'_>,
    layer: LayerIdx,
    w: &IndexerWeights,
    s: &mut IndexerScratch,
    cache: &mut Cache,
) {
    let ratio = step.shape.compress_ratios[layer.index()];
    compressor::add_position_term(step, &w.compressor, ratio, &mut s.compressor);
    compressor::run(step, layer, RingKind::RawIndex, &w.compressor, &mut s.compressor, cache);
}

/// Chooses for every query that has more complete groups than it may attend to.
pub(super) fn choose(
    step: &Step<'_>,
    layer: LayerIdx,
    w: &IndexerWeights,
    qr: &[f32], // [T, QR] f32, as the product takes it
    s: &mut IndexerScratch,
    cache: &Cache,
) {
    if !(0..step.n_rows()).any(|t| is_choosing(step, layer, t)) {
        return;
    }
    make_queries(step, w, step.shape.compress_ratios[layer.index()], qr, s);
    scale_head_weights(step, s);
    let _ = fit(&mut s.chosen, step.n_rows() * step.shape.index_topk);
    for run in &step.runs {
        choose_of_run(step, layer, run, s, cache);
    }
}

/// Whether row t has more complete groups than it may attend to.
fn is_choosing(step: &Step<'_>, layer: LayerIdx, t: usize) -> bool {
    is_overlapping(step.shape.compress_ratios[layer.index()]) && visible_groups(step, layer, t) > step.shape.index_topk
}

/// Queries: projection of the latent row (no norm), rotation, Hadamard, and the rounding of the keys.
fn make_queries(step: &Step<'_>, w: &IndexerWeights, ratio: usize, qr: &[f32], s: &mut IndexerScratch) {
    let (n_heads, head_dim) = (step.shape.index_n_heads, step.shape.index_head_dim);
    let queries = fit(&mut s.queries, step.n_rows() * n_heads * head_dim);
    step.products(vec![LinearParams::dense(qr, &w.wq_b, step.n_rows(), queries)]);
    let rotations = step.rotations(ratio);
    step.cpu.par_chunks(queries, head_dim, HEAD_TILE, |i, head| {
        rotations[i / n_heads].forward(head);
        hadamard(head);
        if step.rounding.rounds_caches() {
            round_fp4(head);
        }
    });
}

fn scale_head_weights(step: &Step<'_>, s: &mut IndexerScratch) {
    let scale = 1.0 / ((step.shape.index_head_dim * step.shape.index_n_heads) as f32).sqrt();
    let weights = &mut s.head_weights[..step.n_rows() * step.shape.index_n_heads];
    weights.iter_mut().for_each(|w| *w *= scale);
}

/// Scores the complete groups of one run for its queries, some at a time, and keeps the best.
fn choose_of_run(step: &Step<'_>, layer: LayerIdx, run: &StepRun<'_>, s: &mut IndexerScratch, cache: &Cache) {
    let (n_heads, top_k) = (step.shape.index_n_heads, step.shape.index_topk);
    let (head_dim, last) = (step.shape.index_head_dim, run.first_row + run.n_rows - 1);
    let Some(first) = (run.first_row..=last).find(|&t| is_choosing(step, layer, t)) else { return };
    let n_all = visible_groups(step, layer, last);
    s.keys.gather(cache, run.blocks, layer, n_all);
    for first in (first..=last).step_by(QUERY_TILE) {
        let queries = first..(first + QUERY_TILE).min(last + 1);
        let n_keys = visible_groups(step, layer, queries.end - 1);
        let scores = fit(&mut s.scores, queries.len() * n_keys);
        let params = IndexScoreParams {
            iq: &s.queries[queries.start * n_heads * head_dim..queries.end * n_heads * head_dim],
            weights: &s.head_weights[queries.start * n_heads..queries.end * n_heads],
            n_queries: queries.len(),
            keys: s.keys.first(n_keys),
            scores: &mut *scores,
            scores_stride: n_keys,
        };
        index_score(step.cpu, params);
        let (scores, chosen) = (&*scores, &mut s.chosen[queries.start * top_k..queries.end * top_k]);
        step.cpu.par_chunks(chosen, top_k, CHOICE_TILE, |i, chosen| {
            let n_visible = visible_groups(step, layer, queries.start + i);
            let mut best = Vec::new();
            top_k_indices(&scores[i * n_keys..][..n_visible], top_k, &mut best);
            chosen.copy_from_slice(&best);
        });
    }
}

impl GatheredKeys {
    /// Copies the first `n` keys of a sequence out of its blocks, as they are stored where they are packed.
    fn gather(&mut self, cache: &Cache, blocks: &[BlockId], layer: LayerIdx, n: usize) {
        let shape = cache.layout().shape();
        self.row_bytes = shape.format.index_row_bytes(shape.dims);
        self.head_dim = shape.dims.index_head_dim;
        self.is_packed = shape.format != RowFormat::Exact;
        if self.is_packed {
            let packed = fit(&mut self.packed, n * self.row_bytes);
            cache.copy_index_rows(blocks, layer, packed);
        } else {
            let values = fit(&mut self.values, n * self.head_dim);
            for (group, key) in values.chunks_exact_mut(self.head_dim).enumerate() {
                cache.read_index_row(blocks, layer, group, key);
            }
        }
    }

    fn first(&self, n: usize) -> Keys<'_> {
        if self.is_packed {
            Keys::Packed(&self.packed[..n * self.row_bytes])
        } else {
            Keys::F32(&self.values[..n * self.head_dim])
        }
    }
}
