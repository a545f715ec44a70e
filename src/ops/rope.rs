//! Rotary position embedding of adjacent pairs: (a, b) -> (a cos - b sin, a sin + b cos), angle = position * frequency.
//!
//! As the published reference implementation, frequencies and angles are f32 (position as f32 times frequency as f32) and the
//! cosine and sine are those of that f32 angle; it shows at long positions.

use crate::device::cpu::math::sin_cos_f32;

/// Parameters of a rope table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeParams {
    /// Rotated elements of a row (its last ones), even.
    pub n_dims: usize,
    /// Base of the frequencies.
    pub theta: f32,
    /// YaRN scaling; only for layers with a compressed cache.
    pub yarn: Option<YarnParams>,
}

/// YaRN frequency scaling; no factor on the attention scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct YarnParams {
    /// How much longer than the original context.
    pub factor: f32,
    /// Rotations above which a frequency is kept.
    pub beta_fast: f32,
    /// Rotations below which a frequency is divided by `factor`.
    pub beta_slow: f32,
    /// Context length of the first training.
    pub original_max_position_embeddings: usize,
}

/// Frequencies of one kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    freqs: Vec<f32>, // [R/2] f32
}

/// The rotation of one position.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rotation {
    /// Cosines.
    pub cos: Vec<f32>, // [R/2] f32
    /// Sines.
    pub sin: Vec<f32>, // [R/2] f32
}

impl RopeTable {
    /// Computes the frequencies: theta^(-2i/n), with YaRN's ramp where asked.
    #[must_use]
    pub fn new(params: &RopeParams) -> Self {
        let n = params.n_dims as f32;
        let mut freqs: Vec<f32> = (0..params.n_dims / 2).map(|i| 1.0 / params.theta.powf(2.0 * i as f32 / n)).collect();
        if let Some(yarn) = &params.yarn {
            let (low, high) = yarn.ramp(params.n_dims, params.theta);
            for (i, f) in freqs.iter_mut().enumerate() {
                let keep = 1.0 - ((i as f32 - low) / (high - low)).clamp(0.0, 1.0);
                *f = *f / yarn.factor * (1.0 - keep) + *f * keep;
            }
        }
        Self { freqs }
    }

    /// Radians a position.
    #[must_use]
    pub fn freqs(&self) -> &[f32] {
        &self.freqs
    }

    /// The rotation at a position.
    #[must_use]
    pub fn rotation(&self, position: usize) -> Rotation {
        let angles = self.freqs.iter().map(|f| position as f32 * f);
        let (sin, cos) = angles.map(sin_cos_f32).unzip();
        Rotation { cos, sin }
    }
}

impl YarnParams {
    /// First and last index of the ramp between kept and divided frequencies.
    fn ramp(&self, n_dims: usize, theta: f32) -> (f32, f32) {
        let n = n_dims as f64;
        let original = self.original_max_position_embeddings as f64;
        let index = |rotations: f32| {
            n * (original / (f64::from(rotations) * 2.0 * std::f64::consts::PI)).ln() / (2.0 * f64::from(theta).ln())
        };
        let low = index(self.beta_fast).floor().max(0.0);
        let high = index(self.beta_slow).ceil().min(n - 1.0);
        let high = if low == high { high + 0.001 } else { high };
        (low as f32, high as f32)
    }
}

impl Rotation {
    /// Rotates the last dims of a row in place.
    pub fn forward(&self, row: &mut [f32]) {
        self.rotate(row, 1.0);
    }

    /// Rotates back (the conjugate), for the attention output.
    pub fn inverse(&self, row: &mut [f32]) {
        self.rotate(row, -1.0);
    }

    fn rotate(&self, row: &mut [f32], sign: f32) {
        let n_dims = 2 * self.cos.len();
        assert!(row.len() >= n_dims, "rope: row of {}, want at least {n_dims}", row.len());
        let start = row.len() - n_dims;
        for ((pair, cos), sin) in row[start..].chunks_exact_mut(2).zip(&self.cos).zip(&self.sin) {
            let (a, b, sin) = (pair[0], pair[1], sign * sin);
            pair[0] = a * cos - b * sin;
            pair[1] = a * sin + b * cos;
        }
    }
}

/// The rotated row in f64, from the f32 angle.
#[must_use]
pub fn reference(table: &RopeTable, position: usize, row: &[f32], inverse: bool) -> Vec<f64> {
    let mut out: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
    let start = row.len() - 2 * table.freqs.len();
    for (i, f) in table.freqs.iter().enumerate() {
        let angle = f64::from(position as f32 * f) * if inverse { -1.0 } else { 1.0 };
        let (a, b) = (out[start + 2 * i], out[start + 2 * i + 1]);
        out[start + 2 * i] = a * angle.cos() - b * angle.sin();
        out[start + 2 * i + 1] = a * angle.sin() + b * angle.cos();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, bits, max_error};

    const YARN: YarnParams =
        YarnParams { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_max_position_embeddings: 65536 };

    fn table(theta: f32, yarn: Option<YarnParams>) -> RopeTable {
        RopeTable::new(&RopeParams { n_dims: 64, theta, yarn })
    }

    #[test]
    fn agrees_with_the_reference_near_and_far() {
        let mut rng = Rng(21);
        for table in [table(10_000.0, None), table(160_000.0, Some(YARN))] {
            for position in [0, 1, 127, 4096, 65_535, 1_048_575] {
                for width in [64, 128, 512] {
                    let x = rng.floats(width);
                    let rotation = table.rotation(position);
                    let mut y = x.clone();
                    rotation.forward(&mut y);
                    assert!(max_error(&y, &reference(&table, position, &x, false)) < 3e-7);
                    assert_eq!(bits(&y[..width - 64]), bits(&x[..width - 64]));
                    let mut y = x.clone();
                    rotation.inverse(&mut y);
                    assert!(max_error(&y, &reference(&table, position, &x, true)) < 3e-7);
                }
            }
        }
    }

    #[test]
    fn position_zero_changes_nothing_and_inverse_undoes() {
        let mut rng = Rng(22);
        let (table, x) = (table(10_000.0, None), rng.floats(64));
        let mut y = x.clone();
        table.rotation(0).forward(&mut y);
        assert_eq!(y, x);
        table.rotation(999).forward(&mut y);
        assert!(x.iter().zip(&y).any(|(a, b)| (a - b).abs() > 0.01));
        table.rotation(999).inverse(&mut y);
        assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-6));
    }

    #[test]
    fn pairs_are_adjacent_elements() {
        let mut row = [0.0; 64];
        row[0] = 1.0;
        table(10_000.0, None).rotation(1).forward(&mut row);
        assert!((row[0] - 1f32.cos()).abs() < 1e-7 && (row[1] - 1f32.sin()).abs() < 1e-7);
        assert!(row[2..].iter().all(|x| *x == 0.0));
    }

    #[test]
    fn yarn_keeps_fast_frequencies_and_divides_slow_ones() {
        let (plain, yarn) = (table(160_000.0, None), table(160_000.0, Some(YARN)));
        assert_eq!(plain.freqs()[..15], yarn.freqs()[..15]);
        let (p, y) = (plain.freqs()[31], yarn.freqs()[31]);
        assert!((p / y - 16.0).abs() < 1e-4, "{p} {y}");
        assert!(plain.freqs().iter().zip(yarn.freqs()).any(|(p, y)| p / y > 1.5 && p / y < 15.0));
        assert!((plain.freqs()[1] - 160_000f32.powf(-2.0 / 64.0)).abs() < 1e-7);
    }
}
