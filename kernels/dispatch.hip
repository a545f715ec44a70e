//! Sorts the (row, choice) pairs of a step by expert, then row, and makes the work items of `expert_linear`: all on the device.
//!
//! One block, since a step has at most some ten thousand pairs. Each wave owns a contiguous range of pairs: it counts them by expert,
//! the counts are summed over (expert, wave), and it then places its pairs in ascending order, a wave's width at a time. Counts are integers
//! and places follow from the pairs alone, so the result is the same every time. Bound: latency; 2 reads and 4 writes a pair.
#include "common/step.h"

namespace dispatch_op {

constexpr u32 DISPATCH_THREADS = 512, DISPATCH_WAVES = DISPATCH_THREADS / WAVE, MAX_EXPERTS = 512;

struct DispatchArgs {
    Step step;
    const u32* experts;    // [T, K], below E
    const float* weights;  // [T, K] f32
    u32* row_of;           // [T, K]: the sorted row of a pair
    u32* row_token;        // [T * K]: the row of the step
    float* row_weight;     // [T * K] f32
    u32* expert_first;     // [E + 1]: the first sorted row of each expert
    u32* items;            // [at most T * K / rows_per_item + E and T * K, 2]: expert, first sorted row
    u32* n_items;          // [1]
    u32 n_experts, top_k, rows_per_item, pad;
};
static_assert(sizeof(DispatchArgs) == 112, "DispatchArgs mirrors src/ops/dispatch.rs");

/// The sum over the lanes before this one; `total` over all.
DEVICE u32 sum_before(u32 v, u32* total) {
    u32 sum = v;
    for (u32 distance = 1; distance < WAVE; distance *= 2) {
        u32 other = shuffle(sum, lane() >= distance ? lane() - distance : lane());
        sum += lane() >= distance ? other : 0;
    }
    *total = shuffle(sum, WAVE - 1);
    return sum - v;
}

/// counts[w][e] of each wave's pairs; `next` keeps them.
DEVICE void count_pairs(const DispatchArgs& args, u32 first, u32 end, u32* counts) {
    for (u32 e = lane(); e < args.n_experts; e += WAVE) counts[e] = 0;
    // Orders the zeros before the counts.
    wave_barrier();
    for (u32 i = first + lane(); i < end; i += WAVE) atomic_add(&counts[args.experts[i]], 1);
}

/// Counts become first places: by expert, then by wave. The first wave does it, and writes expert_first and the items.
DEVICE void place_experts(const DispatchArgs& args, u32* counts) {
    u32 row = 0, item = 0;
    for (u32 base = 0; base < args.n_experts; base += WAVE) {
        u32 e = base + lane(), n = 0, n_rows, n_items;
        bool is_expert = e < args.n_experts;
        for (u32 w = 0; w < DISPATCH_WAVES && is_expert; w++) n += counts[w * MAX_EXPERTS + e];
        u32 first = row + sum_before(n, &n_rows);
        u32 first_item = item + sum_before(ceil_div(n, args.rows_per_item), &n_items);
        row += n_rows;
        item += n_items;
        if (!is_expert) continue;
        args.expert_first[e] = first;
        for (u32 i = 0; i * args.rows_per_item < n; i++) {
            args.items[2 * (first_item + i)] = e;
            args.items[2 * (first_item + i) + 1] = first + i * args.rows_per_item;
        }
        for (u32 w = 0; w < DISPATCH_WAVES; w++) {
            u32 own = counts[w * MAX_EXPERTS + e];
            counts[w * MAX_EXPERTS + e] = first;
            first += own;
        }
    }
    if (lane() == 0) {
        args.expert_first[args.n_experts] = row;
        *args.n_items = item;
    }
}

KERNEL(dispatch, DispatchArgs, DISPATCH_THREADS) {
    SHARED(u32, all_counts, DISPATCH_WAVES * MAX_EXPERTS);
    u32 n_pairs = args.step.counts->n_rows * args.top_k;
    u32 per_wave = ceil_div(n_pairs, DISPATCH_WAVES);
    u32 first = min_(wave() * per_wave, n_pairs), end = min_(first + per_wave, n_pairs);
    u32* places = all_counts + wave() * MAX_EXPERTS;
    count_pairs(args, first, end, places);
    // Orders all waves' counts before their sum.
    barrier();
    if (wave() == 0) place_experts(args, all_counts);
    // Orders the places before the waves use them.
    barrier();
    for (u32 base = first; base < end; base += WAVE) {
        u32 i = base + lane();
        bool is_pair = i < end;
        u32 expert = is_pair ? args.experts[i] : 0xFFFFFFFFu;
        // This pair's rank among those of its expert in this round, and how many they are.
        u32 rank = 0, n_same = 0;
        for (u32 other = 0; other < WAVE; other++) {
            bool is_same = shuffle(expert, other) == expert;
            rank += is_same && other < lane();
            n_same += is_same;
        }
        u32 row = is_pair ? places[expert] + rank : 0;
        // Orders the reads of the places before the last pair of each expert moves them on, and that before the next round.
        wave_barrier();
        if (is_pair && rank + 1 == n_same) places[expert] += n_same;
        wave_barrier();
        if (!is_pair) continue;
        args.row_of[i] = row;
        args.row_token[row] = i / args.top_k;
        args.row_weight[row] = args.weights[i];
    }
}

}  // namespace dispatch_op
