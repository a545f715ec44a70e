//! Hyper-connection at the head: the copies of a row become one by weights g = sigmoid((fn · x) * rsqrt * scale + base) + hc_eps.

use super::hyper_mix::{HC, inverse_rms};

pub mod device;
use crate::device::cpu::Level;
use crate::device::cpu::math::sigmoid_f32 as sigmoid;
use crate::device::cpu::rows::weigh_copies;
use crate::device::cpu::tile::ThreadSums;
use crate::ops::rms_norm::inv_rms;

/// The weights, constants and inputs.
#[derive(Clone, Copy, Debug)]
pub struct HyperHeadParams<'a> {
    /// Columns of one copy (D).
    pub n_cols: usize,
    /// The copies.
    pub residual: &'a [f32], // [T, HC, D] f32
    /// fn · x, not yet divided by the norm of x.
    pub mixes: &'a [f32], // [T, HC] f32
    /// Added to the scaled mixes.
    pub base: &'a [f32], // [HC] f32
    /// Their factor.
    pub scale: f32,
    /// Epsilon of the norm.
    pub norm_eps: f32,
    /// Epsilon of the hyper-connection.
    pub hc_eps: f32,
    /// The threads whose order the squares are added in; none: 16 lanes.
    pub sums: Option<ThreadSums>,
}

/// The contract in scalar code with f64 sums.
pub fn reference(p: &HyperHeadParams<'_>, row: &mut [f32] /* [T, D] f32 */) {
    for (t, x) in p.residual.chunks(HC * p.n_cols).enumerate() {
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
        let inverse = 1.0 / (mean + f64::from(p.norm_eps)).sqrt();
        let weight = |c: usize| {
            let m = f64::from(p.mixes[t * HC + c]) * inverse * f64::from(p.scale) + f64::from(p.base[c]);
            1.0 / (1.0 + (-m).exp()) + f64::from(p.hc_eps)
        };
        let weights: [f64; HC] = std::array::from_fn(weight);
        for i in 0..p.n_cols {
            let sum: f64 = (0..HC).map(|c| weights[c] * f64::from(x[c * p.n_cols + i])).sum();
            row[t * p.n_cols + i] = sum as f32;
        }
    }
}

/// The CPU path. Logit rows are few, so it runs on one thread.
pub fn run(level: Level, p: &HyperHeadParams<'_>, row: &mut [f32] /* [T, D] f32 */) {
    let inputs = p.residual.chunks_exact(HC * p.n_cols).zip(p.mixes.chunks_exact(HC));
    for ((x, mixes), row) in inputs.zip(row.chunks_exact_mut(p.n_cols)) {
        let inverse = match p.sums {
            None => inverse_rms(x, p.norm_eps),
            sums => inv_rms(level, x, p.norm_eps, sums),
        };
        let weights: [f32; HC] = std::array::from_fn(|c| sigmoid(mixes[c] * inverse * p.scale + p.base[c]) + p.hc_eps);
        weigh_copies(level, x, &weights, row);
    }
}

#[cfg(test)]
mod tests {
    use super::super::hyper_mix::tests::noise;
    use super::*;

    #[test]
    fn the_cpu_path_agrees_with_the_reference() {
        for (n_tokens, n_cols) in [(0, 128), (1, 128), (3, 256), (5, 40)] {
            let (residual, mixes, base) = (noise(1, n_tokens * HC * n_cols), noise(2, n_tokens * HC), noise(3, HC));
            let p = HyperHeadParams {
                n_cols,
                residual: &residual,
                mixes: &mixes,
                base: &base,
                scale: 0.7,
                norm_eps: 1e-6,
                hc_eps: 1e-6,
                sums: None,
            };
            let (mut got, mut want) = (vec![f32::NAN; n_tokens * n_cols], vec![f32::NAN; n_tokens * n_cols]);
            run(Level::best(), &p, &mut got);
            reference(&p, &mut want);
            for (got, want) in got.iter().zip(&want) {
                // Four products of at most 1 each and a sigmoid.
                assert!((got - want).abs() < 2e-6, "{got} {want}");
            }
        }
    }
}
