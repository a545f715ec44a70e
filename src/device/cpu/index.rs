//! Indexer scores: tiles of keys, decoded once, times tiles of queries.

use std::cell::RefCell;
use std::ops::Range;

use super::linear::four_rows;
use super::simd::{BLOCK_TOKENS, DotBlock, LANES, Simd, TILE_ROWS};
use super::{Cpu, Shared};

/// Keys decoded at a time; they stay in the first-level cache.
const TILE_KEYS: usize = 32;
/// Queries that use one decoded tile of keys.
const TILE_QUERIES: usize = 32;
/// Multiply-adds that are worth handing to another thread.
const MIN_TILE_WORK: usize = 1 << 15;

/// Scores of all queries for all keys; shapes are checked by the caller, a wrong one panics at a slice bound.
pub(crate) struct Scores<'a, F> {
    pub iq: &'a [f32],      // [T, H, D] f32, D a multiple of 16
    pub weights: &'a [f32], // [T, H] f32
    pub n_queries: usize,
    pub n_keys: usize,
    pub dims: usize,
    /// Writes keys `range` to `[range.len(), D]`.
    pub decode: F,
    pub scores: &'a mut [f32], // [T, scores_stride] f32
    pub scores_stride: usize,
}

/// One query and some decoded keys.
struct Row<'a> {
    iq: &'a [f32],      // [H, D] f32
    weights: &'a [f32], // [H] f32
    keys: &'a [f32],    // [n, D] f32
    dims: usize,
}

thread_local! {
    /// Decoded keys of one tile.
    static KEYS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

simd_fn! {
    fn score_row(row: &Row, scores: &mut [f32]) = score_row_kernel
}

/// Fills the scores on all threads.
pub(crate) fn run<F: Fn(Range<usize>, &mut [f32]) + Sync>(cpu: &Cpu, p: Scores<F>) {
    let (n_heads, dims) = (p.weights.len() / p.n_queries.max(1), p.dims);
    assert!(dims % LANES == 0, "index_score: D: {dims}, want a multiple of {LANES}");
    let (key_tiles, query_tiles) = (p.n_keys.div_ceil(TILE_KEYS), p.n_queries.div_ceil(TILE_QUERIES));
    let scores = Shared::new(p.scores);
    let work = TILE_KEYS * n_heads * dims * TILE_QUERIES.min(p.n_queries.max(1));
    cpu.par_tiles(key_tiles * query_tiles, MIN_TILE_WORK.div_ceil(work.max(1)), |tiles| {
        for tile in tiles {
            let first_key = tile / query_tiles * TILE_KEYS;
            let keys = first_key..(first_key + TILE_KEYS).min(p.n_keys);
            let first_query = tile % query_tiles * TILE_QUERIES;
            KEYS.with_borrow_mut(|decoded| {
                decoded.resize(TILE_KEYS * dims, 0.0);
                let decoded = &mut decoded[..keys.len() * dims];
                (p.decode)(keys.clone(), decoded);
                for t in first_query..(first_query + TILE_QUERIES).min(p.n_queries) {
                    let iq = &p.iq[t * n_heads * dims..][..n_heads * dims];
                    let row = Row { iq, weights: &p.weights[t * n_heads..][..n_heads], keys: decoded, dims };
                    let at = t * p.scores_stride + keys.start;
                    // SAFETY: a (query, key) pair belongs to one tile, and tiles are given to one call each.
                    score_row(cpu.level(), &row, unsafe { scores.range(at..at + keys.len()) });
                }
            });
        }
    });
}

#[inline(always)]
unsafe fn score_row_kernel<S: Simd>(row: &Row, scores: &mut [f32]) {
    let (n_heads, d) = (row.weights.len(), row.dims);
    assert!(row.iq.len() == n_heads * d, "index_score: iq of {}, want {n_heads} x {d}", row.iq.len());
    for (keys, scores) in row.keys.chunks(TILE_ROWS * d).zip(scores.chunks_mut(TILE_ROWS)) {
        let w = four_rows(keys, d);
        let mut totals = [0.0f32; TILE_ROWS];
        for head in (0..n_heads).step_by(BLOCK_TOKENS) {
            let n_tokens = (n_heads - head).min(BLOCK_TOKENS);
            let mut sums = [0.0; BLOCK_TOKENS * TILE_ROWS];
            let block = DotBlock { w, x: &row.iq[head * d..(head + n_tokens) * d], x_stride: d, n_tokens };
            // SAFETY: iq holds n_tokens heads of d elements from `head`, every key d; the caller vouches for the instruction
            // set.
            unsafe { S::dot_block(block, &mut sums, TILE_ROWS) };
            for (weight, sums) in row.weights[head..head + n_tokens].iter().zip(sums.chunks_exact(TILE_ROWS)) {
                for (total, dot) in totals.iter_mut().zip(sums) {
                    let positive = if *dot < 0.0 { 0.0 } else { *dot };
                    *total = weight.mul_add(positive, *total);
                }
            }
        }
        scores.copy_from_slice(&totals[..scores.len()]);
    }
}
