//! Attention of single queries over explicit lists of latent rows (K = V), with a sink that only adds to the denominator.
//!
//! Bits: score = (16-lane dot) * scale; p = exp(score - max) with max over scores and sink; denominator = sum of p over 16
//! lanes by row index, folded, plus exp(sink - max); out = (fused multiply-adds in list order) * (1 / denominator). A head
//! depends on its own query, the rows and their order, and nothing else.

pub mod device;
mod rounded;

pub use rounded::{CHUNK_ROWS, attention_rounded};

use std::cell::RefCell;

use crate::device::SimWave;
use crate::device::cpu::attention::{attention_scores, softmax_with_sink, weighted_rows};
use crate::device::cpu::{Cpu, Level};

/// Heads that one thread takes together: they share every load of a row.
const HEAD_GROUP: usize = 4;
/// Multiply-adds that are worth handing to another thread.
const MIN_TILE_WORK: usize = 1 << 15;

/// Some heads of one query.
#[derive(Debug)]
pub struct AttentionParams<'a> {
    /// The heads' queries.
    pub q: &'a [f32], // [H, DH] f32
    /// Rows to attend to, in the order in which they are summed.
    pub rows: &'a [&'a [f32]], // [n_rows][DH] f32
    /// Learned logit of each head that has no value.
    pub sink: &'a [f32], // [H] f32
    /// Factor of the dot products.
    pub scale: f32,
    /// Result.
    pub out: &'a mut [f32], // [H, DH] f32
}

thread_local! {
    /// Scores of one call; it grows to the largest once.
    static SCORES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Computes some heads of one query on this thread.
pub fn attention(level: Level, params: AttentionParams) {
    let AttentionParams { q, rows, sink, scale, out } = params;
    let (n_heads, n_rows) = (sink.len(), rows.len());
    assert!(q.len() == out.len(), "attention: DH: q of {}, out of {}", q.len(), out.len());
    SCORES.with_borrow_mut(|scratch| {
        scratch.clear();
        scratch.resize(n_heads * (n_rows + 1), 0.0);
        let (scores, norm) = scratch.split_at_mut(n_heads * n_rows);
        attention_scores(level, q, rows, scale, scores);
        for h in 0..n_heads {
            norm[h] = softmax_with_sink(level, &mut scores[h * n_rows..(h + 1) * n_rows], sink[h]);
        }
        weighted_rows(level, scores, norm, rows, out);
    });
}

/// Queries of a step.
pub struct AttentionBatchParams<'a, F> {
    /// All queries.
    pub q: &'a [f32], // [T, H, DH] f32
    /// Elements of a row.
    pub head_dim: usize,
    /// Learned logit of each head.
    pub sink: &'a [f32], // [H] f32
    /// Factor of the dot products.
    pub scale: f32,
    /// `rows(t, list)` appends the rows of query t, in order, to an empty list. It is called from any thread, more than once.
    pub rows: F,
    /// Multiply-adds of a query are `max_rows` x H x DH x 2: used to share out the work.
    pub max_rows: usize,
    /// Whose kernels' roundings and order of sums are taken ([`attention_rounded`]), if any's.
    pub wave: Option<SimWave>,
    /// Result.
    pub out: &'a mut [f32], // [T, H, DH] f32
}

/// Computes all heads of all queries on all threads.
pub fn attention_batch<'r, F: Fn(usize, &mut Vec<&'r [f32]>) + Sync>(cpu: &Cpu, params: AttentionBatchParams<F>) {
    let AttentionBatchParams { q, head_dim, sink, scale, rows, max_rows, wave, out } = params;
    let n_heads = sink.len();
    assert!(q.len() == out.len(), "attention: T: q of {}, out of {}", q.len(), out.len());
    assert!(q.len() % (n_heads * head_dim).max(1) == 0, "attention: H, DH: q of {}", q.len());
    let heads = [HEAD_GROUP, 2, 1].into_iter().find(|g| n_heads % g == 0).unwrap_or(1);
    let (n_groups, chunk) = (n_heads / heads, heads * head_dim);
    let chunks_per_tile = MIN_TILE_WORK.div_ceil((max_rows * chunk * 2).max(1));
    cpu.par_chunks(out, chunk, chunks_per_tile, |i, out| {
        let mut list = Vec::with_capacity(max_rows);
        rows(i / n_groups, &mut list);
        let sink = &sink[i % n_groups * heads..][..heads];
        let params = AttentionParams { q: &q[i * chunk..][..chunk], rows: &list, sink, scale, out };
        match wave {
            Some(wave) => attention_rounded(cpu.level(), wave, params),
            None => attention(cpu.level(), params),
        }
    });
}

/// One query in f64.
#[must_use]
pub fn reference(q: &[f32], rows: &[&[f32]], sink: &[f32], scale: f32) -> Vec<f64> {
    let d = q.len() / sink.len();
    let mut out = vec![0.0; q.len()];
    for (h, sink) in sink.iter().enumerate() {
        let q = &q[h * d..(h + 1) * d];
        let dot = |row: &[f32]| q.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let scores: Vec<f64> = rows.iter().map(|row| dot(row) * f64::from(scale)).collect();
        let max = scores.iter().copied().fold(f64::from(*sink), f64::max);
        let total: f64 = scores.iter().map(|s| (s - max).exp()).sum::<f64>() + (f64::from(*sink) - max).exp();
        for (row, score) in rows.iter().zip(&scores) {
            for (out, x) in out[h * d..(h + 1) * d].iter_mut().zip(*row) {
                *out += (score - max).exp() / total * f64::from(*x);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, bits, cpus, max_error};

    const DIM: usize = 512;

    fn run(level: Level, q: &[f32], rows: &[&[f32]], sink: &[f32], scale: f32) -> Vec<f32> {
        let mut out = vec![f32::NAN; q.len()];
        attention(level, AttentionParams { q, rows, sink, scale, out: &mut out });
        out
    }

    /// The same query twice through the batch form.
    fn run_twice(cpu: &Cpu, q: &[f32], rows: &[&[f32]], sink: &[f32], scale: f32) -> Vec<f32> {
        fn list_of<'r, F: Fn(usize, &mut Vec<&'r [f32]>) + Sync>(rows: F) -> F {
            rows
        }
        let (q, mut out) = ([q, q].concat(), vec![f32::NAN; 2 * q.len()]);
        let params = AttentionBatchParams {
            q: &q,
            head_dim: DIM,
            sink,
            scale,
            rows: list_of(|_, list| list.extend(rows)),
            max_rows: rows.len(),
            wave: None,
            out: &mut out,
        };
        attention_batch(cpu, params);
        out
    }

    #[test]
    fn agrees_with_the_reference_and_bits_agree_on_all_levels() {
        let mut rng = Rng(71);
        for (n_heads, n_rows) in [(4, 128), (64, 640), (1, 1), (4, 0), (3, 5), (5, 129), (7, 16), (8, 17)] {
            let storage: Vec<Vec<f32>> = (0..n_rows).map(|_| rng.floats(DIM)).collect();
            let rows: Vec<&[f32]> = storage.iter().map(Vec::as_slice).collect();
            let (q, sink) = (rng.floats(n_heads * DIM), rng.floats(n_heads));
            let cpus = cpus();
            let out = run(cpus[0].level(), &q, &rows, &sink, 0.3);
            if n_rows > 0 {
                // Scores of a few units carry errors of 1e-6, which exp passes on.
                assert!(max_error(&out, &reference(&q, &rows, &sink, 0.3)) < 5e-6, "{n_heads} {n_rows}");
            } else {
                assert!(out.iter().all(|x| *x == 0.0), "no row: the sink takes all");
            }
            for cpu in &cpus {
                assert_eq!(bits(&out), bits(&run(cpu.level(), &q, &rows, &sink, 0.3)), "{n_heads} {n_rows}");
                let batch = run_twice(cpu, &q, &rows, &sink, 0.3);
                assert_eq!(bits(&batch), bits(&[&out[..], &out[..]].concat()), "{n_heads} {n_rows} in a batch");
            }
        }
    }

    #[test]
    fn a_head_alone_gives_the_bits_it_gives_among_others() {
        let mut rng = Rng(72);
        let storage: Vec<Vec<f32>> = (0..37).map(|_| rng.floats(DIM)).collect();
        let rows: Vec<&[f32]> = storage.iter().map(Vec::as_slice).collect();
        let (q, sink) = (rng.floats(6 * DIM), rng.floats(6));
        for cpu in cpus() {
            let all = run(cpu.level(), &q, &rows, &sink, 0.1);
            for h in 0..6 {
                let one = run(cpu.level(), &q[h * DIM..(h + 1) * DIM], &rows, &sink[h..=h], 0.1);
                assert_eq!(bits(&one), bits(&all[h * DIM..(h + 1) * DIM]));
            }
        }
    }

    #[test]
    fn extreme_scores_do_not_overflow() {
        let (q, big, small) = (vec![10.0; DIM], vec![10.0; DIM], vec![-10.0; DIM]);
        for cpu in cpus() {
            let out = run(cpu.level(), &q, &[&small, &big], &[0.0], 1.0);
            assert!(out.iter().all(|x| *x == 10.0), "the largest score takes all");
            let out = run(cpu.level(), &q, &[&small], &[5.0], 1.0);
            assert!(out.iter().all(|x| *x == 0.0), "the sink takes all");
        }
    }

    #[test]
    fn a_nan_row_shows() {
        let (q, nan) = (vec![1.0; DIM], vec![f32::NAN; DIM]);
        for cpu in cpus() {
            assert!(run(cpu.level(), &q, &[&q, &nan], &[0.0], 1.0).iter().all(|x| x.is_nan()));
        }
    }
}
