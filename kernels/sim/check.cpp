//! Checks of the simulator itself: wrong kernels must fail with their name, block and line, and right ones must not hang.
//!
//! Built for both widths and run by `cargo xtask kernels --target sim`; exits with 1 and says which check failed.
#include <cstdio>
#include <cstring>
#include <vector>

#include "engine.h"

struct CheckArgs {
    u32* out;
    u32 n, pad;
};

/// Half of the threads leave before the barrier and the collectives.
KERNEL(check_early_exit, CheckArgs, 256) {
    SHARED(u32, all, 256);
    if (lane() % 2) return;
    barrier();
    all[thread()] = shuffle(thread(), lane() & ~1u);
    barrier();
    args.out[thread()] = all[thread()] + 1;
    if (wave_ballot(true) != 0x5555555555555555ull >> (64 - WAVE)) args.out[thread()] = 0;
}

/// Shared memory carries nothing from one block to the next.
KERNEL(check_shared_is_nan, CheckArgs, 64) {
    SHARED(u32, all, 64);
    args.out[block_x() * n_threads() + thread()] = all[thread()];
    all[thread()] = 7;
}

/// What one lane of the first wave sees is written by the last wave: wrong without the barrier.
KERNEL(check_barrier_orders, CheckArgs, 256) {
    SHARED(u32, all, 256);
    all[thread()] = thread();
    barrier();
    args.out[thread()] = all[n_threads() - 1 - thread()];
}

/// Without a barrier a wave sees what the wave before it wrote in one block, and does not in the other.
KERNEL(check_missing_barrier, CheckArgs, 256) {
    SHARED(u32, all, 256);
    all[thread()] = thread();
    args.out[block_x() * 256 + thread()] = all[(thread() + 256 - WAVE) % 256];
}

KERNEL(check_barrier_in_a_branch, CheckArgs, 256) {
    if (lane() == 0) barrier();
    else wave_sum(1.0f);
}

KERNEL(check_different_barriers, CheckArgs, 256) {
    if (wave() == 0) barrier();
    else
        barrier();
}

KERNEL(check_lanes_apart, CheckArgs, 64) {
    if (lane() == 3) wave_sum(1.0f);
    else wave_max(1.0f);
}

KERNEL(check_partial_tile, CheckArgs, 64) {
    if (lane() == 3) return;
    FragA a = {};
    FragB b = {};
    FragC c = {};
    mma(c, a, b);
}

KERNEL(check_past_shared, CheckArgs, 64) {
    SHARED(u32, first, 8);
    SHARED(u32, second, 8);
    second[0] = 1;
    u32* past = first;
    past[8 + args.n] = second[0];
}

KERNEL(check_too_much_shared, CheckArgs, 64) {
    SHARED(u32, all, 20000);
    all[thread()] = 1;
}

KERNEL(check_misaligned, CheckArgs, 64) { store16((u8*)args.out + 4, {1, 2, 3, 4}); }

static int n_failed = 0;

static void expect(const SimKernel& kernel, u32 grid, u32 n_threads, u32 n, std::vector<u32>& out, const char* part, const char* part2 = "") {
    CheckArgs args = {out.data(), n, 0};
    std::string error = sim_run({&kernel, &args, grid, 1, n_threads});
    bool is_good = *part ? error.find(part) != std::string::npos && error.find(part2) != std::string::npos &&
                               error.find(kernel.name) != std::string::npos
                         : error.empty();
    if (is_good) return;
    std::printf("%s: \"%s\" where \"%s\" was expected\n", kernel.name, error.c_str(), part);
    n_failed++;
}

static void expect_values(const char* name, const std::vector<u32>& got, u32 n, u32 (*want)(u32)) {
    for (u32 i = 0; i < n; i++) {
        if (got[i] == want(i)) continue;
        std::printf("%s: element %u is %u, not %u\n", name, i, got[i], want(i));
        n_failed++;
        return;
    }
}

int main() {
    alignas(16) std::vector<u32> out(1024);
    expect(flashd_sim_kernel_check_early_exit, 1, 256, 0, out, "");
    expect_values("check_early_exit", out, 256, [](u32 i) { return i % 2 ? 0 : i + 1; });
    expect(flashd_sim_kernel_check_shared_is_nan, 2, 64, 0, out, "");
    expect_values("check_shared_is_nan", out, 128, [](u32) { return 0xFFFFFFFFu; });
    expect(flashd_sim_kernel_check_barrier_orders, 1, 256, 0, out, "");
    expect_values("check_barrier_orders", out, 256, [](u32 i) { return 255 - i; });
    expect(flashd_sim_kernel_check_missing_barrier, 2, 256, 0, out, "");
    expect_values("check_missing_barrier", out, 256, [](u32 i) { return i < WAVE ? 0xFFFFFFFFu : i - WAVE; });
    std::vector<u32> second(out.begin() + 256, out.end());
    expect_values("check_missing_barrier", second, 256, [](u32 i) { return i < WAVE ? 256 - WAVE + i : 0xFFFFFFFFu; });
    expect(flashd_sim_kernel_check_barrier_in_a_branch, 2, 256, 0, out, "block (0, 0): thread 1 waits at a collective", "check.cpp:");
    expect(flashd_sim_kernel_check_different_barriers, 1, 256, 0, out, "different barriers", "check.cpp:");
    expect(flashd_sim_kernel_check_lanes_apart, 1, WAVE, 0, out, "different collectives", "check.cpp:");
    expect(flashd_sim_kernel_check_partial_tile, 1, WAVE, 0, out, "without lane 3");
    expect(flashd_sim_kernel_check_past_shared, 1, 1, 0, out, "outside its 32 bytes");
    expect(flashd_sim_kernel_check_too_much_shared, 1, 64, 0, out, "shared arrays of 80000 bytes");
    expect(flashd_sim_kernel_check_misaligned, 1, 1, 0, out, "4 past a multiple of 16", "check.cpp:");
    expect(flashd_sim_kernel_check_lanes_apart, 1, 65, 0, out, "at most 64");
    return n_failed ? 1 : 0;
}
