//! Reads a range of memory as fast as the device can and leaves a check word a block: the rate that byte floors are stated at.
//!
//! Bound: bytes. Every thread has eight loads of sixteen bytes in flight.
#include "common/device.h"

namespace read_op {

constexpr u32 IN_FLIGHT = 8;

struct ReadArgs {
    const u8* from;  // [n_bytes], at a multiple of 16
    u32* out;        // [grid]
    u64 n_bytes;     // a multiple of 16
};
static_assert(sizeof(ReadArgs) == 24, "ReadArgs mirrors src/ops/read.rs");

/// Each block's word is the exclusive or of all words that it reads.
KERNEL(read, ReadArgs, 256) {
    SHARED(u32, of_wave, 256 / 32);
    u64 n = args.n_bytes / 16, stride = (u64)grid_x() * n_threads();
    u32 word = 0;
    u64 i = (u64)block_x() * n_threads() + thread();
    // Whole rounds without a condition, so that no load waits for another.
    for (; i + (IN_FLIGHT - 1) * stride < n; i += IN_FLIGHT * stride) {
        U4 v[IN_FLIGHT];
#pragma unroll
        for (u32 j = 0; j < IN_FLIGHT; j++) v[j] = load_stream16(args.from + (i + j * stride) * 16);
#pragma unroll
        for (u32 j = 0; j < IN_FLIGHT; j++) word ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < n; i += stride) {
        U4 v = load_stream16(args.from + i * 16);
        word ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    for (u32 mask = WAVE / 2; mask > 0; mask /= 2) word ^= shuffle_xor(word, mask);
    if (lane() == 0) of_wave[wave()] = word;
    // Orders the waves' words before they are joined.
    barrier();
    if (thread() != 0) return;
    for (u32 w = 1; w < n_waves(); w++) word ^= of_wave[w];
    args.out[block_x()] = word;
}

}  // namespace read_op
