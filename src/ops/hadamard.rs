//! The Hadamard rotation of 128 elements in natural order: entry (i, j) has sign (-1)^popcount(i & j), times 1/sqrt(128).
//!
//! Bits: seven butterfly stages of distance 1, 2, 4 ... 64, each a + b and a - b, then one multiplication.

/// Elements of a rotated row.
pub const HADAMARD_DIMS: usize = 128;
/// 1/sqrt(128), rounded to f32.
const SCALE: f32 = 0.088_388_346;

/// Rotates every row of 128 in place.
pub fn hadamard(x: &mut [f32]) {
    assert!(x.len().is_multiple_of(HADAMARD_DIMS), "hadamard: {} elements, want a multiple of 128", x.len());
    for row in x.chunks_exact_mut(HADAMARD_DIMS) {
        let mut distance = 1;
        while distance < HADAMARD_DIMS {
            for pair in row.chunks_exact_mut(2 * distance) {
                let (a, b) = pair.split_at_mut(distance);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            distance *= 2;
        }
        for x in row {
            *x *= SCALE;
        }
    }
}

/// One row by the matrix, in f64.
#[must_use]
pub fn reference(row: &[f32]) -> Vec<f64> {
    let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    (0..HADAMARD_DIMS)
        .map(|i| row.iter().enumerate().map(|(j, x)| f64::from(*x) * sign(i, j)).sum::<f64>() / 128f64.sqrt())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, max_error};

    #[test]
    fn agrees_with_the_matrix() {
        let mut rng = Rng(31);
        for n_rows in [0, 1, 3] {
            let x = rng.floats(n_rows * 128);
            let mut y = x.clone();
            hadamard(&mut y);
            for (x, y) in x.chunks_exact(128).zip(y.chunks_exact(128)) {
                // Seven additions and one product.
                assert!(max_error(y, &reference(x)) < 5e-7);
            }
        }
    }

    #[test]
    fn the_order_is_natural() {
        let mut row = [0.0; 128];
        row[3] = 1.0;
        hadamard(&mut row);
        let sign = |j: usize| if (3 & j).count_ones().is_multiple_of(2) { SCALE } else { -SCALE };
        assert!(row.iter().enumerate().all(|(j, x)| *x == sign(j)));
        assert_eq!(SCALE, (1.0 / 128f64.sqrt()) as f32);
    }
}
