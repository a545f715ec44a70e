//! A weight matrix from the checkpoint's layout into the one that `linear` and `expert_linear` read (common/weight_tile.h).
//!
//! Bound: reads and writes every byte once, at load. One thread makes one piece of 16 bytes or one scale word. On gfx942 FP8 codes become
//! FNUZ (0x80 becomes 0x00) and their scale bytes grow by one. Codes and scales that have no value (NaN), or none there
//! (a scale byte of 0xFE that would have to grow), are counted in `n_refused`: such a checkpoint must not be served.
#include "common/weight_tile.h"

namespace repack_op {

struct RepackArgs {
    const u8* src_codes;   // FP8 [N, K], MXFP4 [N, K / 2], BF16 [N, K] u16: row-major, no alignment
    const u8* src_scales;  // FP8 [ceil(N / 128), ceil(K / 128)], MXFP4 [N, K / 32]
    u8* dst_codes;         // [row tiles, steps, units, 1024]
    u8* dst_scales;        // FP8 as the source, MXFP4 [row tiles, steps, 16, 4]
    u32* n_refused;        // [1], counted up
    u32 n_rows, n_cols, format, pad;
};
static_assert(sizeof(RepackArgs) == 56, "RepackArgs mirrors src/ops/repack.rs");

/// Byte `at` of a row of `row_bytes`, 0 outside.
DEVICE u32 byte_at(const u8* row, u32 at, u32 row_bytes) { return row != nullptr && at < row_bytes ? row[at] : 0; }

/// Eight FP8 codes to two words.
DEVICE u32 repack_f8(const u8* row, u32 column, u32 n_cols, u32 words[2]) {
    u32 n_refused = 0;
    words[0] = words[1] = 0;
    for (u32 i = 0; i < 8; i++) {
        u32 code = byte_at(row, column + i, n_cols);
        n_refused += (code & 0x7F) == 0x7F;
        words[i / 4] |= (u32)weight_code(code) << 8 * f8_byte(i % 4);
    }
    return n_refused;
}

/// Eight E2M1 codes to a word.
DEVICE u32 repack_f4(const u8* row, u32 column, u32 n_cols) {
    u32 out = 0;
    for (u32 i = 0; i < 8; i += 2) {
        u32 two = byte_at(row, (column + i) / 2, n_cols / 2);
        out |= (two & 15) << f4_shift(i) | (two >> 4) << f4_shift(i + 1);
    }
    return out;
}

/// Two BF16 values to a word.
DEVICE u32 repack_bf16(const u8* row, u32 column, u32 n_cols) {
    u32 out = 0;
    for (u32 i = 0; i < 4; i++) out |= byte_at(row, 2 * column + i, 2 * n_cols) << 8 * i;
    return out;
}

/// One piece of codes; returns how many are refused.
DEVICE u32 repack_piece(const RepackArgs& args, u64 index) {
    u32 per_step = units_per_step(args.format), n_units = ceil_div(args.n_cols, STEP_COLS) * per_step;
    u32 piece = index % 64, unit = index / 64 % n_units;
    u32 row = (u32)(index / 64 / n_units) * TILE_M + (WAVE == 64 ? piece % 16 : piece / 4);
    u32 quarter = WAVE == 64 ? piece / 16 : piece % 4, column = unit * (STEP_COLS / per_step) + quarter * 8;
    u64 row_bytes = args.format == FORMAT_FP8 ? args.n_cols : args.format == FORMAT_MXFP4 ? args.n_cols / 2 : 2 * (u64)args.n_cols;
    const u8* source = row < args.n_rows ? args.src_codes + row * row_bytes : nullptr;
    u32 n_refused = 0, words[4];
    if (args.format == FORMAT_FP8) {
        n_refused = repack_f8(source, column, args.n_cols, words) + repack_f8(source, column + BLOCK_COLS, args.n_cols, words + 2);
    } else {
        for (u32 i = 0; i < 4; i++) {
            words[i] = args.format == FORMAT_MXFP4 ? repack_f4(source, column + i * BLOCK_COLS, args.n_cols)
                                                   : repack_bf16(source, column + 2 * i, args.n_cols);
        }
    }
    store16(args.dst_codes + index * 16, {words[0], words[1], words[2], words[3]});
    return n_refused;
}

/// One scale byte (FP8) or the four scale bytes of a row and a step (MXFP4); returns how many are refused.
DEVICE u32 repack_scale(const RepackArgs& args, u64 index) {
    if (args.format == FORMAT_FP8) {
        u32 byte = weight_scale(args.src_scales[index]);
        args.dst_scales[index] = (u8)byte;
        return byte == 0xFF;
    }
    u32 n_steps = ceil_div(args.n_cols, STEP_COLS), step = index / 16 % n_steps;
    u32 row = (u32)(index / 16 / n_steps) * TILE_M + index % 16;
    const u8* source = row < args.n_rows ? args.src_scales + (u64)row * (args.n_cols / BLOCK_COLS) : nullptr;
    u32 out = 0, n_refused = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 byte = byte_at(source, step * 4 + i, args.n_cols / BLOCK_COLS);
        n_refused += byte > 128;
        out |= byte << 8 * i;
    }
    ((u32*)args.dst_scales)[index] = out;
    return n_refused;
}

KERNEL(repack, RepackArgs, 256) {
    u32 n_steps = ceil_div(args.n_cols, STEP_COLS), row_tiles = ceil_div(args.n_rows, TILE_M);
    u64 n_pieces = (u64)row_tiles * n_steps * units_per_step(args.format) * 64;
    u64 n_scales = args.format == FORMAT_FP8     ? (u64)ceil_div(args.n_rows, 128) * n_steps
                   : args.format == FORMAT_MXFP4 ? (u64)row_tiles * n_steps * 16
                                                 : 0;
    u32 n_refused = 0;
    for (u64 i = (u64)block_x() * n_threads() + thread(); i < n_pieces + n_scales; i += (u64)grid_x() * n_threads()) {
        n_refused += i < n_pieces ? repack_piece(args, i) : repack_scale(args, i - n_pieces);
    }
    if (n_refused > 0) atomic_add(args.n_refused, n_refused);
}

}  // namespace repack_op
