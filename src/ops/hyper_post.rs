//! Hyper-connection, way out: each new copy of the residual is post[j] times the sublayer's output plus the old copies weighed by
//! column j of comb.

pub mod device;

use super::hyper_mix::{HC, MIXES, TOKEN_TILE};
use crate::device::cpu::Cpu;
use crate::device::cpu::rows::renew_copies;

/// What goes in beside the residual, which is updated in place.
#[derive(Clone, Copy, Debug)]
pub struct HyperPostParams<'a> {
    /// Columns of one copy (D).
    pub n_cols: usize,
    /// The sublayer's output.
    pub output: &'a [f32], // [T, D] f32
    /// What [`super::hyper_mix`] made: pre, post, then comb, whose [i, j] takes copy i into copy j.
    pub weights: &'a [f32], // [T, MIXES] f32
}

/// The contract in scalar code with f64 sums.
pub fn reference(p: &HyperPostParams<'_>, residual: &mut [f32] /* [T, HC, D] f32 */) {
    for (t, h) in residual.chunks_mut(HC * p.n_cols).enumerate() {
        let (old, weights) = (h.to_vec(), &p.weights[t * MIXES..][..MIXES]);
        for j in 0..HC {
            for i in 0..p.n_cols {
                let mut sum = f64::from(weights[HC + j]) * f64::from(p.output[t * p.n_cols + i]);
                for c in 0..HC {
                    sum += f64::from(weights[2 * HC + HC * c + j]) * f64::from(old[c * p.n_cols + i]);
                }
                h[j * p.n_cols + i] = sum as f32;
            }
        }
    }
}

/// The CPU path.
pub fn run(cpu: &Cpu, p: &HyperPostParams<'_>, residual: &mut [f32] /* [T, HC, D] f32 */) {
    cpu.par_chunks(residual, HC * p.n_cols, TOKEN_TILE, |t, h| {
        let (weights, mut post, mut comb) = (&p.weights[t * MIXES..][..MIXES], [0.0; HC], [[0.0; HC]; HC]);
        post.copy_from_slice(&weights[HC..2 * HC]);
        comb.as_flattened_mut().copy_from_slice(&weights[2 * HC..]);
        renew_copies(cpu.level(), h, &p.output[t * p.n_cols..][..p.n_cols], &post, &comb);
    });
}

#[cfg(test)]
mod tests {
    use super::super::hyper_mix::tests::noise;
    use super::*;
    use crate::device::cpu::SimdLevel;

    #[test]
    fn the_cpu_path_agrees_with_the_reference() {
        for (n_tokens, n_cols) in [(0, 128), (1, 128), (3, 256), (17, 40)] {
            let (output, weights) = (noise(1, n_tokens * n_cols), noise(2, n_tokens * MIXES));
            let p = HyperPostParams { n_cols, output: &output, weights: &weights };
            let mut want = noise(3, n_tokens * HC * n_cols);
            let old = want.clone();
            reference(&p, &mut want);
            for n_threads in [1, 2] {
                let cpu = Cpu::with_level(SimdLevel::Portable, n_threads).unwrap();
                let mut got = old.clone();
                run(&cpu, &p, &mut got);
                for (got, want) in got.iter().zip(&want) {
                    // Five products of at most 1 each.
                    assert!((got - want).abs() < 2e-6, "{got} {want}");
                }
            }
        }
    }

    /// comb is contracted over its first index: a weight at [0, 3] moves copy 0 into copy 3 and nothing else.
    #[test]
    fn comb_takes_its_first_index_into_its_second() {
        let mut weights = [0.0; MIXES];
        weights[2 * HC + 3] = 1.0;
        let mut h = [1.0, 2.0, 3.0, 4.0];
        let cpu = Cpu::with_level(SimdLevel::Portable, 1).unwrap();
        run(&cpu, &HyperPostParams { n_cols: 1, output: &[9.0], weights: &weights }, &mut h);
        assert_eq!(h, [0.0, 0.0, 0.0, 1.0]);
    }
}
