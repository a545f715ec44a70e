//! exp as one fused-multiply-add polynomial over [`Simd`], so that every level and the scalar form give the same bits.

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

#[cfg(test)]
mod tests {
    use super::*;

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
