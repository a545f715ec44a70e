//! Tokens and log-probabilities from rows of logits, one block a row, so that only ids and the numbers asked for go home.
//!
//! The rules are those of src/sample: edits (bias, penalties, bans), temperature, top-k, top-p, min-p, then the largest of
//! logit / T - ln(-ln u); equal logits stand in the order of their ids. What top-k and top-p keep is always a beginning of
//! that order, so both are one search: an entry's place is a 64-bit number, and eight digits of it are found by counting
//! entries or adding their masses in shared memory. Masses are whole numbers of 2^-46 and are added as integers: the result
//! does not depend on who came first. Edits are made in the row itself and undone.
//!
//! Bound: a block reads its row from L2 some times, 4 bytes an entry: greedy once, log-probabilities 4 to 11 times more, noise
//! twice, top-k and top-p up to 8 times each; noise costs two logarithms in f64 for each entry that can still win.
#include "common/row.h"

constexpr u32 N_THREADS = 512, MAX_WAVES = N_THREADS / 32, DIGITS = 256, LANE_DIGITS = DIGITS / WAVE, UNROLL = 8;
/// Log-probabilities that a row can give.
constexpr u32 MAX_TOP = 20;
/// `SampleResult::token` where nothing can be drawn.
constexpr u32 NO_TOKEN = 0xFFFFFFFFu;
constexpr float INFINITE = __builtin_bit_cast(float, 0x7F800000), LOGPROB_FLOOR = -9999.0f;
/// No Gumbel draw is larger.
constexpr double MAX_GUMBEL = 17.329;
/// The mass of the likeliest entry.
constexpr double MASS_ONE = 70368744177664.0;
/// Places hold ids in this many bits.
constexpr u32 ID_BITS = 24, ID_MASK = (1u << ID_BITS) - 1;
/// `SampleRow::flags`: draw a token; its log-probability, too; log-probability of a given token; the token becomes the slot's last.
constexpr u32 DRAW = 1, LOGPROBS = 2, SCORE = 4, KEEP = 8;
/// Kinds of edits, in their order.
constexpr u32 BIAS = 0, REPEAT = 1, PENALISE = 2, N_EDIT_KINDS = 4;

struct SampleRow {
    u64 seed;
    u32 flags, slot, position, choice;
    float temperature;  // 0: greedy
    u32 top_k;
    float top_p, min_p, repetition, presence, frequency;
    u32 target, n_top, first_edit, n_edits[N_EDIT_KINDS];
};
static_assert(sizeof(SampleRow) == 80, "SampleRow mirrors src/ops/sample/device.rs");

/// An edit of one entry. While edits are in force, `value` is what the entry was before.
struct RowEdit {
    u32 token;
    float value;
};
static_assert(sizeof(RowEdit) == 8, "RowEdit mirrors src/ops/sample/device.rs");

struct SampleResult {
    u32 token;
    float logprob;
    u32 rank;
    float target_logprob;
    u32 target_rank, n_top, pad0, pad1;
    u32 top[MAX_TOP];
    float top_logprobs[MAX_TOP];
};
static_assert(sizeof(SampleResult) == 192, "SampleResult mirrors src/ops/sample/device.rs");

struct SampleArgs {
    Step step;
    float* logits;          // [R, V] f32
    const SampleRow* rows;  // [R]
    RowEdit* edits;
    SampleResult* results;  // [R]
    u32* slot_tokens;       // [n_slots]
    u32 n_vocab, pad;
};
static_assert(sizeof(SampleArgs) == 80, "SampleArgs mirrors src/ops/sample/device.rs");

/// A digit, how much is still needed inside it, and how much it holds.
struct Found {
    u64 need, amount;
    u32 digit, pad;
};

/// Shared memory of a block.
struct Scratch {
    u64 partial[MAX_WAVES], top[MAX_TOP];
    Found found;
    u32 low[DIGITS], high[DIGITS];  // amounts by digit
    u32 n_top;
};

/// A row in memory, and its largest entry where that is known.
struct Row {
    const float* x;  // [n]
    u32 n;
    float max;
};

DEVICE u64 block_max(u64 v, Scratch& s) {
#pragma unroll
    for (u32 mask = WAVE / 2; mask > 0; mask /= 2) {
        u64 other = shuffle_xor(v, mask);
        v = other > v ? other : v;
    }
    barrier();  // the parts of the reduction before have been read
    if (lane() == 0) s.partial[wave()] = v;
    barrier();  // all waves' parts are there
    for (u32 w = 0; w < n_waves(); w++) v = s.partial[w] > v ? s.partial[w] : v;
    return v;
}

DEVICE u64 block_sum(u64 v, Scratch& s) {
#pragma unroll
    for (u32 mask = WAVE / 2; mask > 0; mask /= 2) v += shuffle_xor(v, mask);
    barrier();  // the parts of the reduction before have been read
    if (lane() == 0) s.partial[wave()] = v;
    barrier();  // all waves' parts are there
    u64 sum = 0;
    for (u32 w = 0; w < n_waves(); w++) sum += s.partial[w];
    return sum;
}

/// An integer in the order of floats, -0 equal to +0; of NaNs, positive ones above infinity and negative ones below.
DEVICE u32 order_key(float x) {
    u32 b = x == 0.0f ? 0 : bits(x);
    return b >> 31 ? ~b : b | 0x80000000u;
}
DEVICE float key_value(u32 key) { return from_bits(key >> 31 ? key & 0x7FFFFFFFu : ~key); }
DEVICE u64 order_key_f64(double x) {
    u64 b = __builtin_bit_cast(u64, x + 0.0);
    return b >> 63 ? ~b : b | (u64)1 << 63;
}

/// An entry's place in the order by rank, better ones higher: its key, then its id. The highest digit says nothing new, but it
/// spreads the entries of a real row over many counters: its distance from the largest entry in eighths.
DEVICE u64 place(const Row& row, float x, u32 id) {
    u32 key = order_key(x);
    float below = (row.max - x) * 8.0f;
    u32 near = key >= order_key(row.max) ? 255 : below < 255.0f ? 255 - (u32)below : 0;
    return (u64)near << 56 | (u64)key << ID_BITS | (ID_MASK - id);
}
/// The place that every entry above -infinity reaches.
DEVICE u64 lowest_place() { return (u64)(order_key(-INFINITE) + 1) << ID_BITS; }
DEVICE u32 place_id(u64 place) { return ID_MASK - ((u32)place & ID_MASK); }
DEVICE float place_value(u64 place) { return key_value((u32)(place >> ID_BITS)); }

/// 1 for the likeliest.
DEVICE double weight(float x, float max, double temperature) { return exp_f64(((double)x - (double)max) / temperature); }
DEVICE u64 mass(float x, float max, double temperature) {
    double w = weight(x, max, temperature);
    return w > 0.0 ? (u64)(w * MASS_ONE) : 0;
}

/// This thread's entries of a round: ids first + j * N_THREADS + thread(). What lies beyond the row is 0.
DEVICE void load_round(const Row& row, u32 first, float x[UNROLL]) {
#pragma unroll
    for (u32 j = 0; j < UNROLL; j++) {
        u32 id = first + j * N_THREADS + thread();
        x[j] = id < row.n ? row.x[id] : 0.0f;
    }
}

/// The best entry, its key above its inverted id, and whether the row holds a NaN or +infinity.
DEVICE u64 best_entry(const Row& row, bool* is_bad, Scratch& s) {
    u64 best = 0;
    bool bad = false;
    for (u32 first = 0; first < row.n; first += UNROLL * N_THREADS) {
        float x[UNROLL];
        load_round(row, first, x);
#pragma unroll
        for (u32 j = 0; j < UNROLL; j++) {
            u32 id = first + j * N_THREADS + thread();
            u64 entry = (u64)order_key(x[j]) << 32 | (u32)~id;
            if (id < row.n && entry > best) best = entry;
            bad |= x[j] != x[j] || x[j] == INFINITE;
        }
    }
    *is_bad = block_max(bad, s) != 0;
    return block_max(best, s);
}

/// ln of the sum of e^x over the row, in f64.
DEVICE double log_sum(const Row& row, Scratch& s) {
    u64 sum = 0;
    for (u32 first = 0; first < row.n; first += UNROLL * N_THREADS) {
        float x[UNROLL];
        load_round(row, first, x);
#pragma unroll
        for (u32 j = 0; j < UNROLL; j++) {
            if (first + j * N_THREADS + thread() < row.n) sum += mass(x[j], row.max, 1.0);
        }
    }
    return (double)row.max + log_f64((double)block_sum(sum, s) / MASS_ONE);
}

/// Adds to a digit's 64-bit amount by two additions of 32 bits, in any order.
DEVICE void add_amount(Scratch& s, u32 digit, u64 amount) {
    u32 low = (u32)amount, high = (u32)(amount >> 32);
    u32 before = atomic_add(&s.low[digit], low);
    high += before + low < low;
    if (high) atomic_add(&s.high[digit], high);
}

/// Adds the amounts of all entries from `floor` up that agree with `prefix` above `shift` to the digit there. `temperature`
/// is 0 where an entry's amount is 1 and not its mass.
DEVICE void count_digits(const Row& row, double temperature, u64 floor, u64 prefix, u32 shift, Scratch& s) {
    for (u32 first = 0; first < row.n; first += UNROLL * N_THREADS) {
        float x[UNROLL];
        load_round(row, first, x);
#pragma unroll
        for (u32 j = 0; j < UNROLL; j++) {
            u32 id = first + j * N_THREADS + thread();
            u64 at = place(row, x[j], id), first_at = shuffle(at, 0);
            bool counts = id < row.n && at >= floor && (at ^ prefix) >> shift >> 8 == 0;
            // Rows full of one logit would queue up at one counter: what equals the first lane's is added by that lane.
            u64 agree = wave_ballot(counts && (at ^ first_at) >> min_(shift, ID_BITS) == 0);
            u32 n = lane() == 0 ? popcount(agree) : counts && !(agree >> lane() & 1);
            if (n) add_amount(s, (u32)(at >> shift) & 0xFF, temperature == 0.0 ? n : n * mass(x[j], row.max, temperature));
        }
    }
}

DEVICE u64 amount_of(const Scratch& s, u32 digit) { return (u64)s.high[digit] << 32 | s.low[digit]; }

/// The first wave finds the digit in which the sum from the highest digit down reaches `need`, or, where `share` is not 0, that
/// share of all there is. Nothing reaches it: the found amount is 0.
DEVICE void find_digit(Scratch& s, u64 need, double share) {
    // Lane l has the l-th highest digits.
    u32 top = DIGITS - 1 - lane() * LANE_DIGITS;
    u64 mine = 0;
    for (u32 i = 0; i < LANE_DIGITS; i++) mine += amount_of(s, top - i);
    u64 upto = mine;
#pragma unroll
    for (u32 distance = 1; distance < WAVE; distance *= 2) {
        u64 before = shuffle(upto, (lane() - distance) % WAVE);
        if (lane() >= distance) upto += before;
    }
    double wanted = share * (double)shuffle(upto, WAVE - 1);
    if (share != 0.0) {
        need = (u64)wanted;
        if ((double)need < wanted) need++;
        if (need == 0) need = 1;
    }
    if (lane() == 0) s.found.amount = 0;
    wave_barrier();  // a found amount is written after the 0
    u64 above = upto - mine;
    if (above >= need || upto < need) return;
    for (u32 i = 0; i < LANE_DIGITS; i++) {
        u64 amount = amount_of(s, top - i);
        if (above + amount >= need) {
            s.found = {need - above, amount, top - i, 0};
            return;
        }
        above += amount;
    }
}

/// What a search looks for: the n best entries, or the fewest best ones that have a share of the mass at a temperature.
struct Goal {
    u64 n;
    double share, temperature;  // 0: by number
};

/// The place of the last entry that reaches the goal among those from `floor` up; `floor` when all of them don't.
DEVICE u64 find_place(const Row& row, u64 floor, const Goal& goal, Scratch& s) {
    u64 prefix = 0, need = goal.n;
    for (i32 shift = 56; shift >= 0; shift -= 8) {
        for (u32 i = thread(); i < DIGITS; i += N_THREADS) s.low[i] = 0, s.high[i] = 0;
        barrier();  // amounts are zero before anyone adds
        count_digits(row, goal.temperature, floor, prefix, (u32)shift, s);
        barrier();  // all is added before the first wave looks
        if (wave() == 0) find_digit(s, need, shift == 56 ? goal.share : 0.0);
        barrier();  // the digit is found before anyone goes on
        Found found = s.found;
        if (found.amount == 0) return floor;
        prefix |= (u64)found.digit << shift;
        need = found.need;
        // The least amount of an entry inside the digit: all of them are needed when less than that is to spare.
        u64 least = goal.temperature == 0.0 ? 1 : shift > (i32)ID_BITS ? 0 : mass(place_value(prefix), row.max, goal.temperature);
        if (found.amount - need < least) break;
    }
    return prefix > floor ? prefix : floor;
}

/// Collects the places of the n best entries, in any order.
DEVICE void collect_top(const Row& row, u32 n, Scratch& s) {
    u64 floor = n < row.n ? find_place(row, 0, {n, 0.0, 0.0}, s) : 0;
    if (thread() == 0) s.n_top = 0;
    barrier();  // the number is zero before anyone counts
    for (u32 first = 0; first < row.n; first += UNROLL * N_THREADS) {
        float x[UNROLL];
        load_round(row, first, x);
#pragma unroll
        for (u32 j = 0; j < UNROLL; j++) {
            u32 id = first + j * N_THREADS + thread();
            u64 at = place(row, x[j], id);
            if (id < row.n && at >= floor) s.top[atomic_add(&s.n_top, 1)] = at;
        }
    }
    barrier();  // all are there before they are ranked
}

/// Ranks of two tokens from 1, packed: that of `a` in the low half. A token outside the row comes after all of it.
DEVICE u64 ranks_of(const Row& row, u32 a, u32 b, Scratch& s) {
    u64 at_a = a < row.n ? place(row, row.x[a], a) : 0, at_b = b < row.n ? place(row, row.x[b], b) : 0;
    u64 n_better = 0;
    for (u32 first = 0; first < row.n; first += UNROLL * N_THREADS) {
        float x[UNROLL];
        load_round(row, first, x);
#pragma unroll
        for (u32 j = 0; j < UNROLL; j++) {
            u32 id = first + j * N_THREADS + thread();
            u64 at = place(row, x[j], id);
            if (id < row.n) n_better += (u64)(at > at_b) << 32 | (u64)(at > at_a);
        }
    }
    return block_sum(n_better, s) + ((u64)1 << 32 | 1);
}

DEVICE float edited(u32 kind, float logit, float value, const SampleRow& p) {
    if (kind == BIAS) return logit + value;
    if (kind == REPEAT) return logit > 0.0f ? logit / p.repetition : logit * p.repetition;
    if (kind == PENALISE) return logit - p.presence - p.frequency * value;
    return -INFINITE;
}

/// Edits the row, kind by kind; inside a kind every token stands once.
DEVICE void apply_edits(float* x, RowEdit* edits, const SampleRow& p) {
    for (u32 kind = 0; kind < N_EDIT_KINDS; kind++) {
        for (u32 i = thread(); i < p.n_edits[kind]; i += N_THREADS) {
            RowEdit edit = edits[i];
            float before = x[edit.token];
            x[edit.token] = edited(kind, before, edit.value, p);
            edits[i].value = before;
        }
        edits += p.n_edits[kind];
        barrier();  // a kind is done before the next one, and all before the row is read
    }
}

/// Puts back what [`apply_edits`] found, in the opposite order.
DEVICE void undo_edits(float* x, const RowEdit* edits, const SampleRow& p) {
    for (u32 kind = 0; kind < N_EDIT_KINDS; kind++) edits += p.n_edits[kind];
    for (u32 kind = N_EDIT_KINDS; kind-- > 0;) {
        edits -= p.n_edits[kind];
        for (u32 i = thread(); i < p.n_edits[kind]; i += N_THREADS) x[edits[i].token] = edits[i].value;
        barrier();  // as in apply_edits
    }
}

/// The four words of a group of four ids.
struct Words {
    u32 w0, w1, w2, w3;
};

/// Philox4x32 with ten rounds; the counter is (position, purpose, group, choice), the purpose 3: sampling.
DEVICE Words noise_words(const SampleRow& p, u32 group) {
    u32 c0 = p.position, c1 = 3, c2 = group, c3 = p.choice, k0 = (u32)p.seed, k1 = (u32)(p.seed >> 32);
#pragma unroll 1  // ten rounds' keys would fill the scalar registers of gfx942
    for (u32 round = 0; round < 10; round++) {
        u64 a = (u64)0xD2511F53u * c0, b = (u64)0xCD9E8D57u * c2;
        c0 = (u32)(b >> 32) ^ c1 ^ k0, c1 = (u32)b, c2 = (u32)(a >> 32) ^ c3 ^ k1, c3 = (u32)a;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
}

/// -ln(-ln u) of word i.
DEVICE double gumbel(const Words& words, u32 i) {
    u32 word = i & 2 ? (i & 1 ? words.w3 : words.w2) : (i & 1 ? words.w1 : words.w0);
    double u = ((double)(word >> 8) + 0.5) / 16777216.0;
    return -log_f64(-log_f64(u));
}

/// The least place whose weight is at least `min_p`, by halving the keys between -infinity and the largest.
DEVICE u64 least_place(const Row& row, double temperature, double min_p) {
    u32 below = order_key(-INFINITE), key = order_key(row.max);
    while (key - below > 1) {
        u32 middle = below + (key - below) / 2;
        if (weight(key_value(middle), row.max, temperature) >= min_p) {
            key = middle;
        } else {
            below = middle;
        }
    }
    return place(row, key_value(key), ID_MASK);
}

/// The id from `floor` up with the largest logit / T plus noise, the lowest of equals; NO_TOKEN when there is none.
DEVICE u32 draw_noisy(const Row& row, const SampleRow& p, u32 likeliest, u64 floor, Scratch& s) {
    double temperature = (double)p.temperature, most = -(double)INFINITE;
    u32 chosen = NO_TOKEN;
    Words words = noise_words(p, likeliest / 4);
    // What even the largest noise can't lift to this is passed over.
    double bound = (double)row.x[likeliest] / temperature + gumbel(words, likeliest % 4);
    for (u32 group = thread(); group < ceil_div(row.n, 4); group += N_THREADS) {
        bool has_words = false;
#pragma unroll 1
        for (u32 i = 0; i < 4; i++) {
            u32 id = 4 * group + i;
            if (id >= row.n) break;
            float x = row.x[id];
            if (place(row, x, id) < floor) continue;
            double base = (double)x / temperature;
            if (base + MAX_GUMBEL < bound) continue;
            if (!has_words) words = noise_words(p, group);
            has_words = true;
            double total = base + gumbel(words, i);
            if (total > most) most = total, chosen = id;
            if (total > bound) bound = total;
        }
    }
    u64 key = order_key_f64(most), best = block_max(key, s);
    return ~(u32)block_max(key == best ? (u64)(u32)~chosen : 0, s);
}

/// The token of an edited row whose best entry is known.
DEVICE u32 draw(const Row& row, const SampleRow& p, u64 best, Scratch& s) {
    u32 likeliest = ~(u32)best;
    if (row.max == -INFINITE) return NO_TOKEN;
    if (p.temperature == 0.0f) return likeliest;
    u64 floor = lowest_place();
#pragma unroll 1  // one copy of the search
    for (u32 by_mass = 0; by_mass < 2; by_mass++) {
        if (by_mass ? p.top_p >= 1.0f : p.top_k == 0) continue;
        Goal goal = {by_mass ? 1 : p.top_k, by_mass ? (double)p.top_p : 0.0, by_mass ? (double)p.temperature : 0.0};
        floor = find_place(row, floor, goal, s);
    }
    if (p.min_p > 0.0f) {
        u64 least = least_place(row, (double)p.temperature, (double)p.min_p);
        floor = least > floor ? least : floor;
    }
    return draw_noisy(row, p, likeliest, floor, s);
}

/// Applies the edits, draws, and puts the row back as it was. `best` is the raw row's best entry.
DEVICE u32 draw_edited(float* x, Row row, RowEdit* edits, const SampleRow& p, u64 best, Scratch& s) {
    bool has_edits = false, is_bad;
    for (u32 kind = 0; kind < N_EDIT_KINDS; kind++) has_edits |= p.n_edits[kind] > 0;
    if (has_edits) {
        barrier();  // the raw row has been read
        apply_edits(x, edits, p);
        best = best_entry(row, &is_bad, s);
        row.max = key_value((u32)(best >> 32));
    }
    u32 token = draw(row, p, best, s);
    if (has_edits) {
        barrier();  // the edited row has been read
        undo_edits(x, edits, p);
    }
    return token;
}

/// A log-probability; the floor where there is none.
DEVICE float logprob_of(float x, double log_sum) {
    float logprob = (float)((double)x - log_sum);
    return abs_(logprob) < INFINITE ? logprob : LOGPROB_FLOOR;
}

/// Writes what was asked for about the raw row; `log_sum` is not a number where the row holds none.
DEVICE void write_logprobs(const Row& row, const SampleRow& p, u32 token, double log_sum, SampleResult* out, Scratch& s) {
    u32 n_top = min_(p.n_top, min_(MAX_TOP, row.n));
    if (n_top > 0) collect_top(row, n_top, s);
    u64 ranks = ranks_of(row, token, p.target, s);
    if (thread() < n_top) {
        u64 at = s.top[thread()];
        u32 rank = 0;
        for (u32 i = 0; i < n_top; i++) rank += s.top[i] > at;
        out->top[rank] = place_id(at);
        out->top_logprobs[rank] = logprob_of(place_value(at), log_sum);
    }
    if (thread() == 0) {
        out->logprob = token < row.n ? logprob_of(row.x[token], log_sum) : LOGPROB_FLOOR;
        out->target_logprob = p.target < row.n ? logprob_of(row.x[p.target], log_sum) : LOGPROB_FLOOR;
        out->rank = (u32)ranks;
        out->target_rank = (u32)(ranks >> 32);
        out->n_top = n_top;
    }
}

KERNEL_ROOMY(sample, SampleArgs, N_THREADS) {
    SHARED(Scratch, shared, 1);
    Scratch& s = shared[0];
    if (block_x() >= args.step.counts->n_logit_rows) return;
    const SampleRow& p = args.rows[block_x()];
    if (p.flags == 0) return;
    float* x = args.logits + (u64)block_x() * args.n_vocab;
    SampleResult* out = args.results + block_x();
    bool is_bad;
    Row row = {x, args.n_vocab, 0.0f};
    u64 best = best_entry(row, &is_bad, s);
    row.max = key_value((u32)(best >> 32));
    u32 token = NO_TOKEN;
    if ((p.flags & DRAW) && !is_bad) token = draw_edited(x, row, args.edits + p.first_edit, p, best, s);
    if (thread() == 0) {
        out->token = token;
        if ((p.flags & KEEP) && token != NO_TOKEN) args.slot_tokens[p.slot] = token;
    }
    if (!(p.flags & (LOGPROBS | SCORE))) return;
    double sum = is_bad || row.max == -INFINITE ? (double)from_bits(0x7FC00000) : log_sum(row, s);
    write_logprobs(row, p, token, sum, out, s);
}
