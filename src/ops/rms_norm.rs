//! RMSNorm: x / sqrt(mean(x^2) + eps) * weight, the weight as stored (no "1 +"), or no weight.
//!
//! Bits: the sum of squares is a 16-lane dot product of the row with itself, or is taken as a kernel's threads do; then
//! (x * r) * weight with r = 1 / sqrt(...).

use crate::device::cpu::tile::ThreadSums;
use crate::device::cpu::{Cpu, Level, rows};

/// Elements that are worth handing to another thread.
const MIN_TILE_ELEMENTS: usize = 1 << 14;

/// RMSNorm of every row.
#[derive(Debug)]
pub struct RmsNormParams<'a> {
    /// Rows, normalised in place.
    pub x: &'a mut [f32], // [T, D] f32
    /// D.
    pub n_cols: usize,
    /// Weight; none for the query heads' norm.
    pub weight: Option<&'a [f32]>, // [D] f32
    /// Added to the mean of squares.
    pub eps: f32,
    /// The threads whose order the squares are added in; none: 16 lanes.
    pub sums: Option<ThreadSums>,
}

/// Normalises every row in place.
pub fn rms_norm(cpu: &Cpu, params: RmsNormParams) {
    let RmsNormParams { x, n_cols, weight, eps, sums } = params;
    assert!(n_cols > 0 && x.len() % n_cols == 0, "rms_norm: D: {} elements in rows of {n_cols}", x.len());
    if let Some(w) = weight {
        assert!(w.len() == n_cols, "rms_norm: D: weight of {}, want {n_cols}", w.len());
    }
    let level = cpu.level();
    cpu.par_chunks(x, n_cols, MIN_TILE_ELEMENTS.div_ceil(n_cols), |_, row| {
        let r = inv_rms(level, row, eps, sums);
        rows::scale_row(level, row, r, weight);
    });
}

/// Normalises every row of `x` into `y`.
pub fn rms_norm_into(cpu: &Cpu, x: &[f32], params: RmsNormParams) {
    assert!(x.len() == params.x.len(), "rms_norm: T: x of {}, want {}", x.len(), params.x.len());
    params.x.copy_from_slice(x);
    rms_norm(cpu, params);
}

/// 1 / sqrt(mean(x^2) + eps) of one row.
#[must_use]
pub fn inv_rms(level: Level, row: &[f32], eps: f32, sums: Option<ThreadSums>) -> f32 {
    let squares = sums.map_or_else(|| rows::dot(level, row, row), |sums| sums.dot(level, row, row));
    1.0 / (squares / row.len() as f32 + eps).sqrt()
}

/// One row in f64.
#[must_use]
pub fn reference(row: &[f32], weight: Option<&[f32]>, eps: f32) -> Vec<f64> {
    let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64;
    let r = 1.0 / (mean + f64::from(eps)).sqrt();
    row.iter().enumerate().map(|(i, x)| f64::from(*x) * r * weight.map_or(1.0, |w| f64::from(w[i]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, bits, cpus, max_error};

    #[test]
    fn agrees_with_the_reference_on_every_level() {
        let mut rng = Rng(11);
        for (d, t) in [(512, 3), (1024, 2), (256, 65), (4096, 5), (1, 1), (15, 4), (17, 3), (33, 2), (256, 0)] {
            let (x, w) = (rng.floats(d * t), rng.floats(d));
            for weight in [None, Some(&w[..])] {
                let mut first: Option<Vec<u32>> = None;
                for cpu in cpus() {
                    let mut y = vec![f32::NAN; d * t];
                    rms_norm_into(&cpu, &x, RmsNormParams { x: &mut y, n_cols: d, weight, eps: 1e-6, sums: None });
                    for (x, y) in x.chunks_exact(d).zip(y.chunks_exact(d)) {
                        // A handful of roundings an element.
                        assert!(max_error(y, &reference(x, weight, 1e-6)) < 1e-6, "{d} {t}");
                    }
                    assert_eq!(*first.get_or_insert(bits(&y)), bits(&y), "{d} {t} {:?}", cpu.level());
                }
            }
        }
    }

    #[test]
    fn eps_keeps_a_row_of_zeros_finite() {
        let mut x = [0.0; 32];
        rms_norm(&cpus()[0], RmsNormParams { x: &mut x, n_cols: 32, weight: None, eps: 1e-6, sums: None });
        assert_eq!(x, [0.0; 32]);
    }
}
