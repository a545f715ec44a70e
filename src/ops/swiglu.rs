//! The experts' gated activation: silu(min(gate, limit)) * clamp(up, -limit, limit) * routing weight.
//!
//! Bits: silu(g) = g / (1 + exp(-g)); products left to right. A NaN input stays a NaN.

use crate::device::cpu::{Cpu, rows};

pub mod device;

/// Elements that are worth handing to another thread.
const MIN_TILE_ELEMENTS: usize = 1 << 12;

/// Activation of some rows.
#[derive(Debug)]
pub struct SwigluParams<'a> {
    /// w1 x.
    pub gate: &'a [f32], // [T, I] f32
    /// w3 x.
    pub up: &'a [f32], // [T, I] f32
    /// The config's swiglu_limit.
    pub limit: f32,
    /// Routing weight of each row; 1 when absent (the shared expert).
    pub weights: Option<&'a [f32]>, // [T] f32
    /// I.
    pub n_cols: usize,
    /// Result.
    pub out: &'a mut [f32], // [T, I] f32
}

/// Computes every row.
pub fn swiglu(cpu: &Cpu, params: SwigluParams) {
    let SwigluParams { gate, up, limit, weights, n_cols, out } = params;
    assert!(gate.len() == out.len() && up.len() == out.len(), "swiglu: T: {}, {}, {}", gate.len(), up.len(), out.len());
    assert!(n_cols > 0 && out.len() % n_cols == 0, "swiglu: I: {} elements in rows of {n_cols}", out.len());
    if let Some(w) = weights {
        assert!(w.len() * n_cols == out.len(), "swiglu: T: {} weights, {} elements", w.len(), out.len());
    }
    cpu.par_chunks(out, n_cols, MIN_TILE_ELEMENTS.div_ceil(n_cols), |t, out| {
        let range = t * n_cols..(t + 1) * n_cols;
        let weight = weights.map_or(1.0, |w| w[t]);
        rows::swiglu_row(cpu.level(), &gate[range.clone()], &up[range], limit, weight, out);
    });
}

/// One row in f64.
#[must_use]
pub fn reference(gate: &[f32], up: &[f32], limit: f32, weight: f32) -> Vec<f64> {
    let limit = f64::from(limit);
    // A NaN is not below the limit and stays: f64::min would drop it.
    let below = |g: f64| if g > limit { limit } else { g };
    let row = gate.iter().zip(up).map(|(g, u)| (below(f64::from(*g)), f64::from(*u).clamp(-limit, limit)));
    row.map(|(g, u)| g / (1.0 + (-g).exp()) * u * f64::from(weight)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, bits, cpus, max_error};

    fn run(cpu: &Cpu, gate: &[f32], up: &[f32], weights: Option<&[f32]>, n_cols: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; gate.len()];
        swiglu(cpu, SwigluParams { gate, up, limit: 10.0, weights, n_cols, out: &mut out });
        out
    }

    #[test]
    fn agrees_with_the_reference_and_bits_agree_on_all_levels() {
        let mut rng = Rng(111);
        for (n_cols, t) in [(256, 33), (2048, 2), (1, 1), (15, 3), (17, 2), (64, 0)] {
            let mut row = || -> Vec<f32> { rng.floats(n_cols * t).into_iter().map(|x| x * 20.0).collect() };
            let (gate, up) = (row(), row());
            let weights = rng.floats(t);
            let mut first: Option<Vec<u32>> = None;
            for cpu in cpus() {
                let out = run(&cpu, &gate, &up, Some(&weights), n_cols);
                for (i, weight) in weights.iter().enumerate() {
                    let range = i * n_cols..(i + 1) * n_cols;
                    let want = reference(&gate[range.clone()], &up[range.clone()], 10.0, *weight);
                    assert!(max_error(&out[range], &want) < 1e-6, "{n_cols} {t}");
                }
                assert_eq!(*first.get_or_insert(bits(&out)), bits(&out), "{n_cols} {t} {:?}", cpu.level());
            }
        }
    }

    #[test]
    fn both_clamps_hold() {
        // Pre-activations of 20 on either side.
        for cpu in cpus() {
            let at = |gate: f32, up: f32| run(&cpu, &[gate; 16], &[up; 16], None, 16)[0];
            assert_eq!(at(20.0, 1.0), at(10.0, 1.0));
            assert_eq!(at(1.0, 20.0), at(1.0, 10.0));
            assert_eq!(at(1.0, -20.0), at(1.0, -10.0));
            assert!(at(-20.0, 1.0) != at(-10.0, 1.0), "the gate has no lower limit");
            assert_eq!(at(-1e30, 1.0), 0.0);
            assert!(at(f32::NAN, 1.0).is_nan() && at(1.0, f32::NAN).is_nan());
        }
    }
}
