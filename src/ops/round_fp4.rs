//! Rounding to E2M1 in groups of 32 with a power-of-two scale, for indexer keys and queries, and the packed key row.
//!
//! scale = the least power of two s with max(amax, 6 * 2^-126) <= 6 s; exact ties between two codes go towards zero.

use crate::device::cpu::Level;
use crate::device::cpu::expand::decode_e2m1;
use crate::tensor::format::e8m0_to_f32;

/// Columns that share a scale.
pub const FP4_GROUP: usize = 32;
/// Columns of an indexer key.
pub const KEY_DIMS: usize = 128;
/// Code bytes of a packed key.
pub const KEY_CODES_BYTES: usize = KEY_DIMS / 2;
/// Bytes of a packed key: codes (low nibble = even column), then scales.
pub const KEY_ROW_BYTES: usize = KEY_CODES_BYTES + KEY_DIMS / FP4_GROUP;

const _: () = assert!(KEY_ROW_BYTES == 68);

/// The E8M0 byte of the scale for a group whose largest magnitude is `amax`.
#[must_use]
pub fn scale_byte(amax: f32) -> u8 {
    // 6 * 2^-126 is the floor; 6 = 1.5 * 2^2: a mantissa up to 1.5 needs 2^(e - 2), above it one more.
    let bits = amax.max(6.0 * f32::MIN_POSITIVE).to_bits();
    let exponent = (bits >> 23) as i32 - 2 + i32::from(bits & 0x007F_FFFF > 0x0040_0000);
    exponent as u8
}

/// Rounds every group of 32 in place.
pub fn round_fp4(x: &mut [f32]) {
    for group in x.chunks_mut(FP4_GROUP) {
        let byte = scale_byte(amax(group));
        let (scale, inv) = (e8m0_to_f32(byte), inverse_scale(byte));
        for x in group {
            *x = (magnitude(*x * inv) * scale).copysign(*x);
        }
    }
}

/// Packs one key of 128 columns; lossless when it has been rounded.
pub fn encode_key(row: &[f32], packed: &mut [u8]) {
    let (codes, scales) = packed[..KEY_ROW_BYTES].split_at_mut(KEY_CODES_BYTES);
    for ((group, codes), out) in
        row[..KEY_DIMS].chunks_exact(FP4_GROUP).zip(codes.chunks_exact_mut(FP4_GROUP / 2)).zip(scales)
    {
        *out = scale_byte(amax(group));
        let inv = inverse_scale(*out);
        for (byte, pair) in codes.iter_mut().zip(group.chunks_exact(2)) {
            *byte = code(pair[0] * inv) | code(pair[1] * inv) << 4;
        }
    }
}

/// Unpacks one key.
pub fn decode_key(level: Level, packed: &[u8], row: &mut [f32]) {
    let (codes, scales) = packed[..KEY_ROW_BYTES].split_at(KEY_CODES_BYTES);
    decode_e2m1(level, codes, scales, &mut row[..KEY_DIMS]);
}

/// One group in f64.
#[must_use]
pub fn reference(group: &[f32]) -> Vec<f64> {
    let amax = group.iter().fold(0.0f64, |m, x| m.max(f64::from(x.abs()))).max(6.0 * 2f64.powi(-126));
    let mut scale = 2f64.powi(-126);
    while 6.0 * scale < amax {
        scale *= 2.0;
    }
    let grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let nearest = |x: f64| {
        // Strictly nearer: the smaller of two equally near values wins.
        grid.iter().copied().fold(0.0f64, |best, g| if (x - g).abs() < (x - best).abs() { g } else { best })
    };
    group.iter().map(|x| (nearest(f64::from(x.abs()) / scale) * scale).copysign(f64::from(*x))).collect()
}

/// The nearest E2M1 code, ties towards zero, saturating at 6.
fn code(x: f32) -> u8 {
    let m = x.abs();
    let above = |bound: f32| u8::from(m > bound);
    let magnitude = above(0.25) + above(0.75) + above(1.25) + above(1.75) + above(2.5) + above(3.5) + above(5.0);
    magnitude | if x.is_sign_negative() { 8 } else { 0 }
}

/// The nearest E2M1 magnitude, as [`code`]; every step is a difference of neighbouring values, so the sum is exact. No branch,
/// so that loops over it are vectorised. NaN gives 0.
fn magnitude(x: f32) -> f32 {
    let m = x.abs();
    let above = |bound: f32, step: f32| if m > bound { step } else { 0.0 };
    let small = above(0.25, 0.5) + above(0.75, 0.5) + above(1.25, 0.5) + above(1.75, 0.5);
    small + above(2.5, 1.0) + above(3.5, 1.0) + above(5.0, 2.0)
}

/// 1 / scale; exact, the byte is in 1..=254.
fn inverse_scale(byte: u8) -> f32 {
    e8m0_to_f32(254 - byte)
}

fn amax(group: &[f32]) -> f32 {
    // Magnitudes compare as integers; unlike f32::max this is vectorised.
    f32::from_bits(group.iter().fold(0, |m: u32, x| m.max(x.to_bits() & 0x7FFF_FFFF)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, bits, cpus};

    #[test]
    fn scales_are_exact_next_to_a_power_of_two() {
        for exponent in -120i32..120 {
            let top = 6.0 * 2f32.powi(exponent);
            let byte = (127 + exponent) as u8;
            assert_eq!(scale_byte(top), byte);
            assert_eq!(scale_byte(f32::from_bits(top.to_bits() + 1)), byte + 1);
            assert_eq!(scale_byte(4.0 * 2f32.powi(exponent)), byte);
            assert_eq!(scale_byte(3.0 * 2f32.powi(exponent)), byte - 1);
        }
        assert_eq!(scale_byte(0.0), 1);
    }

    #[test]
    fn ties_go_towards_zero() {
        let mut x = [0.0; 32];
        x[..9].copy_from_slice(&[6.0, 0.25, 0.75, -1.25, 1.75, -2.5, 3.5, 5.0, -5.0]);
        round_fp4(&mut x);
        assert_eq!(x[..9], [6.0, 0.0, 0.5, -1.0, 1.5, -2.0, 3.0, 4.0, -4.0]);
        let mut above = [0.0; 32];
        above[..4].copy_from_slice(&[6.0, 0.250_000_03, 2.500_000_2, -5.000_000_5]);
        round_fp4(&mut above);
        assert_eq!(above[..4], [6.0, 0.5, 3.0, -6.0]);
    }

    #[test]
    fn agrees_with_the_reference_and_packs_without_loss() {
        let mut rng = Rng(51);
        for gain in [1e-30, 1e-3, 1.0, 1e5] {
            let x: Vec<f32> = rng.floats(KEY_DIMS).into_iter().map(|x| x * gain).collect();
            let mut y = x.clone();
            round_fp4(&mut y);
            for (x, y) in x.chunks(FP4_GROUP).zip(y.chunks(FP4_GROUP)) {
                assert_eq!(reference(x), y.iter().map(|y| f64::from(*y)).collect::<Vec<f64>>());
            }
            for source in [&x, &y] {
                let mut packed = [0xAA; KEY_ROW_BYTES];
                encode_key(source, &mut packed);
                for cpu in cpus() {
                    let mut got = vec![f32::NAN; KEY_DIMS];
                    decode_key(cpu.level(), &packed, &mut got);
                    assert_eq!(bits(&got), bits(&y), "{gain} {:?}", cpu.level());
                }
            }
        }
    }

    #[test]
    fn a_row_of_zeros_stays_zero() {
        let mut x = [0.0; KEY_DIMS];
        round_fp4(&mut x);
        assert_eq!(x, [0.0; KEY_DIMS]);
    }
}
