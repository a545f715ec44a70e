//! Rounding to FP8 with a power-of-two scale: activations per 128 columns, cache rows per 64, and the packed cache row.
//!
//! scale = the least power of two s with max(amax, 1e-4) <= 448 s; x -> s * e4m3(x / s), ties to even, saturating. The scale is
//! found on the bits of amax: a float logarithm is wrong next to a power of two.

use crate::device::cpu::Level;
use crate::device::cpu::expand::decode_fp8;
use crate::tensor::format::{F8E4M3FN_MAX, bf16_to_f32, e8m0_to_f32, f32_to_bf16};

/// Columns of an activation row that share a scale.
pub const ACTIVATION_GROUP: usize = 128;
/// Columns of a cache row that share a scale.
pub const CACHE_GROUP: usize = 64;
/// Columns of a cache row that are rounded; the rest are the rope columns.
pub const CACHE_FP8_DIMS: usize = 448;
/// Rope columns of a cache row, BF16 in the packed form.
pub const CACHE_ROPE_DIMS: usize = 64;
/// Columns of a cache row.
pub const CACHE_DIMS: usize = CACHE_FP8_DIMS + CACHE_ROPE_DIMS;
/// Scale bytes of a packed row, padded to 8.
pub const CACHE_SCALES_BYTES: usize = 8;
/// Bytes of a packed row: codes, rope columns, scales.
pub const CACHE_ROW_BYTES: usize = CACHE_FP8_DIMS + 2 * CACHE_ROPE_DIMS + CACHE_SCALES_BYTES;

const _: () = assert!(CACHE_ROW_BYTES == 584 && CACHE_FP8_DIMS / CACHE_GROUP < CACHE_SCALES_BYTES);

/// Smallest normal E4M3 magnitude.
const MIN_NORMAL: f32 = 1.0 / 64.0;

/// The E8M0 byte of the scale for a group whose largest magnitude is `amax`.
#[must_use]
pub fn scale_byte(amax: f32) -> u8 {
    let bits = amax.max(1e-4).to_bits();
    // 448 = 1.75 * 2^8: a mantissa up to 1.75 needs 2^(e - 8), above it one more.
    let exponent = (bits >> 23) as i32 - 8 + i32::from(bits & 0x007F_FFFF > 0x0060_0000);
    exponent as u8
}

/// Rounds activations in place: every `ACTIVATION_GROUP` columns of each row (the last group of a row may be short).
pub fn round_activations(x: &mut [f32], n_cols: usize) {
    for row in x.chunks_mut(n_cols.max(1)) {
        for group in row.chunks_mut(ACTIVATION_GROUP) {
            round_group(group);
        }
    }
}

/// Rounds the first 448 columns of one cache row in place; the rope columns stay as they are.
pub fn round_cache_row(row: &mut [f32]) {
    for group in row[..CACHE_FP8_DIMS].chunks_exact_mut(CACHE_GROUP) {
        round_group(group);
    }
}

/// Rounds to BF16 in place, ties to even.
pub fn round_to_bf16(x: &mut [f32]) {
    for value in x {
        *value = bf16_to_f32(f32_to_bf16(*value));
    }
}

/// Packs one cache row: FP8 codes, rope columns in BF16, scales.
pub fn encode_cache_row(row: &[f32], packed: &mut [u8]) {
    let (codes, rope, scales) = split_packed_mut(packed);
    scales.fill(0);
    for ((group, codes), scale) in
        row[..CACHE_FP8_DIMS].chunks_exact(CACHE_GROUP).zip(codes.chunks_exact_mut(CACHE_GROUP)).zip(scales)
    {
        *scale = scale_byte(amax(group));
        let inv = inverse_scale(*scale);
        for (code, x) in codes.iter_mut().zip(group) {
            *code = encode_e4m3(x * inv);
        }
    }
    for (bits, x) in rope.chunks_exact_mut(2).zip(&row[CACHE_FP8_DIMS..CACHE_DIMS]) {
        bits.copy_from_slice(&f32_to_bf16(*x).to_le_bytes());
    }
}

/// Unpacks one cache row.
pub fn decode_cache_row(level: Level, packed: &[u8], row: &mut [f32]) {
    let (codes, rest) = packed[..CACHE_ROW_BYTES].split_at(CACHE_FP8_DIMS);
    let (rope, scales) = rest.split_at(2 * CACHE_ROPE_DIMS);
    decode_fp8(level, codes, scales, CACHE_GROUP, &mut row[..CACHE_FP8_DIMS]);
    for (x, bits) in row[CACHE_FP8_DIMS..CACHE_DIMS].iter_mut().zip(rope.chunks_exact(2)) {
        *x = bf16_to_f32(u16::from_le_bytes([bits[0], bits[1]]));
    }
}

/// One group in f64.
#[must_use]
pub fn reference(group: &[f32]) -> Vec<f64> {
    use crate::tensor::format::{f8e4m3fn_to_f32, f32_to_f8e4m3fn};
    let amax = group.iter().fold(1e-4f32, |m, x| m.max(x.abs()));
    let mut scale = 2f64.powi(-60);
    while 448.0 * scale < f64::from(amax) {
        scale *= 2.0;
    }
    // x / scale is exact in f32 but for underflow far below the smallest code.
    let code = |x: f32| f8e4m3fn_to_f32(f32_to_f8e4m3fn((f64::from(x) / scale) as f32));
    group.iter().map(|x| f64::from(code(*x)) * scale).collect()
}

fn round_group(group: &mut [f32]) {
    let byte = scale_byte(amax(group));
    let (scale, inv) = (e8m0_to_f32(byte), inverse_scale(byte));
    for x in group {
        *x = round_e4m3(*x * inv).copysign(*x) * scale;
    }
}

/// The nearest E4M3 magnitude, ties to even, saturating; NaN stays NaN. No branch, so that loops over it are vectorised.
fn round_e4m3(x: f32) -> f32 {
    let magnitude = x.abs();
    let magnitude = if magnitude > F8E4M3FN_MAX { F8E4M3FN_MAX } else { magnitude };
    // 2^e, e at least -6, times 1.5 * 2^20: a number whose last bit is worth 2^(e - 3), the distance of two codes.
    let floor = if magnitude > MIN_NORMAL { magnitude } else { MIN_NORMAL };
    let step = f32::from_bits(floor.to_bits() & 0x7F80_0000) * 1_572_864.0;
    (magnitude + step) - step
}

/// The E4M3 code of a value, rounded as by [`round_e4m3`].
fn encode_e4m3(x: f32) -> u8 {
    let rounded = round_e4m3(x);
    // Adding 2^23 leaves the multiple of 2^-9 in the low bits; a normal has its fields at the top of the mantissa.
    let subnormal = (rounded * 512.0 + 8_388_608.0).to_bits() & 0x7F;
    let normal = (rounded.to_bits() >> 20).wrapping_sub(120 << 3) & 0x7F;
    let magnitude = if rounded < MIN_NORMAL { subnormal } else { normal };
    let magnitude = if rounded.is_nan() { 0x7F } else { magnitude };
    (x.to_bits() >> 24 & 0x80) as u8 | magnitude as u8
}

fn amax(group: &[f32]) -> f32 {
    // Magnitudes compare as integers; unlike f32::max this is vectorised.
    f32::from_bits(group.iter().fold(0, |m: u32, x| m.max(x.to_bits() & 0x7FFF_FFFF)))
}

/// 1 / scale; exact, the byte is in 105..=247 for finite input.
fn inverse_scale(byte: u8) -> f32 {
    e8m0_to_f32(254 - byte)
}

fn split_packed_mut(packed: &mut [u8]) -> (&mut [u8], &mut [u8], &mut [u8]) {
    let (codes, rest) = packed[..CACHE_ROW_BYTES].split_at_mut(CACHE_FP8_DIMS);
    let (rope, scales) = rest.split_at_mut(2 * CACHE_ROPE_DIMS);
    (codes, rope, scales)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, bits, cpus};

    #[test]
    fn scales_are_exact_next_to_a_power_of_two() {
        // Rounded up, so that the largest value never saturates.
        for exponent in -20i32..100 {
            let top = 448.0 * 2f32.powi(exponent);
            let byte = (127 + exponent) as u8;
            assert_eq!(scale_byte(top), byte, "{top}");
            assert_eq!(scale_byte(f32::from_bits(top.to_bits() + 1)), byte + 1);
            assert_eq!(scale_byte(f32::from_bits(top.to_bits() - 1)), byte);
            assert_eq!(scale_byte(256.0 * 2f32.powi(exponent)), byte);
            assert_eq!(scale_byte(f32::from_bits((256.0 * 2f32.powi(exponent)).to_bits() - 1)), byte);
            assert_eq!(scale_byte(224.0 * 2f32.powi(exponent)), byte - 1);
        }
        // The floor: 1e-4 / 448 lies between 2^-23 and 2^-22.
        assert_eq!(scale_byte(0.0), 127 - 22);
        assert_eq!(scale_byte(1e-4), 127 - 22);
    }

    #[test]
    fn activations_agree_with_the_reference_exactly() {
        let mut rng = Rng(41);
        for (n_cols, n_rows, gain) in [(256, 3, 1.0), (128, 1, 1e-6), (130, 5, 3e4), (1, 2, 1.0), (4096, 2, 0.1)] {
            let x: Vec<f32> = rng.floats(n_cols * n_rows).into_iter().map(|x| x * gain).collect();
            let mut y = x.clone();
            round_activations(&mut y, n_cols);
            for (x, y) in x.chunks(n_cols).zip(y.chunks(n_cols)) {
                for (x, y) in x.chunks(ACTIVATION_GROUP).zip(y.chunks(ACTIVATION_GROUP)) {
                    assert_eq!(reference(x), y.iter().map(|y| f64::from(*y)).collect::<Vec<f64>>());
                }
            }
            let again = y.clone();
            round_activations(&mut y, n_cols);
            assert_eq!(bits(&again), bits(&y), "a rounded row stays as it is");
        }
        let mut zeros = [0.0, -0.0];
        round_activations(&mut zeros, 2);
        assert_eq!(zeros, [0.0, -0.0]);
    }

    #[test]
    fn the_packed_row_holds_the_rounded_row() {
        let mut rng = Rng(42);
        for gain in [1e-7, 1.0, 500.0] {
            let row: Vec<f32> = rng.floats(CACHE_DIMS).into_iter().map(|x| x * gain).collect();
            let mut packed = [0xAA; CACHE_ROW_BYTES];
            encode_cache_row(&row, &mut packed);
            let mut want = row.clone();
            round_cache_row(&mut want);
            assert_eq!(bits(&want[CACHE_FP8_DIMS..]), bits(&row[CACHE_FP8_DIMS..]), "rope columns are left alone");
            for x in &mut want[CACHE_FP8_DIMS..] {
                *x = bf16_to_f32(f32_to_bf16(*x));
            }
            for cpu in cpus() {
                let mut got = vec![f32::NAN; CACHE_DIMS];
                decode_cache_row(cpu.level(), &packed, &mut got);
                assert_eq!(bits(&got), bits(&want), "{gain} {:?}", cpu.level());
            }
            let mut again = [0; CACHE_ROW_BYTES];
            encode_cache_row(&want, &mut again);
            assert_eq!(packed[..], again[..], "packing is stable");
        }
    }

    #[test]
    fn codes_and_values_are_those_of_the_number_format() {
        use crate::tensor::format::{f8e4m3fn_to_f32, f32_to_f8e4m3fn};
        for step in 0..60_000u32 {
            // Every sixteenth-of-a-step neighbourhood of the grid, both signs, beyond both ends.
            let x =
                f32::from_bits(0x3A80_0000 + step * 0x1_3333 % 0x0A00_0000) * if step % 2 == 0 { 1.0 } else { -1.0 };
            assert_eq!(encode_e4m3(x), f32_to_f8e4m3fn(x), "{x}");
            assert_eq!(round_e4m3(x), f8e4m3fn_to_f32(f32_to_f8e4m3fn(x)).abs(), "{x}");
        }
        for code in (0..=255u8).filter(|c| c & 0x7F != 0x7F) {
            let (x, up) =
                (f8e4m3fn_to_f32(code), f8e4m3fn_to_f32(code & 0x80 | (code & 0x7F).saturating_add(1).min(0x7E)));
            for tie in [x, (x + up) / 2.0] {
                assert_eq!(encode_e4m3(tie), f32_to_f8e4m3fn(tie), "{tie}");
            }
        }
    }

    #[test]
    fn nan_stays_nan() {
        let mut x = [1.0, f32::NAN];
        round_activations(&mut x, 2);
        assert!(x[1].is_nan());
        let mut row = [0.0; CACHE_DIMS];
        row[5] = f32::NAN;
        round_cache_row(&mut row);
        assert!(row[5].is_nan());
        let mut packed = [0; CACHE_ROW_BYTES];
        encode_cache_row(&row, &mut packed);
        assert_eq!(packed[5], 0x7F);
    }
}
