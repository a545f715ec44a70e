//! Indexer scores: score[t, g] = sum over heads, ascending, of w[t, h] * scale * relu(iq[t, h] . key[g]).
//!
//! Keys are the M operand and heads the N operand of the tile. A dot of 128 products of E2M1 values is exact in f32 while the
//! scales of the groups of 32 lie within a factor of 2^8, whatever the order; K is walked in 8 steps, the first 64 columns first,
//! four columns of each of the four quarters of 16 a step. Heads are added by fused multiply-add from +0 in ascending order. A NaN
//! in a query or key shows as NaN in the score.
//! Bound: 2 * 128 IH flops for each pair of a row and a visible group (at 64 heads, 2,048 rows and 8,192 groups 275 Gflop); bytes,
//! 68 a group for every `rows_per_block` rows, 256 IH for every 64 groups and row, 4 a score.
#include "common/row.h"

constexpr u32 KEYS = 64, N_THREADS = 128;
constexpr u32 N_WAVES = N_THREADS / WAVE, KEY_TILES = KEYS / TILE_M / N_WAVES, K_STEPS = INDEX_DIMS / TILE_K;
/// Heads whose products are in shared memory at a time, and floats of one head's row there: one more than keys, against conflicts.
constexpr u32 HEADS = 32, HEAD_STRIDE = KEYS + 1;

struct IndexScoreArgs {
    Step step;
    const u16* iq;   // [T, IH, ID] bf16
    const float* w;  // [T, IH] f32
    u64 blocks;      // block 0's [256/ratio, 68] u8
    u64 block_stride_bytes;
    float* scores;  // [n_tile_rows, max_groups] f32
    u32 first_row, n_tile_rows, n_heads, head_dim, max_groups, ratio;
    float scale;
    u32 k, rows_per_block, pad;
};
static_assert(sizeof(IndexScoreArgs) == 112, "IndexScoreArgs mirrors src/ops/index_score/device.rs");

/// A wave's keys as operands, all of K.
struct Keys {
    FragA a[KEY_TILES][K_STEPS];
};

/// Loads the wave's keys of the block's 64; groups past the last become zeros.
DEVICE void load_keys(const IndexScoreArgs& args, const StepRun& run, u32 first_key, u32 n_groups, Keys& keys) {
    constexpr u32 ROWS = A_ELEMS / 4;  // rows of a tile that a lane holds
#pragma unroll
    for (u32 tile = 0; tile < KEY_TILES; tile++) {
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            u32 group = first_key + (wave() * KEY_TILES + tile) * TILE_M + a_row(lane(), 2 * r);
            const u8* row = nullptr;
            if (group < n_groups) {
                row = (const u8*)group_row(
                    args.step, run, args.blocks, args.block_stride_bytes, args.ratio, INDEX_ROW_BYTES, group);
            }
#pragma unroll
            for (u32 span = 0; span < 2; span++) {
                u32 pairs[8] = {};
                u32 col = span * 64 + quarter() * 16;
                if (row) index_values8(row, col, pairs), index_values8(row, col + 8, pairs + 4);
#pragma unroll
                for (u32 step = 0; step < 4; step++) {
                    FragA& a = keys.a[tile][span * 4 + step];
                    // A lane's registers alternate between its rows, then go on in K.
                    a.v[r] = pairs[2 * step];
                    a.v[ROWS + r] = pairs[2 * step + 1];
                }
            }
        }
    }
}

/// One tile of heads as operands, all of K.
DEVICE void load_heads(const IndexScoreArgs& args, u32 t, u32 first_head, FragB out[K_STEPS]) {
    u32 head = first_head + b_col(lane(), 0);
#pragma unroll
    for (u32 span = 0; span < 2; span++) {
        U4 v[2] = {};
        if (head < args.n_heads) {
            const u16* from = args.iq + ((u64)t * args.n_heads + head) * INDEX_DIMS + span * 64 + quarter() * 16;
            v[0] = load16(from);
            v[1] = load16(from + 8);
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            out[span * 4 + half * 2] = {{v[half].x, v[half].y}};
            out[span * 4 + half * 2 + 1] = {{v[half].z, v[half].w}};
        }
    }
}

/// Products of the wave's keys with heads first_head .. first_head + TILE_N, weighed later: relu(dot) to shared memory.
DEVICE void store_dots(const Keys& keys, const FragB heads[K_STEPS], u32 place, float* dots) {
#pragma unroll
    for (u32 tile = 0; tile < KEY_TILES; tile++) {
        FragC c = {};
#pragma unroll
        for (u32 step = 0; step < K_STEPS; step++) mma(c, keys.a[tile][step], heads[step]);
        u32 first = (wave() * KEY_TILES + tile) * TILE_M;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float dot = c.v[i] < 0.0f ? 0.0f : c.v[i];
            dots[(place + c_col(lane(), i)) * HEAD_STRIDE + first + c_row(lane(), i)] = dot;
        }
    }
}

/// One row's scores for the block's keys.
DEVICE void score_row(const IndexScoreArgs& args, u32 t, u32 first_key, u32 n_groups, const Keys& keys, float* dots) {
    const float* w = args.w + (u64)t * args.n_heads;
    float score = 0.0f;
    for (u32 first = 0; first < args.n_heads; first += HEADS) {
        u32 n = min_(args.n_heads - first, HEADS);
        barrier();  // the heads before have been added by all
        for (u32 head = 0; head < n; head += TILE_N) {
            FragB heads[K_STEPS];
            load_heads(args, t, first + head, heads);
            store_dots(keys, heads, head, dots);
        }
        barrier();  // all dots of these heads before they are added
        if (thread() >= KEYS) continue;
        for (u32 head = 0; head < n; head++) {
            score = fma(w[first + head] * args.scale, dots[head * HEAD_STRIDE + thread()], score);
        }
    }
    u32 group = first_key + thread();
    if (thread() < KEYS && group < n_groups) args.scores[(u64)(t - args.first_row) * args.max_groups + group] = score;
}

/// Block (keys, rows): 64 keys for `rows_per_block` rows, which share them while they are of one run.
KERNEL(index_score, IndexScoreArgs, N_THREADS) {
    SHARED(float, dots, HEADS * HEAD_STRIDE);
    u32 first_key = block_x() * KEYS, loaded_run = NO_RUN, loaded_groups = 0;
    Keys keys = {};
    for (u32 i = 0; i < args.rows_per_block; i++) {
        u32 tile_row = block_y() * args.rows_per_block + i, t = args.first_row + tile_row;
        if (tile_row >= args.n_tile_rows) return;
        const StepRow* row = step_row(args.step, t);
        if (!row) continue;  // the same in the whole block, as is all of the following
        u32 n_groups = min_(visible_groups(row->position, args.ratio), args.max_groups);
        if (n_groups <= args.k || first_key >= n_groups) continue;
        // A later row of the run may see more of these keys.
        if (row->run != loaded_run || (loaded_groups < n_groups && loaded_groups < first_key + KEYS)) {
            load_keys(args, args.step.runs[row->run], first_key, n_groups, keys);
            loaded_run = row->run, loaded_groups = n_groups;
        }
        score_row(args, t, first_key, n_groups, keys, dots);
    }
}
