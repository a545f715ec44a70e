//! Attention with the roundings and the order of sums of the kernels of GPUs, for comparing with them closely.
//!
//! Bits: those of kernels/attention.hip at a wave width. Rows are taken in tiles of 64 in list order. A score is the sum of two halves of
//! its columns, times scale; a tile's p = exp(score - largest score so far) is rounded to BF16, for the sum of rows and for the
//! denominator alike, and what came before is scaled by exp(largest before - largest now). The largest starts at the sink, which
//! joins the denominator at the end.

use super::AttentionParams;
use crate::device::SimWave;
use crate::device::cpu::Level;
use crate::device::cpu::math::exp_f32;
use crate::device::cpu::tile::{TILE, multiply};
use crate::tensor::format::{bf16_to_f32, f32_to_bf16};

/// Rows that are taken before the maximum is looked at again.
pub const TILE_ROWS: usize = 64;
/// Columns of a span, of which each quarter of a wave owns sixteen.
const SPAN: usize = 64;
/// Rows that one thread adds up.
const THREAD_ROWS: usize = 4;

/// One head's running maximum and denominator.
struct Softmax {
    top: f32,
    total: f32,
}

/// Up to 64 rows as operands, zeros past the last.
struct Tile {
    n_rows: usize,
    /// Columns are K: as [`place`] has them.
    by_column: Vec<f32>, // [4, DH, 16 rows] f32
    /// Rows are K.
    by_row: Vec<f32>, // [DH / 16, 64, 16 columns] f32
}

/// Computes some heads of one query on this thread.
pub fn attention_rounded(level: Level, wave: SimWave, params: AttentionParams) {
    let AttentionParams { q, rows, sink, scale, out } = params;
    assert!(q.len() == out.len(), "attention: DH: q of {}, out of {}", q.len(), out.len());
    let head_dim = q.len() / sink.len().max(1);
    let mut heads: Vec<Softmax> = sink.iter().map(|sink| Softmax { top: *sink, total: 0.0 }).collect();
    let mut placed = vec![0.0; q.len()];
    q.iter().enumerate().for_each(|(i, x)| placed[i / head_dim * head_dim + place(i % head_dim)] = *x);
    out.fill(0.0);
    for rows in rows.chunks(TILE_ROWS) {
        let tile = Tile::new(rows, head_dim);
        let each = placed.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim));
        for (head, (q, out)) in heads.iter_mut().zip(each) {
            let mut p = tile.scores(level, wave, q, scale);
            let factor = head.weigh(&mut p, tile.n_rows);
            tile.add(level, wave, &p, factor, out);
        }
    }
    for ((head, sink), out) in heads.iter().zip(sink).zip(out.chunks_exact_mut(head_dim)) {
        let total = head.total + exp_f32(sink - head.top);
        out.iter_mut().for_each(|sum| *sum /= total);
    }
}

/// Where a column stands among the operands: an instruction takes four columns of each quarter of a span.
fn place(column: usize) -> usize {
    let (span, quarter, step) = (column / SPAN, column % SPAN / TILE, column % TILE / 4);
    span * SPAN + step * TILE + quarter * 4 + column % 4
}

impl Tile {
    fn new(rows: &[&[f32]], head_dim: usize) -> Self {
        let (mut by_column, mut by_row) = (vec![0.0; TILE_ROWS * head_dim], vec![0.0; TILE_ROWS * head_dim]);
        for (r, row) in rows.iter().enumerate() {
            let columns = &mut by_column[r / TILE * TILE * head_dim..];
            for (column, x) in row[..head_dim].iter().enumerate() {
                columns[place(column) * TILE + r % TILE] = *x;
                by_row[(column / TILE * TILE_ROWS + r) * TILE + column % TILE] = *x;
            }
        }
        Self { n_rows: rows.len(), by_column, by_row }
    }

    /// Scores of a placed query.
    fn scores(&self, level: Level, wave: SimWave, q: &[f32], scale: f32) -> [f32; TILE_ROWS] {
        let mut scores = [0.0; TILE_ROWS];
        let half = q.len() / 2;
        for (scores, rows) in scores.chunks_exact_mut(TILE).zip(self.by_column.chunks_exact(q.len() * TILE)) {
            let (mut low, mut high) = ([0.0; TILE], [0.0; TILE]);
            multiply(level, wave, &mut low, &rows[..half * TILE], &q[..half]);
            multiply(level, wave, &mut high, &rows[half * TILE..], &q[half..]);
            for (score, (low, high)) in scores.iter_mut().zip(low.iter().zip(&high)) {
                *score = (low + high) * scale;
            }
        }
        scores
    }

    /// out = out * factor + the sum of p times rows.
    fn add(&self, level: Level, wave: SimWave, p: &[f32; TILE_ROWS], factor: f32, out: &mut [f32]) {
        for (out, rows) in out.chunks_exact_mut(TILE).zip(self.by_row.chunks_exact(TILE_ROWS * TILE)) {
            let mut sums = [0.0; TILE];
            sums.iter_mut().zip(&*out).for_each(|(sum, out)| *sum = out * factor);
            multiply(level, wave, &mut sums, rows, p);
            out.copy_from_slice(&sums);
        }
    }
}

impl Softmax {
    /// Turns the scores of `n` rows into their weights, those past them into 0; returns what the sums so far are scaled by.
    fn weigh(&mut self, scores: &mut [f32; TILE_ROWS], n: usize) -> f32 {
        // A NaN is passed over here and reaches the sums.
        let top = scores[..n].iter().fold(self.top, |top, score| if *score > top { *score } else { top });
        scores[..n].iter_mut().for_each(|score| *score = bf16_to_f32(f32_to_bf16(exp_f32(*score - top))));
        scores[n..].fill(0.0);
        let mut sums: Vec<f32> = scores.chunks_exact(THREAD_ROWS).map(|v| (v[0] + v[1]) + (v[2] + v[3])).collect();
        while sums.len() > 1 {
            sums = sums.chunks_exact(2).map(|pair| pair[0] + pair[1]).collect();
        }
        let factor = exp_f32(self.top - top);
        self.total = self.total.mul_add(factor, sums[0]);
        self.top = top;
        factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, max_error};
    use crate::ops::attention::reference;

    const DIM: usize = 512;

    #[test]
    fn the_rounded_form_is_near_the_reference_over_several_tiles() {
        let mut rng = Rng(73);
        let mut bf16 =
            |n: usize| -> Vec<f32> { rng.floats(n).into_iter().map(|x| bf16_to_f32(f32_to_bf16(x))).collect() };
        for (n_heads, n_rows) in [(4, 0), (4, 1), (3, 64), (2, 65), (4, 200)] {
            let storage: Vec<Vec<f32>> = (0..n_rows).map(|_| bf16(DIM)).collect();
            let rows: Vec<&[f32]> = storage.iter().map(Vec::as_slice).collect();
            let (q, sink) = (bf16(n_heads * DIM), bf16(n_heads));
            for wave in [SimWave::W32, SimWave::W64] {
                let mut out = vec![f32::NAN; q.len()];
                let params = AttentionParams { q: &q, rows: &rows, sink: &sink, scale: 0.3, out: &mut out };
                attention_rounded(Level::best(), wave, params);
                // Weights of at most 1 are rounded to 8 bits, numerator and denominator alike.
                let error = max_error(&out, &reference(&q, &rows, &sink, 0.3));
                assert!(error < 4e-3, "{n_heads} {n_rows} {wave:?}: {error}");
            }
        }
    }
}
