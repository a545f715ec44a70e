//! The way into a sublayer: 24 dots of the flattened copies give the mixes, these the weights; the weighed copies are normed.
//!
//! Where the sublayer before has ended with no more than its output, both kernels see the copies as `hyper_post` would leave them, and
//! `hyper_mix`, which alone has a whole row, writes them; `hyper_dots` adds up the experts where even that is left, as `combine` would.
//! `hyper_dots` sums 1,024 columns a block, so that a decode step fills the device with the matrix (1.5 MB at D = 4096, from L2);
//! `hyper_mix` adds the parts in order and does the rest, one block a row. Bound: bytes, 4 HC D read twice (by the dots HC times, from
//! L2) and written once, and 2 D written a row, and 4 * 24 HC D of the matrix for every `rows_per_block` rows; 2 * 25 HC D flops a row.
#include "common/hyper.h"

constexpr u32 PART_COLS = 1024, PART_STRIDE = 32, MAX_DOTS_ROWS = 8, N_THREADS = 256, MAX_WAVES = N_THREADS / WAVE;
/// Columns of a model at most: what a block of `hyper_mix` keeps in registers.
constexpr u32 MAX_CHUNKS = 4;
static_assert(PART_COLS == 4 * N_THREADS && MAX_DOTS_ROWS * PART_STRIDE == N_THREADS, "a thread takes four columns and one sum");

struct HyperMixArgs {
    Step step;
    float* residual;        // [T, HC, D] f32
    const float* mix;       // [MIXES, HC*D] f32
    const float* base;      // [MIXES] f32
    const float* scale;     // [3] f32
    const float* norm;      // [D] f32
    float* weights;         // [T, MIXES] f32: of the sublayer before, then of this one
    u16* y;                 // [T, D] bf16
    float* partials;        // [T, n_parts, PART_STRIDE] f32
    float* output;          // [T, D] f32: the output of the sublayer before, or null: the copies are new
    const float* routed;    // [T * K, D] f32: experts' results that make the output, or null: it is made
    const u32* row_of;      // [T, K]
    const float* shared;    // [T, D] f32
    u32 n_cols, n_iters, top_k, rows_per_block;
    float norm_eps, hc_eps;
};
static_assert(sizeof(HyperMixArgs) == 152, "HyperMixArgs mirrors src/ops/hyper_mix/device.rs");

/// One halving of [`sum_across`]: the lanes' values i and i + HALF are added where bit HALF of the lane says.
template <u32 HALF> DEVICE void sum_halves(float (&v)[32]) {
    bool upper = lane() & HALF;
#pragma unroll
    for (u32 i = 0; i < HALF; i++) {
        // Both are read before one is chosen, or the array goes to memory for a choice of its address.
        float low = v[i], high = v[i + HALF];
        v[i] = (upper ? high : low) + shuffle_xor(upper ? low : high, HALF);
    }
}

/// Sums 32 values over each 32 lanes at once, by halving: lane l gets the sum of value l % 32.
DEVICE float sum_across(float (&v)[32]) {
    sum_halves<16>(v);
    sum_halves<8>(v);
    sum_halves<4>(v);
    sum_halves<2>(v);
    sum_halves<1>(v);
    return WAVE == 64 ? v[0] + shuffle_xor(v[0], 32 % WAVE) : v[0];
}

/// Four flattened columns of a row's copies as they are when the sublayer before has ended. They lie in one copy, since D is a multiple
/// of 4; the first copy's thread keeps the output that it has added up.
DEVICE void load_new(const HyperMixArgs& args, u32 t, u32 flat, float x[4]) {
    u32 d = args.n_cols, copy = flat / d, col = flat % d;
    const float* h = args.residual + (u64)t * HC * d;
    if (!args.output) return load4(h + flat, x);
    float* output = args.output + (u64)t * d + col;
    float o[4], old[HC][4];
#pragma unroll
    for (u32 c = 0; c < HC; c++) load4(h + c * d + col, old[c]);
    if (args.routed) {
        const u32* row_of = args.row_of + (u64)t * args.top_k;
        add_experts(args.routed, row_of, args.top_k, args.shared + (u64)t * d, d, col, o);
        if (copy == 0) store4(output, o);
    } else {
        load4(output, o);
    }
    renew_copy(args.weights + (u64)t * MIXES, copy, o, old, x);
}

/// Block (part, tile): the part's share of the dots and of the sum of squares for some rows.
KERNEL(hyper_dots, HyperMixArgs, N_THREADS) {
    SHARED(float, sums, MAX_DOTS_ROWS * MAX_WAVES * PART_STRIDE);
    u32 n = HC * args.n_cols, part = block_x(), n_parts = ceil_div(n, PART_COLS), n_rows = args.rows_per_block;
    u32 col = part * PART_COLS + 4 * thread(), first_row = block_y() * n_rows;
    float w[MIXES][4];
#pragma unroll
    for (u32 m = 0; m < MIXES; m++) {
        w[m][0] = w[m][1] = w[m][2] = w[m][3] = 0.0f;
        if (col < n) load4(args.mix + (u64)m * n + col, w[m]);
    }
    for (u32 r = 0; r < n_rows; r++) {
        if (!step_row(args.step, first_row + r)) continue;  // the same in the whole block
        float x[4] = {0.0f, 0.0f, 0.0f, 0.0f}, v[32] = {};
        if (col < n) load_new(args, first_row + r, col, x);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
#pragma unroll
            for (u32 m = 0; m < MIXES; m++) v[m] = fma(w[m][i], x[i], v[m]);
            v[MIXES] = fma(x[i], x[i], v[MIXES]);
        }
        float sum = sum_across(v);
        if (lane() < PART_STRIDE) sums[(r * MAX_WAVES + wave()) * PART_STRIDE + lane()] = sum;
    }
    barrier();  // every wave's sums before they are added
    u32 r = thread() / PART_STRIDE, value = thread() % PART_STRIDE;
    if (r >= n_rows || !step_row(args.step, first_row + r)) return;
    float sum = 0.0f;
#pragma unroll
    for (u32 w = 0; w < MAX_WAVES; w++) sum = sum + sums[(r * MAX_WAVES + w) * PART_STRIDE + value];
    args.partials[((u64)(first_row + r) * n_parts + part) * PART_STRIDE + value] = sum;
}

DEVICE float sum_over_row(float v) {
    v = v + shuffle_xor(v, 1);
    return v + shuffle_xor(v, 2);
}
DEVICE float sum_over_column(float v) {
    v = v + shuffle_xor(v, 4);
    return v + shuffle_xor(v, 8);
}

/// comb of one row from its 16 mixes: lane l % 16 holds [l / 4, l % 4]. Nearly doubly stochastic after n_iters rounds.
DEVICE float doubly_stochastic(float m, float eps, u32 n_iters) {
    float top = max_(m, shuffle_xor(m, 1));
    top = max_(top, shuffle_xor(top, 2));
    float v = exp_(m - top);
    v = v / sum_over_row(v) + eps;
    v = v / (sum_over_column(v) + eps);
    for (u32 i = 1; i < n_iters; i++) {
        v = v / (sum_over_row(v) + eps);
        v = v / (sum_over_column(v) + eps);
    }
    return v;
}

/// The first wave makes a row's weights; `pre` goes to shared memory, all of them to `weights`.
DEVICE void make_weights(const HyperMixArgs& args, u32 t, float* pre) {
    u32 n = HC * args.n_cols, n_parts = ceil_div(n, PART_COLS), value = lane() % PART_STRIDE;
    const float* partials = args.partials + (u64)t * n_parts * PART_STRIDE + value;
    float dot = 0.0f;
    for (u32 part = 0; part < n_parts; part++) dot = dot + partials[part * PART_STRIDE];
    float inverse = rsqrt_(shuffle(dot, MIXES) / (float)n + args.norm_eps);
    float m = 0.0f;
    if (value < MIXES) m = dot * inverse * args.scale[value < 2 * HC ? value / HC : 2] + args.base[value];
    float comb = doubly_stochastic(shuffle(m, 2 * HC + lane() % (HC * HC)), args.hc_eps, args.n_iters);
    float* out = args.weights + (u64)t * MIXES;
    float gate = sigmoid(m);
    if (lane() < HC) pre[lane()] = gate + args.hc_eps;
    if (lane() < 2 * HC) out[lane()] = lane() < HC ? gate + args.hc_eps : 2.0f * gate;
    if (lane() < HC * HC) out[2 * HC + lane()] = comb;
}

/// One block a row: weights, new copies, mixed row, norm.
KERNEL(hyper_mix, HyperMixArgs, N_THREADS) {
    SHARED(float, before, MIXES);
    SHARED(float, pre, HC);
    SHARED(float, scratch, MAX_WAVES);
    u32 t = block_x(), d = args.n_cols;
    if (!step_row(args.step, t)) return;
    if (args.output && thread() < MIXES) before[thread()] = args.weights[(u64)t * MIXES + thread()];
    barrier();  // the weights of the sublayer before are kept before this one's take their place
    if (wave() == 0) make_weights(args, t, pre);
    barrier();  // the weights before anyone mixes with them
    float* h = args.residual + (u64)t * HC * d;
    float y[MAX_CHUNKS][4], sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < MAX_CHUNKS; j++) {
        u32 col = 4 * (j * N_THREADS + thread());
        if (col >= d) continue;
        float copy[HC][4];
#pragma unroll
        for (u32 c = 0; c < HC; c++) load4(h + c * d + col, copy[c]);
        if (args.output) {
            float o[4], old[HC][4];
            load4(args.output + (u64)t * d + col, o);
#pragma unroll
            for (u32 i = 0; i < 4 * HC; i++) old[i / 4][i % 4] = copy[i / 4][i % 4];
#pragma unroll
            for (u32 c = 0; c < HC; c++) renew_copy(before, c, o, old, copy[c]), store4(h + c * d + col, copy[c]);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float v = pre[0] * copy[0][i];
#pragma unroll
            for (u32 c = 1; c < HC; c++) v = fma(pre[c], copy[c][i], v);
            y[j][i] = v;
            sum = fma(v, v, sum);
        }
    }
    float r = rsqrt_(block_sum(sum, scratch) / (float)d + args.norm_eps);
#pragma unroll
    for (u32 j = 0; j < MAX_CHUNKS; j++) {
        u32 col = 4 * (j * N_THREADS + thread());
        if (col >= d) continue;
        float w[4];
        load4(args.norm + col, w);
        u32* out = (u32*)(args.y + (u64)t * d + col);
        out[0] = bf16_pair(y[j][0] * r * w[0], y[j][1] * r * w[1]);
        out[1] = bf16_pair(y[j][2] * r * w[2], y[j][3] * r * w[3]);
    }
}
