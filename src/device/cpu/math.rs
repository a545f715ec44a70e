//! Elementary functions by polynomials and explicit fused multiply-adds: the same bits on every level, machine and device.
//! exp is written over [`Simd`]; the others are scalar. kernels/common/math.h has the same steps.

use super::simd::{Portable, Simd};

/// Below this exp is taken as 0: its value would be under the smallest normal f32.
const EXP_MIN: f32 = -87.336_54;
/// Above this exp is infinite.
const EXP_MAX: f32 = 88.722_83;

/// e^x: within 2 units in the last place where the result is a normal f32, 0 below, infinity above; NaN stays NaN.
///
/// # Safety
/// The instruction set of `S` must be present.
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: only register arithmetic; the caller vouches for the instruction set.
    unsafe {
        // min and max return their second operand for a NaN, so x stands second.
        let clamped = S::max(S::splat(EXP_MIN), S::min(S::splat(EXP_MAX), x));
        // Adding 1.5 * 2^23 rounds to an integer, ties to even.
        let magic = S::splat(12_582_912.0);
        let n = S::sub(S::fma(clamped, S::splat(std::f32::consts::LOG2_E), magic), magic);
        // ln 2 in two parts; the first has few bits, so that n times it is exact.
        let r = S::fma(n, S::splat(-0.693_359_4), clamped);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
            p = S::fma(p, r, S::splat(c));
        }
        let p = S::add(S::fma(p, S::mul(r, r), r), S::splat(1.0));
        // 2^n in two factors: n may be 128.
        let half = S::sub(S::fma(n, S::splat(0.5), magic), magic);
        let y = S::mul(S::mul(p, S::exp2_int(half)), S::exp2_int(S::sub(n, half)));
        let y = S::select_lt(x, S::splat(EXP_MIN), S::splat(0.0), y);
        S::select_lt(S::splat(EXP_MAX), x, S::splat(f32::INFINITY), y)
    }
}

/// [`exp`] of one number, for the few places outside a vector loop.
#[must_use]
pub fn exp_f32(x: f32) -> f32 {
    // SAFETY: the portable form needs no instruction set.
    unsafe { exp::<Portable>(x) }
}

/// e^x = m 2^n, as (m, n): the mantissa is around 1 and the exponent an integer, the same as those of GPU kernels. Beyond 10,000 x is
/// taken as 10,000; NaN makes both NaN.
#[must_use]
pub fn exp_parts(x: f32) -> (f32, f32) {
    let x = x.clamp(-1e4, 1e4);
    let n = x.mul_add(std::f32::consts::LOG2_E, 12_582_912.0) - 12_582_912.0;
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5];
    let p = p.into_iter().fold(1.987_569_1e-4f32, |p, c| p.mul_add(r, c));
    (p.mul_add(r * r, r) + 1.0, n)
}

/// 2^n for an integer n up to 0; 0 below -125 and for NaN, as GPU kernels have it.
#[must_use]
pub fn exp2_int(n: f32) -> f32 {
    if n >= -125.0 { f32::from_bits(((n as i32 + 127) as u32) << 23) } else { 0.0 }
}

/// ln x: within 2 units in the last place, subnormals too; -infinity at 0, NaN below.
#[must_use]
pub fn log_f32(x: f32) -> f32 {
    if x <= 0.0 || x.is_nan() {
        return if x == 0.0 { f32::NEG_INFINITY } else { f32::NAN };
    }
    if x == f32::INFINITY {
        return x;
    }
    let (x, shift) = if x < f32::MIN_POSITIVE { (x * 8_388_608.0, -23.0) } else { (x, 0.0) };
    // x = 2^e m, m in [sqrt(1/2), sqrt(2)).
    let above = x.to_bits().wrapping_sub(0x3F35_04F3);
    let e = (above as i32 >> 23) as f32 + shift;
    let f = f32::from_bits((above & 0x007F_FFFF) + 0x3F35_04F3) - 1.0;
    // ln m = 2 artanh(s) with s = f / (2 + f); 2 s = f - s f exactly, and the series is small beside it.
    let s = f / (2.0 + f);
    let z = s * s;
    let mut q = z.mul_add(0.111_111_11, 0.142_857_14);
    q = z.mul_add(q, 0.2);
    q = z.mul_add(q, 0.333_333_34);
    let tail = (2.0 * z).mul_add(q, -f);
    let low = s.mul_add(tail, e * -2.121_944_4e-4);
    e.mul_add(0.693_359_4, f + low)
}

/// ln(1 + x) for x > -1, accurate near 0.
#[must_use]
pub fn log1p_f32(x: f32) -> f32 {
    let u = 1.0 + x;
    if u.to_bits() >= 0x7F80_0000 {
        return log_f32(u);
    }
    if u == 1.0 { x } else { log_f32(u) * (x / (u - 1.0)) }
}

/// 1 / (1 + e^-x).
#[must_use]
pub fn sigmoid_f32(x: f32) -> f32 {
    1.0 / (1.0 + exp_f32(-x))
}

/// ln(1 + e^x).
#[must_use]
pub fn softplus_f32(x: f32) -> f32 {
    // A NaN fails the comparison and stays.
    (if x < 0.0 { 0.0 } else { x }) + log1p_f32(exp_f32(-x.abs()))
}

/// Sine and cosine for angles up to 1e6, correctly rounded but for rare ties: reduced and evaluated in f64.
#[must_use]
pub fn sin_cos_f32(angle: f32) -> (f32, f32) {
    // 1.5 * 2^52: adding it rounds to an integer.
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    let x = f64::from(angle);
    let shifted = x.mul_add(std::f64::consts::FRAC_2_PI, MAGIC);
    let n = shifted - MAGIC;
    // pi / 2 in two doubles; the first has 33 bits, so that n times it is exact.
    let mut r = n.mul_add(-1.570_796_326_734_125_6, x);
    r = n.mul_add(-6.077_100_506_506_192e-11, r);
    let z = r * r;
    let mut s = z.mul_add(-2.505_210_838_544_172e-8, 2.755_731_922_398_589_3e-6);
    s = z.mul_add(s, -0.000_198_412_698_412_698_4);
    s = z.mul_add(s, 0.008_333_333_333_333_333);
    s = z.mul_add(s, -0.166_666_666_666_666_66);
    s = (r * z).mul_add(s, r);
    let mut c = z.mul_add(2.087_675_698_786_81e-9, -2.755_731_922_398_589e-7);
    c = z.mul_add(c, 2.480_158_730_158_73e-5);
    c = z.mul_add(c, -0.001_388_888_888_888_889);
    c = z.mul_add(c, 0.041_666_666_666_666_664);
    c = z.mul_add(c, -0.5);
    c = z.mul_add(c, 1.0);
    let (s, c) = (s as f32, c as f32);
    match shifted.to_bits() & 3 {
        0 => (s, c),
        1 => (c, -s),
        2 => (-s, -c),
        _ => (-c, s),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_close_everywhere_and_exact_at_the_ends() {
        for step in -8700..=8800 {
            let x = (step as f32 * 0.01).exp();
            for (got, want) in [(log_f32(x), f64::from(x).ln()), (log1p_f32(x), f64::from(x).ln_1p())] {
                // 5 ulp of f32: the polynomial's error, and for log1p that of its quotient.
                assert!((f64::from(got) - want).abs() <= want.abs() * 6e-7, "of {x}: {got}, want {want}");
            }
        }
        assert_eq!([log_f32(1.0), log1p_f32(0.0), log1p_f32(1e-20)], [0.0, 0.0, 1e-20]);
        assert_eq!(log_f32(0.0), f32::NEG_INFINITY);
        assert_eq!(log_f32(f32::INFINITY), f32::INFINITY);
        assert!(log_f32(-1.0).is_nan() && log_f32(f32::NAN).is_nan() && log1p_f32(f32::NAN).is_nan());
        assert!(softplus_f32(f32::NAN).is_nan());
        assert_eq!([softplus_f32(-200.0), softplus_f32(200.0)], [0.0, 200.0]);
    }

    #[test]
    fn sines_are_rounded_right_near_and_far() {
        for step in 0..20_000u32 {
            let angle = step as f32 * step as f32 * 0.0025 * if step % 2 == 0 { 1.0 } else { -1.0 };
            let (sin, cos) = sin_cos_f32(angle);
            for (got, want) in [(sin, f64::from(angle).sin()), (cos, f64::from(angle).cos())] {
                // Half a unit in the last place, and a little for the polynomial.
                let limit = f64::from((want as f32).abs().next_up() - (want as f32).abs()) * 0.501;
                assert!((f64::from(got) - want).abs() <= limit, "of {angle}: {got}, want {want}");
            }
        }
    }

    #[test]
    fn exp_is_close_everywhere_and_exact_at_the_ends() {
        for step in -8733..=8872 {
            let x = step as f32 * 0.01;
            let want = f64::from(x).exp();
            let got = f64::from(exp_f32(x));
            // 2 ulp of f32: the polynomial's own error and one rounding of the argument reduction.
            assert!((got - want).abs() <= want * 2.4e-7, "exp({x}) = {got}, want {want}");
        }
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!(exp_f32(-0.0), 1.0);
        assert_eq!(exp_f32(-87.4), 0.0);
        assert_eq!(exp_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_f32(89.0), f32::INFINITY);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert!(exp_f32(f32::NAN).is_nan());
    }

    #[test]
    fn the_parts_of_exp_make_it_up() {
        for step in -8733..=0 {
            let x = step as f32 * 0.01;
            let (mantissa, exponent) = exp_parts(x);
            let scale = exp2_int(exponent);
            assert!(scale == 0.0 || mantissa * scale == exp_f32(x), "{x}: {mantissa} 2^{exponent}");
        }
        assert_eq!(exp_parts(f32::INFINITY), exp_parts(1e4));
        assert!(exp_parts(f32::NAN).0.is_nan() && exp_parts(f32::NAN).1.is_nan());
        assert_eq!([0.0, -1.0, -126.0, f32::NAN].map(exp2_int), [1.0, 0.5, 0.0, 0.0]);
    }
}
