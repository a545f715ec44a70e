//! What every other kernel is built from, run by itself: elementary functions, number formats, wave collectives, the matrix tile.
//!
//! These kernels are for tests alone: they show that a target's half of kernels/common does what the others' halves do.
#include "common/formats.h"
#include "common/math.h"

struct PrimitivesArgs {
    const void* in;
    void* out;
    u32 n, pad;
};
static_assert(sizeof(PrimitivesArgs) == 24, "PrimitivesArgs mirrors src/ops/primitives.rs");

/// in [n] f32, out [n, 10] f32: the elementary functions.
KERNEL(primitive_math, PrimitivesArgs, 256) {
    u32 i = block_x() * n_threads() + thread();
    if (i >= args.n) return;
    float x = ((const float*)args.in)[i];
    float* out = (float*)args.out + 10 * (u64)i;
    out[0] = exp_(x);
    out[1] = log_(x);
    out[2] = log1p_(x);
    out[3] = sigmoid(x);
    out[4] = silu(x);
    out[5] = softplus(x);
    out[6] = sqrt_(x);
    out[7] = rsqrt_(x);
    sincos_(x, out + 8, out + 9);
}

/// in [n] f64, out [n, 2] f64: exp of -|x| and ln of |x|.
KERNEL(primitive_math_f64, PrimitivesArgs, 256) {
    u32 i = block_x() * n_threads() + thread();
    if (i >= args.n) return;
    double x = ((const double*)args.in)[i], size = x < 0.0 ? -x : x;
    double* out = (double*)args.out + 2 * (u64)i;
    out[0] = exp_f64(-size);
    out[1] = log_f64(size);
}

/// in [n] f32, out [n, 8] u32: what numbers are rounded to.
KERNEL(primitive_encode, PrimitivesArgs, 256) {
    u32 i = block_x() * n_threads() + thread();
    if (i >= args.n) return;
    float x = ((const float*)args.in)[i];
    u32* out = (u32*)args.out + 8 * (u64)i;
    out[0] = f32_to_bf16(x);
    out[1] = bf16_pair(x, -x);
    out[2] = f32_to_f8e4m3fn(x);
    out[3] = f32_to_e2m1(x);
    out[4] = f32_to_e2m1_down(x);
    out[5] = f8_scale_byte(abs_(x));
    out[6] = f4_scale_byte(abs_(x));
    out[7] = bits(round_f8e4m3fn(x));
}

/// One block of 256; out [256, 8] f32: what codes stand for. Columns 4-7 are weight codes expanded as products expand them.
KERNEL(primitive_decode, PrimitivesArgs, 256) {
    u32 i = thread();
    float* out = (float*)args.out + 8 * i;
    // A stored weight code has half its value where it is FNUZ, and its scale's byte is one more.
    float gain = FP8_FNUZ ? 2.0f : 1.0f;
    out[0] = f8e4m3fn_to_f32(i);
    out[1] = e8m0_to_f32(i);
    out[2] = e2m1_to_f32(i);
    out[3] = weight_code_to_f32(weight_code(i)) * gain;
    u32 codes = (u32)weight_code(i) | (u32)weight_code(i ^ 0x80) << 8 | (u32)weight_code(255 - i) << 16 | (u32)weight_code(i / 2) << 24;
    u32 low, high, nibbles[4];
    weight_f8x4_to_bf16(codes, &low, &high);
    e2m1x8_to_bf16((i << 24 | i << 12 | i) ^ 0x30500070u, nibbles);
    out[4] = pair_low(low) * gain;
    out[5] = pair_high(low) * gain;
    out[6] = pair_low(high) * gain;
    out[7] = pair_high(high) * gain;
    for (u32 j = 0; j < 4; j++) {
        ((float*)args.out)[256 * 8 + 8 * i + 2 * j] = pair_low(nibbles[j]);
        ((float*)args.out)[256 * 8 + 8 * i + 2 * j + 1] = pair_high(nibbles[j]);
    }
}

/// One block; in [n_threads] f32, out [n_threads, 12] u32: ids and collectives.
KERNEL(primitive_wave, PrimitivesArgs, 256) {
    SHARED(float, scratch, 256 / WAVE);
    u32 i = thread();
    float x = ((const float*)args.in)[i];
    u32* out = (u32*)args.out + 12 * i;
    out[0] = lane() | wave() << 8 | n_waves() << 16;
    out[1] = shuffle(i * 3, (lane() * 7 + 3) % WAVE);
    u64 wide = shuffle((u64)bits(x) << 32 | i, WAVE - 1 - lane());
    out[2] = (u32)wide;
    out[3] = (u32)(wide >> 32);
    out[4] = bits(shuffle_xor(x, 5));
    u64 votes = wave_ballot(x > 0.0f);
    out[5] = (u32)votes;
    out[6] = (u32)(votes >> 32);
    out[7] = bits(wave_sum(x));
    out[8] = bits(wave_max(x));
    out[9] = bits(block_sum(x, scratch));
    out[10] = bits(block_max(x, scratch));
    out[11] = byte_perm(i * 0x01010101u, ~(i * 0x01010101u), 0x5173);
}

/// One wave; in bf16: A [n, 16, 16], then B [n, TILE_N, 16]; out [16, TILE_N] f32: the sum of n products.
KERNEL(primitive_tile, PrimitivesArgs, WAVE) {
    const u16* a = (const u16*)args.in;
    const u16* b = a + args.n * TILE_M * TILE_K;
    FragC c = {};
    for (u32 p = 0; p < args.n; p++) {
        FragA fa = {};
        FragB fb = {};
        for (u32 i = 0; i < A_ELEMS; i++) {
            fa.v[i / 2] |= (u32)a[(p * TILE_M + a_row(lane(), i)) * TILE_K + a_k(lane(), i)] << i % 2 * 16;
        }
        for (u32 i = 0; i < B_ELEMS; i++) {
            fb.v[i / 2] |= (u32)b[(p * TILE_N + b_col(lane(), i)) * TILE_K + b_k(lane(), i)] << i % 2 * 16;
        }
        mma(c, fa, fb);
    }
    for (u32 i = 0; i < 4; i++) ((float*)args.out)[c_row(lane(), i) * TILE_N + c_col(lane(), i)] = c.v[i];
}
