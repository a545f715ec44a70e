//! Rows of the window as they are stored: norm with a weight, rotation, FP8 in groups of 64, bf16 for the rotary columns.
//!
//! Bound: bytes, 4 DH read and 584 written a row; in a decode step the latency of one wave.
#include "common/row.h"

constexpr u32 ROWS_PER_BLOCK = 4;

struct KvRowArgs {
    Step step;
    const float* x;       // [T, DH] f32
    const float* weight;  // [DH] f32
    const float* freqs;   // [32] f32
    u8* rows;             // [T, 584]
    u32 head_dim;
    float eps;
};
static_assert(sizeof(KvRowArgs) == 72, "KvRowArgs mirrors src/ops/kv_row.rs");

/// One wave a row, one after the other where there are fewer waves.
KERNEL(kv_row, KvRowArgs, 128) {
    for (u32 i = wave(); i < ROWS_PER_BLOCK; i += n_waves()) {
        u32 t = block_x() * ROWS_PER_BLOCK + i;
        const StepRow* row = step_row(args.step, t);
        if (!row) return;
        WaveRow v;
        load_row(v, args.x + (u64)t * KV_DIMS);
        norm_row(v, args.weight, args.eps);
        rotate_row(v, row->position, args.freqs);
        store_kv_row(v, args.rows + (u64)t * KV_ROW_BYTES);
    }
}
