//! One token times four stored weight rows, expanded in registers: the decode path, where a panel would be used once.
//!
//! The 16 lanes, their order and the fold are those of the panel path, so the bits are the same.

// Register tiles are indexed by position, so that every loop unrolls alike on all instruction sets.
#![allow(clippy::needless_range_loop)]

use super::simd::{LANES, Simd, TILE_ROWS};
use crate::tensor::format::e8m0_to_f32;
use crate::tensor::matrix::{FP8_BLOCK, MXFP4_BLOCK, Matrix, MatrixData};

/// Columns must be a multiple of this for the path to be taken.
const BLOCK: usize = FP8_BLOCK;
/// Rows of one pass over K.
const PASS_ROWS: usize = 2;
/// Scale bytes up to this one can be multiplied by 2^8 without overflow.
const MAX_LIFTED_E8M0: u8 = 246;

/// Four rows of a stored matrix.
trait StoredRows {
    /// Columns that share a scale.
    const SCALE_COLUMNS: usize;

    /// The factor of a row's values in a block of `SCALE_COLUMNS`.
    fn scale(&self, row: usize, block: usize) -> f32;

    /// Elements `column .. column + 2 WIDTH` of a row, times `scale`.
    ///
    /// # Safety
    /// The elements exist and the instruction set of `S` is present.
    unsafe fn load2<S: Simd>(&self, row: usize, column: usize, scale: S::V) -> [S::V; 2];
}

struct Fp8Rows<'a> {
    codes: [&'a [u8]; TILE_ROWS],
    scales: [&'a [u8]; TILE_ROWS],
}

struct Mxfp4Rows<'a> {
    codes: [&'a [u8]; TILE_ROWS],
    scales: [&'a [u8]; TILE_ROWS],
}

struct Bf16Rows<'a> {
    bits: [&'a [u8]; TILE_ROWS],
}

struct F32Rows<'a> {
    values: [&'a [f32]; TILE_ROWS],
}

/// Dots of `x` (K floats) with four rows; false when the path does not take this weight and nothing was written.
///
/// # Safety
/// The instruction set of `S` must be present.
#[inline(always)]
pub(super) unsafe fn dot_4_rows<S: Simd>(w: &Matrix, rows: [usize; 4], x: &[f32], sums: &mut [f32; 4]) -> bool {
    let k = w.n_cols;
    if !k.is_multiple_of(BLOCK) || x.len() < k {
        return false;
    }
    // SAFETY: every slice taken here has the K columns of its row and x has K floats; the caller vouches for the instruction
    // set.
    unsafe {
        match &w.data {
            MatrixData::Fp8 { codes, scales } => {
                let (codes, scales) = (quad(codes, rows, k), quad(scales, rows.map(|r| r / FP8_BLOCK), k / FP8_BLOCK));
                if scales.iter().any(|s| s.iter().any(|s| *s > MAX_LIFTED_E8M0)) {
                    return false;
                }
                dot_rows::<S, _>(&Fp8Rows { codes, scales }, k, x, sums);
            }
            MatrixData::Mxfp4 { codes, scales } => {
                let rows = Mxfp4Rows { codes: quad(codes, rows, k / 2), scales: quad(scales, rows, k / MXFP4_BLOCK) };
                dot_rows::<S, _>(&rows, k, x, sums);
            }
            MatrixData::Bf16 { bits } => dot_rows::<S, _>(&Bf16Rows { bits: quad(bits, rows, 2 * k) }, k, x, sums),
            MatrixData::F32 { values } => dot_rows::<S, _>(&F32Rows { values: quad(values, rows, k) }, k, x, sums),
        }
    }
    true
}

/// Four rows of a row-major array.
fn quad<T>(all: &[T], rows: [usize; 4], len: usize) -> [&[T]; 4] {
    rows.map(|r| &all[r * len..][..len])
}

#[inline(always)]
unsafe fn dot_rows<S: Simd, R: StoredRows>(rows: &R, k: usize, x: &[f32], sums: &mut [f32; 4]) {
    let mut lanes = [[0.0f32; LANES]; TILE_ROWS];
    // SAFETY: passed on unchanged; four rows of 16 lanes are read.
    unsafe {
        // Two rows at a time: four and their scales do not fit the 16 registers of AVX2 beside what expands the codes.
        for first in (0..TILE_ROWS).step_by(PASS_ROWS) {
            dot_pass::<S, R>(rows, first, k, x, &mut lanes);
        }
        let mut last = [S::splat(0.0); TILE_ROWS];
        for r in 0..TILE_ROWS {
            last[r] = S::load(lanes[r].as_ptr().add(LANES - S::WIDTH));
        }
        S::fold4(lanes.as_ptr().cast(), LANES, last, sums.as_mut_ptr());
    }
}

/// The lanes of `PASS_ROWS` rows from `first`.
#[inline(always)]
unsafe fn dot_pass<S: Simd, R: StoredRows>(
    rows: &R,
    first: usize,
    k: usize,
    x: &[f32],
    lanes: &mut [[f32; LANES]; TILE_ROWS],
) {
    let n_parts = LANES / S::WIDTH;
    // SAFETY: columns stay below k, a multiple of 128 and so of every SCALE_COLUMNS and of 2 WIDTH; x has k floats.
    unsafe {
        let mut acc = [[S::splat(0.0); LANES]; PASS_ROWS];
        for block in (0..k).step_by(R::SCALE_COLUMNS) {
            let mut scale = [S::splat(0.0); PASS_ROWS];
            for r in 0..PASS_ROWS {
                scale[r] = S::splat(rows.scale(first + r, block / R::SCALE_COLUMNS));
            }
            for step in (0..R::SCALE_COLUMNS).step_by(LANES.max(2 * S::WIDTH)) {
                let mut column = block + step;
                // One run over the 16 lanes, or two where a register holds them all.
                for pair in 0..n_parts.div_ceil(2) {
                    let (a, b) = (2 * pair % n_parts, (2 * pair + 1) % n_parts);
                    let (x_a, x_b) = (S::load(x.as_ptr().add(column)), S::load(x.as_ptr().add(column + S::WIDTH)));
                    for r in 0..PASS_ROWS {
                        let [w_a, w_b] = rows.load2::<S>(first + r, column, scale[r]);
                        acc[r][a] = S::fma(w_a, x_a, acc[r][a]);
                        acc[r][b] = S::fma(w_b, x_b, acc[r][b]);
                    }
                    column += 2 * S::WIDTH;
                }
            }
        }
        for r in 0..PASS_ROWS {
            for part in 0..n_parts {
                S::store(lanes[first + r].as_mut_ptr().add(part * S::WIDTH), acc[r][part]);
            }
        }
    }
}

impl StoredRows for Fp8Rows<'_> {
    const SCALE_COLUMNS: usize = FP8_BLOCK;

    #[inline(always)]
    fn scale(&self, row: usize, block: usize) -> f32 {
        e8m0_to_f32(self.scales[row][block]) * 256.0
    }

    #[inline(always)]
    unsafe fn load2<S: Simd>(&self, row: usize, column: usize, scale: S::V) -> [S::V; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let at = self.codes[row].as_ptr().add(column);
            let (a, b) = (S::load_f8e4m3fn_scaled::<false>(at), S::load_f8e4m3fn_scaled::<false>(at.add(S::WIDTH)));
            [S::mul(a, scale), S::mul(b, scale)]
        }
    }
}

impl StoredRows for Mxfp4Rows<'_> {
    const SCALE_COLUMNS: usize = MXFP4_BLOCK;

    #[inline(always)]
    fn scale(&self, row: usize, block: usize) -> f32 {
        e8m0_to_f32(self.scales[row][block])
    }

    #[inline(always)]
    unsafe fn load2<S: Simd>(&self, row: usize, column: usize, scale: S::V) -> [S::V; 2] {
        // SAFETY: the caller's promise; column is even.
        unsafe {
            let [a, b] = S::load_e2m1(self.codes[row].as_ptr().add(column / 2));
            [S::mul(a, scale), S::mul(b, scale)]
        }
    }
}

impl StoredRows for Bf16Rows<'_> {
    const SCALE_COLUMNS: usize = BLOCK;

    #[inline(always)]
    fn scale(&self, _row: usize, _block: usize) -> f32 {
        1.0
    }

    #[inline(always)]
    unsafe fn load2<S: Simd>(&self, row: usize, column: usize, _scale: S::V) -> [S::V; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let at = self.bits[row].as_ptr().add(2 * column);
            [S::load_bf16(at), S::load_bf16(at.add(2 * S::WIDTH))]
        }
    }
}

impl StoredRows for F32Rows<'_> {
    const SCALE_COLUMNS: usize = BLOCK;

    #[inline(always)]
    fn scale(&self, _row: usize, _block: usize) -> f32 {
        1.0
    }

    #[inline(always)]
    unsafe fn load2<S: Simd>(&self, row: usize, column: usize, _scale: S::V) -> [S::V; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let at = self.values[row].as_ptr().add(column);
            [S::load(at), S::load(at.add(S::WIDTH))]
        }
    }
}
