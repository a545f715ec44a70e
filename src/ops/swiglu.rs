//! The experts' gated activation: silu(min(gate, limit)) * clamp(up, -limit, limit) * routing weight (faults G3).
//!
//! Bits: silu(g) = g / (1 + exp(-g)); products left to right. A NaN input stays a NaN.

use crate::device::cpu::{Cpu, rows};

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
    let row = gate.iter().zip(up).map(|(g, u)| (f64::from(*g).min(limit), f64::from(*u).clamp(-limit, limit)));
    row.map(|(g, u)| g / (1.0 + (-g).exp()) * u * f64::from(weight)).collect()
}
