//! y = W x for a stored weight matrix: FP8, MXFP4, BF16 or F32, any number of tokens.
//!
//! Bits: each y element is one 16-lane dot product of its x row and its (exactly expanded) weight row, so it does not depend on
//! the other tokens, on the rows asked for, or on threads.

use std::borrow::Cow;
use std::ops::Range;

use crate::device::SimWave;
use crate::device::cpu::Cpu;
use crate::device::cpu::linear::{Problem, run};
use crate::device::cpu::simd::LANES;
use crate::device::cpu::tile::{self, TileProduct};
use crate::ops::repack::WeightShape;
use crate::tensor::matrix::{Matrix, MatrixData};

pub mod device;

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
    /// Weights of this shape that a device works with at the same time: they decide how it splits K.
    pub n_alike: u32,
}

impl<'a> LinearParams<'a> {
    /// All rows of a weight, dense x `[T, K]` and y `[T, N]`.
    pub fn dense(x: &'a [f32], weight: &'a Matrix, n_tokens: usize, y: &'a mut [f32]) -> Self {
        let (x_stride, y_stride) = (weight.n_cols, weight.n_rows);
        Self { x, x_stride, n_tokens, weight, rows: 0..weight.n_rows, y, y_stride, n_alike: 1 }
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

/// As [`linear_grouped`], all rows, in the order of sums of the kernels at a wave width; x holds values of BF16. For comparing with them:
/// it is several times slower.
pub fn linear_in_tiles(cpu: &Cpu, wave: SimWave, p: LinearParams, n_groups: usize) {
    let shape = WeightShape::of(p.weight);
    assert!(
        p.rows == (0..p.weight.n_rows) && p.weight.n_rows.is_multiple_of(n_groups),
        "linear: N: rows {:?} in {n_groups} groups",
        p.rows
    );
    let product = TileProduct {
        weight: p.weight,
        x: p.x,
        x_stride: p.x_stride,
        n_tokens: p.n_tokens,
        group_rows: p.weight.n_rows / n_groups,
        n_splits: shape.map_or(1, |shape| shape.n_splits(p.n_alike) as usize),
        y: p.y,
        y_stride: p.y_stride,
    };
    tile::run(cpu, wave, product);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, STORED, Stored, bits, cpus, matrix, max_error};

    /// (N, K, T): shapes of the demo model and of the official one (cut in N), then 0, 1, odd and just past a tile.
    const SHAPES: [(usize, usize, usize); 16] = [
        (128, 256, 9),
        (512, 128, 5),
        (24, 1024, 7),
        (40, 4096, 2),
        (1, 32, 1),
        (0, 32, 3),
        (3, 32, 0),
        (17, 32, 13),
        (16, 64, 12),
        (15, 96, 11),
        (130, 160, 3),
        (33, 288, 4),
        (5, 512, 33),
        (129, 128, 257),
        (65, 2048, 1),
        (4, 1024, 6),
    ];

    fn run_dense(cpu: &Cpu, x: &[f32], w: &Matrix, n_tokens: usize) -> Vec<f32> {
        let mut y = vec![f32::NAN; n_tokens * w.n_rows];
        linear(cpu, LinearParams::dense(x, w, n_tokens, &mut y));
        y
    }

    #[test]
    fn agrees_with_the_reference_and_bits_agree_on_all_levels() {
        let mut rng = Rng(1);
        let cpus = cpus();
        for (n, k, t) in SHAPES {
            for kind in STORED {
                let (w, x) = (matrix(&mut rng, kind, n, k), rng.floats(t * k));
                let y = run_dense(&cpus[0], &x, &w, t);
                let mut none = Vec::new();
                let want = reference(&LinearParams::dense(&x, &w, t, &mut none));
                // K/16 roundings a lane and the fold, each 2^-24 of a partial sum that random signs keep near the result.
                assert!(max_error(&y, &want) < 2e-6, "{kind:?} {n} {k} {t}: {}", max_error(&y, &want));
                for cpu in &cpus {
                    assert_eq!(bits(&y), bits(&run_dense(cpu, &x, &w, t)), "{kind:?} {n} {k} {t} {:?}", cpu.level());
                }
            }
        }
    }

    #[test]
    fn a_token_alone_gives_the_bits_it_gives_in_a_batch() {
        let mut rng = Rng(2);
        for cpu in cpus() {
            for (kind, k) in STORED.into_iter().flat_map(|kind| [(kind, 160), (kind, 384)]) {
                let (n, t) = (70, 29);
                let (w, x) = (matrix(&mut rng, kind, n, k), rng.floats(t * k));
                let y = run_dense(&cpu, &x, &w, t);
                for i in 0..t {
                    let one = run_dense(&cpu, &x[i * k..(i + 1) * k], &w, 1);
                    assert_eq!(bits(&one), bits(&y[i * n..(i + 1) * n]), "{kind:?} {k} token {i} {:?}", cpu.level());
                }
            }
        }
    }

    #[test]
    fn columns_outside_a_multiple_of_16_work_where_the_format_allows() {
        let mut rng = Rng(3);
        for k in [1, 15, 17, 130, 200] {
            for kind in [Stored::Fp8, Stored::Bf16, Stored::F32] {
                let (w, x) = (matrix(&mut rng, kind, 19, k), rng.floats(5 * k));
                let mut all = cpus().into_iter().map(|cpu| run_dense(&cpu, &x, &w, 5));
                let y = all.next().unwrap();
                let want = reference(&LinearParams::dense(&x, &w, 5, &mut []));
                assert!(max_error(&y, &want) < 2e-6, "{kind:?} {k}");
                assert!(all.all(|other| bits(&other) == bits(&y)), "{kind:?} {k}");
            }
        }
    }

    #[test]
    fn padding_is_neither_read_into_results_nor_written() {
        let mut rng = Rng(4);
        let (n, k, t, x_stride, y_stride) = (21, 64, 7, 80, 30);
        for cpu in cpus() {
            let w = matrix(&mut rng, Stored::Mxfp4, n, k);
            let mut x = vec![f32::NAN; t * x_stride];
            for row in x.chunks_exact_mut(x_stride) {
                row[..k].copy_from_slice(&rng.floats(k));
            }
            let mut y = vec![-7.0; t * y_stride];
            let rows = 3..19;
            let params =
                LinearParams { x: &x, x_stride, n_tokens: t, weight: &w, rows, y: &mut y, y_stride, n_alike: 1 };
            let want = reference(&params);
            linear(&cpu, params);
            for (i, row) in y.chunks_exact(y_stride).enumerate() {
                assert!(max_error(&row[..16], &want[16 * i..16 * (i + 1)]) < 2e-6);
                assert!(row[16..].iter().all(|y| *y == -7.0));
            }
        }
    }

    #[test]
    fn scales_at_both_ends_take_every_path() {
        let mut rng = Rng(7);
        for scale in [0, 1, 246, 247, 254] {
            let Matrix { name, n_rows, n_cols, mut data } = matrix(&mut rng, Stored::Fp8, 9, 256);
            if let MatrixData::Fp8 { codes, scales } = &mut data {
                *scales = bytes::Bytes::from(vec![scale; 2]);
                // The largest codes overflow under the largest scales.
                *codes = codes.iter().map(|c| c & 0xBF).collect::<Vec<u8>>().into();
            }
            let w = Matrix { name, n_rows, n_cols, data };
            let x: Vec<f32> = rng.floats(3 * 256).into_iter().map(|x| x * 1e-3).collect();
            let mut first: Option<Vec<u32>> = None;
            for cpu in cpus() {
                let y = run_dense(&cpu, &x, &w, 3);
                assert!(y.iter().all(|y| y.is_finite()) && y.iter().any(|y| *y != 0.0), "{scale}");
                assert_eq!(*first.get_or_insert(bits(&y)), bits(&y), "{scale} {:?}", cpu.level());
                assert_eq!(bits(&y[..9]), bits(&run_dense(&cpu, &x[..256], &w, 1)), "{scale} {:?}", cpu.level());
            }
        }
    }

    #[test]
    fn groups_read_their_own_columns() {
        let mut rng = Rng(5);
        for (n_groups, group_rows, k) in [(2, 128, 96), (8, 20, 64), (3, 7, 40)] {
            let kind = if k % 16 == 0 { Stored::Fp8 } else { Stored::Bf16 };
            let (t, n) = (6, n_groups * group_rows);
            let (w, x) = (matrix(&mut rng, kind, n, k), rng.floats(t * n_groups * k));
            for cpu in cpus() {
                let mut y = vec![f32::NAN; t * n];
                let params = LinearParams {
                    x: &x,
                    x_stride: n_groups * k,
                    n_tokens: t,
                    weight: &w,
                    rows: 0..n,
                    y: &mut y,
                    y_stride: n,
                    n_alike: 1,
                };
                linear_grouped(&cpu, params, n_groups);
                for g in 0..n_groups {
                    let mut one = vec![0.0; t * group_rows];
                    let rows = g * group_rows..(g + 1) * group_rows;
                    let (x, y_stride) = (&x[g * k..], group_rows);
                    let x_stride = n_groups * k;
                    let own = LinearParams { x_stride, rows, ..LinearParams::dense(x, &w, t, &mut one) };
                    linear(&cpu, LinearParams { y_stride, ..own });
                    for i in 0..t {
                        let got = &y[i * n + g * group_rows..][..group_rows];
                        assert_eq!(bits(got), bits(&one[i * group_rows..][..group_rows]));
                    }
                }
            }
        }
    }

    #[test]
    fn tiles_agree_with_the_reference_for_every_storage_and_split() {
        let mut rng = Rng(8);
        for (kind, n, k, t, n_groups) in [
            (Stored::Fp8, 48, 256, 3, 1),
            (Stored::Fp8, 128, 1024, 2, 2),
            (Stored::Mxfp4, 20, 2048, 2, 1),
            (Stored::Bf16, 17, 72, 5, 1),
            (Stored::Bf16, 1, 4096, 1, 1),
        ] {
            let w = matrix(&mut rng, kind, n, k);
            let x: Vec<f32> =
                rng.floats(t * n_groups * k).iter().map(|x| f32::from_bits(x.to_bits() & 0xFFFF_0000)).collect();
            for wave in [SimWave::W32, SimWave::W64] {
                let mut y = vec![f32::NAN; t * n];
                let dense = LinearParams { x_stride: n_groups * k, ..LinearParams::dense(&x, &w, t, &mut y) };
                linear_in_tiles(&cpus()[0], wave, dense, n_groups);
                for g in 0..n_groups {
                    let rows = g * n / n_groups..(g + 1) * n / n_groups;
                    let mut none = [];
                    let dense =
                        LinearParams { x_stride: n_groups * k, ..LinearParams::dense(&x[g * k..], &w, t, &mut none) };
                    let want = reference(&LinearParams { rows: rows.clone(), ..dense });
                    let got: Vec<f32> = (0..t).flat_map(|t| &y[t * n..][rows.clone()]).copied().collect();
                    // Sums of up to 4,096 products of a few units, each sum cut to 24 bits.
                    let error = max_error(&got, &want);
                    assert!(error < 2e-3, "{kind:?} {n} x {k} {wave:?}: {error}");
                }
            }
        }
    }

    #[test]
    fn a_batch_of_products_gives_the_bits_of_each() {
        let mut rng = Rng(6);
        let shapes = [(64, 256, 3), (5, 32, 1), (256, 128, 40), (0, 32, 4)];
        let problems: Vec<_> = shapes
            .iter()
            .zip(STORED)
            .map(|((n, k, t), kind)| (matrix(&mut rng, kind, *n, *k), rng.floats(t * k), *t))
            .collect();
        for cpu in cpus() {
            let mut ys: Vec<Vec<f32>> = problems.iter().map(|(w, _, t)| vec![f32::NAN; t * w.n_rows]).collect();
            let params = problems.iter().zip(&mut ys).map(|((w, x, t), y)| LinearParams::dense(x, w, *t, y)).collect();
            linear_batch(&cpu, params);
            for ((w, x, t), y) in problems.iter().zip(&ys) {
                assert_eq!(bits(y), bits(&run_dense(&cpu, x, w, *t)));
            }
        }
    }

    #[test]
    fn expansion_is_exact_for_every_code_and_scale() {
        use crate::tensor::format::{e2m1_to_f32, e8m0_to_f32, f8e4m3fn_to_f32};
        // All 256 bytes under scales 2^-127 .. 2^127.
        let codes: Vec<u8> = (0..=255).collect();
        for cpu in cpus() {
            for scale in (0..=254u8).step_by(1) {
                let mut out = vec![0.0; 256];
                crate::device::cpu::expand::decode_fp8(cpu.level(), &codes, &[scale; 2], 128, &mut out);
                for (code, got) in codes.iter().zip(&out) {
                    let want = f8e4m3fn_to_f32(*code) * e8m0_to_f32(scale);
                    assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{code} {scale} {got}");
                }
                let mut out = vec![0.0; 512];
                crate::device::cpu::expand::decode_e2m1(cpu.level(), &codes, &[scale; 16], &mut out);
                for (byte, got) in codes.iter().zip(out.chunks_exact(2)) {
                    let want = [byte & 15, byte >> 4].map(|n| e2m1_to_f32(n) * e8m0_to_f32(scale));
                    assert_eq!(bits(got), bits(&want), "{byte} {scale}");
                }
            }
        }
    }
}
