//! A stand-in for the part of HIP's runtime that flashd calls: memory is the host's, kernels run in the simulator, at once.
//!
//! Memory is NaN-filled when it is taken and lies between guard bytes that are looked at when it is given back. Faults can be asked
//! for by the environment, read at every launch or allocation: FLASHD_SIM_FAIL_LAUNCH=n fails the n-th launch, FLASHD_SIM_LOSE_DEVICE=n
//! loses the device at the n-th (every later call fails), FLASHD_SIM_MEMORY_BYTES=n is all memory there is, FLASHD_SIM_DEVICES=n
//! the number of devices.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "engine.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Code {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    NOT_FOUND = 500,
    LAUNCH_FAILURE = 719,
    DEVICE_LOST = 709,
    CAPTURE_UNSUPPORTED = 900,
};

constexpr size_t GUARD_BYTES = 256;
constexpr unsigned char GUARD_FILL = 0xC7, NAN_FILL = 0xFF;
constexpr long long DEFAULT_MEMORY_BYTES = 16ll << 30;

struct Operation {
    // A launch when `kernel` is set, else a copy when `from` is, else a fill.
    const SimKernel* kernel;
    std::vector<unsigned char> args;
    u32 grid_x, grid_y, n_threads;
    void* to;
    const void* from;
    size_t n_bytes;
    int byte;
};
struct Graph {
    std::vector<Operation> operations;
};
struct Stream {
    Graph* capture = nullptr;
};
struct Event {
    std::chrono::steady_clock::time_point at;
};
struct Module {
    void* library;
    // Stays open: the loader knows libraries by their names, and the next module must not get this one's.
    int file;
};

std::mutex memory_lock;
std::map<void*, size_t> allocations;
size_t allocated_bytes = 0;
std::atomic<long long> n_launches{0};
std::atomic<bool> is_lost{false};
thread_local std::string last_text;

long long number(const char* name, long long otherwise) {
    const char* text = std::getenv(name);
    return text && *text ? std::atoll(text) : otherwise;
}

int refuse(Code code, const std::string& text) {
    last_text = text;
    return code;
}

int check_lost() { return is_lost ? refuse(DEVICE_LOST, "the simulated device is lost") : SUCCESS; }

int run_operation(const Operation& op) {
    if (int code = check_lost()) return code;
    if (!op.kernel) {
        if (op.from) std::memmove(op.to, op.from, op.n_bytes);
        else std::memset(op.to, op.byte, op.n_bytes);
        return SUCCESS;
    }
    long long n = ++n_launches;
    if (n == number("FLASHD_SIM_LOSE_DEVICE", -1)) is_lost = true;
    if (int code = check_lost()) return code;
    if (n == number("FLASHD_SIM_FAIL_LAUNCH", -1)) return refuse(LAUNCH_FAILURE, "a launch was made to fail");
    std::string error = sim_run({op.kernel, op.args.data(), op.grid_x, op.grid_y, op.n_threads});
    if (error.empty()) return SUCCESS;
    std::fprintf(stderr, "simulator: %s\n", error.c_str());
    return refuse(LAUNCH_FAILURE, error);
}

/// Runs an operation now, or records it.
int submit(void* stream, Operation op) {
    Stream* s = static_cast<Stream*>(stream);
    if (s && s->capture) {
        s->capture->operations.push_back(std::move(op));
        return SUCCESS;
    }
    return run_operation(op);
}

}  // namespace

EXPORT int hipInit(unsigned) { return SUCCESS; }
EXPORT int hipGetDeviceCount(int* count) {
    *count = (int)number("FLASHD_SIM_DEVICES", 1);
    return *count > 0 ? SUCCESS : refuse(NO_DEVICE, "no simulated device");
}
EXPORT int hipSetDevice(int device) { return device == 0 ? check_lost() : refuse(INVALID_DEVICE, "no such simulated device"); }
EXPORT int hipDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 23: *value = 9; break;    // compute capability, as gfx942
        case 61: *value = 4; break;
        case 63: *value = 4; break;    // multiprocessors
        case 87: *value = 64; break;   // lanes of a wave; a code object for 32 runs as well
        default: return refuse(INVALID_VALUE, "the simulator does not know this attribute");
    }
    return SUCCESS;
}
EXPORT int hipDeviceGetName(char* name, int n_bytes, int) {
    std::snprintf(name, (size_t)n_bytes, "host simulator");
    return SUCCESS;
}
EXPORT int hipRuntimeGetVersion(int* version) {
    *version = 70000000;
    return SUCCESS;
}
EXPORT int hipDriverGetVersion(int* version) { return hipRuntimeGetVersion(version); }
EXPORT int hipMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    std::lock_guard<std::mutex> guard(memory_lock);
    *total_bytes = (size_t)number("FLASHD_SIM_MEMORY_BYTES", DEFAULT_MEMORY_BYTES);
    *free_bytes = *total_bytes > allocated_bytes ? *total_bytes - allocated_bytes : 0;
    return check_lost();
}

EXPORT int hipMalloc(void** address, size_t n_bytes) {
    if (int code = check_lost()) return code;
    std::lock_guard<std::mutex> guard(memory_lock);
    size_t total = (size_t)number("FLASHD_SIM_MEMORY_BYTES", DEFAULT_MEMORY_BYTES);
    if (allocated_bytes + n_bytes > total) return refuse(OUT_OF_MEMORY, "the simulated device is full");
    size_t whole = (n_bytes + 2 * GUARD_BYTES + 255) / 256 * 256;
    auto* base = static_cast<unsigned char*>(std::aligned_alloc(256, whole));
    if (!base) return refuse(OUT_OF_MEMORY, "the host has no memory");
    std::memset(base, GUARD_FILL, GUARD_BYTES);
    std::memset(base + GUARD_BYTES, NAN_FILL, n_bytes);
    std::memset(base + GUARD_BYTES + n_bytes, GUARD_FILL, whole - GUARD_BYTES - n_bytes);
    *address = base + GUARD_BYTES;
    allocations[*address] = n_bytes;
    allocated_bytes += n_bytes;
    return SUCCESS;
}
EXPORT int hipFree(void* address) {
    if (!address) return SUCCESS;
    std::lock_guard<std::mutex> guard(memory_lock);
    auto found = allocations.find(address);
    if (found == allocations.end()) return refuse(INVALID_VALUE, "not an address that hipMalloc gave");
    auto* bytes = static_cast<unsigned char*>(address);
    size_t n_bytes = found->second;
    bool is_intact = true;
    for (size_t i = 0; i < GUARD_BYTES; i++) is_intact = is_intact && bytes[-1 - (ptrdiff_t)i] == GUARD_FILL && bytes[n_bytes + i] == GUARD_FILL;
    allocations.erase(found);
    allocated_bytes -= n_bytes;
    std::free(bytes - GUARD_BYTES);
    if (is_intact) return SUCCESS;
    // A write outside an array is a fault of a kernel that nothing else would show.
    std::fprintf(stderr, "simulator: memory around an allocation of %zu bytes was written\n", n_bytes);
    std::abort();
}
EXPORT int hipHostMalloc(void** address, size_t n_bytes, unsigned) {
    *address = std::aligned_alloc(256, (n_bytes + 255) / 256 * 256);
    return *address ? SUCCESS : refuse(OUT_OF_MEMORY, "the host has no memory");
}
EXPORT int hipHostFree(void* address) {
    std::free(address);
    return SUCCESS;
}

EXPORT int hipMemcpyAsync(void* to, const void* from, size_t n_bytes, int, void* stream) {
    Operation op{};
    op.to = to;
    op.from = from;
    op.n_bytes = n_bytes;
    return n_bytes ? submit(stream, std::move(op)) : check_lost();
}
EXPORT int hipMemsetAsync(void* to, int byte, size_t n_bytes, void* stream) {
    Operation op{};
    op.to = to;
    op.byte = byte;
    op.n_bytes = n_bytes;
    return n_bytes ? submit(stream, std::move(op)) : check_lost();
}

EXPORT int hipStreamCreateWithFlags(void** stream, unsigned) {
    *stream = new Stream;
    return check_lost();
}
EXPORT int hipStreamDestroy(void* stream) {
    delete static_cast<Stream*>(stream);
    return SUCCESS;
}
EXPORT int hipStreamSynchronize(void*) { return check_lost(); }
EXPORT int hipStreamBeginCapture(void* stream, int) {
    static_cast<Stream*>(stream)->capture = new Graph;
    return check_lost();
}
EXPORT int hipStreamEndCapture(void* stream, void** graph) {
    Stream* s = static_cast<Stream*>(stream);
    if (!s->capture) return refuse(CAPTURE_UNSUPPORTED, "no recording was begun");
    *graph = s->capture;
    s->capture = nullptr;
    return check_lost();
}

EXPORT int hipEventCreateWithFlags(void** event, unsigned) {
    *event = new Event;
    return check_lost();
}
EXPORT int hipEventDestroy(void* event) {
    delete static_cast<Event*>(event);
    return SUCCESS;
}
EXPORT int hipEventRecord(void* event, void*) {
    static_cast<Event*>(event)->at = std::chrono::steady_clock::now();
    return check_lost();
}
EXPORT int hipEventSynchronize(void*) { return check_lost(); }
EXPORT int hipEventElapsedTime(float* ms, void* from, void* to) {
    *ms = std::chrono::duration<float, std::milli>(static_cast<Event*>(to)->at - static_cast<Event*>(from)->at).count();
    return SUCCESS;
}

/// The bytes of an ELF file, by the end of its section table, which linkers put last.
static size_t elf_bytes(const unsigned char* image) {
    u64 section_offset;
    u16 section_bytes, n_sections;
    std::memcpy(&section_offset, image + 40, 8);
    std::memcpy(&section_bytes, image + 58, 2);
    std::memcpy(&n_sections, image + 60, 2);
    return section_offset + (size_t)section_bytes * n_sections;
}
EXPORT int hipModuleLoadData(void** module, const void* image) {
    if (int code = check_lost()) return code;
    const auto* bytes = static_cast<const unsigned char*>(image);
    if (std::memcmp(bytes, "\177ELF", 4) != 0) return refuse(INVALID_IMAGE, "not a code object of the simulator");
    int file = (int)syscall(SYS_memfd_create, "flashd-kernels", 0u);
    size_t n_bytes = elf_bytes(bytes);
    if (file < 0 || write(file, bytes, n_bytes) != (ssize_t)n_bytes) return refuse(INVALID_IMAGE, "no file in memory for the code object");
    std::string path = "/proc/self/fd/" + std::to_string(file);
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    const char* reason = library ? nullptr : dlerror();
    if (!library) {
        close(file);
        return refuse(INVALID_IMAGE, reason ? reason : "dlopen");
    }
    *module = new Module{library, file};
    return SUCCESS;
}
EXPORT int hipModuleUnload(void* module) {
    Module* m = static_cast<Module*>(module);
    dlclose(m->library);
    close(m->file);
    delete m;
    return SUCCESS;
}
EXPORT int hipModuleGetFunction(void** function, void* module, const char* name) {
    std::string symbol = std::string("flashd_sim_kernel_") + name;
    *function = dlsym(static_cast<Module*>(module)->library, symbol.c_str());
    return *function ? SUCCESS : refuse(NOT_FOUND, std::string("no kernel ") + name);
}
EXPORT int hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                                 unsigned block_z, unsigned, void* stream, void** params, void** extra) {
    Operation op{};
    op.kernel = static_cast<const SimKernel*>(function);
    if (grid_z != 1 || block_y != 1 || block_z != 1) return refuse(INVALID_VALUE, "blocks have one dimension, grids two");
    if (!grid_x || !grid_y || !block_x) return refuse(INVALID_VALUE, "an empty grid");
    // `extra` is {1, buffer, 2, &bytes, 3}.
    const void* args = params ? params[0] : extra[1];
    if (!params && *static_cast<const size_t*>(extra[3]) != op.kernel->args_bytes) return refuse(INVALID_VALUE, "arguments of another size");
    const auto* bytes = static_cast<const unsigned char*>(args);
    op.args.assign(bytes, bytes + op.kernel->args_bytes);
    op.grid_x = grid_x;
    op.grid_y = grid_y;
    op.n_threads = block_x;
    return submit(stream, std::move(op));
}

EXPORT int hipGraphInstantiate(void** exec, void* graph, void**, char*, size_t) {
    *exec = new Graph(*static_cast<Graph*>(graph));
    return check_lost();
}
EXPORT int hipGraphDestroy(void* graph) {
    delete static_cast<Graph*>(graph);
    return SUCCESS;
}
EXPORT int hipGraphExecDestroy(void* exec) { return hipGraphDestroy(exec); }
EXPORT int hipGraphLaunch(void* exec, void*) {
    for (const Operation& op : static_cast<Graph*>(exec)->operations) {
        if (int code = run_operation(op)) return code;
    }
    return SUCCESS;
}

EXPORT int hipGetLastError() { return SUCCESS; }
EXPORT const char* hipGetErrorName(int code) {
    switch (code) {
        case SUCCESS: return "hipSuccess";
        case INVALID_VALUE: return "hipErrorInvalidValue";
        case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
        case NO_DEVICE: return "hipErrorNoDevice";
        case INVALID_DEVICE: return "hipErrorInvalidDevice";
        case INVALID_IMAGE: return "hipErrorInvalidImage";
        case NOT_FOUND: return "hipErrorNotFound";
        case LAUNCH_FAILURE: return "hipErrorLaunchFailure";
        case DEVICE_LOST: return "hipErrorContextIsDestroyed";
        case CAPTURE_UNSUPPORTED: return "hipErrorStreamCaptureUnsupported";
        default: return "hipErrorUnknown";
    }
}
EXPORT const char* hipGetErrorString(int code) { return last_text.empty() ? hipGetErrorName(code) : last_text.c_str(); }
