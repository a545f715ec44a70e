//! Synthetic contents by formula: stored elements of a weight, bit for bit those of a synthetic checkpoint, and rows of the caches.
//!
//! Bound: about forty integer instructions an element (64-bit mixing), one store of sixteen bytes a piece; used at load and by benches only.
#include "common/formats.h"

namespace fill_op {

enum Rule : u32 { FILL_BF16, FILL_F32, FILL_FP8, FILL_MXFP4, FILL_SCALE, FILL_KV_ROW, FILL_INDEX_ROW };

struct FillArgs {
    u8* out;           // part p at out + p * stride_bytes, n_bytes each; both multiples of 16
    u64 noise;         // what an element's index is added to
    u64 first;         // index of the first stored element; of rows the first byte's, a multiple of a row
    u64 n_bytes;       // bytes of a part
    u64 stride_bytes;  // from part to part, a multiple of 16
    u32 rule, first_scale;
    float gain, offset;
};
static_assert(sizeof(FillArgs) == 56, "FillArgs mirrors src/ops/fill.rs");

/// The sum of the four 16-bit fields of an element's noise. It leaves the same remainder by 3 as the noise, since 2^16 leaves 1.
DEVICE u32 noise_sum(const FillArgs& args, u64 index) {
    u64 x = args.noise + index + 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    x = x ^ x >> 31;
    u32 low = (u32)x, high = (u32)(x >> 32);
    return (low & 0xFFFF) + (low >> 16) + (high & 0xFFFF) + (high >> 16);
}

/// Nearly normal, exact in f32.
DEVICE float noise_z(const FillArgs& args, u64 index) {
    return (float)((i32)noise_sum(args, index) - 131070) * (1.75f / 65536.0f);
}

DEVICE u32 bf16_at(const FillArgs& args, u64 index, float gain, float offset) {
    return f32_to_bf16(noise_z(args, index) * gain + offset);
}
DEVICE u32 fp8_at(const FillArgs& args, u64 index) { return f32_to_f8e4m3fn(noise_z(args, index) * 32.0f); }
/// Two codes, the even column in the low half.
DEVICE u32 mxfp4_at(const FillArgs& args, u64 index) {
    u32 low = f32_to_e2m1(noise_z(args, 2 * index) * 2.0f);
    return low | (u32)f32_to_e2m1(noise_z(args, 2 * index + 1) * 2.0f) << 4;
}

/// A byte of a cached KV row: codes near 2^5 under scales near 2^-5.
DEVICE u32 kv_byte(const FillArgs& args, u64 index, u32 at) {
    if (at < KV_ROPE_AT) return fp8_at(args, index);
    if (at < KV_SCALES_AT) return bf16_at(args, index - at % 2, 1.0f, 0.0f) >> at % 2 * 8 & 0xFF;
    return at < KV_SCALES_AT + KV_N_SCALES ? 121 + noise_sum(args, index) % 3 : 0;
}
/// A byte of an indexer key: codes near 2 under scales near 1/2.
DEVICE u32 index_byte(const FillArgs& args, u64 index, u32 at) {
    return at < INDEX_SCALES_AT ? mxfp4_at(args, index) : 125 + noise_sum(args, index) % 3;
}

/// Four stored bytes, the first of which is byte `at` behind the first element.
DEVICE u32 fill_word(const FillArgs& args, u64 at) {
    if (args.rule == FILL_F32) return bits(noise_z(args, args.first + at / 4) * args.gain);
    u32 word = 0;
    if (args.rule == FILL_BF16) {
        u64 index = args.first + at / 2;
        return bf16_at(args, index, args.gain, args.offset) | bf16_at(args, index + 1, args.gain, args.offset) << 16;
    }
    for (u32 i = 0; i < 4; i++) {
        u64 index = args.first + at + i;
        u32 byte = args.rule == FILL_FP8      ? fp8_at(args, index)
                   : args.rule == FILL_MXFP4  ? mxfp4_at(args, index)
                   : args.rule == FILL_SCALE  ? args.first_scale + noise_sum(args, index) % 3
                   : args.rule == FILL_KV_ROW ? kv_byte(args, index, (u32)(index % KV_ROW_BYTES))
                                              : index_byte(args, index, (u32)(index % INDEX_ROW_BYTES));
        word |= byte << 8 * i;
    }
    return word;
}

/// Blocks (some pieces of 16 bytes, part).
KERNEL(fill, FillArgs, 256) {
    u8* out = args.out + block_y() * args.stride_bytes;
    u64 before = block_y() * args.n_bytes;
    for (u64 piece = (u64)block_x() * n_threads() + thread(); piece * 16 < args.n_bytes; piece += (u64)grid_x() * n_threads()) {
        u64 at = piece * 16;
        u32 words[4];
        for (u32 i = 0; i < 4; i++) words[i] = fill_word(args, before + at + 4 * i);
        if (at + 16 <= args.n_bytes) {
            store16(out + at, {words[0], words[1], words[2], words[3]});
            continue;
        }
        for (u32 i = 0; at + i < args.n_bytes; i++) out[at + i] = (u8)(words[i / 4] >> i % 4 * 8);
    }
}

}  // namespace fill_op
