//! The dialect that every kernel is written in: ids, barriers, wave collectives and the matrix tile, for gfx942, sm_90 and the simulator.
//!
//! Kernels are freestanding C++17. What differs by target lies in target_*.h; this file holds what is the same everywhere.
//! Floating-point contraction is off on every target: a fused multiply-add is written `fma`, so targets differ as little as possible.
#pragma once

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using i16 = short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(void*) == 8, "the kernels count on these sizes");

/// Sixteen bytes, loaded at once.
struct alignas(16) U4 {
    u32 x, y, z, w;
};

#if defined(FLASHD_SIM)
#include "target_sim.h"
#elif defined(__CUDACC__)
#include "target_sm90.h"
#elif defined(__HIP__)
#include "target_gfx942.h"
#else
#error "no target: compile as HIP for gfx942, as CUDA for sm_90, or with FLASHD_SIM"
#endif

// A target header defines:
//   DEVICE                                qualifier of a function that kernels call
//   KERNEL(name, Args, max_threads)       head of a kernel; the body reads `args`
//   KERNEL_ROOMY(name, Args, max_threads) one whose blocks may have all registers, even if only one of them fits then
//   SHARED(T, name, COUNT)                a static shared array; uninitialised
//   PLAIN_LOOP                            before a loop that is not to be unrolled, where that would take too many scalar registers
//   WAVE, FP8_FNUZ                        lanes of a wave; whether repacked FP8 weight codes are FNUZ
//   block_x block_y grid_x thread n_threads
//   barrier()                             all threads of the block that have not returned
//   wave_barrier()                        all lanes of the wave; orders their shared-memory accesses
//   device_fence()                        earlier writes become visible to other blocks before later ones
//   shuffle(v, from)                      v of lane `from`, for u32
//   wave_ballot(p)                             bit l: p of lane l
//   opaque(v)                             v, of which the compiler knows nothing: it keeps v and does not find it again
//   uniform(v)                            v, which must be the same in all lanes (a hint)
//   atomic_add(u32*, u32)                 returns the earlier value
//   fma sqrt_ byte_perm                   correctly rounded; bytes of {b, a} chosen by the nibbles of a selector
//   load_stream16(p), load_global16(p), load16(p), store16(p, v)   sixteen aligned bytes; the first does not stay in the caches, the
//                                         second is of device memory that the kernel does not write
//   the tile: TILE_N, A_ELEMS, B_ELEMS, a_row a_k b_k b_col c_row c_col, mma

/// The bits of a float.
DEVICE u32 bits(float x) { return __builtin_bit_cast(u32, x); }
/// The float of some bits.
DEVICE float from_bits(u32 x) { return __builtin_bit_cast(float, x); }

/// |x|.
DEVICE float abs_(float x) { return from_bits(bits(x) & 0x7FFFFFFFu); }
/// The larger; NaN if either is.
DEVICE float max_(float a, float b) { return (a != a || a > b) ? a : b; }
/// The smaller; NaN if either is.
DEVICE float min_(float a, float b) { return (a != a || a < b) ? a : b; }
DEVICE u32 max_(u32 a, u32 b) { return a > b ? a : b; }
DEVICE u32 min_(u32 a, u32 b) { return a < b ? a : b; }
/// n / d rounded up.
DEVICE constexpr u32 ceil_div(u32 n, u32 d) { return (n + d - 1) / d; }

/// This thread's lane in its wave.
DEVICE u32 lane() { return thread() % WAVE; }
/// This thread's wave in its block.
DEVICE u32 wave() { return uniform(thread() / WAVE); }
/// Waves of the block, the last may be partial.
DEVICE u32 n_waves() { return ceil_div(n_threads(), WAVE); }

DEVICE i32 shuffle(i32 v, u32 from) { return (i32)shuffle((u32)v, from); }
DEVICE float shuffle(float v, u32 from) { return from_bits(shuffle(bits(v), from)); }
DEVICE u64 shuffle(u64 v, u32 from) {
    u64 high = shuffle((u32)(v >> 32), from);
    return high << 32 | shuffle((u32)v, from);
}
/// v of lane `lane() ^ mask`.
template <class T> DEVICE T shuffle_xor(T v, u32 mask) { return shuffle(v, lane() ^ mask); }

#if !defined(FLASHD_SIM)
/// The sum over all lanes, by halving distances: the same bits in every lane.
DEVICE float wave_sum(float v) {
#pragma unroll
    for (u32 mask = WAVE / 2; mask > 0; mask /= 2) v = v + shuffle_xor(v, mask);
    return v;
}
/// The maximum over all lanes; NaN if any lane has one. Zeros come out positive.
DEVICE float wave_max(float v) {
#pragma unroll
    for (u32 mask = WAVE / 2; mask > 0; mask /= 2) v = max_(v, shuffle_xor(v, mask));
    return v + 0.0f;
}
#endif

/// The sum over the block, first in waves, then over waves in order; in every thread. `scratch` is shared, [n_waves]. Full waves only.
DEVICE float block_sum(float v, float* scratch) {
    v = wave_sum(v);
    barrier();
    if (lane() == 0) scratch[wave()] = v;
    barrier();
    float sum = scratch[0];
    for (u32 w = 1; w < n_waves(); w++) sum = sum + scratch[w];
    return sum;
}

/// The maximum over the block, as [`block_sum`].
DEVICE float block_max(float v, float* scratch) {
    v = wave_max(v);
    barrier();
    if (lane() == 0) scratch[wave()] = v;
    barrier();
    float top = scratch[0];
    for (u32 w = 1; w < n_waves(); w++) top = max_(top, scratch[w]);
    return top;
}
