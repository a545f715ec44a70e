//! sm_90 (Hopper) by PTX: waves of 32, mma.sync m16n8k16 bf16. No header beyond what nvcc and NVRTC always give.
#pragma once

#define DEVICE static __device__ __forceinline__
#define KERNEL(name, Args, max_threads) \
    extern "C" __global__ void __launch_bounds__(max_threads) name(const __grid_constant__ Args args)
#define KERNEL_ROOMY(name, Args, max_threads) \
    extern "C" __global__ void __launch_bounds__(max_threads, 1) name(const __grid_constant__ Args args)
#define SHARED(T, name, COUNT) __shared__ __align__(16) T name[COUNT]
#define PLAIN_LOOP

constexpr u32 WAVE = 32;
constexpr bool FP8_FNUZ = false;

DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 grid_x() { return gridDim.x; }
DEVICE u32 n_threads() { return blockDim.x; }
DEVICE u32 thread() { return threadIdx.x; }

DEVICE void barrier() { __syncthreads(); }
DEVICE void wave_barrier() { __syncwarp(); }
DEVICE void device_fence() { __threadfence(); }

DEVICE u32 shuffle(u32 v, u32 from) { return __shfl_sync(0xFFFFFFFFu, v, (int)from, 32); }
DEVICE u64 wave_ballot(bool p) { return __ballot_sync(0xFFFFFFFFu, p); }
DEVICE u32 opaque(u32 v) {
    asm volatile("" : "+r"(v));
    return v;
}
DEVICE u32 uniform(u32 v) { return v; }
DEVICE u32 atomic_add(u32* p, u32 v) { return atomicAdd(p, v); }

// `fma` for floats is one of the compiler's own functions.
DEVICE double fma_f64(double a, double b, double c) {
    double d;
    asm("fma.rn.f64 %0, %1, %2, %3;" : "=d"(d) : "d"(a), "d"(b), "d"(c));
    return d;
}
DEVICE float sqrt_(float x) {
    float y;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/// Byte i of the result is byte s_i of the eight bytes {a: 0-3, b: 4-7}, s_i the low three bits of nibble i of `selector`.
DEVICE u32 byte_perm(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector & 0x7777));
    return d;
}

DEVICE U4 load_stream16(const void* p) {
    U4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
/// A compiler that can't tell device from shared memory takes a slower way to both.
DEVICE U4 load_global16(const void* p) {
    U4 v;
    asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE U4 load16(const void* p) { return *(const U4*)p; }
DEVICE void store16(void* p, U4 v) { *(U4*)p = v; }

// The tile: C[16, 8] += A[16, 16] B[16, 8].
constexpr u32 TILE_M = 16, TILE_K = 16, TILE_N = 8;
constexpr u32 A_ELEMS = 8, B_ELEMS = 4, A_REGS = 4, B_REGS = 2;
struct FragA {
    u32 v[A_REGS];
};
struct FragB {
    u32 v[B_REGS];
};
struct FragC {
    float v[4];
};
DEVICE constexpr u32 a_row(u32 lane, u32 i) { return lane / 4 + i / 2 % 2 * 8; }
DEVICE constexpr u32 a_k(u32 lane, u32 i) { return lane % 4 * 2 + i % 2 + i / 4 * 8; }
DEVICE constexpr u32 b_k(u32 lane, u32 i) { return lane % 4 * 2 + i % 2 + i / 2 * 8; }
DEVICE constexpr u32 b_col(u32 lane, u32) { return lane / 4; }
DEVICE constexpr u32 c_row(u32 lane, u32 i) { return lane / 4 + i / 2 * 8; }
DEVICE constexpr u32 c_col(u32 lane, u32 i) { return lane % 4 * 2 + i % 2; }

DEVICE void mma(FragC& c, const FragA& a, const FragB& b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
                 : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b.v[0]), "r"(b.v[1]));
}
