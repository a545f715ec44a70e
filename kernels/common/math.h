//! Elementary functions by polynomials and explicit fused multiply-adds: the same bits on every target, errors of a few ulp.
#pragma once
#include "device.h"

/// m of e^x = m 2^n for an integer n and m around 1, x being no larger than some ten thousand; `shifted` is 1.5 * 2^23 + n. NaN stays NaN.
DEVICE float exp_mantissa(float x, float* shifted) {
    // Adding 1.5 * 2^23 rounds to an integer, ties to even.
    const float magic = 12582912.0f;
    *shifted = fma(x, 1.44269504f, magic);
    float n = *shifted - magic;
    // ln 2 in two parts; the first has few bits, so that n times it is exact.
    float r = fma(n, -0.6933594f, x);
    r = fma(n, 2.1219444e-4f, r);
    float p = 1.9875691e-4f;
    p = fma(p, r, 1.3981999e-3f);
    p = fma(p, r, 8.333452e-3f);
    p = fma(p, r, 4.1665796e-2f);
    p = fma(p, r, 0.16666665f);
    p = fma(p, r, 0.5f);
    return fma(p, r * r, r) + 1.0f;
}

/// e^x: within 2 ulp where the result is a normal float, 0 below, infinity above; NaN stays NaN. The bits of the CPU path's exp.
DEVICE float exp_(float x) {
    const float low = -87.33654f, high = 88.72283f, magic = 12582912.0f;
    // A NaN fails both comparisons and passes through.
    float clamped = x < low ? low : x > high ? high : x, shifted;
    float p = exp_mantissa(clamped, &shifted), n = shifted - magic;
    // 2^n in two factors: n may be 128. Differences of bits are the integers, without a conversion of NaN.
    i32 whole = (i32)(bits(shifted) - bits(magic));
    i32 half = (i32)(bits(fma(n, 0.5f, magic)) - bits(magic));
    float y = p * from_bits((u32)(half + 127) << 23) * from_bits((u32)(whole - half + 127) << 23);
    y = x < low ? 0.0f : y;
    return x > high ? from_bits(0x7F800000) : y;
}

/// ln x: within 2 ulp, subnormals too; -infinity at 0, NaN below.
DEVICE float log_(float x) {
    if (!(x > 0.0f)) return x == 0.0f ? from_bits(0xFF800000) : from_bits(0x7FC00000);
    if (bits(x) >= 0x7F800000) return x;
    float shift = 0.0f;
    if (x < 1.17549435e-38f) {
        x = x * 8388608.0f;
        shift = -23.0f;
    }
    // x = 2^e m, m in [sqrt(1/2), sqrt(2)).
    u32 above = bits(x) - 0x3F3504F3u;
    float e = (float)((i32)above >> 23) + shift;
    float f = from_bits((above & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f;
    // ln m = 2 artanh(s) = f - s (f - 2 t), s = f / (2 + f), 2 t = 2 s^2 (1/3 + s^2/5 + ...) * 1 ... summed as below.
    float s = f / (2.0f + f);
    float z = s * s;
    float q = fma(z, 0.11111111f, 0.14285714f);
    q = fma(z, q, 0.2f);
    q = fma(z, q, 0.33333334f);
    // 2 s = f - s f exactly, and the series is small beside it.
    float tail = fma(2.0f * z, q, -f);
    float low = fma(s, tail, e * -2.1219444e-4f);
    return fma(e, 0.6933594f, f + low);
}

/// ln(1 + x) for x > -1, accurate near 0.
DEVICE float log1p_(float x) {
    float u = 1.0f + x;
    if (u == 1.0f || bits(u) >= 0x7F800000) return bits(u) >= 0x7F800000 ? log_(u) : x;
    return log_(u) * (x / (u - 1.0f));
}

/// e^x = mantissa * 2^exponent: the mantissa is around 1, the exponent an integer. Beyond 10,000 x is taken as 10,000; NaN makes both NaN.
struct ExpParts {
    float mantissa, exponent;
};
DEVICE ExpParts exp_parts(float x) {
    float shifted, mantissa = exp_mantissa(x < -1e4f ? -1e4f : x > 1e4f ? 1e4f : x, &shifted);
    return {mantissa, shifted - 12582912.0f};
}
/// 2^n for an integer n up to 0; 0 below -125, where a mantissa times it would not be normal, and for NaN.
DEVICE float exp2_int(float n) { return n >= -125.0f ? from_bits((u32)((i32)n + 127) << 23) : 0.0f; }

/// 1 / (1 + e^-x).
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp_(-x)); }
/// x sigmoid(x).
DEVICE float silu(float x) { return x / (1.0f + exp_(-x)); }
/// ln(1 + e^x).
DEVICE float softplus(float x) { return (x > 0.0f ? x : x == x ? 0.0f : x) + log1p_(exp_(-abs_(x))); }
/// 1 / sqrt(x), both correctly rounded.
DEVICE float rsqrt_(float x) { return 1.0f / sqrt_(x); }

/// Sine and cosine for |angle| up to 1e6, correctly rounded but for rare ties: reduced and evaluated in f64.
DEVICE void sincos_(float angle, float* sine, float* cosine) {
    const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
    double x = (double)angle;
    double shifted = fma_f64(x, 0.63661977236758134308, magic);
    double n = shifted - magic;
    // pi / 2 in two doubles; the first has 33 bits, so that n times it is exact.
    double r = fma_f64(n, -1.57079632673412561417, x);
    r = fma_f64(n, -6.07710050650619224932e-11, r);
    double z = r * r;
    double s = fma_f64(z, -2.50521083854417187751e-8, 2.75573192239858906526e-6);
    s = fma_f64(z, s, -1.98412698412698412698e-4);
    s = fma_f64(z, s, 8.33333333333333333333e-3);
    s = fma_f64(z, s, -1.66666666666666666667e-1);
    s = fma_f64(r * z, s, r);
    double c = fma_f64(z, 2.08767569878680989792e-9, -2.75573192239858906526e-7);
    c = fma_f64(z, c, 2.48015873015873015873e-5);
    c = fma_f64(z, c, -1.38888888888888888889e-3);
    c = fma_f64(z, c, 4.16666666666666666667e-2);
    c = fma_f64(z, c, -0.5);
    c = fma_f64(z, c, 1.0);
    u32 quadrant = (u32)__builtin_bit_cast(u64, shifted) & 3;
    float sf = (float)s, cf = (float)c;
    float a = quadrant & 1 ? cf : sf, b = quadrant & 1 ? sf : cf;
    *sine = quadrant & 2 ? -a : a;
    *cosine = (quadrant + 1) & 2 ? -b : b;
}

/// e^x for x <= 0, within 2 ulp; 0 below -708. NaN stays NaN.
DEVICE double exp_f64(double x) {
    if (x < -708.0) return 0.0;
    const double magic = 6755399441055744.0;
    double shifted = fma_f64(x, 1.44269504088896338700, magic);
    double n = shifted - magic;
    // ln 2 in two doubles; the first has 32 bits, so that n times it is exact.
    double r = fma_f64(n, -6.93147180369123816490e-1, x);
    r = fma_f64(n, -1.90821492927058770002e-10, r);
    double p = 1.60590438368216145994e-10;
    p = fma_f64(p, r, 2.08767569878680989792e-9);
    p = fma_f64(p, r, 2.50521083854417187751e-8);
    p = fma_f64(p, r, 2.75573192239858906526e-7);
    p = fma_f64(p, r, 2.75573192239858906526e-6);
    p = fma_f64(p, r, 2.48015873015873015873e-5);
    p = fma_f64(p, r, 1.98412698412698412698e-4);
    p = fma_f64(p, r, 1.38888888888888888889e-3);
    p = fma_f64(p, r, 8.33333333333333333333e-3);
    p = fma_f64(p, r, 4.16666666666666666667e-2);
    p = fma_f64(p, r, 1.66666666666666666667e-1);
    p = fma_f64(p, r, 0.5);
    p = fma_f64(p, r * r, r) + 1.0;
    u64 whole = __builtin_bit_cast(u64, shifted) - __builtin_bit_cast(u64, magic);
    return p * __builtin_bit_cast(double, (whole + 1023) << 52);
}

/// ln x for normal x > 0, within 2 ulp.
DEVICE double log_f64(double x) {
    // x = 2^e m, m in [sqrt(1/2), sqrt(2)).
    const u64 root = 0x3FE6A09E667F3BCDull;
    u64 above = __builtin_bit_cast(u64, x) - root;
    double e = (double)(i32)((i64)above >> 52);
    double f = __builtin_bit_cast(double, (above & 0x000FFFFFFFFFFFFFull) + root) - 1.0;
    // As in log_: ln m = 2 artanh(s), s = f / (2 + f), and 2 s = f - s f.
    double s = f / (2.0 + f), z = s * s;
    double q = fma_f64(z, 4.34782608695652173913e-2, 4.76190476190476190476e-2);
    q = fma_f64(z, q, 5.26315789473684210526e-2);
    q = fma_f64(z, q, 5.88235294117647058824e-2);
    q = fma_f64(z, q, 6.66666666666666666667e-2);
    q = fma_f64(z, q, 7.69230769230769230769e-2);
    q = fma_f64(z, q, 9.09090909090909090909e-2);
    q = fma_f64(z, q, 1.11111111111111111111e-1);
    q = fma_f64(z, q, 1.42857142857142857143e-1);
    q = fma_f64(z, q, 2.00000000000000000000e-1);
    q = fma_f64(z, q, 3.33333333333333333333e-1);
    double tail = fma_f64(2.0 * z, q, -f);
    double low = fma_f64(s, tail, e * 1.90821492927058770002e-10);
    return fma_f64(e, 6.93147180369123816490e-1, f + low);
}
