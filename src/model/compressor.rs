//! A compressor: pools the raw rows of a group of tokens into one row, for attention or for the indexer.

use crate::ids::LayerIdx;
use crate::model::cache::{Cache, Ring, RingKind, is_overlapping};
use crate::model::forward::{Step, StepRun, fit};
use crate::model::weights::CompressorWeights;
use crate::ops::compress::{CompressParams, compress};
use crate::ops::hadamard::hadamard;
use crate::ops::linear::LinearParams;
use crate::ops::rms_norm::{RmsNormParams, rms_norm};
use crate::ops::round_fp4::round_fp4;
use crate::ops::round_fp8::{round_cache_row, round_to_bf16};

/// Rows that a thread finishes at a time.
const ROW_TILE: usize = 8;

#[derive(Debug, Default)]
pub(super) struct CompressorScratch {
    values: Vec<f32>,            // [T, CW] f32
    gates: Vec<f32>,             // [T, CW] f32, with the position term
    rows: Vec<f32>,              // [n_groups, head_dim] f32
    groups: Vec<(usize, usize)>, // [n_groups] (run, group)
}

/// Raw rows of one run by position: this step's, or those the slot's ring kept.
struct RawRows<'a> {
    run: &'a StepRun<'a>,
    ring: Option<Ring<'a>>,
    values: &'a [f32],
    gates: &'a [f32],
    width: usize,
}

/// The products of the layer's input that the compressor needs.
pub(super) fn projections<'a>(
    step: &Step<'_>,
    w: &'a CompressorWeights,
    y: &'a [f32], // [T, D] f32
    s: &'a mut CompressorScratch,
) -> [LinearParams<'a>; 2] {
    let n_rows = step.n_rows();
    let values = fit(&mut s.values, n_rows * w.wkv.n_rows);
    let gates = fit(&mut s.gates, n_rows * w.wgate.n_rows);
    [LinearParams::dense(y, &w.wkv, n_rows, values), LinearParams::dense(y, &w.wgate, n_rows, gates)]
}

/// Adds the learned term of each position inside its group to the gates.
pub(super) fn add_position_term(step: &Step<'_>, w: &CompressorWeights, ratio: usize, s: &mut CompressorScratch) {
    let width = w.wgate.n_rows;
    step.cpu.par_chunks(&mut s.gates[..step.n_rows() * width], width, 4 * ROW_TILE, |t, gates| {
        let at = step.positions[t] % ratio * width;
        for (gate, term) in gates.iter_mut().zip(&w.ape[at..at + width]) {
            *gate += term;
        }
    });
}

/// Pools every group that is completed by this step and stores its row. A group completed by a draft that is rejected later is
/// written again before any query may see it.
pub(super) fn run(
    step: &Step<'_>,
    layer: LayerIdx,
    kind: RingKind,
    w: &CompressorWeights,
    s: &mut CompressorScratch,
    cache: &mut Cache,
) {
    let ratio = step.shape.compress_ratios[layer.index()];
    s.groups.clear();
    for (run_idx, run) in step.runs.iter().enumerate() {
        s.groups.extend((run.first_pos / ratio..(run.first_pos + run.n_rows) / ratio).map(|group| (run_idx, group)));
    }
    if s.groups.is_empty() {
        return;
    }
    let (head_dim, groups) = (w.norm.len(), &s.groups);
    let rows = fit(&mut s.rows, groups.len() * head_dim);
    step.cpu.par_chunks(rows, head_dim, ROW_TILE, |i, row| {
        let (run_idx, group) = groups[i];
        let run = &step.runs[run_idx];
        let ring = cache.ring(run.slot, layer, kind);
        let raw = RawRows { run, ring, values: &s.values, gates: &s.gates, width: w.wkv.n_rows };
        pool(step, &raw, ratio, group, row);
    });
    let (eps, sums) = (step.shape.rms_norm_eps, step.wave_sums(head_dim));
    rms_norm(step.cpu, RmsNormParams { x: rows, n_cols: head_dim, weight: Some(&w.norm), eps, sums });
    step.cpu.par_chunks(rows, head_dim, ROW_TILE, |i, row| {
        step.compressed_rotation(groups[i].1 * ratio).forward(row);
        finish(step, kind, row);
    });
    for (&(run_idx, group), row) in groups.iter().zip(rows.chunks_exact(head_dim)) {
        let blocks = step.runs[run_idx].blocks;
        match kind {
            RingKind::RawIndex => cache.write_index_row(blocks, layer, group, row),
            RingKind::Raw | RingKind::Window => cache.write_kv_row(blocks, layer, group, row),
        }
    }
}

/// The slots' rings take this step's raw rows.
pub(super) fn keep_rows(step: &Step<'_>, layer: LayerIdx, kind: RingKind, s: &CompressorScratch, cache: &mut Cache) {
    for run in &step.runs {
        let Some(ring) = cache.ring(run.slot, layer, kind) else { return };
        let width = ring.width() / 2;
        let rows = run.first_row * width..(run.first_row + run.n_rows) * width;
        cache.write_ring(run.slot, layer, kind, run.first_pos, &[&s.values[rows.clone()], &s.gates[rows]]);
    }
}

/// Softmax of the gates over the rows of the group, for each dimension, times their values. Where groups overlap, the first
/// halves of the group before come first (group 0 has none), then the second halves of the group itself.
fn pool(step: &Step<'_>, raw: &RawRows<'_>, ratio: usize, group: usize, row: &mut [f32]) {
    let head_dim = row.len();
    let (mut values, mut gates) = (Vec::with_capacity(2 * ratio), Vec::with_capacity(2 * ratio));
    let mut push = |group: usize, columns: std::ops::Range<usize>| {
        for position in group * ratio..(group + 1) * ratio {
            let (value, gate) = raw.at(position);
            values.push(&value[columns.clone()]);
            gates.push(&gate[columns.clone()]);
        }
    };
    if is_overlapping(ratio) {
        if group > 0 {
            push(group - 1, 0..head_dim);
        }
        push(group, head_dim..2 * head_dim);
    } else {
        push(group, 0..head_dim);
    }
    compress(step.cpu.level(), CompressParams { a: &values, s: &gates, out: row });
}

/// The rounding of the cache; indexer keys are rotated first.
fn finish(step: &Step<'_>, kind: RingKind, row: &mut [f32]) {
    let is_rounded = step.rounding.rounds_caches();
    if kind == RingKind::RawIndex {
        hadamard(row);
        if is_rounded {
            round_fp4(row);
        }
    } else if is_rounded {
        round_cache_row(row);
        if step.rounding.is_device() {
            round_to_bf16(row);
        }
    }
}

impl<'a> RawRows<'a> {
    /// The values and gates of a position.
    fn at(&self, position: usize) -> (&'a [f32], &'a [f32]) {
        match (position.checked_sub(self.run.first_pos), self.ring) {
            (None, Some(ring)) => ring.row(position).split_at(self.width),
            (own, _) => {
                let at = (self.run.first_row + own.unwrap_or(0)) * self.width;
                (&self.values[at..at + self.width], &self.gates[at..at + self.width])
            }
        }
    }
}
