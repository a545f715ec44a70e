//! What kernels that make or read rows share: where a run's rows lie, rotation, Hadamard, the stored row of a wave, tile operands.
#pragma once
#include "formats.h"
#include "math.h"
#include "step.h"

/// Tokens whose compressed rows share one KV block.
constexpr u32 BLOCK_TOKENS = 256;
/// Rotary columns, the last ones of a row.
constexpr u32 ROPE_DIMS = 64;
/// Columns that a wave takes at a time when it holds a 512-wide row: four to a lane, consecutive.
constexpr u32 QUAD_COLS = 4 * WAVE;
/// Such steps in a row.
constexpr u32 N_QUADS = KV_DIMS / QUAD_COLS;
/// Columns of an indexer row that a lane holds, consecutive.
constexpr u32 INDEX_COLS = INDEX_DIMS / WAVE;

/// The row that thread block row `t` works for, or null where the bucket has no such row.
DEVICE const StepRow* step_row(const Step& step, u32 t) {
    if (t >= step.counts->n_rows) return nullptr;
    const StepRow* row = step.rows + t;
    return row->run == NO_RUN ? nullptr : row;
}

/// Groups that are complete at a position.
DEVICE u32 visible_groups(u32 position, u32 ratio) { return ratio == 0 ? 0 : (position + 1) / ratio; }

/// The stored row of a group: its run's block table says in which block, `base` is the layer's first row in block 0.
DEVICE u64 group_row(const Step& step, const StepRun& run, u64 base, u64 stride_bytes, u32 ratio, u32 row_bytes, u32 group) {
    u32 n_rows = BLOCK_TOKENS / ratio;
    u64 block = step.block_ids[run.first_block + group / n_rows];
    return base + block * stride_bytes + (u64)(group % n_rows) * row_bytes;
}

/// Four floats at a 16-byte address.
DEVICE void load4(const float* from, float out[4]) {
    U4 v = load16(from);
    out[0] = from_bits(v.x), out[1] = from_bits(v.y), out[2] = from_bits(v.z), out[3] = from_bits(v.w);
}

/// Four floats to a 16-byte address.
DEVICE void store4(float* to, const float v[4]) { store16(to, {bits(v[0]), bits(v[1]), bits(v[2]), bits(v[3])}); }

/// Rotates N consecutive rotary columns, the first of which is `first`; `sign` is -1 for the inverse.
template <u32 N> DEVICE void rotate(float* v, u32 first, u32 position, const float* freqs, float sign) {
#pragma unroll
    for (u32 i = 0; i < N; i += 2) {
        float s, c;
        sincos_((float)position * freqs[(first + i) / 2], &s, &c);
        s = s * sign;
        float a = v[i], b = v[i + 1];
        v[i] = a * c - b * s;
        v[i + 1] = a * s + b * c;
    }
}

/// The 512-wide row of a wave: column j * QUAD_COLS + 4 * lane + i is v[j][i].
struct WaveRow {
    float v[N_QUADS][4];
};

/// The first column of step j in this lane.
DEVICE u32 quad_col(u32 j) { return j * QUAD_COLS + 4 * lane(); }

DEVICE void load_row(WaveRow& row, const float* from) {
#pragma unroll
    for (u32 j = 0; j < N_QUADS; j++) load4(from + quad_col(j), row.v[j]);
}

/// RMSNorm of the wave's row; `weight` may be null. The sum runs over a lane's columns ascending, then over lanes by halves.
DEVICE void norm_row(WaveRow& row, const float* weight, float eps) {
    float sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < N_QUADS; j++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) sum = fma(row.v[j][i], row.v[j][i], sum);
    }
    float r = rsqrt_(wave_sum(sum) / (float)KV_DIMS + eps);
#pragma unroll
    for (u32 j = 0; j < N_QUADS; j++) {
        float w[4] = {1.0f, 1.0f, 1.0f, 1.0f};
        if (weight) load4(weight + quad_col(j), w);
#pragma unroll
        for (u32 i = 0; i < 4; i++) row.v[j][i] = row.v[j][i] * r * w[i];
    }
}

/// Rotates the row's last 64 columns.
DEVICE void rotate_row(WaveRow& row, u32 position, const float* freqs) {
#pragma unroll
    for (u32 j = 0; j < N_QUADS; j++) {
        u32 col = quad_col(j);
        if (col >= KV_FP8_DIMS) rotate<4>(row.v[j], col - KV_FP8_DIMS, position, freqs, 1.0f);
    }
}

/// Stores the wave's row in 584 bytes. A group of 64 columns that holds a NaN gets the scale NaN, so that readers need not test
/// every code.
DEVICE void store_kv_row(const WaveRow& row, u8* out) {
#pragma unroll
    for (u32 j = 0; j < N_QUADS; j++) {
        u32 col = quad_col(j);
        const float* v = row.v[j];
        float amax = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 4; i++) amax = max_(amax, abs_(v[i]));
        // 64 columns are 16 lanes.
#pragma unroll
        for (u32 mask = 1; mask < 16; mask *= 2) amax = max_(amax, shuffle_xor(amax, mask));
        if (col >= KV_FP8_DIMS) {
            u32* rope = (u32*)(out + KV_ROPE_AT + 2 * (col - KV_FP8_DIMS));
            rope[0] = bf16_pair(v[0], v[1]);
            rope[1] = bf16_pair(v[2], v[3]);
            if (col == KV_FP8_DIMS) out[KV_SCALES_AT + KV_N_SCALES] = 0;
            continue;
        }
        u32 byte = f8_scale_byte(amax), codes = 0;
        float inverse = inverse_scale(byte);
#pragma unroll
        for (u32 i = 0; i < 4; i++) codes |= (u32)f32_to_f8e4m3fn(v[i] * inverse) << 8 * i;
        *(u32*)(out + KV_CODES_AT + col) = codes;
        if (col % KV_GROUP == 0) out[KV_SCALES_AT + col / KV_GROUP] = (u8)(amax != amax ? 0xFF : byte);
    }
}

/// Rotation by the Hadamard matrix of 128 in natural order, as the CPU: distances 1, 2, 4 .. 64, then one multiplication. Lane l
/// holds columns l * INDEX_COLS and on.
DEVICE void hadamard(float v[INDEX_COLS]) {
#pragma unroll
    for (u32 distance = 1; distance < INDEX_COLS; distance *= 2) {
#pragma unroll
        for (u32 i = 0; i < INDEX_COLS; i++) {
            if (i & distance) continue;
            float a = v[i], b = v[i + distance];
            v[i] = a + b;
            v[i + distance] = a - b;
        }
    }
#pragma unroll
    for (u32 mask = 1; mask < WAVE; mask *= 2) {
#pragma unroll
        for (u32 i = 0; i < INDEX_COLS; i++) {
            float other = shuffle_xor(v[i], mask);
            v[i] = lane() & mask ? other - v[i] : v[i] + other;
        }
    }
#pragma unroll
    for (u32 i = 0; i < INDEX_COLS; i++) v[i] = v[i] * 0.088388346f;
}

/// The E8M0 byte of the lane's group of 32 columns.
DEVICE u32 index_scale_byte(const float v[INDEX_COLS]) {
    float amax = 0.0f;
#pragma unroll
    for (u32 i = 0; i < INDEX_COLS; i++) amax = max_(amax, abs_(v[i]));
#pragma unroll
    for (u32 mask = 1; mask < INDEX_GROUP / INDEX_COLS; mask *= 2) amax = max_(amax, shuffle_xor(amax, mask));
    return amax != amax ? 0xFF : f4_scale_byte(amax);
}

// The tile with a permuted K: in a span of 64 columns, lane quarter q holds columns 16 q .. 16 q + 15, four a step of the tile, so
// that it reads them at once. A and B agree because both take element k of a step from the same quarter and place.

/// The quarter of lanes that holds element k of a tile's K.
DEVICE constexpr u32 k_quarter(u32 k) { return TILE_N == 8 ? k % 8 / 2 : k / 4; }
/// Its place among the quarter's four.
DEVICE constexpr u32 k_place(u32 k) { return TILE_N == 8 ? k % 2 + k / 8 * 2 : k % 4; }
/// This lane's quarter.
DEVICE u32 quarter() { return k_quarter(b_k(lane(), 0)); }

/// Four OCP FP8 codes (byte 0 first) times a scale; NaN codes do not occur (the scale is NaN instead). The products are exact
/// in bf16: four significant bits.
DEVICE void expand_f8x4(u32 codes, float scale, float out[4]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        // Byte i to the sign and to the bits from 20 on: shifts of 24 - 8 i and 20 - 8 i, the latter negative for the last.
        u32 sign = codes << (24 - 8 * i) & 0x80000000u;
        u32 magnitude = (i < 3 ? codes << (20 - 8 * (i % 3)) : codes >> 4) & 0x07F00000u;
        out[i] = from_bits(sign | magnitude) * 1.32922799578491587290e36f * scale;
    }
}

/// Bits set.
DEVICE u32 popcount(u64 x) {
    u32 n = 0;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 v = (u32)(x >> 32 * half);
        v = v - (v >> 1 & 0x55555555u);
        v = (v & 0x33333333u) + (v >> 2 & 0x33333333u);
        n += ((v + (v >> 4)) & 0x0F0F0F0Fu) * 0x01010101u >> 24;
    }
    return n;
}
