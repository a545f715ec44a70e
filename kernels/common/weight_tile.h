//! The weight tile: how a repacked matrix lies in device memory, and the one walk over K that every product with it takes.
//!
//! A matrix [N, K] is cut into row tiles of 16 rows, a row tile into steps of 128 columns, a step into units of 1,024 bytes, a unit
//! into 64 pieces of 16 bytes: what one lane reads at once. Rows are padded to 16 and columns to 128 with zero codes.
//! A unit is 64 columns of FP8, 128 of MXFP4 or 32 of BF16, and is made of blocks of 32 columns. Inside a block the quarter q of a
//! wave (the lanes that share their K slots of the matrix instruction) owns columns 8 q .. 8 q + 7: the first four for the block's first
//! instruction, the others for its second. So a lane's B operand of a block is 16 consecutive bytes of a token's row, too, and
//! the K slots of A and B agree whatever the instruction's own order is.
//!
//! Order of sums, for every element of every result, whatever the number of tokens: K is split into n_splits ranges of steps; in
//! a range each step's eight instructions start from zero, and acc = fma(part, scale, acc) in ascending steps, from +0 (the scale is an
//! FP8 block's, else 1: an exact product, so this is one rounding); the ranges' sums are added in ascending order, from +0.
//! FP8 scales are therefore applied to f32 partial sums. MXFP4 scales are multiplied into the expanded bf16 weights, exactly: a code
//! has two significant bits. Repack refuses scale bytes above 128, so that one multiplication does.
#pragma once
#include "formats.h"

constexpr u32 FORMAT_FP8 = 0, FORMAT_MXFP4 = 1, FORMAT_BF16 = 2;
constexpr u32 STEP_COLS = 128, BLOCK_COLS = 32, UNIT_BYTES = 1024;
/// Waves of a block of `linear` and `expert_linear`.
constexpr u32 PRODUCT_WAVES = 8;
/// Rows of a row tile that one lane holds: 8 apart.
constexpr u32 LANE_ROWS = A_ELEMS / 4;

static_assert(TILE_M == 16 && TILE_K == 16 && B_ELEMS == 4, "the layout is made for 16 x 16 weight fragments");

/// The sizes of a format's unit.
template <u32 FORMAT> struct UnitOf {
    static constexpr u32 COLS = FORMAT == FORMAT_FP8 ? 64 : FORMAT == FORMAT_MXFP4 ? 128 : 32;
    static constexpr u32 PER_STEP = STEP_COLS / COLS;
    static constexpr u32 BLOCKS = COLS / BLOCK_COLS;
};

/// Units of a step, for a format known at run time.
DEVICE constexpr u32 units_per_step(u32 format) { return format == FORMAT_FP8 ? 2 : format == FORMAT_MXFP4 ? 1 : 4; }

/// The quarter of its wave that a lane is in: which K slots it holds.
DEVICE constexpr u32 quarter_of(u32 lane) { return WAVE == 64 ? lane / 16 : lane % 4; }
/// The first row of a tile that a lane holds; also its token of a token tile where that has 8.
DEVICE constexpr u32 row_of(u32 lane) { return WAVE == 64 ? lane % 16 : lane / 4; }
/// The piece of a unit that holds a row's columns of a quarter: consecutive over the lanes of a wave.
DEVICE constexpr u32 piece_of(u32 row, u32 quarter) { return WAVE == 64 ? quarter * 16 + row : row * 4 + quarter; }

/// In how many ranges K is split: by the weight's shape alone. `n_like_it` matrices of this shape are at work at the same time (experts).
/// Enough waves to keep 132 multiprocessors loading (24 each), and at least two steps a range. Mirrors `n_splits` in src/ops/repack.rs.
DEVICE u32 n_splits(u32 n_row_tiles, u32 n_steps, u32 n_like_it) {
    u32 splits = 1;
    while (splits < PRODUCT_WAVES && n_row_tiles * n_like_it * splits < 3072 && n_steps >= 4 * splits) splits *= 2;
    return splits;
}
/// Of a power of two; dividing by a number that the compiler does not know is dear.
DEVICE constexpr u32 log2_of(u32 power) {
    u32 n = 0;
    while (power >> n > 1) n++;
    return n;
}
/// The first step of a range.
DEVICE u32 first_step_of(u32 split, u32 splits, u32 n_steps) { return split * n_steps >> log2_of(splits); }

/// Word i of sixteen bytes.
DEVICE u32 word(const U4& v, u32 i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

/// Two bf16 times two bf16, where the products are bf16 themselves.
DEVICE u32 scale_pair(u32 pair, u32 factors) {
#if defined(__CUDA_ARCH__)
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(pair), "r"(factors));
    return d;
#else
    return bf16_pair_exact(pair_low(pair) * pair_low(factors), pair_high(pair) * pair_high(factors));
#endif
}

// Codes to bf16 pairs ------------------------------------------------------------------------------

/// Where repack puts FP8 code i of four in a word, so that expanding is cheap: waves of 32 move the bits of codes 0 and 1 together.
DEVICE constexpr u32 f8_byte(u32 i) { return WAVE == 64 ? i : i == 1 ? 2 : i == 2 ? 1 : i; }
/// Where repack puts E2M1 code i of eight in a word: pair i / 2 in the same nibble of both halves.
DEVICE constexpr u32 f4_shift(u32 i) { return i / 2 * 4 + i % 2 * 16; }

/// Four FP8 codes to two bf16 pairs.
DEVICE void expand_f8(u32 codes, u32* low, u32* high) {
    if constexpr (WAVE == 64) {
        weight_f8x4_to_bf16(codes, low, high);
    } else {
        // Sign, exponent and mantissa moved into place are the value times 2^-120, subnormals too; 0x7B80 is 2^120.
        u32 even = (codes << 8 & 0x80008000u) | (codes << 4 & 0x07F007F0u);
        u32 odd = (codes & 0x80008000u) | (codes >> 4 & 0x07F007F0u);
        *low = scale_pair(even, 0x7B807B80u);
        *high = scale_pair(odd, 0x7B807B80u);
    }
}

/// The factor that `expand_f4` wants, in both halves: 2^(scale - 1) of byte i of four scale bytes.
DEVICE u32 f4_factor(u32 scales, u32 i) { return byte_perm(scales, 0, 0x4040 + i * 0x0101) * 0x80 + 126 * 0x00800080u; }

/// Eight E2M1 codes to four bf16 pairs. The fields as a bf16 are the value times 2^-126, subnormals too.
DEVICE void expand_f4(u32 codes, u32 factor, u32 pairs[4]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 fields = i < 2 ? codes << (6 - 4 * i) : codes >> (4 * i - 6);
        pairs[i] = scale_pair((codes << (12 - 4 * i) & 0x80008000u) | (fields & 0x01C001C0u), factor);
    }
}

// One wave's walk over K ---------------------------------------------------------------------------

/// One row tile of a matrix, as a lane sees it.
struct RowTile {
    const u8* codes;   // this lane's piece of the tile's first unit
    const u8* scales;  // FP8: the scale byte of step 0; MXFP4: the four scale bytes of step 0 of this lane's first row
};

template <u32 FORMAT> DEVICE RowTile row_tile(const u8* codes, const u8* scales, u32 tile, u32 n_steps) {
    RowTile t;
    t.codes = codes + (u64)tile * n_steps * (UnitOf<FORMAT>::PER_STEP * UNIT_BYTES) + lane() * 16;
    t.scales = scales;
    if constexpr (FORMAT == FORMAT_FP8) t.scales = scales + (u64)(tile / 8) * n_steps;
    if constexpr (FORMAT == FORMAT_MXFP4) t.scales = scales + (u64)tile * n_steps * 64 + row_of(lane()) * 4;
    return t;
}

/// A lane's share of one unit.
struct Unit {
    U4 codes[LANE_ROWS];
    u32 scales[LANE_ROWS];  // MXFP4: of the four blocks
};

template <u32 FORMAT, bool STREAM> DEVICE void load_unit(Unit& u, const RowTile& t, u32 unit) {
#pragma unroll
    for (u32 h = 0; h < LANE_ROWS; h++) {
        const u8* at = t.codes + unit * UNIT_BYTES + h * 512;
        u.codes[h] = STREAM ? load_stream16(at) : load16(at);
        if constexpr (FORMAT == FORMAT_MXFP4) u.scales[h] = *(const u32*)(t.scales + unit * 64 + h * 32);
    }
}

/// The scale of a step's partial sums.
template <u32 FORMAT> DEVICE float step_scale(const RowTile& t, u32 step) {
    if constexpr (FORMAT == FORMAT_FP8) return e8m0_to_f32(t.scales[step]);
    return 1.0f;
}

/// The A operands of a block's two instructions.
template <u32 FORMAT> DEVICE void expand_block(const Unit& u, u32 block, FragA a[2]) {
#pragma unroll
    for (u32 h = 0; h < LANE_ROWS; h++) {
        u32 pairs[4];
        if constexpr (FORMAT == FORMAT_FP8) {
            expand_f8(word(u.codes[h], 2 * block), &pairs[0], &pairs[1]);
            expand_f8(word(u.codes[h], 2 * block + 1), &pairs[2], &pairs[3]);
        } else if constexpr (FORMAT == FORMAT_MXFP4) {
            expand_f4(word(u.codes[h], block), f4_factor(u.scales[h], block), pairs);
        } else {
            for (u32 i = 0; i < 4; i++) pairs[i] = word(u.codes[h], i);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) a[i / 2].v[i % 2 * LANE_ROWS + h] = pairs[i];
    }
}

/// part[i] += the block's 32 columns, for each token tile's 16 bytes.
template <u32 N_TILES> DEVICE void multiply_block(const FragA a[2], const U4 x[N_TILES], FragC part[N_TILES]) {
#pragma unroll
    for (u32 j = 0; j < 2; j++) {
#pragma unroll
        for (u32 i = 0; i < N_TILES; i++) {
            FragB b;
            b.v[0] = j == 0 ? x[i].x : x[i].z;
            b.v[1] = j == 0 ? x[i].y : x[i].w;
            mma(part[i], a[j], b);
        }
    }
}

template <u32 N_TILES> DEVICE void clear(FragC sums[N_TILES]) {
#pragma unroll
    for (u32 i = 0; i < N_TILES; i++) sums[i].v[0] = sums[i].v[1] = sums[i].v[2] = sums[i].v[3] = 0.0f;
}

/// acc = fma(part, scale, acc)
template <u32 N_TILES> DEVICE void add_step(FragC acc[N_TILES], const FragC part[N_TILES], float scale) {
#pragma unroll
    for (u32 i = 0; i < N_TILES; i++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) acc[i].v[j] = fma(part[i].v[j], scale, acc[i].v[j]);
    }
}

/// Eight columns of a token's row from `column` on; zeros past the row's end, and for no row at all. n_cols is a multiple of 8.
DEVICE U4 load_x8(const u16* row, u32 column, u32 n_cols) {
    if (row == nullptr || column >= n_cols) return {0, 0, 0, 0};
    return load16(row + column);
}

/// As `load_x8`, of a row that exists and is not written by the kernel. Past its end, where the weights are zeros, it gives the row's
/// last columns. n_cols is not 0.
DEVICE U4 load_row8(const u16* row, u32 column, u32 n_cols) { return load_global16(row + min_(column, n_cols - 8)); }
