//! Attention with the roundings and the order of sums of the kernels of GPUs, for comparing with them closely.
//!
//! Bits: those of kernels/attention.hip at a wave width. The list is cut into chunks of 64 rows. A score is the sum of two halves of its
//! columns, times scale; e^score = m 2^n, and m is rounded to BF16, for the sum of rows and for the denominator alike. A chunk's sums are
//! relative to its largest n, and chunks are added in order relative to the largest n so far, which starts at the sink's: powers of
//! two, so that nothing is rounded but the sums. The sink joins the denominator at the end.

use super::AttentionParams;
use crate::device::SimWave;
use crate::device::cpu::Level;
use crate::device::cpu::math::{exp_parts, exp2_int};
use crate::device::cpu::tile::{TILE, multiply};
use crate::tensor::format::{bf16_to_f32, f32_to_bf16};

/// Rows of a chunk.
pub const CHUNK_ROWS: usize = 64;
/// Columns of a span, of which each quarter of a wave owns sixteen.
const SPAN: usize = 64;
/// Rows that one thread adds up.
const THREAD_ROWS: usize = 4;

/// The largest exponent of some rows of one head, and the total of their weights relative to it.
struct Softmax {
    top: f32,
    total: f32,
}

/// Up to 64 rows as operands, zeros past the last.
struct Chunk {
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
    let sinks: Vec<(f32, f32)> = sink.iter().map(|sink| exp_parts(*sink)).collect();
    let mut heads: Vec<Softmax> = sinks.iter().map(|sink| Softmax { top: sink.1, total: 0.0 }).collect();
    let mut placed = vec![0.0; q.len()];
    q.iter().enumerate().for_each(|(i, x)| placed[i / head_dim * head_dim + place(i % head_dim)] = *x);
    out.fill(0.0);
    for rows in rows.chunks(CHUNK_ROWS) {
        let chunk = Chunk::new(rows, head_dim);
        let each = placed.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim));
        for (head, (q, out)) in heads.iter_mut().zip(each) {
            let mut p = chunk.scores(level, wave, q, scale);
            let factors = head.merge(&Softmax::weigh(&mut p, chunk.n_rows));
            chunk.add(level, wave, &p, factors, out);
        }
    }
    for ((head, sink), out) in heads.iter().zip(&sinks).zip(out.chunks_exact_mut(head_dim)) {
        let total = head.total + sink.0 * exp2_int(sink.1 - head.top);
        out.iter_mut().for_each(|sum| *sum /= total);
    }
}

/// Where a column stands among the operands: an instruction takes four columns of each quarter of a span.
fn place(column: usize) -> usize {
    let (span, quarter, step) = (column / SPAN, column % SPAN / TILE, column % TILE / 4);
    span * SPAN + step * TILE + quarter * 4 + column % 4
}

impl Chunk {
    fn new(rows: &[&[f32]], head_dim: usize) -> Self {
        let (mut by_column, mut by_row) = (vec![0.0; CHUNK_ROWS * head_dim], vec![0.0; CHUNK_ROWS * head_dim]);
        for (r, row) in rows.iter().enumerate() {
            let columns = &mut by_column[r / TILE * TILE * head_dim..];
            for (column, x) in row[..head_dim].iter().enumerate() {
                columns[place(column) * TILE + r % TILE] = *x;
                by_row[(column / TILE * CHUNK_ROWS + r) * TILE + column % TILE] = *x;
            }
        }
        Self { n_rows: rows.len(), by_column, by_row }
    }

    /// Scores of a placed query.
    fn scores(&self, level: Level, wave: SimWave, q: &[f32], scale: f32) -> [f32; CHUNK_ROWS] {
        let mut scores = [0.0; CHUNK_ROWS];
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

    /// out = the sum of p times rows, scaled, + out, scaled.
    fn add(&self, level: Level, wave: SimWave, p: &[f32; CHUNK_ROWS], [before, own]: [f32; 2], out: &mut [f32]) {
        for (out, rows) in out.chunks_exact_mut(TILE).zip(self.by_row.chunks_exact(CHUNK_ROWS * TILE)) {
            let mut sums = [0.0; TILE];
            multiply(level, wave, &mut sums, rows, p);
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = sum.mul_add(own, *out * before);
            }
        }
    }
}

impl Softmax {
    /// Turns the scores of a chunk of `n` rows into their weights, those past them into 0.
    fn weigh(scores: &mut [f32; CHUNK_ROWS], n: usize) -> Self {
        let parts: Vec<(f32, f32)> = scores[..n].iter().map(|score| exp_parts(*score)).collect();
        // A NaN is passed over here and reaches the sums.
        let top = parts.iter().fold(f32::MIN, |top, part| if part.1 > top { part.1 } else { top });
        for (score, (mantissa, exponent)) in scores.iter_mut().zip(parts) {
            *score = bf16_to_f32(f32_to_bf16(mantissa)) * exp2_int(exponent - top);
        }
        scores[n..].fill(0.0);
        let mut sums: Vec<f32> = scores.chunks_exact(THREAD_ROWS).map(|v| (v[0] + v[1]) + (v[2] + v[3])).collect();
        while sums.len() > 1 {
            sums = sums.chunks_exact(2).map(|pair| pair[0] + pair[1]).collect();
        }
        Self { top, total: sums[0] }
    }

    /// Merges a chunk into what came before; returns what the sums of both are scaled by, before and chunk.
    fn merge(&mut self, chunk: &Self) -> [f32; 2] {
        let now = if chunk.top > self.top { chunk.top } else { self.top };
        let factors = [exp2_int(self.top - now), exp2_int(chunk.top - now)];
        self.total = chunk.total.mul_add(factors[1], self.total * factors[0]);
        self.top = now;
        factors
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, max_error};
    use crate::ops::attention::reference;

    const DIM: usize = 512;

    #[test]
    fn the_rounded_form_is_near_the_reference_over_several_chunks() {
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
