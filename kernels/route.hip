//! The router, `route`: experts and weights of every row, from its logits or from a table by token id; then `dispatch`: the (row,
//! choice) pairs sorted by expert, then row, and the work items of `expert_linear`. For few rows `route_few` does both in one block, while
//! other blocks make the shared expert's activation, whose inputs are there by then.
//!
//! route: one wave a row: scores into shared memory, then top_k rounds of an argmax over the lanes, ties to the lowest index, -0 equal
//! to +0, NaN last. Bound: E f32 read a row; latency of top_k wave reductions. Scores are summed in the order of choice.
//!
//! dispatch: one block, since a step has at most some ten thousand pairs. Each wave owns a contiguous range of pairs: it counts them by
//! expert, the counts are summed over (expert, wave), and it then places its pairs in ascending order, a wave's width at a time. Counts are
//! integers and places follow from the pairs alone, so the result is the same every time. Bound: latency; 2 reads and 4 writes a pair.
#include "common/math.h"
#include "common/step.h"
#include "common/swiglu.h"

namespace route_op {

constexpr u32 ROUTE_WAVES = 4, MAX_EXPERTS = 512;
constexpr u32 DISPATCH_THREADS = 512, DISPATCH_WAVES = DISPATCH_THREADS / WAVE;

struct RouteArgs {
    Step step;
    const float* logits;  // [T, E] f32
    const float* bias;    // [E] f32, or none
    const u16* tid2eid;   // [V, K] u16, or none
    const u32* ids;       // [T]: resolved token ids, below V
    u32* experts;         // [T, K]
    float* weights;       // [T, K] f32
    u32 n_experts, top_k;
    float scale;
    u32 pad;
};
static_assert(sizeof(RouteArgs) == 96, "RouteArgs mirrors src/ops/route/device.rs");

/// A key whose order is that of (value, lowest index first); NaN below every number, 0 is nothing.
DEVICE u64 choice_key(float value, u32 expert) {
    u32 b = bits(value + 0.0f);
    u32 ordered = value != value ? 0 : b & 0x80000000u ? ~b : b | 0x80000000u;
    return (u64)ordered << 32 | (0xFFFFFFFFu - expert);
}

DEVICE u64 wave_max_key(u64 key) {
    for (u32 mask = WAVE / 2; mask > 0; mask /= 2) {
        u64 other = shuffle_xor(key, mask);
        key = other > key ? other : key;
    }
    return key;
}

/// The best expert whose bit in `taken` (this lane's experts: lane, lane + WAVE, ...) is not set.
DEVICE u32 best_expert(const RouteArgs& args, const float* scores, u32 taken) {
    u64 best = 0;
    PLAIN_LOOP
    for (u32 e = lane(), i = 0; e < args.n_experts; e += WAVE, i++) {
        if (taken >> i & 1) continue;
        u64 key = choice_key(args.bias ? scores[e] + args.bias[e] : scores[e], e);
        best = key > best ? key : best;
    }
    return 0xFFFFFFFFu - (u32)wave_max_key(best);
}

/// One wave's row, which must be real; `scores` is shared, [MAX_EXPERTS].
DEVICE void route_row(const RouteArgs& args, u32 row, float* scores) {
    const float* logits = args.logits + (u64)row * args.n_experts;
    PLAIN_LOOP
    for (u32 e = lane(); e < args.n_experts; e += WAVE) scores[e] = sqrt_(softplus(logits[e]));
    // Orders the scores before other lanes' reads.
    wave_barrier();

    u32 chosen = 0, taken = 0;  // lane k keeps the k-th choice
    for (u32 k = 0; k < args.top_k; k++) {
        u32 e = args.tid2eid ? args.tid2eid[(u64)args.ids[row] * args.top_k + k] : best_expert(args, scores, taken);
        if (e % WAVE == lane()) taken |= 1u << e / WAVE;
        if (k == lane()) chosen = e;
    }
    // A table's entry may be wrong, a choice is not: every expert written exists.
    chosen = min_(chosen, args.n_experts - 1);
    float sum = 0.0f, score = scores[chosen];
    for (u32 k = 0; k < args.top_k; k++) sum = sum + shuffle(score, k);
    if (lane() < args.top_k) {
        args.experts[(u64)row * args.top_k + lane()] = chosen;
        args.weights[(u64)row * args.top_k + lane()] = score / sum * args.scale;
    }
}

KERNEL(route, RouteArgs, ROUTE_WAVES * WAVE) {
    SHARED(float, all_scores, ROUTE_WAVES * MAX_EXPERTS);
    u32 row = block_x() * ROUTE_WAVES + wave();
    if (row < args.step.counts->n_rows) route_row(args, row, all_scores + wave() * MAX_EXPERTS);
}

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
static_assert(sizeof(DispatchArgs) == 112, "DispatchArgs mirrors src/ops/route/dispatch.rs");

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

/// All pairs, by one block; `all_counts` is shared, [DISPATCH_WAVES * MAX_EXPERTS].
DEVICE void sort_pairs(const DispatchArgs& args, u32* all_counts) {
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

KERNEL(dispatch, DispatchArgs, DISPATCH_THREADS) {
    SHARED(u32, all_counts, DISPATCH_WAVES * MAX_EXPERTS);
    sort_pairs(args, all_counts);
}

struct RouteFewArgs {
    RouteArgs route;
    DispatchArgs dispatch;
    SwigluArgs shared;
};
static_assert(sizeof(RouteFewArgs) == 264, "RouteFewArgs mirrors src/ops/route/few.rs");

/// The first block routes and sorts; the others take 1,024 columns of a row of the shared expert each.
KERNEL(route_few, RouteFewArgs, DISPATCH_THREADS) {
    SHARED(u32, memory, DISPATCH_WAVES * MAX_EXPERTS);
    if (block_x() > 0) {
        u32 n_chunks = ceil_div(args.shared.n_cols, SWIGLU_COLS), i = block_x() - 1;
        return swiglu_row(args.shared, i / n_chunks, i % n_chunks);
    }
    for (u32 row = wave(); row < args.route.step.counts->n_rows; row += DISPATCH_WAVES) {
        route_row(args.route, row, (float*)memory + wave() * MAX_EXPERTS);
        // Orders the reads of this row's scores before the next row's take their place.
        wave_barrier();
    }
    // Orders all choices before they are sorted, and the scores' last reads before the counts take their place.
    barrier();
    sort_pairs(args.dispatch, memory);
}

}  // namespace route_op
