//! The pooled row of a group: for each dimension, the softmax over the group's rows of s, times a, summed.
//!
//! Bits: max, then p = exp(s - max); sums of p and of p * a (fused multiply-add) in the order of the rows; one division.

use crate::device::cpu::{Level, attention::pool_rows};

/// Raw rows of one group, in ascending position: 128 rows (ratio 128), or the first halves of the previous group's four rows
/// and then the second halves of this group's four (ratio 4; the first group has only its own).
#[derive(Debug)]
pub struct CompressParams<'a> {
    /// Values.
    pub a: &'a [&'a [f32]], // [R][D] f32
    /// Logits, positional bias already added.
    pub s: &'a [&'a [f32]], // [R][D] f32
    /// The pooled row.
    pub out: &'a mut [f32], // [D] f32
}

/// Pools one group.
pub fn compress(level: Level, params: CompressParams) {
    let CompressParams { a, s, out } = params;
    assert!(a.len() == s.len() && !a.is_empty(), "compress: R: {} rows of a, {} of s", a.len(), s.len());
    pool_rows(level, a, s, out);
}

/// One group in f64.
#[must_use]
pub fn reference(a: &[&[f32]], s: &[&[f32]]) -> Vec<f64> {
    let pooled = |d: usize| {
        let max = s.iter().map(|s| f64::from(s[d])).fold(f64::NEG_INFINITY, f64::max);
        let p: Vec<f64> = s.iter().map(|s| (f64::from(s[d]) - max).exp()).collect();
        let sum: f64 = p.iter().zip(a).map(|(p, a)| p * f64::from(a[d])).sum();
        sum / p.iter().sum::<f64>()
    };
    (0..a[0].len()).map(pooled).collect()
}
