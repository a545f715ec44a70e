//! Lightning-indexer scores: score[t, n] = sum over heads of w[t, h] * relu(iq[t, h] . ik[n]).
//!
//! Bits: each dot is a 16-lane dot product; heads are added in ascending order by fused multiply-add from +0.

pub mod device;

use crate::device::cpu::Cpu;
use crate::device::cpu::index::{self, Scores};
use crate::ops::round_fp4::{KEY_DIMS, KEY_ROW_BYTES, decode_key};

/// Keys of consecutive rows.
#[derive(Clone, Copy, Debug)]
pub enum Keys<'a> {
    /// Decoded.
    F32(&'a [f32]), // [n, 128] f32
    /// As stored by [`crate::ops::round_fp4::encode_key`]; the same values.
    Packed(&'a [u8]), // [n, 68] codes and scales
}

/// Scores of some queries for some keys.
#[derive(Debug)]
pub struct IndexScoreParams<'a> {
    /// Rounded queries.
    pub iq: &'a [f32], // [T, H, 128] f32
    /// Head weights, any sign.
    pub weights: &'a [f32], // [T, H] f32
    /// T.
    pub n_queries: usize,
    /// Keys.
    pub keys: Keys<'a>, // [n, 128]
    /// Scores of query t start at `t * scores_stride`; the first n are written.
    pub scores: &'a mut [f32], // [T, scores_stride] f32
    /// Elements from one row of scores to the next, at least n.
    pub scores_stride: usize,
}

impl Keys<'_> {
    /// Number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len() / KEY_DIMS,
            Self::Packed(bytes) => bytes.len() / KEY_ROW_BYTES,
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Fills `scores`.
pub fn index_score(cpu: &Cpu, params: IndexScoreParams) {
    let IndexScoreParams { iq, weights, n_queries, keys, scores, scores_stride } = params;
    let (n_keys, n_heads) = (keys.len(), weights.len() / n_queries.max(1));
    assert!(
        iq.len() == n_queries * n_heads * KEY_DIMS,
        "index_score: T, H: iq of {}, w of {}",
        iq.len(),
        weights.len()
    );
    assert!(scores_stride >= n_keys, "index_score: n: stride {scores_stride}, want at least {n_keys}");
    let decode = |range: std::ops::Range<usize>, out: &mut [f32]| match keys {
        Keys::F32(values) => out.copy_from_slice(&values[range.start * KEY_DIMS..range.end * KEY_DIMS]),
        Keys::Packed(bytes) => {
            let packed = bytes[range.start * KEY_ROW_BYTES..range.end * KEY_ROW_BYTES].chunks_exact(KEY_ROW_BYTES);
            packed.zip(out.chunks_exact_mut(KEY_DIMS)).for_each(|(p, out)| decode_key(cpu.level(), p, out));
        }
    };
    index::run(cpu, Scores { iq, weights, n_queries, n_keys, dims: KEY_DIMS, decode, scores, scores_stride });
}

/// Scores of one query for decoded keys, in f64.
#[must_use]
pub fn reference(iq: &[f32], weights: &[f32], keys: &[f32]) -> Vec<f64> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let heads = || iq.chunks_exact(KEY_DIMS).zip(weights);
    let score = |key: &[f32]| heads().map(|(q, w)| f64::from(*w) * dot(q, key).max(0.0)).sum();
    keys.chunks_exact(KEY_DIMS).map(score).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, bits, cpus, max_error};
    use crate::ops::round_fp4::{encode_key, round_fp4};

    #[test]
    fn agrees_with_the_reference_and_bits_agree_everywhere() {
        let mut rng = Rng(81);
        for (n_queries, n_heads, n_keys) in
            [(1, 64, 70), (3, 4, 33), (35, 5, 65), (1, 1, 1), (0, 4, 9), (2, 4, 0), (2, 7, 31)]
        {
            let mut keys = rng.floats(n_keys * KEY_DIMS);
            round_fp4(&mut keys);
            let mut packed = vec![0; n_keys * KEY_ROW_BYTES];
            for (key, packed) in keys.chunks_exact(KEY_DIMS).zip(packed.chunks_exact_mut(KEY_ROW_BYTES)) {
                encode_key(key, packed);
            }
            let (iq, weights) = (rng.floats(n_queries * n_heads * KEY_DIMS), rng.floats(n_queries * n_heads));
            let stride = n_keys + 3;
            let mut first: Option<Vec<u32>> = None;
            for cpu in cpus() {
                for keys in [Keys::F32(&keys), Keys::Packed(&packed)] {
                    let mut scores = vec![-9.0; n_queries * stride];
                    let (iq, weights, scores_stride) = (&iq, &weights, stride);
                    let scores_mut = &mut scores;
                    let p = IndexScoreParams { iq, weights, n_queries, keys, scores: scores_mut, scores_stride };
                    index_score(&cpu, p);
                    assert!(scores.chunks_exact(stride).all(|row| row[n_keys..] == [-9.0; 3]), "canary");
                    assert_eq!(*first.get_or_insert(bits(&scores)), bits(&scores), "{:?} {keys:?}", cpu.level());
                }
            }
            let scores: Vec<f32> = first.unwrap().into_iter().map(f32::from_bits).collect();
            for t in 0..n_queries {
                let (q, w) = (&iq[t * n_heads * KEY_DIMS..][..n_heads * KEY_DIMS], &weights[t * n_heads..][..n_heads]);
                // 8 roundings a lane of each dot, then one a head.
                assert!(max_error(&scores[t * stride..][..n_keys], &reference(q, w, &keys)) < 2e-6);
            }
        }
    }

    #[test]
    fn a_negative_dot_adds_nothing() {
        let keys = vec![-1.0; KEY_DIMS];
        let mut scores = [f32::NAN];
        let iq = vec![1.0; KEY_DIMS];
        let (weights, keys) = (&[-3.0], Keys::F32(&keys));
        let params = IndexScoreParams { iq: &iq, weights, n_queries: 1, keys, scores: &mut scores, scores_stride: 1 };
        index_score(&cpus()[0], params);
        assert_eq!(scores, [0.0]);
    }
}
