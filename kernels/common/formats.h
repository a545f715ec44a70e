//! Number formats of weights and cache rows, bit for bit those of the CPU: bf16, FP8 E4M3 (OCP and FNUZ), E8M0, E2M1, packed rows.
#pragma once
#include "device.h"

// bf16 -------------------------------------------------------------------------------------------

DEVICE float bf16_to_f32(u16 x) { return from_bits((u32)x << 16); }
/// Rounds to nearest, ties to even; NaN stays NaN.
DEVICE u16 f32_to_bf16(float x) {
    u32 b = bits(x);
    if (x != x) return (u16)(b >> 16 | 0x40);
    return (u16)((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}
/// The value after rounding to bf16.
DEVICE float round_bf16(float x) { return bf16_to_f32(f32_to_bf16(x)); }
/// Two rounded values in a word, the first in the low half.
DEVICE u32 bf16_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
#else
    return (u32)f32_to_bf16(high) << 16 | f32_to_bf16(low);
#endif
}
/// Two values that are bf16 already (their low 16 bits are 0) in a word.
DEVICE u32 bf16_pair_exact(float low, float high) { return byte_perm(bits(low), bits(high), 0x7632); }
DEVICE float pair_low(u32 pair) { return from_bits(pair << 16); }
DEVICE float pair_high(u32 pair) { return from_bits(pair & 0xFFFF0000u); }

// E8M0 -------------------------------------------------------------------------------------------

/// 2^(byte - 127); 0 is 2^-127, 0xFF is NaN.
DEVICE float e8m0_to_f32(u32 byte) {
    u32 b = byte == 0 ? 0x00400000u : byte << 23;
    return from_bits(byte == 0xFF ? 0x7FC00000u : b);
}

// FP8 E4M3, OCP ----------------------------------------------------------------------------------

constexpr float F8E4M3FN_MAX = 448.0f;

/// The value of an OCP E4M3 byte; NaN for 0x7F and 0xFF.
DEVICE float f8e4m3fn_to_f32(u32 byte) {
    // The fields as a float are the value times 2^-120, subnormals too.
    float v = from_bits((byte & 0x7F) << 20 | (byte & 0x80) << 24) * 1.32922799578491587290e36f;
    return (byte & 0x7F) == 0x7F ? from_bits(0x7FC00000u) : v;
}

/// The nearest E4M3 magnitude, ties to even, saturating at 448; NaN stays NaN.
DEVICE float round_f8e4m3fn(float x) {
    float magnitude = abs_(x);
    magnitude = magnitude > F8E4M3FN_MAX ? F8E4M3FN_MAX : magnitude;
    // 2^e, e at least -6, times 1.5 * 2^20: a number whose last bit is worth 2^(e - 3), the distance of two codes.
    float at_least = magnitude > 0.015625f ? magnitude : 0.015625f;
    float step = from_bits(bits(at_least) & 0x7F800000u) * 1572864.0f;
    return (magnitude + step) - step;
}

/// Rounds to OCP E4M3, ties to even, saturating at 448; zero keeps its sign, NaN gives 0x7F with the sign.
DEVICE u8 f32_to_f8e4m3fn(float x) {
    float rounded = round_f8e4m3fn(x);
    // Adding 2^23 leaves the multiple of 2^-9 in the low bits; a normal has its fields at the top of the mantissa.
    u32 subnormal = bits(fma(rounded, 512.0f, 8388608.0f)) & 0x7F;
    u32 normal = ((bits(rounded) >> 20) - (120u << 3)) & 0x7F;
    u32 magnitude = rounded < 0.015625f ? subnormal : normal;
    magnitude = rounded != rounded ? 0x7F : magnitude;
    return (u8)((bits(x) >> 24 & 0x80) | magnitude);
}

// FP8 E4M3, FNUZ (what gfx942's instructions read) ------------------------------------------------

/// The value of an FNUZ E4M3 byte (bias 8, one zero, NaN is 0x80).
DEVICE float f8e4m3fnuz_to_f32(u32 byte) {
    float v = from_bits((byte & 0x7F) << 20 | (byte & 0x80) << 24) * 6.64613997892457936452e35f;
    return byte == 0x80 ? from_bits(0x7FC00000u) : v;
}
/// The FNUZ byte of half an OCP byte's value; the scale's byte grows by one in return. -0 becomes 0, NaN becomes NaN.
DEVICE u8 f8e4m3fn_to_fnuz(u32 byte) {
    return (u8)((byte & 0x7F) == 0x7F ? 0x80 : byte == 0x80 ? 0x00 : byte);
}

// Repacked weight codes: FNUZ where FP8_FNUZ, else OCP ---------------------------------------------

/// The code that repack stores for a checkpoint's code.
DEVICE u8 weight_code(u32 ocp) { return FP8_FNUZ ? f8e4m3fn_to_fnuz(ocp) : (u8)ocp; }
/// The scale byte that repack stores for a checkpoint's scale byte of FP8 codes.
DEVICE u8 weight_scale(u32 byte) { return (u8)(FP8_FNUZ && byte < 0xFF ? byte + 1 : byte); }
/// The value of one stored code.
DEVICE float weight_code_to_f32(u32 code) { return FP8_FNUZ ? f8e4m3fnuz_to_f32(code) : f8e4m3fn_to_f32(code); }

/// Four stored FP8 codes (byte 0 first) as bf16 pairs, exactly.
DEVICE void weight_f8x4_to_bf16(u32 codes, u32* low, u32* high) {
#if defined(__HIP_DEVICE_COMPILE__)
    auto a = __builtin_amdgcn_cvt_pk_f32_fp8((i32)codes, false);
    auto b = __builtin_amdgcn_cvt_pk_f32_fp8((i32)codes, true);
    *low = bf16_pair_exact(a[0], a[1]);
    *high = bf16_pair_exact(b[0], b[1]);
#elif defined(__CUDA_ARCH__)
    float a, b, c, d;
    asm("{ .reg .b16 l, h; .reg .b32 x, y; .reg .b16 p, q, r, s;\n\t"
        "mov.b32 {l, h}, %4;\n\t"
        "cvt.rn.f16x2.e4m3x2 x, l; cvt.rn.f16x2.e4m3x2 y, h;\n\t"
        "mov.b32 {p, q}, x; mov.b32 {r, s}, y;\n\t"
        "cvt.f32.f16 %0, p; cvt.f32.f16 %1, q; cvt.f32.f16 %2, r; cvt.f32.f16 %3, s; }"
        : "=f"(a), "=f"(b), "=f"(c), "=f"(d)
        : "r"(codes));
    *low = bf16_pair_exact(a, b);
    *high = bf16_pair_exact(c, d);
#else
    *low = bf16_pair_exact(weight_code_to_f32(codes & 0xFF), weight_code_to_f32(codes >> 8 & 0xFF));
    *high = bf16_pair_exact(weight_code_to_f32(codes >> 16 & 0xFF), weight_code_to_f32(codes >> 24));
#endif
}

// E2M1 -------------------------------------------------------------------------------------------

/// The value of the low four bits as E2M1.
DEVICE float e2m1_to_f32(u32 nibble) {
    // The fields as a float are the value times 2^-126.
    return from_bits((nibble & 7) << 22 | (nibble & 8) << 28) * 8.50705917302346158658e37f;
}
/// Eight E2M1 codes (lowest nibble first) as four bf16 pairs, exactly.
DEVICE void e2m1x8_to_bf16(u32 codes, u32 out[4]) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 four = i == 0 ? codes : codes >> 16;
        // The two bytes of 0, 0.5, 1, 1.5, 2, 3, 4, 6 in bf16.
        u32 low = byte_perm(0xC0800000u, 0xC0804000u, four & 0x7777);
        u32 high = byte_perm(0x3F3F3F00u, 0x40404040u, four & 0x7777);
        out[2 * i] = byte_perm(low, high, 0x5140) | (four & 0x8) << 12 | (four & 0x80) << 24;
        out[2 * i + 1] = byte_perm(low, high, 0x7362) | (four & 0x800) << 4 | (four & 0x8000) << 16;
    }
}
/// The nearest E2M1 code, ties to the even code, saturating at 6 (the checkpoint's format).
DEVICE u8 f32_to_e2m1(float x) {
    float m = abs_(x);
    u32 code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    return (u8)(code | (bits(x) >> 28 & 8));
}
/// The nearest E2M1 code, ties towards zero, saturating at 6 (indexer keys and queries). NaN gives 0.
DEVICE u8 f32_to_e2m1_down(float x) {
    float m = abs_(x);
    u32 code = (m > 0.25f) + (m > 0.75f) + (m > 1.25f) + (m > 1.75f) + (m > 2.5f) + (m > 3.5f) + (m > 5.0f);
    return (u8)(code | (bits(x) >> 28 & 8));
}

// Scales of groups, from the bits of the largest magnitude -----------------------------------------

/// The least power of two s with max(amax, 1e-4) <= 448 s, as E8M0: cache rows (64 columns) and activations (128).
DEVICE u32 f8_scale_byte(float amax) {
    u32 b = bits(amax > 1e-4f ? amax : 1e-4f);
    return ((b >> 23) - 8 + ((b & 0x007FFFFFu) > 0x00600000u)) & 0xFF;
}
/// The least power of two s with max(amax, 6 * 2^-126) <= 6 s, as E8M0: indexer keys and queries (32 columns).
DEVICE u32 f4_scale_byte(float amax) {
    const float least = 6.0f * 1.17549435e-38f;
    u32 b = bits(amax > least ? amax : least);
    return ((b >> 23) - 2 + ((b & 0x007FFFFFu) > 0x00400000u)) & 0xFF;
}
/// 1 / 2^(byte - 127), exact for bytes 1..=253.
DEVICE float inverse_scale(u32 byte) { return e8m0_to_f32(254 - byte); }

// The cache row, 584 bytes: 448 FP8 codes (OCP on every target), 64 bf16 rope columns, 7 scales of 64 columns and a zero ----------

constexpr u32 KV_GROUP = 64, KV_FP8_DIMS = 448, KV_ROPE_DIMS = 64, KV_DIMS = 512;
constexpr u32 KV_CODES_AT = 0, KV_ROPE_AT = 448, KV_SCALES_AT = 576, KV_N_SCALES = 7, KV_ROW_BYTES = 584;

/// Column d of a cache row.
DEVICE float kv_value(const u8* row, u32 d) {
    if (d >= KV_FP8_DIMS) return bf16_to_f32(((const u16*)(row + KV_ROPE_AT))[d - KV_FP8_DIMS]);
    return f8e4m3fn_to_f32(row[KV_CODES_AT + d]) * e8m0_to_f32(row[KV_SCALES_AT + d / KV_GROUP]);
}
/// Columns d and d + 1 (d even) as a bf16 pair: exact, a code has four bits and the scale is a power of two.
DEVICE u32 kv_pair(const u8* row, u32 d) {
    if (d >= KV_FP8_DIMS) return ((const u32*)(row + KV_ROPE_AT))[(d - KV_FP8_DIMS) / 2];
    u32 codes = ((const u16*)(row + KV_CODES_AT))[d / 2];
    float scale = e8m0_to_f32(row[KV_SCALES_AT + d / KV_GROUP]);
    return bf16_pair_exact(f8e4m3fn_to_f32(codes & 0xFF) * scale, f8e4m3fn_to_f32(codes >> 8) * scale);
}

// The index row, 68 bytes: 128 E2M1 codes (low nibble = even column), 4 scales of 32 columns ----------------------------------

constexpr u32 INDEX_GROUP = 32, INDEX_DIMS = 128, INDEX_SCALES_AT = 64, INDEX_ROW_BYTES = 68;

/// Column d of an index row.
DEVICE float index_value(const u8* row, u32 d) {
    return e2m1_to_f32(row[d / 2] >> d % 2 * 4) * e8m0_to_f32(row[INDEX_SCALES_AT + d / INDEX_GROUP]);
}
/// Columns d .. d + 8 (d a multiple of 8) as four bf16 pairs, exactly.
DEVICE void index_values8(const u8* row, u32 d, u32 out[4]) {
    float scale = e8m0_to_f32(row[INDEX_SCALES_AT + d / INDEX_GROUP]);
    e2m1x8_to_bf16(((const u32*)row)[d / 8], out);
#pragma unroll
    for (u32 i = 0; i < 4; i++) out[i] = bf16_pair_exact(pair_low(out[i]) * scale, pair_high(out[i]) * scale);
}
