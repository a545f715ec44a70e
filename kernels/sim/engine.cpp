//! The simulator's engine: every thread of a block is a fibre with a stack of its own; barriers and wave collectives switch fibres.
//!
//! Blocks run one after another. Lanes of a wave run in turn until all of them have come to the same collective; the last to come
//! computes it for all. A lane that has returned is not waited for: what it would have given is NaN. A barrier waits for
//! all threads that have not returned. Where nobody can go on, or lanes of a wave stand at different collectives, the launch
//! fails and says where. Shared arrays begin as NaN bytes and have red zones on both sides.
#include "engine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

thread_local const SimThread* sim_thread __attribute__((tls_model("initial-exec")));

// Saves the callee's registers on its stack, puts its stack pointer into *from, and goes on where `to` was left.
extern "C" void sim_switch(void** from, void* to);
#if defined(__x86_64__)
constexpr size_t SAVED_WORDS = 6;
asm(R"(
.text
.globl sim_switch
.hidden sim_switch
.type sim_switch, @function
sim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size sim_switch, .-sim_switch
)");
#elif defined(__aarch64__)
constexpr size_t SAVED_WORDS = 20;
asm(R"(
.text
.globl sim_switch
.hidden sim_switch
.type sim_switch, %function
sim_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size sim_switch, .-sim_switch
)");
#else
#error "the simulator switches fibres on x86-64 and AArch64"
#endif

namespace {

constexpr u32 MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 256 * 1024, RED_ZONE_BYTES = 64;
/// Local memory of a block on gfx942, and of static arrays on sm_90.
constexpr size_t SHARED_BYTES_64 = 64 * 1024, SHARED_BYTES_32 = 48 * 1024;
constexpr unsigned char SHARED_FILL = 0xFF, RED_ZONE_FILL = 0xA5;
constexpr u32 NAN_BITS = 0x7FC0DEAD;

enum class State : u32 { Ready, Barrier, Collective, Done };

struct Fibre {
    SimThread ids;
    void* stack_pointer;
    State state;
    SimOp op;
    SimPlace place;
    u64 value, result;
    u32 from;
    float* c;
    const u32 *a, *b;
};

struct SharedArray {
    const void* site;
    unsigned char* bytes;
    size_t n_bytes;
    u32 line;
};

/// One block at a time; kept for the life of its thread because stacks are dear.
struct Engine {
    u32 wave = 0, n_threads = 0, current = 0;
    const SimLaunch* launch = nullptr;
    u32 block_x = 0, block_y = 0;
    Fibre fibres[MAX_THREADS];
    void* scheduler_stack_pointer = nullptr;
    unsigned char* stacks = nullptr;
    std::vector<SharedArray> shared;
    std::vector<unsigned char> arena;
    size_t arena_used = 0;
    std::string error;

    ~Engine() {
        if (stacks) munmap(stacks, STACK_BYTES * MAX_THREADS);
    }
    unsigned char* stack_top(u32 thread) const { return stacks + STACK_BYTES * (thread + 1); }
};

thread_local std::unique_ptr<Engine> engine;

std::string place_text(const SimPlace& place) {
    const char* name = std::strrchr(place.file, '/');
    return std::string(name ? name + 1 : place.file) + ":" + std::to_string(place.line);
}

/// The first error of a launch is kept; the block is given up at the next switch.
void fail(const std::string& what) {
    Engine& e = *engine;
    if (e.error.empty()) {
        e.error = std::string("kernel ") + e.launch->kernel->name + ", block (" + std::to_string(e.block_x) + ", " +
                  std::to_string(e.block_y) + "): " + what;
    }
}

void to_scheduler() {
    Engine& e = *engine;
    sim_switch(&e.fibres[e.current].stack_pointer, e.scheduler_stack_pointer);
}

/// A fibre that met an error never runs again.
[[noreturn]] void stop_fibre() {
    engine->fibres[engine->current].state = State::Done;
    to_scheduler();
    std::abort();
}

void fibre_main() {
    Engine& e = *engine;
    e.launch->kernel->run(e.launch->args);
    stop_fibre();
}

void start_fibre(Engine& e, u32 thread) {
    Fibre& fibre = e.fibres[thread];
    fibre = Fibre{};
    fibre.ids = {thread, e.n_threads, e.block_x, e.block_y, e.launch->grid_x};
    void** top = reinterpret_cast<void**>(e.stack_top(thread));
#if defined(__x86_64__)
    // After the switch pops its registers and returns, the stack is aligned as at a function's entry.
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void*>(fibre_main);
    void** pointer = top - 2 - SAVED_WORDS;
    std::memset(static_cast<void*>(pointer), 0, SAVED_WORDS * sizeof(void*));
#else
    void** pointer = top - SAVED_WORDS;
    std::memset(static_cast<void*>(pointer), 0, SAVED_WORDS * sizeof(void*));
    pointer[11] = reinterpret_cast<void*>(fibre_main);  // x30, the return address
#endif
    fibre.stack_pointer = pointer;
}

float bf16(u32 half) { return __builtin_bit_cast(float, half << 16); }

/// The lane layouts of device.h for both widths.
struct Layout {
    bool wide;
    u32 a_elems() const { return wide ? 4 : 8; }
    u32 a_row(u32 l, u32 i) const { return wide ? l % 16 : l / 4 + i / 2 % 2 * 8; }
    u32 a_k(u32 l, u32 i) const { return wide ? l / 16 * 4 + i : l % 4 * 2 + i % 2 + i / 4 * 8; }
    u32 b_k(u32 l, u32 i) const { return wide ? l / 16 * 4 + i : l % 4 * 2 + i % 2 + i / 2 * 8; }
    u32 b_col(u32 l) const { return wide ? l % 16 : l / 4; }
    u32 c_row(u32 l, u32 i) const { return wide ? l / 16 * 4 + i : l / 4 + i / 2 * 8; }
    u32 c_col(u32 l, u32 i) const { return wide ? l % 16 : l % 4 * 2 + i % 2; }
};

double power_of_two(i32 exponent) { return __builtin_bit_cast(double, (u64)(exponent + 1023) << 52); }
i32 exponent_field(float x) { return (i32)(bits(x) >> 23 & 0xFF); }

/// What one matrix instruction of sm_90 makes of sixteen products and the accumulator: all are cut towards zero to multiples of 2^-25 of
/// the largest one's power of two, added exactly, and the sum is cut towards zero. Anything that is not finite gives NaN. The
/// same rule is in src/device/cpu/tile.rs, which says where it is from.
float fused_sum(const float* a, const float* b, float c) {
    // Exponent fields; that of a subnormal is 1, and nothing is below it.
    i32 top = std::max(exponent_field(c), 1), largest = top;
    for (u32 k = 0; k < 16; k++) {
        i32 fa = std::max(exponent_field(a[k]), 1), fb = std::max(exponent_field(b[k]), 1);
        top = std::max(top, a[k] == 0.0f || b[k] == 0.0f ? 1 : fa + fb - 127);
        largest = std::max(largest, std::max(fa, fb));
    }
    if (largest == 255) return from_bits(0x7FC00000);
    double inverse = power_of_two(127 + 25 - top), sum = __builtin_trunc((double)c * inverse);
    for (u32 k = 0; k < 16; k++) sum += __builtin_trunc((double)a[k] * (double)b[k] * inverse);
    sum *= power_of_two(top - 127 - 25);
    if (__builtin_fabs(sum) < 1.17549435e-38) return (float)(__builtin_trunc(sum * power_of_two(149)) * power_of_two(-149));
    return (float)__builtin_bit_cast(double, __builtin_bit_cast(u64, sum) & ~((1ull << 29) - 1));
}

/// C += A B of one wave: waves of 32 as sm_90 adds, waves of 64 in ascending k by fused multiply-add.
void run_mma(Fibre* lanes, u32 wave) {
    Layout layout{wave == 64};
    float a[16][16], b[16][16] = {}, c[16][16] = {};
    for (u32 l = 0; l < wave; l++) {
        for (u32 i = 0; i < layout.a_elems(); i++) {
            a[layout.a_row(l, i)][layout.a_k(l, i)] = bf16(lanes[l].a[i / 2] >> i % 2 * 16 & 0xFFFF);
        }
        for (u32 i = 0; i < 4; i++) {
            b[layout.b_k(l, i)][layout.b_col(l)] = bf16(lanes[l].b[i / 2] >> i % 2 * 16 & 0xFFFF);
            c[layout.c_row(l, i)][layout.c_col(l, i)] = lanes[l].c[i];
        }
    }
    for (u32 m = 0; layout.wide && m < 16; m++) {
        for (u32 k = 0; k < 16; k++) {
            for (u32 n = 0; n < 16; n++) c[m][n] = __builtin_fmaf(a[m][k], b[k][n], c[m][n]);
        }
    }
    for (u32 n = 0; !layout.wide && n < 8; n++) {
        float column[16];
        for (u32 k = 0; k < 16; k++) column[k] = b[k][n];
        for (u32 m = 0; m < 16; m++) c[m][n] = fused_sum(a[m], column, c[m][n]);
    }
    for (u32 l = 0; l < wave; l++) {
        for (u32 i = 0; i < 4; i++) lanes[l].c[i] = c[layout.c_row(l, i)][layout.c_col(l, i)];
    }
}

float max_nan(float a, float b) { return (a != a || a > b) ? a : b; }

/// Sum or maximum by halving distances, as the devices do it.
void run_butterfly(Fibre* lanes, u32 n, u32 wave, bool is_sum) {
    float v[64], next[64];
    for (u32 l = 0; l < wave; l++) {
        bool is_here = l < n && lanes[l].state == State::Collective;
        v[l] = __builtin_bit_cast(float, is_here ? (u32)lanes[l].value : NAN_BITS);
    }
    for (u32 mask = wave / 2; mask > 0; mask /= 2) {
        for (u32 l = 0; l < wave; l++) next[l] = is_sum ? v[l] + v[l ^ mask] : max_nan(v[l], v[l ^ mask]);
        std::memcpy(v, next, sizeof(v));
    }
    for (u32 l = 0; l < n; l++) lanes[l].result = __builtin_bit_cast(u32, is_sum ? v[l] : v[l] + 0.0f);
}

/// Computes a collective at which all `n` lanes that have not returned have met.
void run_collective(Fibre* lanes, u32 n, u32 wave, SimOp op) {
    u64 votes = 0;
    switch (op) {
        case SimOp::Sync: break;
        case SimOp::Shuffle:
            for (u32 l = 0; l < n; l++) {
                u32 from = lanes[l].from % wave;
                bool is_here = from < n && lanes[from].state == State::Collective;
                lanes[l].result = is_here ? lanes[from].value : NAN_BITS;
            }
            break;
        case SimOp::Ballot:
            for (u32 l = 0; l < n; l++) {
                if (lanes[l].state == State::Collective && lanes[l].value) votes |= 1ull << l;
            }
            for (u32 l = 0; l < n; l++) lanes[l].result = votes;
            break;
        case SimOp::Sum: run_butterfly(lanes, n, wave, true); break;
        case SimOp::Max: run_butterfly(lanes, n, wave, false); break;
        case SimOp::Mma:
            for (u32 l = 0; l < wave; l++) {
                if (l >= n || lanes[l].state != State::Collective) return fail("a matrix instruction without lane " + std::to_string(l));
            }
            run_mma(lanes, wave);
            break;
    }
}

/// Lets a wave go on if all its lanes have met; false if it is still waiting.
bool settle_wave(Engine& e, u32 first) {
    u32 n = std::min(e.wave, e.n_threads - first), n_waiting = 0, n_done = 0;
    Fibre* lanes = e.fibres + first;
    const Fibre* one = nullptr;
    for (u32 l = 0; l < n; l++) {
        if (lanes[l].state == State::Done) n_done++;
        if (lanes[l].state == State::Collective) {
            n_waiting++;
            if (one && (one->op != lanes[l].op || one->place.line != lanes[l].place.line)) {
                fail("lanes of a wave stand at different collectives: " + place_text(one->place) + " and " + place_text(lanes[l].place));
                return false;
            }
            one = &lanes[l];
        }
    }
    if (!one || n_waiting + n_done < n) return false;
    run_collective(lanes, n, e.wave, one->op);
    for (u32 l = 0; l < n; l++) {
        if (lanes[l].state == State::Collective) lanes[l].state = State::Ready;
    }
    return true;
}

/// Lets the block go on if all threads that have not returned stand at a barrier.
bool settle_barrier(Engine& e) {
    const Fibre* one = nullptr;
    for (u32 t = 0; t < e.n_threads; t++) {
        const Fibre& fibre = e.fibres[t];
        if (fibre.state == State::Done) continue;
        if (fibre.state != State::Barrier) {
            const char* where = fibre.state == State::Collective ? "a collective" : "code";
            fail("thread " + std::to_string(t) + " waits at " + where + " (" + place_text(fibre.place) + ") that the others never reach");
            return false;
        }
        if (one && one->place.line != fibre.place.line) {
            fail("threads stand at different barriers: " + place_text(one->place) + " and " + place_text(fibre.place));
            return false;
        }
        one = &fibre;
    }
    for (u32 t = 0; t < e.n_threads; t++) {
        if (e.fibres[t].state == State::Barrier) e.fibres[t].state = State::Ready;
    }
    return true;
}

/// Runs one wave until every lane waits for the block or has returned.
void run_wave(Engine& e, u32 first) {
    u32 n = std::min(e.wave, e.n_threads - first);
    do {
        for (u32 l = 0; l < n; l++) {
            Fibre& fibre = e.fibres[first + l];
            if (fibre.state != State::Ready) continue;
            e.current = first + l;
            sim_thread = &fibre.ids;
            sim_switch(&e.scheduler_stack_pointer, fibre.stack_pointer);
            if (!e.error.empty()) return;
        }
    } while (settle_wave(e, first));
}

void check_red_zones(Engine& e) {
    for (const SharedArray& array : e.shared) {
        for (size_t i = 0; i < RED_ZONE_BYTES; i++) {
            if (array.bytes[-1 - (ptrdiff_t)i] != RED_ZONE_FILL || array.bytes[array.n_bytes + i] != RED_ZONE_FILL) {
                return fail("the shared array of line " + std::to_string(array.line) + " was written outside its " +
                            std::to_string(array.n_bytes) + " bytes");
            }
        }
    }
}

void run_block(Engine& e) {
    e.shared.clear();
    e.arena_used = 0;
    for (u32 t = 0; t < e.n_threads; t++) start_fibre(e, t);
    for (;;) {
        bool is_done = true;
        u32 n_waves = (e.n_threads + e.wave - 1) / e.wave;
        for (u32 w = 0; w < n_waves; w++) {
            // Waves of odd blocks run from the last to the first: a missing barrier shows in one order or the other.
            run_wave(e, e.wave * (e.block_x % 2 ? n_waves - 1 - w : w));
            if (!e.error.empty()) return;
        }
        for (u32 t = 0; t < e.n_threads; t++) is_done = is_done && e.fibres[t].state == State::Done;
        if (is_done) break;
        if (!settle_barrier(e)) return;
    }
    check_red_zones(e);
}

/// Stacks with a page at the low end of each that may not be touched.
unsigned char* make_stacks() {
    void* stacks = mmap(nullptr, STACK_BYTES * MAX_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) return nullptr;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (u32 t = 0; t < MAX_THREADS; t++) mprotect(static_cast<unsigned char*>(stacks) + STACK_BYTES * t, page, PROT_NONE);
    return static_cast<unsigned char*>(stacks);
}

}  // namespace

std::string sim_run(const SimLaunch& launch) {
    if (!engine) engine = std::make_unique<Engine>();
    Engine& e = *engine;
    if (!e.stacks) e.stacks = make_stacks();
    if (!e.stacks) return "no memory for fibres";
    e.launch = &launch;
    e.wave = launch.kernel->wave;
    e.n_threads = launch.n_threads;
    e.error.clear();
    if (e.n_threads == 0 || e.n_threads > launch.kernel->max_threads || e.n_threads > MAX_THREADS) {
        fail("a block of " + std::to_string(e.n_threads) + " threads; at most " + std::to_string(launch.kernel->max_threads));
        return e.error;
    }
    for (e.block_y = 0; e.block_y < launch.grid_y; e.block_y++) {
        for (e.block_x = 0; e.block_x < launch.grid_x; e.block_x++) {
            run_block(e);
            if (!e.error.empty()) return e.error;
        }
    }
    return {};
}

void* sim_shared(const void* site, u64 n_bytes, u32 line) {
    Engine& e = *engine;
    for (const SharedArray& array : e.shared) {
        if (array.site == site) return array.bytes;
    }
    size_t limit = e.wave == 64 ? SHARED_BYTES_64 : SHARED_BYTES_32;
    // Twice the limit leaves room for red zones and alignment.
    if (e.arena.empty()) e.arena.resize(2 * SHARED_BYTES_64 + 64);
    size_t in_use = 0;
    for (const SharedArray& array : e.shared) in_use += array.n_bytes;
    if (in_use + n_bytes > limit || e.arena_used + n_bytes + 2 * RED_ZONE_BYTES + 64 > e.arena.size()) {
        fail("shared arrays of " + std::to_string(in_use + n_bytes) + " bytes; at most " + std::to_string(limit));
        stop_fibre();
    }
    unsigned char* base = e.arena.data() + e.arena_used;
    base += (64 - (uintptr_t)base % 64) % 64;
    std::memset(base, RED_ZONE_FILL, RED_ZONE_BYTES);
    std::memset(base + RED_ZONE_BYTES, SHARED_FILL, n_bytes);
    std::memset(base + RED_ZONE_BYTES + n_bytes, RED_ZONE_FILL, RED_ZONE_BYTES);
    e.arena_used = (size_t)(base - e.arena.data()) + n_bytes + 2 * RED_ZONE_BYTES;
    e.shared.push_back({site, base + RED_ZONE_BYTES, n_bytes, line});
    return base + RED_ZONE_BYTES;
}

void sim_barrier(SimPlace place) {
    Fibre& fibre = engine->fibres[engine->current];
    fibre.place = place;
    fibre.state = State::Barrier;
    to_scheduler();
}

u64 sim_collective(SimOp op, u64 value, u32 from, SimPlace place) {
    Fibre& fibre = engine->fibres[engine->current];
    fibre.op = op;
    fibre.value = value;
    fibre.from = from;
    fibre.place = place;
    fibre.state = State::Collective;
    to_scheduler();
    return fibre.result;
}

void sim_mma(float* c, const u32* a, const u32* b, SimPlace place) {
    Fibre& fibre = engine->fibres[engine->current];
    fibre.c = c;
    fibre.a = a;
    fibre.b = b;
    sim_collective(SimOp::Mma, 0, 0, place);
}

void sim_misaligned(const void* p, SimPlace place) {
    fail("sixteen bytes at an address that is " + std::to_string((uintptr_t)p % 16) + " past a multiple of 16, at " + place_text(place));
    stop_fibre();
}
