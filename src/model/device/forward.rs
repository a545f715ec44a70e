//! The forward pass on a device: one ragged batch through all layers, in as few launches as wait for each other.
//!
//! The steps are those of the CPU's forward pass; what is rounded where is in docs/numerics.md. Every address that a launch
//! takes is fixed for the life of the executor or part of the staged step.

use crate::device::{Device, DeviceError};
use crate::ids::LayerIdx;
use crate::model::cache::RingKind;
use crate::model::device::cache::DeviceCache;
use crate::model::device::experts;
use crate::model::device::step::{LogitTile, ScoreTile, StagedStep};
use crate::model::device::weights::{
    DeviceAttention, DeviceCompressor, DeviceHyper, DeviceIndexer, DeviceWeights, Dims,
};
use crate::model::device::workspace::{ROW_BYTES, Scratch, n_chunks};
use crate::model::forward::TracePoint;
use crate::model::shape::ModelShape;
use crate::ops::attention::device::{self as attention, AttentionArgs};
use crate::ops::embed::device::{self as embed, EmbedArgs};
use crate::ops::hyper_head::device::{self as hyper_head, HyperHeadArgs};
use crate::ops::hyper_mix::device::{self as hyper_mix, HyperMixArgs};
use crate::ops::hyper_post::device::{self as hyper_post, HyperPostArgs};
use crate::ops::index_score::device::{self as index_score, IndexScoreArgs};
use crate::ops::latent::group::GroupArgs;
use crate::ops::latent::norm::NormArgs;
use crate::ops::latent::window::WindowArgs;
use crate::ops::latent::{self, LatentArgs};
use crate::ops::linear::device::{self as linear, DeviceProduct, RowsCount};
use crate::ops::query::{self, QueryArgs};
use crate::ops::ring_store::{self, RingStoreArgs};
use crate::ops::top_k::device::{self as top_k, TopKArgs};

/// Blocks of the whole form of attention up to which lists are split: that many leave most of a device idle.
const SPLIT_BLOCKS: u32 = 64;

/// What every launch of a step reads.
pub(super) struct Pass<'a> {
    pub device: &'a Device,
    pub shape: &'a ModelShape,
    pub dims: Dims,
    pub weights: &'a DeviceWeights,
    pub at: &'a Scratch,
    pub cache: &'a DeviceCache,
    /// Every slot's last token.
    pub slot_tokens: u64, // [n_slots] u32
    pub staged: &'a StagedStep,
}

/// How a sublayer has ended: what the next one's start has still to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The residual is whole.
    Whole,
    /// The output is there.
    Output,
    /// The experts' results are there.
    Experts,
}

/// One layer's place in the pass.
#[derive(Clone, Copy)]
struct LayerPass {
    layer: LayerIdx,
    ratio: u32,
    freqs: u64, // [32] f32
}

impl Pass<'_> {
    /// Puts the step's rows into the caches and leaves the residual of every row.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn trunk(&self) -> Result<(), DeviceError> {
        self.trunk_seen(&mut |_, _| Ok(()))
    }

    /// As [`Pass::trunk`]; `look` gets the address of what is at every [`TracePoint`].
    ///
    /// # Errors
    /// When the device is lost, and those of `look`.
    pub fn trunk_seen(
        &self,
        look: &mut dyn FnMut(TracePoint, u64) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.embed()?;
        let (mut before, mut last) = (Ended::Whole, None);
        for (layer, w) in (0..).map(LayerIdx).zip(&self.weights.layers) {
            self.enter(before, &w.hc_attn, w.attn_norm)?;
            self.show_end(last, look)?;
            self.attention(layer, &w.attn)?;
            look(TracePoint::Attention(layer), self.at.output)?;
            self.enter(Ended::Output, &w.hc_ffn, w.ffn_norm)?;
            before = experts::run(self, &w.ffn)?;
            last = Some(layer);
        }
        self.leave(before)?;
        self.show_end(last, look)
    }

    /// Shows what a layer has left, once the start of the next one has made it whole.
    fn show_end(
        &self,
        layer: Option<LayerIdx>,
        look: &mut dyn FnMut(TracePoint, u64) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let Some(layer) = layer else { return Ok(()) };
        look(TracePoint::Experts(layer), self.at.output)?;
        look(TracePoint::Residual(layer), self.at.residual)
    }

    /// Logits of some wanted rows, `[n_rows, V]` at `at.head.logits`.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn head(&self, tile: &LogitTile) -> Result<(), DeviceError> {
        let w = self.weights;
        let args = HyperHeadArgs {
            step: tile.step,
            logit_rows: tile.rows,
            residual: self.at.residual,
            mix: w.hc_head.mix,
            base: w.hc_head.base,
            scale: w.hc_head.scale,
            norm: w.norm,
            y: self.at.head.y,
            n_cols: self.dims.d,
            norm_eps: self.shape.rms_norm_eps,
            hc_eps: self.shape.hc_eps,
            pad: 0,
        };
        hyper_head::launch(self.device, &args, tile.n_rows as u32)?;
        let product = w.head.product(self.at.head.y, self.at.head.logits);
        let product = DeviceProduct { rows_count: RowsCount::LogitRows, ..product };
        linear::launch(self.device, tile.step, &[product], tile.n_rows as u32)
    }

    /// Rows of the step, as grids take them.
    pub fn n_rows(&self) -> u32 {
        self.staged.n_rows as u32
    }

    /// Some products of the same rows, in one launch.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn products(&self, products: &[DeviceProduct]) -> Result<(), DeviceError> {
        linear::launch(self.device, self.staged.step, products, self.n_rows())
    }

    fn embed(&self) -> Result<(), DeviceError> {
        let args = EmbedArgs {
            step: self.staged.step,
            slot_tokens: self.slot_tokens,
            table: self.weights.embed,
            ids_out: self.at.ids,
            residual: self.at.residual,
            n_cols: self.dims.d,
            vocab_size: self.dims.vocab_size,
        };
        embed::launch(self.device, &args, self.n_rows())
    }

    /// The sublayer's input from the copies of the residual, which take what the sublayer before has left first.
    fn enter(&self, before: Ended, w: &DeviceHyper, norm: u64) -> Result<(), DeviceError> {
        let moe = &self.at.moe;
        let args = HyperMixArgs {
            step: self.staged.step,
            residual: self.at.residual,
            mix: w.mix,
            base: w.base,
            scale: w.scale,
            norm,
            weights: self.at.mixes,
            y: self.at.y,
            partials: self.at.partials,
            output: if before == Ended::Whole { 0 } else { self.at.output },
            routed: if before == Ended::Experts { moe.routed } else { 0 },
            row_of: moe.row_of,
            shared: moe.shared,
            n_cols: self.dims.d,
            n_iters: self.shape.hc_sinkhorn_iters as u32,
            top_k: self.dims.top_k,
            norm_eps: self.shape.rms_norm_eps,
            hc_eps: self.shape.hc_eps,
            ..HyperMixArgs::default()
        };
        hyper_mix::launch(self.device, &args, self.n_rows())
    }

    /// The last residual.
    fn leave(&self, before: Ended) -> Result<(), DeviceError> {
        if before == Ended::Experts {
            experts::combine(self)?;
        }
        let args = HyperPostArgs {
            step: self.staged.step,
            output: self.at.output,
            weights: self.at.mixes,
            residual: self.at.residual,
            n_cols: self.dims.d,
            pad: 0,
        };
        hyper_post::launch(self.device, &args, self.n_rows())
    }

    fn attention(&self, layer: LayerIdx, w: &DeviceAttention) -> Result<(), DeviceError> {
        let ratio = self.shape.compress_ratios[layer.index()];
        let freqs = self.weights.freqs[usize::from(ratio != 0)];
        let pass = LayerPass { layer, ratio: ratio as u32, freqs };
        self.project(w)?;
        self.latent_rows(pass, w)?;
        // While every row sees no more groups than it may attend to, none chooses.
        let indexer = w.indexer.as_ref().filter(|_| !self.staged.score_tiles.is_empty());
        self.queries(pass, w, indexer)?;
        if indexer.is_some() {
            self.staged.score_tiles.iter().try_for_each(|tile| self.choose_tile(pass, *tile))?;
        }
        self.attend(pass, w, indexer.map_or(0, |_| self.at.attention.chosen))?;
        self.project_out(w)
    }

    /// Every product of the layer's input.
    fn project(&self, w: &DeviceAttention) -> Result<(), DeviceError> {
        let (y, at) = (self.at.y, &self.at.attention);
        let mut products = vec![w.wq_a.product(y, at.qr), w.wkv.product(y, at.kv)];
        if let Some(w) = &w.compressor {
            products.extend([w.wkv.product(y, at.a), w.wgate.product(y, at.s)]);
        }
        if let Some(w) = &w.indexer {
            let compressor = &w.compressor;
            products.extend([compressor.wkv.product(y, at.ia), compressor.wgate.product(y, at.is)]);
            products.push(w.weights_proj.product(y, at.iw));
        }
        self.products(&products)
    }

    /// The rows that the projections become: the queries' latent row, the window's row, and the rows of completed groups.
    fn latent_rows(&self, pass: LayerPass, w: &DeviceAttention) -> Result<(), DeviceError> {
        let (at, cache) = (&self.at.attention, self.cache);
        let mut groups = [GroupArgs::default(); latent::MAX_GROUPS];
        let compressors = [
            w.compressor.as_ref().map(|w| self.group(pass, RingKind::Raw, w)),
            w.indexer.as_ref().map(|w| self.group(pass, RingKind::RawIndex, &w.compressor)),
        ];
        let mut n_groups = 0;
        for (to, group) in groups.iter_mut().zip(compressors.into_iter().flatten()) {
            (*to, n_groups) = (group, n_groups + 1);
        }
        let args = LatentArgs {
            step: self.staged.step,
            norm: NormArgs { x: at.qr, weight: w.q_norm, out: at.qr_normed, n_cols: w.wq_a.shape.n_rows, pad: 0 },
            window: WindowArgs { x: at.kv, weight: w.kv_norm, rows: at.rows },
            groups,
            freqs: pass.freqs,
            slot_stride_bytes: cache.slot_stride_bytes(),
            block_stride_bytes: cache.block_stride_bytes(),
            n_groups,
            ratio: pass.ratio,
            eps: self.shape.rms_norm_eps,
            ..LatentArgs::default()
        };
        latent::launch(self.device, &args, self.n_rows())
    }

    /// A compressor's rows of completed groups.
    fn group(&self, pass: LayerPass, kind: RingKind, w: &DeviceCompressor) -> GroupArgs {
        let (at, cache) = (&self.at.attention, self.cache);
        let is_index = kind == RingKind::RawIndex;
        let ring = cache.ring(pass.layer, kind);
        let (a, s) = if is_index { (at.ia, at.is) } else { (at.a, at.s) };
        GroupArgs {
            a,
            s,
            ape: w.ape,
            norm: w.norm,
            ring: ring.base,
            blocks: if is_index { cache.index_rows(pass.layer) } else { cache.kv_rows(pass.layer) },
            row_dim: w.row_dim,
            n_ring: ring.n_rows,
            row_bytes: if is_index { cache.index_row_bytes() } else { ROW_BYTES as u32 },
            is_index: u32::from(is_index),
            n_cols: w.wkv.shape.n_rows,
            pad: 0,
        }
    }

    /// Queries from the latent row: projection to heads, norm of each head, rotation; the indexer's too where it is given.
    fn queries(
        &self,
        pass: LayerPass,
        w: &DeviceAttention,
        indexer: Option<&DeviceIndexer>,
    ) -> Result<(), DeviceError> {
        let (at, dims) = (&self.at.attention, self.dims);
        let mut products = vec![w.wq_b.product(at.qr_normed, at.q)];
        products.extend(indexer.map(|w| w.wq_b.product(at.qr_normed, at.iq)));
        self.products(&products)?;
        let args = QueryArgs {
            step: self.staged.step,
            q: at.q,
            out: at.q_finished,
            iq: at.iq,
            index_out: at.iq_finished,
            freqs: pass.freqs,
            n_heads: dims.n_heads,
            head_dim: dims.head_dim,
            n_index_heads: indexer.map_or(0, |_| dims.index_n_heads),
            index_head_dim: dims.index_head_dim,
            eps: self.shape.rms_norm_eps,
            pad: 0,
        };
        query::launch(self.device, &args, self.n_rows())
    }

    fn choose_tile(&self, pass: LayerPass, tile: ScoreTile) -> Result<(), DeviceError> {
        let (at, dims) = (&self.at.attention, self.dims);
        let ScoreTile { first_row, n_rows: n_tile_rows, max_groups } = tile;
        let args = IndexScoreArgs {
            step: self.staged.step,
            iq: at.iq_finished,
            w: at.iw,
            blocks: self.cache.index_rows(pass.layer),
            block_stride_bytes: self.cache.block_stride_bytes(),
            scores: at.scores,
            first_row,
            n_tile_rows,
            n_heads: dims.index_n_heads,
            head_dim: dims.index_head_dim,
            max_groups,
            ratio: pass.ratio,
            scale: 1.0 / ((dims.index_head_dim * dims.index_n_heads) as f32).sqrt(),
            k: dims.index_topk,
            ..IndexScoreArgs::default()
        };
        index_score::launch(self.device, &args)?;
        let args = TopKArgs {
            step: self.staged.step,
            scores: at.scores,
            chosen: at.chosen,
            first_row,
            n_tile_rows,
            max_groups,
            k: dims.index_topk,
            ratio: pass.ratio,
            pad: 0,
        };
        top_k::launch(self.device, &args)
    }

    /// Attention; then the rings take the step's rows, now that no query needs the rows they replace.
    fn attend(&self, pass: LayerPass, w: &DeviceAttention, chosen: u64) -> Result<(), DeviceError> {
        let (at, cache, dims) = (&self.at.attention, self.cache, self.dims);
        let n_chunks = n_chunks(self.shape, pass.ratio as usize, self.staged.max_tokens);
        let ring = cache.ring(pass.layer, RingKind::Window);
        let args = AttentionArgs {
            step: self.staged.step,
            q: at.q_finished,
            sink: w.attn_sink,
            own_rows: at.rows,
            window_ring: ring.base,
            slot_stride_bytes: cache.slot_stride_bytes(),
            blocks: cache.kv_rows(pass.layer),
            block_stride_bytes: cache.block_stride_bytes(),
            chosen,
            freqs: pass.freqs,
            out: at.heads,
            parts: at.q,
            part_totals: at.part_totals,
            n_heads: dims.n_heads,
            head_dim: dims.head_dim,
            window: dims.window,
            n_ring: ring.n_rows,
            ratio: pass.ratio,
            k: dims.index_topk,
            scale: 1.0 / (dims.head_dim as f32).sqrt(),
            n_chunks: n_chunks as u32,
        };
        let rings = self.rings(pass, w);
        let is_few = attention::n_blocks(dims.n_heads, self.n_rows()) <= SPLIT_BLOCKS;
        if is_few && self.staged.n_rows * n_chunks <= at.n_parts {
            return attention::launch_split(self.device, &args, &rings, self.n_rows());
        }
        attention::launch(self.device, &args, self.n_rows())?;
        ring_store::launch(self.device, &rings, self.n_rows())
    }

    /// Where the step's rows go.
    fn rings(&self, pass: LayerPass, w: &DeviceAttention) -> RingStoreArgs {
        let (at, cache) = (&self.at.attention, self.cache);
        let [window, raw, raw_index] =
            [RingKind::Window, RingKind::Raw, RingKind::RawIndex].map(|kind| cache.ring(pass.layer, kind));
        let compressor = w.compressor.as_ref();
        let index = w.indexer.as_ref().map(|indexer| &indexer.compressor);
        RingStoreArgs {
            step: self.staged.step,
            rows: at.rows,
            window_ring: window.base,
            a: at.a,
            s: at.s,
            ape: compressor.map_or(0, |w| w.ape),
            raw_ring: raw.base,
            ia: at.ia,
            is: at.is,
            iape: index.map_or(0, |w| w.ape),
            index_ring: raw_index.base,
            slot_stride_bytes: cache.slot_stride_bytes(),
            n_window_ring: window.n_rows,
            n_raw_ring: raw.n_rows,
            n_index_ring: raw_index.n_rows,
            n_raw_cols: compressor.map_or(0, |w| w.wkv.shape.n_rows),
            n_index_cols: index.map_or(0, |w| w.wkv.shape.n_rows),
            ratio: pass.ratio,
        }
    }

    /// The two output products: one a group of heads, one over all of them.
    fn project_out(&self, w: &DeviceAttention) -> Result<(), DeviceError> {
        let at = &self.at.attention;
        let groups = w.wo_a.grouped(self.dims.n_groups, at.heads, at.groups);
        self.products(&[DeviceProduct { is_rounded: true, ..groups }])?;
        self.products(&[w.wo_b.product(at.groups, self.at.output)])
    }
}
