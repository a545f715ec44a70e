//! The checkpoint's number formats, decoded and encoded exactly: OCP E4M3, E8M0, E2M1 and BF16 (spec: OCP MX v1.0).

/// Largest finite OCP E4M3 magnitude.
pub const F8E4M3FN_MAX: f32 = 448.0;
/// E2M1 magnitudes by code (bit 3 of a nibble is the sign).
pub const E2M1_VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The value of an OCP E4M3 byte (bias 7, no infinity, NaN = 0x7F and 0xFF).
#[must_use]
pub const fn f8e4m3fn_to_f32(byte: u8) -> f32 {
    let magnitude = byte & 0x7F;
    if magnitude == 0x7F {
        return f32::NAN;
    }
    let exponent = magnitude >> 3;
    let mantissa = (magnitude & 7) as f32;
    let value = if exponent == 0 { mantissa * exp2i(-9) } else { (1.0 + mantissa / 8.0) * exp2i(exponent as i32 - 7) };
    if byte & 0x80 == 0 { value } else { -value }
}

/// Rounds to OCP E4M3, ties to even, saturating at ±448; a negative value that rounds to zero keeps its sign. NaN gives 0x7F.
#[must_use]
pub fn f32_to_f8e4m3fn(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7F;
    }
    if magnitude >= 464.0 {
        return sign | 0x7E;
    }
    // Below the smallest normal, 2^-6, codes are multiples of 2^-9; above, 3 mantissa bits.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
    let steps = (magnitude * exp2i(3 - exponent)).round_ties_even() as i32;
    // `steps` is 8..=16 for normals (16 carries into the exponent), 0..=8 for subnormals.
    let code = if exponent == -6 { steps } else { (exponent + 6) * 8 + steps };
    sign | code.min(0x7E) as u8
}

/// The value of an E8M0 scale byte: 2^(byte - 127); 0xFF is NaN.
#[must_use]
pub const fn e8m0_to_f32(byte: u8) -> f32 {
    match byte {
        0xFF => f32::NAN,
        0 => f32::from_bits(0x0040_0000), // 2^-127, a subnormal f32
        _ => f32::from_bits((byte as u32) << 23),
    }
}

/// The value of the low four bits as E2M1.
#[must_use]
pub const fn e2m1_to_f32(nibble: u8) -> f32 {
    let value = E2M1_VALUES[(nibble & 7) as usize];
    if nibble & 8 == 0 { value } else { -value }
}

/// Rounds to the nearest E2M1 code, ties to the even code, saturating at ±6; the sign bit follows the input's sign.
#[must_use]
pub fn f32_to_e2m1(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 8 } else { 0 };
    let magnitude = value.abs();
    // Midpoints of neighbouring magnitudes; a tie goes to the even code.
    let code = match magnitude {
        m if m <= 0.25 => 0,
        m if m < 0.75 => 1,
        m if m <= 1.25 => 2,
        m if m < 1.75 => 3,
        m if m <= 2.5 => 4,
        m if m < 3.5 => 5,
        m if m <= 5.0 => 6,
        _ => 7,
    };
    sign | code
}

/// The value of BF16 bits.
#[must_use]
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Rounds a finite f32 to BF16, ties to even.
#[must_use]
pub const fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    let round = 0x7FFF + ((bits >> 16) & 1);
    ((bits + round) >> 16) as u16
}

/// 2^exponent for a normal f32 exponent.
#[must_use]
pub const fn exp2i(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_e4m3_byte_round_trips() {
        for byte in 0..=255u8 {
            let value = f8e4m3fn_to_f32(byte);
            if byte & 0x7F == 0x7F {
                assert!(value.is_nan());
            } else {
                assert_eq!(f32_to_f8e4m3fn(value), byte, "{value}");
            }
        }
        assert_eq!(f8e4m3fn_to_f32(0x7E), 448.0);
        assert_eq!(f8e4m3fn_to_f32(0x01), 0.001953125);
    }

    #[test]
    fn e4m3_rounds_to_nearest_even_against_a_search() {
        let finite: Vec<(u8, f32)> = (0..0x7F).map(|b| (b, f8e4m3fn_to_f32(b))).collect();
        for step in 0..20_000u32 {
            let x = step as f32 * 0.023_1;
            let best = finite
                .iter()
                .min_by(|a, b| {
                    let (da, db) = ((a.1 - x).abs(), (b.1 - x).abs());
                    da.total_cmp(&db).then((a.0 & 1).cmp(&(b.0 & 1)))
                })
                .map(|b| b.0);
            assert_eq!(Some(f32_to_f8e4m3fn(x)), best, "{x}");
        }
        assert_eq!(f32_to_f8e4m3fn(-0.0), 0x80);
        assert_eq!(f32_to_f8e4m3fn(1e30), 0x7E);
    }

    #[test]
    fn e2m1_and_e8m0_known_answers() {
        // The low nibble is the even column.
        let unpack = |byte: u8| (e2m1_to_f32(byte & 15), e2m1_to_f32(byte >> 4));
        assert_eq!(unpack(0x21), (0.5, 1.0));
        assert_eq!(unpack(0x87), (6.0, -0.0));
        assert_eq!(unpack(0xF0), (0.0, -6.0));
        for code in 0..16 {
            assert_eq!(f32_to_e2m1(e2m1_to_f32(code)), code);
        }
        assert_eq!([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0].map(f32_to_e2m1), [0, 2, 2, 4, 4, 6, 6, 7]);
        // The byte is a biased exponent, never a number; 0 is the smallest power, not zero.
        assert_eq!(e8m0_to_f32(127), 1.0);
        assert_eq!(e8m0_to_f32(120), 0.0078125);
        assert_eq!(e8m0_to_f32(0), 2f32.powi(-127));
        assert_eq!(e8m0_to_f32(1), 2f32.powi(-126));
        assert_eq!(e8m0_to_f32(254), 2f32.powi(127));
        assert!(e8m0_to_f32(255).is_nan());
    }

    #[test]
    fn bf16_rounds_like_half() {
        for step in 0..100_000u32 {
            let x = f32::from_bits(step.wrapping_mul(0x9E37_79B9));
            if x.is_finite() {
                assert_eq!(f32_to_bf16(x), half::bf16::from_f32(x).to_bits(), "{x}");
            }
        }
    }
}
