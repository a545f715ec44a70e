//! The slots' rings take the last rows of every run, for the kernels that do it once no query of the step needs the rows they replace.
#pragma once
#include "row.h"

struct RingStoreArgs {
    Step step;
    const u8* rows;      // [T, 584]
    u8* window_ring;     // slot 0's [n_window_ring, 584]
    const float* a;      // [T, CW] f32
    const float* s;      // [T, CW] f32
    const float* ape;    // [ratio, CW] f32
    u8* raw_ring;        // slot 0's [n_raw_ring, 2*CW] f32
    const float* ia;     // [T, IW] f32
    const float* is;     // [T, IW] f32
    const float* iape;   // [ratio, IW] f32
    u8* index_ring;      // slot 0's [n_index_ring, 2*IW] f32
    u64 slot_stride_bytes;
    u32 n_window_ring, n_raw_ring, n_index_ring, n_raw_cols, n_index_cols, ratio;
};
static_assert(sizeof(RingStoreArgs) == 144, "RingStoreArgs mirrors src/ops/ring_store.rs");

/// A raw row: values, then logits with the positional term.
DEVICE void store_raw(const float* a, const float* s, const float* ape, u32 n_cols, u32 t, u32 place, float* to) {
    for (u32 col = thread(); col < n_cols; col += n_threads()) {
        to[col] = a[(u64)t * n_cols + col];
        to[n_cols + col] = s[(u64)t * n_cols + col] + ape[place * n_cols + col];
    }
}

/// One row, by all threads of a block, where its position is among the last of its run that the ring holds, so that no two rows meet
/// in one place.
DEVICE void store_in_rings(const RingStoreArgs& args, u32 t, const StepRow& row) {
    const StepRun& run = args.step.runs[row.run];
    u32 position = row.position, n_after = run.first_row + run.n_rows - t;  // rows of the run from this one on
    u64 slot = run.slot * args.slot_stride_bytes;
    if (args.window_ring && n_after <= args.n_window_ring) {
        u64* to = (u64*)(args.window_ring + slot + (u64)(position % args.n_window_ring) * KV_ROW_BYTES);
        const u64* from = (const u64*)(args.rows + (u64)t * KV_ROW_BYTES);
        for (u32 i = thread(); i < KV_ROW_BYTES / 8; i += n_threads()) to[i] = from[i];
    }
    if (args.raw_ring && n_after <= args.n_raw_ring) {
        float* to = (float*)(args.raw_ring + slot) + (u64)(position % args.n_raw_ring) * 2 * args.n_raw_cols;
        store_raw(args.a, args.s, args.ape, args.n_raw_cols, t, position % args.ratio, to);
    }
    if (args.index_ring && n_after <= args.n_index_ring) {
        float* to = (float*)(args.index_ring + slot) + (u64)(position % args.n_index_ring) * 2 * args.n_index_cols;
        store_raw(args.ia, args.is, args.iape, args.n_index_cols, t, position % args.ratio, to);
    }
}
