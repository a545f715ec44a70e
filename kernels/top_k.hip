//! The k best groups of each row that sees more than k: score descending, ties to the lowest index, out in ascending order.
//!
//! Scores are compared as ordered bits: -0 equals +0, NaN is the lowest. Four passes of 8 bits find the k-th key by counting in
//! shared memory, a fifth writes what lies above it and the first of what equals it. Bound: bytes, 5 * 4 a group (262,144 groups:
//! 5.2 MB by one block, mostly from L2).
#include "common/row.h"

constexpr u32 N_THREADS = 512, MAX_WAVES = N_THREADS / WAVE, BINS = 256, LANE_BINS = BINS / WAVE;

struct TopKArgs {
    Step step;
    const float* scores;  // [n_tile_rows, max_groups] f32
    u32* chosen;          // [T, k]
    u32 first_row, n_tile_rows, max_groups, k, ratio, pad;
};
static_assert(sizeof(TopKArgs) == 72, "TopKArgs mirrors src/ops/top_k/device.rs");

/// An integer in the order of the scores.
DEVICE u32 order_key(float score) {
    if (score != score) return 0;
    u32 b = score == 0.0f ? 0 : bits(score);
    return b >> 31 ? ~b : b | 0x80000000u;
}

/// Counts the digit at `shift` of all keys that agree with `prefix` above it.
DEVICE void count_digits(const float* scores, u32 n, u32 prefix, u32 shift, u32* counts) {
    for (u32 first = 0; first < n; first += N_THREADS) {
        u32 i = first + thread(), key = i < n ? order_key(scores[i]) : 0;
        bool counts_here = i < n && (u64)key >> (shift + 8) == (u64)prefix >> (shift + 8);
        u32 digit = key >> shift & 0xFF;
        // Rows full of one score would queue up at one counter: a wave that agrees counts at once.
        u32 first_digit = shuffle(digit, 0);
        u64 agree = wave_ballot(counts_here && digit == first_digit);
        if (lane() == 0 && agree) atomic_add(&counts[first_digit], popcount(agree));
        if (counts_here && digit != first_digit) atomic_add(&counts[digit], 1);
    }
}

/// The first wave finds the digit of the `need`-th largest key, and how many of its digit are still needed.
DEVICE void find_digit(const u32* counts, u32 need, u32* digit_out, u32* need_out) {
    // Lane l has the l-th highest bins.
    u32 top = BINS - 1 - lane() * LANE_BINS, mine = 0;
#pragma unroll
    for (u32 i = 0; i < LANE_BINS; i++) mine += counts[top - i];
    u32 upto = mine;
#pragma unroll
    for (u32 distance = 1; distance < WAVE; distance *= 2) {
        u32 before = shuffle(upto, (lane() - distance) % WAVE);
        if (lane() >= distance) upto += before;
    }
    u32 above = upto - mine;
    if (above >= need || upto < need) return;
    for (u32 i = 0; i < LANE_BINS; i++) {
        u32 count = counts[top - i];
        if (above + count >= need) {
            *digit_out = top - i;
            *need_out = need - above;
            return;
        }
        above += count;
    }
}

/// Writes the indices of keys above the threshold and of the first `n_equal` that equal it.
DEVICE void write_chosen(const float* scores, u32 n, u32 threshold, u32 n_equal, u32* wave_counts, u32* out) {
    u64 below = ((u64)1 << lane()) - 1;
    u32 n_above = 0, n_same = 0;  // so far
    for (u32 first = 0; first < n; first += N_THREADS) {
        u32 i = first + thread(), key = i < n ? order_key(scores[i]) : 0;
        bool is_above = i < n && key > threshold, is_same = i < n && key == threshold;
        u64 aboves = wave_ballot(is_above), sames = wave_ballot(is_same);
        barrier();  // the counts of the round before have been read
        if (lane() == 0) wave_counts[2 * wave()] = popcount(aboves), wave_counts[2 * wave() + 1] = popcount(sames);
        barrier();  // the counts of all waves before they are added
        u32 above = n_above + popcount(aboves & below), same = n_same + popcount(sames & below);
        for (u32 w = 0; w < n_waves(); w++) {
            u32 a = wave_counts[2 * w], s = wave_counts[2 * w + 1];
            if (w < wave()) above += a, same += s;
            n_above += a, n_same += s;
        }
        if (is_above || (is_same && same < n_equal)) out[above + min_(same, n_equal)] = i;
    }
}

/// One block a row of the tile.
KERNEL(top_k, TopKArgs, N_THREADS) {
    SHARED(u32, counts, BINS);
    SHARED(u32, wave_counts, 2 * MAX_WAVES);
    SHARED(u32, found, 2);
    u32 t = args.first_row + block_x();
    const StepRow* row = step_row(args.step, t);
    if (!row || args.k == 0) return;
    u32 n = visible_groups(row->position, args.ratio);
    if (n <= args.k || n > args.max_groups) return;
    const float* scores = args.scores + (u64)block_x() * args.max_groups;
    u32 prefix = 0, need = args.k;
    for (i32 shift = 24; shift >= 0; shift -= 8) {
        if (thread() < BINS) counts[thread()] = 0;
        barrier();  // counters are zero before anyone counts
        count_digits(scores, n, prefix, (u32)shift, counts);
        barrier();  // all is counted before the first wave looks
        if (wave() == 0) find_digit(counts, need, &found[0], &found[1]);
        barrier();  // the digit is found before anyone goes on
        prefix |= found[0] << shift;
        need = found[1];
    }
    write_chosen(scores, n, prefix, need, wave_counts, args.chosen + (u64)t * args.k);
}
