//! y = W x for a stored weight matrix: FP8, MXFP4, BF16 or F32, any number of tokens.
//!
//! Bits: each y element is one 16-lane dot product of its x row and its (exactly expanded) weight row, so it does not depend on
//! the other tokens, on the rows asked for, or on threads.

use std::borrow::Cow;
use std::ops::Range;

use crate::device::cpu::Cpu;
use crate::device::cpu::linear::{Problem, run};
use crate::device::cpu::simd::LANES;
use crate::tensor::matrix::{Matrix, MatrixData};

/// y[t, r - rows.start] = sum over k of x[t, k] * W[r, k].
#[derive(Debug)]
pub struct LinearParams<'a> {
    /// Inputs; row t starts at `t * x_stride`.
    pub x: &'a [f32], // [T, x_stride] f32, the first K of each row
    /// Elements from one row of x to the next, at least K.
    pub x_stride: usize,
    /// T.
    pub n_tokens: usize,
    /// W.
    pub weight: &'a Matrix, // [N, K]
    /// The weight rows to use.
    pub rows: Range<usize>,
    /// Outputs; row t starts at `t * y_stride`.
    pub y: &'a mut [f32], // [T, y_stride] f32, the first rows.len() of each row are written
    /// Elements from one row of y to the next, at least `rows.len()`.
    pub y_stride: usize,
}

impl<'a> LinearParams<'a> {
    /// All rows of a weight, dense x `[T, K]` and y `[T, N]`.
    pub fn dense(x: &'a [f32], weight: &'a Matrix, n_tokens: usize, y: &'a mut [f32]) -> Self {
        let (x_stride, y_stride) = (weight.n_cols, weight.n_rows);
        Self { x, x_stride, n_tokens, weight, rows: 0..weight.n_rows, y, y_stride }
    }
}

/// Computes one product. Panics when a slice is shorter than the shapes say: that is a bug in the caller.
pub fn linear(cpu: &Cpu, params: LinearParams) {
    run(cpu, &mut [problem(params, 1)]);
}

/// Computes several independent products with one hand-over to the threads (projections of the same row, or experts).
pub fn linear_batch(cpu: &Cpu, params: Vec<LinearParams>) {
    let mut problems: Vec<Problem> = params.into_iter().map(|p| problem(p, 1)).collect();
    run(cpu, &mut problems);
}

/// A block-diagonal product: the rows are split into `n_groups` equal groups, and group g reads columns g K .. (g + 1) K of x
/// (rows of x have `n_groups` K elements). This is the grouped output projection.
pub fn linear_grouped(cpu: &Cpu, params: LinearParams, n_groups: usize) {
    run(cpu, &mut [problem(params, n_groups.max(1))]);
}

/// The same sums in f64, scalar.
pub fn reference(params: &LinearParams) -> Vec<f64> {
    let (k, weight) = (params.weight.n_cols, params.weight);
    let mut y = Vec::with_capacity(params.n_tokens * params.rows.len());
    for t in 0..params.n_tokens {
        let x = &params.x[t * params.x_stride..][..k];
        for r in params.rows.clone() {
            y.push(x.iter().enumerate().map(|(c, x)| f64::from(*x) * f64::from(element(weight, r, c))).sum());
        }
    }
    y
}

/// One element of a stored matrix.
#[must_use]
pub fn element(weight: &Matrix, row: usize, column: usize) -> f32 {
    use crate::tensor::format::{bf16_to_f32, e2m1_to_f32, e8m0_to_f32, f8e4m3fn_to_f32};
    use crate::tensor::matrix::{FP8_BLOCK, MXFP4_BLOCK};
    let (k, at) = (weight.n_cols, row * weight.n_cols + column);
    match &weight.data {
        MatrixData::Fp8 { codes, scales } => {
            let scale = scales[row / FP8_BLOCK * k.div_ceil(FP8_BLOCK) + column / FP8_BLOCK];
            f8e4m3fn_to_f32(codes[at]) * e8m0_to_f32(scale)
        }
        MatrixData::Mxfp4 { codes, scales } => {
            e2m1_to_f32(codes[at / 2] >> (4 * (at % 2)) & 15) * e8m0_to_f32(scales[at / MXFP4_BLOCK])
        }
        MatrixData::Bf16 { bits } => bf16_to_f32(u16::from_le_bytes([bits[2 * at], bits[2 * at + 1]])),
        MatrixData::F32 { values } => values[at],
    }
}

fn problem(p: LinearParams, n_groups: usize) -> Problem {
    let (k, n) = (p.weight.n_cols, p.rows.len());
    assert!(p.rows.end <= p.weight.n_rows, "linear: N: rows {:?} of {}", p.rows, p.weight.n_rows);
    assert!(n % n_groups == 0, "linear: N: {n} rows in {n_groups} groups");
    assert!(p.x_stride >= k * n_groups, "linear: K: x_stride {}, want {}", p.x_stride, k * n_groups);
    assert!(p.y_stride >= n, "linear: N: y_stride {}, want {n}", p.y_stride);
    if let Some(last) = p.n_tokens.checked_sub(1) {
        let (want_x, want_y) = (last * p.x_stride + k * n_groups, last * p.y_stride + n);
        assert!(p.x.len() >= want_x, "linear: T: x of {}, want {want_x}", p.x.len());
        assert!(p.y.len() >= want_y, "linear: T: y of {}, want {want_y}", p.y.len());
    }
    check_stored(p.weight);
    let (x, x_stride) = if k % LANES == 0 { (Cow::Borrowed(p.x), p.x_stride) } else { pad(&p, n_groups) };
    let LinearParams { weight, rows, n_tokens, y, y_stride, .. } = p;
    Problem { weight, rows, group_rows: (n / n_groups).max(1), n_tokens, x, x_stride, y, y_stride }
}

/// x with the K of every group padded by zeros to a multiple of 16.
fn pad(p: &LinearParams, n_groups: usize) -> (Cow<'static, [f32]>, usize) {
    let k = p.weight.n_cols;
    let k_padded = k.next_multiple_of(LANES);
    let mut x = vec![0.0; p.n_tokens * n_groups * k_padded];
    for (i, out) in x.chunks_exact_mut(k_padded).enumerate() {
        out[..k].copy_from_slice(&p.x[i / n_groups * p.x_stride + i % n_groups * k..][..k]);
    }
    (Cow::Owned(x), n_groups * k_padded)
}

/// The stored bytes must cover the shape.
fn check_stored(weight: &Matrix) {
    use crate::tensor::matrix::{FP8_BLOCK, MXFP4_BLOCK};
    let (n, k) = (weight.n_rows, weight.n_cols);
    let (got, want) = match &weight.data {
        MatrixData::Fp8 { codes, scales } => {
            let blocks = n.div_ceil(FP8_BLOCK) * k.div_ceil(FP8_BLOCK);
            assert!(scales.len() >= blocks, "linear: scales: {} blocks, want {blocks}", scales.len());
            (codes.len(), n * k)
        }
        MatrixData::Mxfp4 { codes, scales } => {
            assert!(k % MXFP4_BLOCK == 0, "linear: K: {k}, want a multiple of {MXFP4_BLOCK}");
            let blocks = n * k / MXFP4_BLOCK;
            assert!(scales.len() >= blocks, "linear: scales: {} blocks, want {blocks}", scales.len());
            (codes.len(), n * k / 2)
        }
        MatrixData::Bf16 { bits } => (bits.len(), 2 * n * k),
        MatrixData::F32 { values } => (values.len(), n * k),
    };
    assert!(got >= want, "linear: weight of {got}, want {want} for [{n}, {k}]");
}
