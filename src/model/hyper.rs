//! Hyper-connections around a sublayer: into one normed row, out again into all copies of the residual.

use crate::model::forward::{Step, fit, gather_rows};
use crate::model::weights::HyperWeights;
use crate::ops::hyper_head::{self, HyperHeadParams};
use crate::ops::hyper_mix::{self, HC, HyperMixParams, MIXES, part_dot};
use crate::ops::hyper_post::{self, HyperPostParams};
use crate::ops::linear::{LinearParams, linear};
use crate::ops::rms_norm::{RmsNormParams, rms_norm};
use crate::tensor::matrix::{Matrix, MatrixData};

/// What `enter` leaves for `leave`.
#[derive(Debug, Default)]
pub(super) struct HyperScratch {
    weights: Vec<f32>, // [T, MIXES] f32
}

impl HyperScratch {
    /// Rows that go on alone move to the front.
    pub fn gather(&mut self, rows: &[usize]) {
        gather_rows(&mut self.weights, MIXES, rows);
    }
}

/// Every copy of the residual starts as the embedding.
pub(super) fn expand(embedded: &[f32], n_cols: usize, residual: &mut [f32]) {
    for (row, copies) in embedded.chunks_exact(n_cols).zip(residual.chunks_exact_mut(HC * n_cols)) {
        copies.chunks_exact_mut(n_cols).for_each(|copy| copy.copy_from_slice(row));
    }
}

/// The sublayer's input: the mixed and normed row.
pub(super) fn enter(
    step: &Step<'_>,
    w: &HyperWeights,
    norm: &[f32],     // [D] f32
    residual: &[f32], // [T, HC, D] f32
    scratch: &mut HyperScratch,
    normed: &mut [f32], // [T, D] f32
) {
    let (shape, n_rows) = (step.shape, step.n_rows());
    let mixes = fit(&mut scratch.weights, n_rows * MIXES);
    let wave = step.rounding.wave();
    match wave {
        None => linear(step.cpu, LinearParams::dense(residual, &w.mix, n_rows, mixes)),
        Some(wave) => dots(step, &w.mix, residual, mixes, |x, y| part_dot(step.cpu.level(), wave, x, y)),
    }
    let params = HyperMixParams {
        n_cols: shape.hidden_size,
        residual,
        base: &w.base,
        scale: &w.scale,
        norm_eps: shape.rms_norm_eps,
        hc_eps: shape.hc_eps,
        n_iters: shape.hc_sinkhorn_iters,
        wave,
    };
    hyper_mix::run(step.cpu, &params, mixes, normed);
    let (n_cols, eps, sums) = (shape.hidden_size, shape.rms_norm_eps, step.block_sums(4));
    rms_norm(step.cpu, RmsNormParams { x: &mut *normed, n_cols, weight: Some(norm), eps, sums });
    step.round_if_device(normed, n_cols);
}

/// `y[t, m]` = the dot of x's row t with row m of a matrix of f32.
fn dots(step: &Step<'_>, w: &Matrix, x: &[f32], y: &mut [f32], dot: impl Fn(&[f32], &[f32]) -> f32 + Sync) {
    let values: &[f32] = if let MatrixData::F32 { values } = &w.data { values } else { &[] };
    assert!(
        values.len() == w.n_rows * w.n_cols,
        "hyper: mixes of {} f32, want {} x {}",
        values.len(),
        w.n_rows,
        w.n_cols
    );
    step.cpu.par_chunks(y, w.n_rows, 1, |t, y| {
        for (y, row) in y.iter_mut().zip(values.chunks_exact(w.n_cols)) {
            *y = dot(row, &x[t * w.n_cols..][..w.n_cols]);
        }
    });
}

/// The new residual from the sublayer's output and the old one.
pub(super) fn leave(step: &Step<'_>, output: &[f32], scratch: &HyperScratch, residual: &mut [f32]) {
    let params = HyperPostParams { n_cols: step.shape.hidden_size, output, weights: &scratch.weights };
    hyper_post::run(step.cpu, &params, residual);
}

/// One row from the copies of every wanted row.
pub(super) fn finish(
    step: &Step<'_>,
    w: &HyperWeights,
    residual: &[f32], // [n, HC, D] f32
    scratch: &mut HyperScratch,
    row: &mut [f32], // [n, D] f32
) {
    let n_cols = step.shape.hidden_size;
    let n_rows = row.len() / n_cols;
    let mixes = fit(&mut scratch.weights, n_rows * HC);
    let sums = step.block_sums(1);
    match sums {
        None => linear(step.cpu, LinearParams::dense(residual, &w.mix, n_rows, mixes)),
        Some(sums) => dots(step, &w.mix, residual, mixes, |x, y| sums.dot(step.cpu.level(), x, y)),
    }
    let params = HyperHeadParams {
        n_cols,
        residual,
        mixes,
        base: &w.base,
        scale: w.scale[0],
        norm_eps: step.shape.rms_norm_eps,
        hc_eps: step.shape.hc_eps,
        sums,
    };
    hyper_head::run(step.cpu.level(), &params, row);
}
