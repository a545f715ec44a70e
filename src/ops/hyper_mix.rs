//! Hyper-connection, way in: the residual's copies become one row, and the weights of the way out are made.
//!
//! With x the flattened copies of a token and m = (fn · x) * rsqrt(mean(x²) + norm_eps):
//! pre = sigmoid(m[0..HC] * scale[0] + base) + hc_eps; post = 2 sigmoid(m[HC..2HC] * scale[1] + base); comb is the softmax of each
//! row of m[2HC..] * scale[2] + base, plus hc_eps, whose columns are then divided by (their sum + hc_eps), and after that
//! n_iters - 1 times its rows and its columns. The mixed row is the sum of pre[c] times copy c.

pub mod device;

use crate::device::SimWave;
use crate::device::cpu::math::{exp_f32, sigmoid_f32 as sigmoid};
use crate::device::cpu::rows::weigh_copies;
use crate::device::cpu::tile::ThreadSums;
use crate::device::cpu::{Cpu, Level};

/// Copies of the residual.
pub const HC: usize = 4;
/// Values that `fn` gives a token: HC for pre, HC for post, HC x HC for comb.
pub const MIXES: usize = 2 * HC + HC * HC;

/// The weights, constants and inputs of one hyper-connection.
#[derive(Clone, Copy, Debug)]
pub struct HyperMixParams<'a> {
    /// Columns of one copy (D).
    pub n_cols: usize,
    /// The copies.
    pub residual: &'a [f32], // [T, HC, D] f32
    /// Added to the scaled mixes.
    pub base: &'a [f32], // [MIXES] f32
    /// Factors of pre, post and comb.
    pub scale: &'a [f32], // [3] f32
    /// Epsilon of the norm.
    pub norm_eps: f32,
    /// Epsilon of the hyper-connection.
    pub hc_eps: f32,
    /// Normalisations of comb, at least 1.
    pub n_iters: usize,
    /// Whose kernels' order of sums is taken ([`part_dot`]); none: 16 lanes.
    pub wave: Option<SimWave>,
}

/// The contract in scalar code with f64 sums.
pub fn reference(
    p: &HyperMixParams<'_>,
    mixes: &mut [f32], // [T, MIXES] f32, replaced by pre, post, comb
    row: &mut [f32],   // [T, D] f32
) {
    let eps = f64::from(p.hc_eps);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for (t, x) in p.residual.chunks(HC * p.n_cols).enumerate() {
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
        let inverse = 1.0 / (mean + f64::from(p.norm_eps)).sqrt();
        let m: Vec<f64> = (0..MIXES)
            .map(|i| {
                let part = if i < 2 * HC { i / HC } else { 2 };
                f64::from(mixes[t * MIXES + i]) * inverse * f64::from(p.scale[part]) + f64::from(p.base[i])
            })
            .collect();
        let mut comb = [[0f64; HC]; HC];
        for i in 0..HC {
            let row = &m[2 * HC + HC * i..][..HC];
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = row.iter().map(|v| (v - max).exp()).sum();
            for j in 0..HC {
                comb[i][j] = (row[j] - max).exp() / sum + eps;
            }
        }
        for step in 0..2 * p.n_iters - 1 {
            let by_row = step % 2 == 1;
            for a in 0..HC {
                let at = |b: usize| if by_row { (a, b) } else { (b, a) };
                let sum: f64 = (0..HC).map(|b| comb[at(b).0][at(b).1]).sum();
                (0..HC).for_each(|b| comb[at(b).0][at(b).1] /= sum + eps);
            }
        }
        let weights = &mut mixes[t * MIXES..][..MIXES];
        for c in 0..HC {
            weights[c] = (sigmoid(m[c]) + eps) as f32;
            weights[HC + c] = (2.0 * sigmoid(m[HC + c])) as f32;
            for j in 0..HC {
                weights[2 * HC + HC * c + j] = comb[c][j] as f32;
            }
        }
        for i in 0..p.n_cols {
            let sum: f64 = (0..HC).map(|c| f64::from(weights[c]) * f64::from(x[c * p.n_cols + i])).sum();
            row[t * p.n_cols + i] = sum as f32;
        }
    }
}

/// The CPU path.
pub fn run(
    cpu: &Cpu,
    p: &HyperMixParams<'_>,
    mixes: &mut [f32], // [T, MIXES] f32, replaced by pre, post, comb
    row: &mut [f32],   // [T, D] f32
) {
    let n = HC * p.n_cols;
    cpu.par_chunks(mixes, MIXES, TOKEN_TILE, |t, mixes| make_weights(cpu.level(), p, &p.residual[t * n..][..n], mixes));
    let mixes = &*mixes;
    cpu.par_chunks(row, p.n_cols, TOKEN_TILE, |t, row| {
        let mut pre = [0.0; HC];
        pre.copy_from_slice(&mixes[t * MIXES..][..HC]);
        weigh_copies(cpu.level(), &p.residual[t * n..][..n], &pre, row);
    });
}

/// Tokens a thread takes at a time.
pub(crate) const TOKEN_TILE: usize = 8;

/// One token: its copies `x` `[HC, D]`, and its mixes, which become its weights.
fn make_weights(level: Level, p: &HyperMixParams<'_>, x: &[f32], mixes: &mut [f32]) {
    let inverse = p.wave.map_or_else(
        || inverse_rms(x, p.norm_eps),
        |wave| 1.0 / (part_dot(level, wave, x, x) / x.len() as f32 + p.norm_eps).sqrt(),
    );
    for (i, (m, base)) in mixes.iter_mut().zip(p.base).enumerate() {
        let part = if i < 2 * HC { i / HC } else { 2 };
        *m = *m * inverse * p.scale[part] + base;
    }
    let (pre, rest) = mixes.split_at_mut(HC);
    let (post, comb) = rest.split_at_mut(HC);
    pre.iter_mut().for_each(|m| *m = sigmoid(*m) + p.hc_eps);
    post.iter_mut().for_each(|m| *m = 2.0 * sigmoid(*m));
    make_doubly_stochastic(comb, p.hc_eps, p.n_iters);
}

/// x · y in the order of the kernels: 1,024 columns a block, four a thread; the lanes of 32 by halving distances, pairs of those
/// where a wave has 64, then waves and blocks in order.
#[must_use]
pub fn part_dot(level: Level, wave: SimWave, x: &[f32], y: &[f32]) -> f32 {
    const PART: ThreadSums = ThreadSums { n_threads: 256, run: 4, wave: 32 };
    const N_COLS: usize = PART.n_threads * PART.run;
    let parts = x.chunks(N_COLS).zip(y.chunks(N_COLS)).map(|(x, y)| {
        let halves = PART.wave_dots(level, x, y);
        let waves = halves.chunks_exact(wave.n_lanes() as usize / PART.wave);
        waves.map(|wave| wave.iter().sum::<f32>()).sum::<f32>()
    });
    parts.sum()
}

/// 1 / sqrt(mean(x²) + eps), summed over 16 lanes in a fixed order.
pub(crate) fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mut lanes = [0f32; 16];
    let chunks = x.chunks_exact(16);
    for (lane, value) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += value * value;
    }
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value * value;
        }
    }
    let mut half = 8;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    1.0 / (lanes[0] / x.len() as f32 + eps).sqrt()
}

fn make_doubly_stochastic(values: &mut [f32], eps: f32, n_iters: usize) {
    let mut comb = [[0f32; HC]; HC];
    for (row, m) in comb.iter_mut().zip(values.chunks_exact(HC)) {
        let max = m.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for (e, m) in row.iter_mut().zip(m) {
            *e = exp_f32(m - max);
        }
        let sum = (row[0] + row[1]) + (row[2] + row[3]);
        for e in row {
            *e = *e / sum + eps;
        }
    }
    divide_columns(&mut comb, eps);
    for _ in 1..n_iters {
        for row in &mut comb {
            let sum = (row[0] + row[1]) + (row[2] + row[3]) + eps;
            for value in row {
                *value /= sum;
            }
        }
        divide_columns(&mut comb, eps);
    }
    values.copy_from_slice(comb.as_flattened());
}

// Plain loops over fixed arrays: they become vector code, which closures over arrays did not.
fn divide_columns(comb: &mut [[f32; HC]; HC], eps: f32) {
    let mut sums = [0f32; HC];
    for j in 0..HC {
        sums[j] = (comb[0][j] + comb[1][j]) + (comb[2][j] + comb[3][j]) + eps;
    }
    for row in comb {
        for (value, sum) in row.iter_mut().zip(&sums) {
            *value /= sum;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::device::cpu::SimdLevel;

    /// Numbers without pattern in [-1, 1).
    pub(crate) fn noise(seed: u32, n: usize) -> Vec<f32> {
        let step = |i: usize| {
            let x = (i as u32 + 1).wrapping_mul(0x9E37_79B9) ^ seed.wrapping_mul(0x85EB_CA6B);
            let x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3C6D);
            (x ^ (x >> 12)) as f32 / (1u64 << 31) as f32 - 1.0
        };
        (0..n).map(step).collect()
    }

    type Op<'a> = &'a dyn Fn(&HyperMixParams<'_>, &mut [f32], &mut [f32]);

    fn apply(n_tokens: usize, n_cols: usize, op: Op<'_>) -> [Vec<f32>; 2] {
        let residual = noise(1, n_tokens * HC * n_cols);
        let mut mixes: Vec<f32> = noise(2, n_tokens * MIXES).iter().map(|m| m * 4.0).collect();
        let (base, scale) = (noise(3, MIXES), [0.6, 0.7, 0.5]);
        let p = HyperMixParams {
            n_cols,
            residual: &residual,
            base: &base,
            scale: &scale,
            norm_eps: 1e-6,
            hc_eps: 1e-6,
            n_iters: 20,
            wave: None,
        };
        let mut row = vec![f32::NAN; n_tokens * n_cols];
        op(&p, &mut mixes, &mut row);
        [mixes, row]
    }

    #[test]
    fn the_cpu_path_agrees_with_the_reference() {
        for (n_tokens, n_cols) in [(0, 128), (1, 128), (3, 256), (17, 384), (9, 40)] {
            let want = apply(n_tokens, n_cols, &reference);
            for n_threads in [1, 2] {
                let cpu = Cpu::with_level(SimdLevel::Portable, n_threads).unwrap();
                let got = apply(n_tokens, n_cols, &|p, mixes, row| run(&cpu, p, mixes, row));
                for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
                    // 40 normalisations of one rounding each; values are at most about 5.
                    assert!((got - want).abs() < 2e-5, "{got} {want}");
                }
            }
        }
    }

    #[test]
    fn comb_is_nearly_doubly_stochastic_and_not_symmetric() {
        let [weights, _] = apply(3, 64, &reference);
        for weights in weights.chunks(MIXES) {
            let comb = &weights[2 * HC..];
            for i in 0..HC {
                let row: f32 = comb[i * HC..][..HC].iter().sum();
                let column: f32 = (0..HC).map(|j| comb[j * HC + i]).sum();
                assert!((row - 1.0).abs() < 1e-3 && (column - 1.0).abs() < 1e-4, "{row} {column}");
            }
            assert!((comb[1] - comb[HC]).abs() > 1e-3);
        }
    }
}
