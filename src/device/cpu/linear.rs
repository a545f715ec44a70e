//! Matrix products: problems cut into parts for the threads, parts into dot tiles; weight rows are expanded once a part.

use std::borrow::Cow;
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::expand::expand_row_kernel;
use super::row_dot::dot_4_rows;
use super::simd::{BLOCK_TOKENS, DotBlock, LANES, Simd, TILE_ROWS};
use super::{Cpu, Shared};
use crate::tensor::matrix::{Matrix, MatrixData};

/// Weight rows expanded at a time: with a few tokens they stay in the first-level cache.
const PANEL_ROWS: usize = 16;
/// Multiply-adds that are worth handing to another thread.
const MIN_PART_WORK: usize = 1 << 15;
/// Tokens of a part when there are enough weight rows to keep all threads busy.
const MAX_PART_TOKENS: usize = 256;
/// Tokens of a part otherwise; fewer would expand weights too often.
const MIN_PART_TOKENS: usize = 32;

/// One product y = W x whose shapes the caller has checked; a wrong one panics at a slice bound.
pub(crate) struct Problem<'a> {
    pub weight: &'a Matrix, // [N, K]
    /// Weight rows used; row r goes to column `r - rows.start` of y.
    pub rows: Range<usize>,
    /// Rows of one group; group g reads x from column g K on. All rows when there is one group.
    pub group_rows: usize,
    pub n_tokens: usize,
    /// K is a multiple of 16 or padded to it with zeros, in each group.
    pub x: Cow<'a, [f32]>, // [T, x_stride] f32
    pub x_stride: usize,
    pub y: &'a mut [f32], // [T, y_stride] f32
    pub y_stride: usize,
}

/// A part of the work of a call: some rows (of one group) and some tokens of one problem.
struct Part {
    problem: usize,
    rows: Range<usize>,
    tokens: Range<usize>,
}

/// What one part reads and writes.
struct Tile<'a> {
    weight: &'a Matrix, // [N, K]
    rows: Range<usize>,
    tokens: Range<usize>,
    x: &'a [f32], // [T, x_stride] f32
    x_stride: usize,
    y: &'a Shared<'a, f32>, // [T, y_stride] f32
    y_stride: usize,
    first_row: usize,
}

thread_local! {
    /// The expanded panel; it grows to the largest K once.
    static PANEL: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

simd_fn! {
    fn run_tile(tile: &Tile, panel: &mut Vec<f32>) = run_tile_kernel
}

/// Computes all problems with one hand-over to the threads.
pub(crate) fn run(cpu: &Cpu, problems: &mut [Problem]) {
    let mut parts = Vec::new();
    for (i, problem) in problems.iter().enumerate() {
        problem.split(i, cpu.n_threads(), &mut parts);
    }
    let work: usize = problems.iter().map(|p| p.rows.len() * p.n_tokens * p.weight.n_cols).sum();
    let parts_per_call = if work < 2 * MIN_PART_WORK { parts.len() } else { 1 };
    let problems: Vec<(Shared<f32>, Inputs)> = problems.iter_mut().map(Problem::borrow).collect();
    cpu.par_tiles(parts.len(), parts_per_call, |range| {
        for part in &parts[range] {
            let (y, inputs) = &problems[part.problem];
            PANEL.with_borrow_mut(|panel| run_tile(cpu.level(), &inputs.tile(part, y), panel));
        }
    });
}

/// The read-only side of a problem.
struct Inputs<'a> {
    weight: &'a Matrix, // [N, K]
    rows: Range<usize>,
    group_rows: usize,
    x: &'a [f32], // [T, x_stride] f32
    x_stride: usize,
    y_stride: usize,
}

impl Problem<'_> {
    /// Rows that one part takes: whole panels worth a hand-over, inside one group.
    fn part_rows(&self, n_tokens: usize) -> usize {
        let per_row = self.weight.n_cols.max(1) * n_tokens.max(1);
        MIN_PART_WORK.div_ceil(per_row).next_multiple_of(PANEL_ROWS).min(self.group_rows)
    }

    /// Tokens that one part takes.
    fn part_tokens(&self, n_threads: usize) -> usize {
        let enough_rows = self.rows.len() >= 4 * n_threads * PANEL_ROWS;
        if enough_rows { MAX_PART_TOKENS } else { MIN_PART_TOKENS }
    }

    fn split(&self, problem: usize, n_threads: usize, parts: &mut Vec<Part>) {
        let part_tokens = self.part_tokens(n_threads).min(self.n_tokens).max(1);
        let part_rows = self.part_rows(part_tokens);
        for group in self.rows.clone().step_by(self.group_rows) {
            let group_end = (group + self.group_rows).min(self.rows.end);
            for first in (group..group_end).step_by(part_rows) {
                for token in (0..self.n_tokens).step_by(part_tokens) {
                    let rows = first..(first + part_rows).min(group_end);
                    parts.push(Part { problem, rows, tokens: token..(token + part_tokens).min(self.n_tokens) });
                }
            }
        }
    }

    fn borrow(&mut self) -> (Shared<'_, f32>, Inputs<'_>) {
        let inputs = Inputs {
            weight: self.weight,
            rows: self.rows.clone(),
            group_rows: self.group_rows,
            x: &self.x,
            x_stride: self.x_stride,
            y_stride: self.y_stride,
        };
        (Shared::new(self.y), inputs)
    }
}

impl Inputs<'_> {
    fn tile<'t>(&'t self, part: &Part, y: &'t Shared<'t, f32>) -> Tile<'t> {
        let group = (part.rows.start - self.rows.start) / self.group_rows;
        Tile {
            weight: self.weight,
            rows: part.rows.clone(),
            tokens: part.tokens.clone(),
            x: &self.x[group * self.weight.n_cols.next_multiple_of(LANES)..],
            x_stride: self.x_stride,
            y,
            y_stride: self.y_stride,
            first_row: self.rows.start,
        }
    }
}

// No closure may stand around vector code: it would be compiled without the features of the function it is in.
#[inline(always)]
unsafe fn run_tile_kernel<S: Simd>(tile: &Tile, panel: &mut Vec<f32>) {
    // SAFETY: the caller vouches for the instruction set.
    if tile.tokens.len() == 1 && unsafe { one_token::<S>(tile) } {
        return;
    }
    let k_padded = tile.weight.n_cols.next_multiple_of(LANES);
    if let (MatrixData::F32 { values }, true) = (&tile.weight.data, k_padded == tile.weight.n_cols) {
        let rows = &values[tile.rows.start * k_padded..tile.rows.end * k_padded];
        // SAFETY: as above.
        return unsafe { panel_times_tokens::<S>(rows, k_padded, tile.rows.clone(), tile) };
    }
    if panel.len() < PANEL_ROWS * k_padded {
        panel.resize(PANEL_ROWS * k_padded, 0.0);
    }
    for first in tile.rows.clone().step_by(PANEL_ROWS) {
        let rows = first..(first + PANEL_ROWS).min(tile.rows.end);
        for (row, out) in rows.clone().zip(panel.chunks_exact_mut(k_padded)) {
            // SAFETY: the caller vouches for the instruction set.
            unsafe { expand_row_kernel::<S>(tile.weight, row, out) };
            out[tile.weight.n_cols..].fill(0.0);
        }
        // SAFETY: as above.
        unsafe { panel_times_tokens::<S>(panel, k_padded, rows, tile) };
    }
}

/// The decode path; false when it does not take this weight.
#[inline(always)]
unsafe fn one_token<S: Simd>(tile: &Tile) -> bool {
    let token = tile.tokens.start;
    let x = &tile.x[token * tile.x_stride..];
    for first in tile.rows.clone().step_by(TILE_ROWS) {
        let last = tile.rows.end - 1;
        // A short group repeats its last row; the extra sums are dropped.
        let rows = [first, (first + 1).min(last), (first + 2).min(last), (first + 3).min(last)];
        let mut sums = [0.0; TILE_ROWS];
        // SAFETY: the caller vouches for the instruction set.
        if !unsafe { dot_4_rows::<S>(tile.weight, rows, x, &mut sums) } {
            return false;
        }
        let n_rows = (tile.rows.end - first).min(TILE_ROWS);
        let at = token * tile.y_stride + first - tile.first_row;
        // SAFETY: tiles write disjoint elements of y (parts of a problem are, and problems own their y).
        unsafe { tile.y.range(at..at + n_rows) }.copy_from_slice(&sums[..n_rows]);
    }
    true
}

/// A panel of expanded rows times all tokens of the tile: a block of tokens goes through all rows before the next one.
#[inline(always)]
unsafe fn panel_times_tokens<S: Simd>(panel: &[f32], k_padded: usize, rows: Range<usize>, tile: &Tile) {
    // The sums of a block go to y in runs of up to 64 bytes: rows of y often lie a multiple of 4 KiB apart, where a cache holds
    // few lines, and writing four columns at a time would miss it every time.
    let mut sums = [0.0; BLOCK_TOKENS * PANEL_ROWS];
    for token in tile.tokens.clone().step_by(BLOCK_TOKENS) {
        let n_tokens = (tile.tokens.end - token).min(BLOCK_TOKENS);
        let x = &tile.x[token * tile.x_stride..(token + n_tokens - 1) * tile.x_stride + k_padded];
        for panel_row in (0..rows.len()).step_by(PANEL_ROWS) {
            let n_rows = (rows.len() - panel_row).min(PANEL_ROWS);
            for first in (0..n_rows).step_by(TILE_ROWS) {
                let end = (panel_row + first + TILE_ROWS).min(rows.len());
                let w = four_rows(&panel[(panel_row + first) * k_padded..end * k_padded], k_padded);
                // SAFETY: every x row of the block has k_padded elements inside `x`; the caller vouches for the instruction
                // set.
                unsafe {
                    let block = DotBlock { w, x, x_stride: tile.x_stride, n_tokens };
                    S::dot_block(block, &mut sums[first..], PANEL_ROWS);
                }
            }
            let column = rows.start + panel_row - tile.first_row;
            for (t, sums) in sums.chunks_exact(PANEL_ROWS).take(n_tokens).enumerate() {
                let at = (token + t) * tile.y_stride + column;
                // SAFETY: tiles write disjoint elements of y (parts of a problem are, and problems own their y).
                let y = unsafe { tile.y.range(at..at + n_rows) };
                // A fixed length is copied by a few instructions, any other by a call.
                match y.first_chunk_mut::<PANEL_ROWS>() {
                    Some(y) => y.copy_from_slice(sums),
                    None => y.copy_from_slice(&sums[..n_rows]),
                }
            }
        }
    }
}

/// Up to four rows of `k` elements; a short group repeats its last row, and the extra sums are dropped.
#[inline(always)]
pub(crate) fn four_rows(rows: &[f32], k: usize) -> [&[f32]; TILE_ROWS] {
    let last = (rows.len() / k).saturating_sub(1);
    let row = |r: usize| &rows[r.min(last) * k..][..k];
    [row(0), row(1), row(2), row(3)]
}

/// Four weight rows times up to `BLOCK_TOKENS` tokens: the four sums of token t go to `sums[t * sums_stride ..]`.
///
/// # Safety
/// The instruction set of `S` must be present, `x` must hold n_tokens rows of `w[0].len()` elements at `x_stride`, and all w rows
/// have one length, a multiple of 16.
#[inline(always)]
pub(crate) unsafe fn dot_block<S: Simd>(block: DotBlock, sums: &mut [f32], sums_stride: usize) {
    let mut token = 0;
    while token < block.n_tokens {
        let left = block.n_tokens - token;
        // Tiles of a block are about equal: a small one leaves units idle.
        let n_tile = left.div_ceil(left.div_ceil(S::TILE_TOKENS));
        let tile = DotBlock { x: &block.x[token * block.x_stride..], n_tokens: n_tile, ..block };
        let sums = &mut sums[token * sums_stride..][..(n_tile - 1) * sums_stride + TILE_ROWS];
        // SAFETY: passed on; the tile's tokens are some of the block's, and `sums` was cut to its size. The comparisons are of
        // constants: a level has only the sizes that fit its registers.
        unsafe {
            match n_tile {
                1 => dot_tile::<S, 1>(tile, sums, sums_stride),
                2 => dot_tile::<S, 2>(tile, sums, sums_stride),
                _ if S::TILE_TOKENS == 2 => dot_tile::<S, 2>(tile, sums, sums_stride),
                3 => dot_tile::<S, 3>(tile, sums, sums_stride),
                _ if S::TILE_TOKENS == 3 => dot_tile::<S, 3>(tile, sums, sums_stride),
                4 => dot_tile::<S, 4>(tile, sums, sums_stride),
                5 => dot_tile::<S, 5>(tile, sums, sums_stride),
                _ => dot_tile::<S, 6>(tile, sums, sums_stride),
            }
        }
        token += n_tile;
    }
}

/// The innermost loop: 4 x T accumulators of one register each, one pass over K for each part of the 16 lanes.
///
/// # Safety
/// As for [`dot_block`]; `sums` holds T rows of four at `sums_stride`.
#[inline(always)]
unsafe fn dot_tile<S: Simd, const T: usize>(tile: DotBlock, sums: &mut [f32], sums_stride: usize) {
    let DotBlock { w, x, x_stride, .. } = tile;
    let k = w[0].len();
    let w = [w[0].as_ptr(), w[1].as_ptr(), w[2].as_ptr(), w[3].as_ptr()];
    let mut x = [x.as_ptr(); T];
    for t in 1..T {
        x[t] = x[t - 1].wrapping_add(x_stride);
    }
    let mut lanes = [[[MaybeUninit::<f32>::uninit(); LANES]; TILE_ROWS]; T];
    let last = LANES - S::WIDTH;
    // SAFETY: passed on; `lanes` has room for every part but the last, which stays in registers, and `sums` for T rows.
    unsafe {
        for part in (0..last).step_by(S::WIDTH) {
            let acc = dot_part::<S, T>(w, x, part, k);
            for t in 0..T {
                for r in 0..TILE_ROWS {
                    S::store(lanes[t][r].as_mut_ptr().cast::<f32>().add(part), acc[t][r]);
                }
            }
            // Sends the sums of this part to memory: kept in registers they push out accumulators of the next part.
            std::hint::black_box(&mut lanes);
        }
        let acc = dot_part::<S, T>(w, x, last, k);
        for t in 0..T {
            S::fold4(lanes[t].as_ptr().cast(), LANES, acc[t], sums.as_mut_ptr().add(t * sums_stride));
        }
    }
}

/// The sums of `WIDTH` of the 16 lanes, from lane `part`: `[token][row]`.
///
/// # Safety
/// The instruction set of `S` must be present and every row must have k floats, a multiple of 16.
#[inline(always)]
unsafe fn dot_part<S: Simd, const T: usize>(
    w: [*const f32; TILE_ROWS],
    x: [*const f32; T],
    part: usize,
    k: usize,
) -> [[S::V; TILE_ROWS]; T] {
    // SAFETY: offsets stay below k; k and the part are multiples of WIDTH.
    unsafe {
        let mut acc = [[S::splat(0.0); TILE_ROWS]; T];
        for i in (part..k).step_by(LANES) {
            // T registers of x and one of w: with 12 accumulators that is all 16 of AVX2.
            let mut x_i = [S::splat(0.0); T];
            for t in 0..T {
                x_i[t] = S::load(x[t].add(i));
            }
            for r in 0..TILE_ROWS {
                let w_i = S::load(w[r].add(i));
                for t in 0..T {
                    acc[t][r] = S::fma(w_i, x_i[t], acc[t][r]);
                }
            }
        }
        acc
    }
}
