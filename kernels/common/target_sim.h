//! The host simulator's side of the dialect; the engine is kernels/sim/engine.cpp. FLASHD_SIM_WAVE chooses the lane layout.
#pragma once

#if FLASHD_SIM_WAVE != 32 && FLASHD_SIM_WAVE != 64
#error "FLASHD_SIM_WAVE must be 32 (sm_90's layout) or 64 (gfx942's)"
#endif

#define DEVICE static inline __attribute__((unused))

/// One exported kernel: what the engine needs to run a thread of it.
struct SimKernel {
    void (*run)(const void* args);
    const char* name;
    u32 args_bytes, max_threads, wave;
};

#define KERNEL(name, Args, max_threads)                                                                          \
    static void sim_body_##name(const Args& args);                                                               \
    static void sim_run_##name(const void* args) { sim_body_##name(*(const Args*)args); }                         \
    extern "C" __attribute__((visibility("default"))) const SimKernel flashd_sim_kernel_##name;                  \
    extern "C" __attribute__((visibility("default"))) const SimKernel flashd_sim_kernel_##name = {               \
        sim_run_##name, #name, sizeof(Args), max_threads, FLASHD_SIM_WAVE};                                                       \
    static void sim_body_##name([[maybe_unused]] const Args& args)

#define KERNEL_ROOMY KERNEL

// One array a block and a place in the source; it starts as NaN bytes and has red zones.
#define SHARED(T, name, COUNT)                    \
    static char sim_site_##name;                  \
    T(&name)[COUNT] = *(T(*)[COUNT])sim_shared(&sim_site_##name, sizeof(T) * (COUNT), __LINE__)
#define PLAIN_LOOP

constexpr u32 WAVE = FLASHD_SIM_WAVE;
constexpr bool FP8_FNUZ = WAVE == 64;

/// The ids of the thread that runs; the engine sets them at every switch.
struct SimThread {
    u32 thread, n_threads, block_x, block_y, grid_x;
};
/// Kinds of wave collectives; all lanes of a wave must meet at the same one.
enum class SimOp : u32 { Shuffle, Ballot, Sum, Max, Mma, Sync };

struct SimPlace {
    const char* file;
    u32 line;
};
extern thread_local const SimThread* sim_thread __attribute__((tls_model("initial-exec")));
void* sim_shared(const void* site, u64 n_bytes, u32 line);
void sim_barrier(SimPlace place);
/// Waits for all lanes and returns this lane's result. Shuffle: value and lane; Ballot, Sum, Max: value.
u64 sim_collective(SimOp op, u64 value, u32 from, SimPlace place);
void sim_mma(float* c, const u32* a, const u32* b, SimPlace place);

#define SIM_HERE const char *file = __builtin_FILE(), u32 line = __builtin_LINE()

DEVICE u32 block_x() { return sim_thread->block_x; }
DEVICE u32 block_y() { return sim_thread->block_y; }
DEVICE u32 grid_x() { return sim_thread->grid_x; }
DEVICE u32 n_threads() { return sim_thread->n_threads; }
DEVICE u32 thread() { return sim_thread->thread; }

DEVICE void barrier(SIM_HERE) { sim_barrier({file, line}); }
DEVICE void wave_barrier(SIM_HERE) { sim_collective(SimOp::Sync, 0, 0, {file, line}); }
DEVICE void device_fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

DEVICE u32 shuffle(u32 v, u32 from, SIM_HERE) { return (u32)sim_collective(SimOp::Shuffle, v, from, {file, line}); }
DEVICE u64 wave_ballot(bool p, SIM_HERE) { return sim_collective(SimOp::Ballot, p, 0, {file, line}); }
DEVICE float wave_sum(float v, SIM_HERE) {
    return __builtin_bit_cast(float, (u32)sim_collective(SimOp::Sum, __builtin_bit_cast(u32, v), 0, {file, line}));
}
DEVICE float wave_max(float v, SIM_HERE) {
    return __builtin_bit_cast(float, (u32)sim_collective(SimOp::Max, __builtin_bit_cast(u32, v), 0, {file, line}));
}
DEVICE u32 opaque(u32 v) { return v; }
DEVICE u32 uniform(u32 v) { return v; }
DEVICE u32 atomic_add(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }

DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE double fma_f64(double a, double b, double c) { return __builtin_fma(a, b, c); }
DEVICE float sqrt_(float x) { return __builtin_sqrtf(x); }
/// Byte i of the result is byte s_i of the eight bytes {a: 0-3, b: 4-7}, s_i the low three bits of nibble i of `selector`.
DEVICE u32 byte_perm(u32 a, u32 b, u32 selector) {
    u64 all = (u64)b << 32 | a;
    u32 out = 0;
    for (u32 i = 0; i < 4; i++) out |= (u32)(all >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return out;
}

/// Sixteen bytes at an aligned address; a misaligned one is an error, as it is on a device.
void sim_misaligned(const void* p, SimPlace place);
DEVICE U4 load16(const void* p, SIM_HERE) {
    if ((u64)p % 16) sim_misaligned(p, {file, line});
    return *(const U4*)p;
}
DEVICE U4 load_global16(const void* p, SIM_HERE) { return load16(p, file, line); }
DEVICE U4 load_stream16(const void* p, SIM_HERE) { return load16(p, file, line); }
DEVICE void store16(void* p, U4 v, SIM_HERE) {
    if ((u64)p % 16) sim_misaligned(p, {file, line});
    *(U4*)p = v;
}

constexpr u32 TILE_M = 16, TILE_K = 16, TILE_N = WAVE == 64 ? 16 : 8;
constexpr u32 A_ELEMS = WAVE == 64 ? 4 : 8, B_ELEMS = 4, A_REGS = A_ELEMS / 2, B_REGS = 2;
struct FragA {
    u32 v[A_REGS];
};
struct FragB {
    u32 v[B_REGS];
};
struct FragC {
    float v[4];
};
DEVICE constexpr u32 a_row(u32 lane, u32 i) { return WAVE == 64 ? lane % 16 : lane / 4 + i / 2 % 2 * 8; }
DEVICE constexpr u32 a_k(u32 lane, u32 i) { return WAVE == 64 ? lane / 16 * 4 + i : lane % 4 * 2 + i % 2 + i / 4 * 8; }
DEVICE constexpr u32 b_k(u32 lane, u32 i) { return WAVE == 64 ? lane / 16 * 4 + i : lane % 4 * 2 + i % 2 + i / 2 * 8; }
DEVICE constexpr u32 b_col(u32 lane, u32) { return WAVE == 64 ? lane % 16 : lane / 4; }
DEVICE constexpr u32 c_row(u32 lane, u32 i) { return WAVE == 64 ? lane / 16 * 4 + i : lane / 4 + i / 2 * 8; }
DEVICE constexpr u32 c_col(u32 lane, u32 i) { return WAVE == 64 ? lane % 16 : lane % 4 * 2 + i % 2; }

DEVICE void mma(FragC& c, const FragA& a, const FragB& b, SIM_HERE) { sim_mma(c.v, a.v, b.v, {file, line}); }
