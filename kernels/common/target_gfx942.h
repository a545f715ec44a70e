//! gfx942 (MI300X) by clang's builtins: waves of 64, 16x16x16 bf16 MFMA.
#pragma once

#if !defined(__global__)
#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif

#define DEVICE static inline __attribute__((always_inline)) __device__
#define KERNEL(name, Args, max_threads) \
    extern "C" __global__ __attribute__((amdgpu_flat_work_group_size(1, max_threads))) void name(const Args args)
#define KERNEL_ROOMY KERNEL
#define SHARED(T, name, COUNT) __shared__ __attribute__((aligned(16))) T name[COUNT]
#define PLAIN_LOOP _Pragma("clang loop vectorize(disable) interleave(disable) unroll(disable)")

constexpr u32 WAVE = 64;
constexpr bool FP8_FNUZ = true;

DEVICE u32 block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE u32 block_y() { return __builtin_amdgcn_workgroup_id_y(); }
// Code object version 5: the hidden arguments start with the grid's size in blocks, then the block's size.
DEVICE u32 grid_x() { return ((const __attribute__((address_space(4))) u32*)__builtin_amdgcn_implicitarg_ptr())[0]; }
DEVICE u32 n_threads() { return ((const __attribute__((address_space(4))) u16*)__builtin_amdgcn_implicitarg_ptr())[6]; }
DEVICE u32 thread() { return __builtin_amdgcn_workitem_id_x(); }

DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE void wave_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
DEVICE void device_fence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }

DEVICE u32 shuffle(u32 v, u32 from) { return (u32)__builtin_amdgcn_ds_bpermute((i32)(from * 4), (i32)v); }
DEVICE u64 wave_ballot(bool p) { return __builtin_amdgcn_ballot_w64(p); }
DEVICE u32 opaque(u32 v) {
    asm volatile("" : "+v"(v));
    return v;
}
DEVICE u32 uniform(u32 v) { return (u32)__builtin_amdgcn_readfirstlane((i32)v); }
DEVICE u32 atomic_add(u32* p, u32 v) { return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }

DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE double fma_f64(double a, double b, double c) { return __builtin_fma(a, b, c); }
DEVICE float sqrt_(float x) { return __builtin_sqrtf(x); }
/// Byte i of the result is byte s_i of the eight bytes {a: 0-3, b: 4-7}, s_i the low three bits of nibble i of `selector`.
DEVICE u32 byte_perm(u32 a, u32 b, u32 selector) {
    u32 wide = (selector & 7) | (selector & 0x70) << 4 | (selector & 0x700) << 8 | (selector & 0x7000) << 12;
    return __builtin_amdgcn_perm(b, a, wide);
}

using Vector4U32 = u32 __attribute__((ext_vector_type(4)));
DEVICE U4 load_stream16(const void* p) {
    Vector4U32 v = __builtin_nontemporal_load((const Vector4U32*)p);
    return {v.x, v.y, v.z, v.w};
}
DEVICE U4 load16(const void* p) {
    Vector4U32 v = *(const Vector4U32*)p;
    return {v.x, v.y, v.z, v.w};
}
DEVICE U4 load_global16(const void* p) { return load16(p); }
DEVICE void store16(void* p, U4 v) { *(Vector4U32*)p = Vector4U32{v.x, v.y, v.z, v.w}; }

// The tile: C[16, 16] += A[16, 16] B[16, 16].
constexpr u32 TILE_M = 16, TILE_K = 16, TILE_N = 16;
constexpr u32 A_ELEMS = 4, B_ELEMS = 4, A_REGS = 2, B_REGS = 2;
struct FragA {
    u32 v[A_REGS];
};
struct FragB {
    u32 v[B_REGS];
};
struct FragC {
    float v[4];
};
DEVICE constexpr u32 a_row(u32 lane, u32) { return lane % 16; }
DEVICE constexpr u32 a_k(u32 lane, u32 i) { return lane / 16 * 4 + i; }
DEVICE constexpr u32 b_k(u32 lane, u32 i) { return lane / 16 * 4 + i; }
DEVICE constexpr u32 b_col(u32 lane, u32) { return lane % 16; }
DEVICE constexpr u32 c_row(u32 lane, u32 i) { return lane / 16 * 4 + i; }
DEVICE constexpr u32 c_col(u32 lane, u32) { return lane % 16; }

using Vector4I16 = i16 __attribute__((ext_vector_type(4)));
using Vector4F32 = float __attribute__((ext_vector_type(4)));
DEVICE void mma(FragC& c, const FragA& a, const FragB& b) {
    Vector4F32 sum = {c.v[0], c.v[1], c.v[2], c.v[3]};
    sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(
        __builtin_bit_cast(Vector4I16, a), __builtin_bit_cast(Vector4I16, b), sum, 0, 0, 0);
    c.v[0] = sum.x, c.v[1] = sum.y, c.v[2] = sum.z, c.v[3] = sum.w;
}
