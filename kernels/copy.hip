//! Copies between places in device memory: whole KV blocks, and slots' rings to and from checkpoints.
//!
//! Bound: bytes, twice those copied. Sixteen at a time where both addresses allow it.
#include "common/device.h"

constexpr u64 PART_BYTES = 64 * 1024;

struct CopyItem {
    u64 src, dst, n_bytes;
};
static_assert(sizeof(CopyItem) == 24, "CopyItem mirrors src/ops/copy.rs");

struct CopyArgs {
    const CopyItem* items;  // [n]
    u32 n, pad;
};
static_assert(sizeof(CopyArgs) == 16, "CopyArgs mirrors src/ops/copy.rs");

/// Block (part, item): 64 KiB of one copy.
KERNEL(copy, CopyArgs, 256) {
    CopyItem item = args.items[block_y()];
    u64 first = block_x() * PART_BYTES;
    if (first >= item.n_bytes) return;
    u64 n = item.n_bytes - first < PART_BYTES ? item.n_bytes - first : PART_BYTES;
    u64 src = item.src + first, dst = item.dst + first;
    u64 done = 0;
    if ((src | dst) % 16 == 0) {
        for (u64 at = thread() * 16; at + 16 <= n; at += n_threads() * 16) store16((void*)(dst + at), load16((const void*)(src + at)));
        done = n / 16 * 16;
    }
    for (u64 at = done + thread() * 4; at < n; at += n_threads() * 4) *(u32*)(dst + at) = *(const u32*)(src + at);
}
