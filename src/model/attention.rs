//! One layer's attention: latent queries and rows, window and compressed rows, grouped output projection.

use crate::ids::LayerIdx;
use crate::model::cache::{Cache, RingKind};
use crate::model::compressor::{self, CompressorScratch};
use crate::model::forward::{Asked, Step, fit, gather_rows};
use crate::model::indexer::{self, IndexerScratch};
use crate::model::pool::Pool;
use crate::model::weights::AttentionWeights;
use crate::ops::attention::{AttentionBatchParams, attention_batch};
use crate::ops::linear::{LinearParams, linear_grouped, linear_in_tiles};
use crate::ops::rms_norm::{RmsNormParams, rms_norm};
use crate::ops::round_fp8::round_cache_row;

/// Rows that a thread rotates at a time.
const ROPE_TILE: usize = 32;

#[derive(Debug, Default)]
pub(super) struct AttentionScratch {
    input: Vec<f32>,    // [T, D] f32, rounded
    qr: Vec<f32>,       // [T, QR] f32
    qr_input: Vec<f32>, // [T, QR] f32, rounded
    q: Vec<f32>,        // [T, H, DH] f32
    kv: Vec<f32>,       // [T, DH] f32
    heads: Vec<f32>,    // [T, H, DH] f32
    groups: Vec<f32>,   // [T, G, OR] f32
    groups_input: Vec<f32>,
    compressor: CompressorScratch,
    indexer: IndexerScratch,
    pool: Pool,
}

/// Puts the rows of the step into the caches and computes the layer's attention: of every row, or of those that `asked` names.
pub(super) fn run(
    (step, asked): (&Step<'_>, Option<&Asked<'_>>),
    layer: LayerIdx,
    w: &AttentionWeights,
    y: &[f32], // [T, D] f32
    cache: &mut Cache,
    s: &mut AttentionScratch,
    out: &mut [f32], // [T, D] f32, or of the asked rows alone
) {
    let ratio = step.shape.compress_ratios[layer.index()];
    project(step, w, ratio, y, s);
    finish_rows(step, w, ratio, s);
    if let Some(compressor) = &w.compressor {
        compressor::run(step, layer, RingKind::Raw, compressor, &mut s.compressor, cache);
    }
    if let Some(indexer) = &w.indexer {
        indexer::add_keys(step, layer, indexer, &mut s.indexer, cache);
    }
    if let Some(Asked { step: asked, rows }) = asked {
        // Few and late rows: what they see of earlier rows of their own chunk is in the rings by then.
        keep_rows(step, layer, s, cache);
        gather_rows(&mut s.qr, w.wq_a.n_rows, rows);
        gather_rows(&mut s.kv, step.shape.head_dim, rows);
        s.indexer.gather(step, rows);
        query(asked, layer, w, cache, s, out);
    } else {
        query(step, layer, w, cache, s, out);
        // The rings take the step's rows now that no query needs the rows they replace.
        keep_rows(step, layer, s, cache);
    }
}

/// Attention of all rows of a step.
fn query(
    step: &Step<'_>,
    layer: LayerIdx,
    w: &AttentionWeights,
    cache: &Cache,
    s: &mut AttentionScratch,
    out: &mut [f32], // [T, D] f32
) {
    let ratio = step.shape.compress_ratios[layer.index()];
    finish_queries(step, w, ratio, s);
    if let Some(indexer) = &w.indexer {
        let qr = if step.rounding.rounds_activations() { &s.qr_input } else { &s.qr };
        indexer::choose(step, layer, indexer, qr, &mut s.indexer, cache);
    }
    attend(step, layer, w, cache, s);
    project_out(step, w, ratio, s, out);
}

/// Every product of the layer's input, in one go.
fn project(step: &Step<'_>, w: &AttentionWeights, ratio: usize, y: &[f32], s: &mut AttentionScratch) {
    let n_rows = step.n_rows();
    let x = step.product_input(y, step.shape.hidden_size, &mut s.input);
    let (qr, kv) = (fit(&mut s.qr, n_rows * w.wq_a.n_rows), fit(&mut s.kv, n_rows * w.wkv.n_rows));
    let mut products = vec![LinearParams::dense(x, &w.wq_a, n_rows, qr), LinearParams::dense(x, &w.wkv, n_rows, kv)];
    if let Some(compressor) = &w.compressor {
        products.extend(compressor::projections(step, compressor, y, &mut s.compressor));
    }
    if let Some(indexer) = &w.indexer {
        products.extend(indexer::projections(step, indexer, y, &mut s.indexer));
    }
    step.products(products);
    if let Some(compressor) = &w.compressor {
        compressor::add_position_term(step, compressor, ratio, &mut s.compressor);
    }
}

/// Queries: norm of the latent row, projection to heads, norm of each head without a weight, rotation.
fn finish_queries(step: &Step<'_>, w: &AttentionWeights, ratio: usize, s: &mut AttentionScratch) {
    let (n_rows, rank, head_dim) = (step.n_rows(), w.wq_a.n_rows, step.shape.head_dim);
    let eps = step.shape.rms_norm_eps;
    let qr = &mut s.qr[..n_rows * rank];
    rms_norm(step.cpu, RmsNormParams { x: qr, n_cols: rank, weight: Some(&w.q_norm), eps, sums: step.block_sums(1) });
    let x = step.product_input(qr, rank, &mut s.qr_input);
    let q = fit(&mut s.q, n_rows * w.wq_b.n_rows);
    step.products(vec![LinearParams::dense(x, &w.wq_b, n_rows, q)]);
    rms_norm(step.cpu, RmsNormParams { x: q, n_cols: head_dim, weight: None, eps, sums: step.wave_sums(head_dim) });
    let (rotations, n_heads) = (step.rotations(ratio), step.shape.num_attention_heads);
    step.cpu.par_chunks(q, head_dim, ROPE_TILE, |i, head| rotations[i / n_heads].forward(head));
    step.round_if_device(q, head_dim);
}

/// Rows of the window: norm, rotation, and the rounding of the cache.
fn finish_rows(step: &Step<'_>, w: &AttentionWeights, ratio: usize, s: &mut AttentionScratch) {
    let head_dim = step.shape.head_dim;
    let kv = &mut s.kv[..step.n_rows() * head_dim];
    let (eps, sums) = (step.shape.rms_norm_eps, step.wave_sums(head_dim));
    rms_norm(step.cpu, RmsNormParams { x: kv, n_cols: head_dim, weight: Some(&w.kv_norm), eps, sums });
    let rotations = step.rotations(ratio);
    step.cpu.par_chunks(kv, head_dim, ROPE_TILE / 4, |t, row| {
        rotations[t].forward(row);
        if step.rounding.rounds_caches() {
            round_cache_row(row);
        }
    });
    step.round_if_device(kv, head_dim);
}

/// Softmax attention of every query over its window rows (ascending), then its compressed rows (ascending), and the sink.
fn attend(step: &Step<'_>, layer: LayerIdx, w: &AttentionWeights, cache: &Cache, s: &mut AttentionScratch) {
    let (shape, head_dim) = (step.shape, step.shape.head_dim);
    s.pool.fill(step, layer, &s.indexer, cache);
    let (kv, pool) = (&s.kv[..step.n_rows() * head_dim], &s.pool);
    let rows = |t: usize, list: &mut Vec<_>| {
        push_window(list, step, layer, cache, kv, t);
        list.extend(pool.rows(t, head_dim));
    };
    let out = fit(&mut s.heads, step.n_rows() * w.attn_sink.len() * head_dim);
    let params = AttentionBatchParams {
        q: &s.q[..out.len()],
        head_dim,
        sink: &w.attn_sink,
        scale: 1.0 / (head_dim as f32).sqrt(),
        rows,
        max_rows: shape.sliding_window + pool.max_rows(),
        wave: step.rounding.wave(),
        out,
    };
    attention_batch(step.cpu, params);
}

/// The window of row t: earlier positions come from the slot's ring, the run's own from this step's rows.
fn push_window<'a>(
    list: &mut Vec<&'a [f32]>,
    step: &Step<'_>,
    layer: LayerIdx,
    cache: &'a Cache,
    kv: &'a [f32], // [T, DH] f32
    t: usize,
) {
    let (run, head_dim) = (step.run_of(t), step.shape.head_dim);
    let first = (step.positions[t] + 1).saturating_sub(step.shape.sliding_window);
    if let Some(ring) = cache.ring(run.slot, layer, RingKind::Window) {
        list.extend((first..run.first_pos).map(|p| ring.row(p)));
    }
    let first_own = run.first_row + first.saturating_sub(run.first_pos);
    list.extend(kv[first_own * head_dim..(t + 1) * head_dim].chunks_exact(head_dim));
}

/// The slots' rings take the step's rows.
fn keep_rows(step: &Step<'_>, layer: LayerIdx, s: &AttentionScratch, cache: &mut Cache) {
    let head_dim = step.shape.head_dim;
    for run in &step.runs {
        let rows = run.first_row * head_dim..(run.first_row + run.n_rows) * head_dim;
        cache.write_ring(run.slot, layer, RingKind::Window, run.first_pos, &[&s.kv[rows]]);
    }
    compressor::keep_rows(step, layer, RingKind::Raw, &s.compressor, cache);
    compressor::keep_rows(step, layer, RingKind::RawIndex, &s.indexer.compressor, cache);
}

/// Inverse rotation of every head, then the two output products: one a group of heads, one over all of them. The first
/// one's input is never rounded.
fn project_out(step: &Step<'_>, w: &AttentionWeights, ratio: usize, s: &mut AttentionScratch, out: &mut [f32]) {
    let (n_rows, head_dim, n_heads) = (step.n_rows(), step.shape.head_dim, step.shape.num_attention_heads);
    let heads = &mut s.heads[..n_rows * n_heads * head_dim];
    let rotations = step.rotations(ratio);
    step.cpu.par_chunks(heads, head_dim, ROPE_TILE, |i, head| rotations[i / n_heads].inverse(head));
    step.round_if_device(heads, head_dim);
    let n_groups_cols = w.wo_a.n_rows;
    let groups = fit(&mut s.groups, n_rows * n_groups_cols);
    let params = LinearParams {
        x: heads,
        x_stride: n_heads * head_dim,
        n_tokens: n_rows,
        weight: &w.wo_a,
        rows: 0..n_groups_cols,
        y: groups,
        y_stride: n_groups_cols,
        n_alike: 1,
    };
    match step.rounding.wave() {
        None => linear_grouped(step.cpu, params, step.shape.o_groups),
        Some(wave) => linear_in_tiles(step.cpu, wave, params, step.shape.o_groups),
    }
    let x = step.product_input(groups, n_groups_cols, &mut s.groups_input);
    step.products(vec![LinearParams::dense(x, &w.wo_b, n_rows, out)]);
}
