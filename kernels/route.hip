//! The router: experts and weights of every row, from its logits or from a table by token id.
//!
//! One wave a row: scores into shared memory, then top_k rounds of an argmax over the lanes, ties to the lowest index, -0 equal to +0, NaN
//! last. Bound: E f32 read a row; latency of top_k wave reductions. Scores are summed in the order of choice.
#include "common/math.h"
#include "common/step.h"

namespace route_op {

constexpr u32 ROUTE_WAVES = 4, MAX_EXPERTS = 512;

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
static_assert(sizeof(RouteArgs) == 96, "RouteArgs mirrors src/ops/route.rs");

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
    for (u32 e = lane(), i = 0; e < args.n_experts; e += WAVE, i++) {
        if (taken >> i & 1) continue;
        u64 key = choice_key(args.bias ? scores[e] + args.bias[e] : scores[e], e);
        best = key > best ? key : best;
    }
    return 0xFFFFFFFFu - (u32)wave_max_key(best);
}

KERNEL(route, RouteArgs, ROUTE_WAVES * WAVE) {
    SHARED(float, all_scores, ROUTE_WAVES * MAX_EXPERTS);
    u32 row = block_x() * ROUTE_WAVES + wave();
    if (row >= args.step.counts->n_rows) return;
    float* scores = all_scores + wave() * MAX_EXPERTS;
    const float* logits = args.logits + (u64)row * args.n_experts;
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

}  // namespace route_op
