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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, bits, cpus, max_error};

    #[test]
    fn agrees_with_the_reference_and_bits_agree_on_all_levels() {
        let mut rng = Rng(101);
        for (n_rows, d) in [(128, 512), (8, 512), (8, 128), (4, 128), (1, 1), (3, 7), (5, 17), (2, 0)] {
            let mut rows = |gain: f32| -> Vec<Vec<f32>> {
                (0..n_rows).map(|_| rng.floats(d).into_iter().map(|x| x * gain).collect()).collect()
            };
            let (a, s) = (rows(1.0), rows(6.0));
            let a: Vec<&[f32]> = a.iter().map(Vec::as_slice).collect();
            let s: Vec<&[f32]> = s.iter().map(Vec::as_slice).collect();
            let mut first: Option<Vec<u32>> = None;
            for cpu in cpus() {
                let mut out = vec![f32::NAN; d];
                compress(cpu.level(), CompressParams { a: &a, s: &s, out: &mut out });
                // Two sums of up to 128 terms and exp.
                assert!(max_error(&out, &reference(&a, &s)) < 5e-6, "{n_rows} {d}");
                assert_eq!(*first.get_or_insert(bits(&out)), bits(&out), "{n_rows} {d} {:?}", cpu.level());
            }
        }
    }

    #[test]
    fn the_softmax_is_by_dimension_and_large_logits_are_safe() {
        let (a, s): ([&[f32]; 2], [&[f32]; 2]) = ([&[1.0, 2.0], &[3.0, 4.0]], [&[1000.0, -1000.0], &[-1000.0, 1000.0]]);
        for cpu in cpus() {
            let mut out = [0.0; 2];
            compress(cpu.level(), CompressParams { a: &a, s: &s, out: &mut out });
            assert_eq!(out, [1.0, 4.0]);
        }
    }
}
