//! The caches' shape and storage: KV blocks of compressed rows, slots of window state, checkpoints of slots.
//!
//! Three kinds of state. Blocks hold the compressed rows and indexer keys of 256 tokens in every layer and are shared between
//! sequences. A slot holds what can't be shared: in each layer a ring of the last KV rows and of the compressor's raw rows
//! whose group is not finished. A checkpoint is a copy of a slot's rings at one length, from which any slot can go on.
//! Offsets are data, so that the same layout can describe device memory.

use std::ops::Range;

use crate::ids::{BlockId, CheckpointId, LayerIdx, SlotIdx};
pub use crate::model::row_format::{RowDims, RowFormat};
use crate::model::shape::ModelShape;

/// Tokens whose compressed rows share one KV block.
pub const BLOCK_TOKENS: usize = 256;
/// Most rows a Verify run may have after its first.
pub const MAX_DRAFT_ROWS: usize = 15;
/// Rows a ring keeps beyond those a query needs: one step's rejected rows are overwritten by the next one's, and one more step
/// may have been launched before the rejection is known.
pub const RING_SLACK: usize = (MAX_DRAFT_ROWS + 1) * 2;

/// What the layout depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Compression ratio of each trunk layer: 0 (window only), 4 or 128.
    pub ratios: Vec<usize>,
    /// Row sizes.
    pub dims: RowDims,
    /// Rows of its own window a query sees, itself included.
    pub window: usize,
    /// How rows are stored.
    pub format: RowFormat,
}

/// Numbers of places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachePlaces {
    /// KV blocks.
    pub n_blocks: usize,
    /// Slots.
    pub n_slots: usize,
    /// Checkpoints.
    pub n_checkpoints: usize,
}

/// Where a layer's rows lie inside a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BlockRows {
    ratio: usize,
    kv_offset_bytes: usize,
    index_offset_bytes: usize,
}

/// A ring of rows addressed by position, inside a slot's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RingSpec {
    offset: usize,
    n_rows: usize,
    width: usize,
}

/// The rings of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SlotRings {
    window: RingSpec,
    raw: Option<RingSpec>,
    raw_index: Option<RingSpec>,
}

/// Offsets and sizes of every part, a pure function of [`CacheShape`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    shape: CacheShape,
    block_rows: Vec<BlockRows>,
    rings: Vec<SlotRings>,
    block_bytes: usize,
    slot_floats: usize,
}

/// Which ring of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingKind {
    /// The last KV rows.
    Window,
    /// The compressor's raw rows: `a`, then `s` with its position term.
    Raw,
    /// The indexer compressor's raw rows.
    RawIndex,
}

/// A ring's rows, for reading.
#[derive(Clone, Copy, Debug)]
pub struct Ring<'a> {
    rows: &'a [f32], // [n_rows, width] f32
    width: usize,
}

/// The CPU's storage of all three kinds of state.
#[derive(Debug)]
pub struct Cache {
    layout: CacheLayout,
    blocks: Vec<u8>, // [n_blocks, block_bytes]
    slots: Vec<f32>, // [n_slots, slot_floats] f32
    checkpoints: Vec<Checkpoint>,
}

/// A copy of one slot's state after `n_tokens` tokens.
#[derive(Clone, Debug, Default)]
struct Checkpoint {
    n_tokens: usize,
    window: Vec<u8>, // [layer, position, kv_row_bytes]
    raw: Vec<f32>,   // [layer, ring, position, width] f32
}

/// The first position whose raw row is still needed by a compressor once `n_tokens` tokens are in: the start of the unfinished
/// group, and for the overlapping ratio 4 of the group before it.
#[must_use]
pub const fn first_raw_position(ratio: usize, n_tokens: usize) -> usize {
    let group = n_tokens / ratio;
    if is_overlapping(ratio) { group.saturating_sub(1) * ratio } else { group * ratio }
}

/// True when a group's row also pools the group before it.
#[must_use]
pub const fn is_overlapping(ratio: usize) -> bool {
    ratio == 4
}

/// Width of a compressor's projections: twice the row where groups overlap.
#[must_use]
pub const fn raw_dim(ratio: usize, row_dim: usize) -> usize {
    if is_overlapping(ratio) { 2 * row_dim } else { row_dim }
}

impl CacheShape {
    /// The trunk's caches; the draft stages' come with drafting.
    #[must_use]
    pub fn new(shape: &ModelShape, format: RowFormat) -> Self {
        Self {
            ratios: shape.compress_ratios[..shape.num_hidden_layers].to_vec(),
            dims: RowDims {
                head_dim: shape.head_dim,
                rope_dim: shape.qk_rope_head_dim,
                index_head_dim: shape.index_head_dim,
            },
            window: shape.sliding_window,
            format,
        }
    }
}

impl CacheLayout {
    /// Lays the caches out.
    #[must_use]
    pub fn new(shape: CacheShape) -> Self {
        let (mut block_rows, mut block_bytes) = (Vec::new(), 0);
        for &ratio in &shape.ratios {
            let n_rows = BLOCK_TOKENS.checked_div(ratio).unwrap_or(0);
            let kv_offset_bytes = block_bytes;
            block_bytes += n_rows * shape.format.kv_row_bytes(shape.dims);
            let index_offset_bytes = block_bytes;
            if is_overlapping(ratio) {
                block_bytes += n_rows * shape.format.index_row_bytes(shape.dims);
            }
            block_rows.push(BlockRows { ratio, kv_offset_bytes, index_offset_bytes });
        }
        let (mut rings, mut slot_floats) = (Vec::new(), 0);
        for &ratio in &shape.ratios {
            let mut ring = |n_needed: usize, width: usize| {
                let spec = RingSpec { offset: slot_floats, n_rows: n_needed + RING_SLACK, width };
                slot_floats += spec.n_rows * width;
                spec
            };
            let n_raw = if is_overlapping(ratio) { 2 * ratio } else { ratio };
            rings.push(SlotRings {
                window: ring(shape.window, shape.dims.head_dim),
                raw: (ratio != 0).then(|| ring(n_raw, 2 * raw_dim(ratio, shape.dims.head_dim))),
                raw_index: is_overlapping(ratio).then(|| ring(n_raw, 2 * raw_dim(ratio, shape.dims.index_head_dim))),
            });
        }
        Self { shape, block_rows, rings, block_bytes, slot_floats }
    }

    /// What it was made from.
    #[must_use]
    pub const fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// Bytes of one KV block.
    #[must_use]
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes of one slot's window state.
    #[must_use]
    pub const fn slot_bytes(&self) -> usize {
        self.slot_floats * 4
    }

    /// Bytes of a checkpoint after `n_tokens` tokens.
    #[must_use]
    pub fn checkpoint_bytes(&self, n_tokens: usize) -> usize {
        let mut n_bytes = 0;
        for kept in self.kept_rows(n_tokens) {
            let row_bytes = match kept.kind {
                RingKind::Window => self.shape.format.kv_row_bytes(self.shape.dims),
                RingKind::Raw | RingKind::RawIndex => kept.ring.width * 4,
            };
            n_bytes += kept.positions.len() * row_bytes;
        }
        n_bytes
    }

    /// Bytes of the largest checkpoint: a full window and one token short of a whole group of every ratio.
    #[must_use]
    pub fn max_checkpoint_bytes(&self) -> usize {
        let longest = self.shape.ratios.iter().copied().max().unwrap_or(0).max(self.shape.window);
        self.checkpoint_bytes(2 * longest.next_multiple_of(4).max(1) - 1)
    }

    /// Where a layer's compressed rows begin in every block.
    #[must_use]
    pub fn kv_offset_bytes(&self, layer: LayerIdx) -> usize {
        self.block_rows[layer.index()].kv_offset_bytes
    }

    /// Where a layer's indexer keys begin in every block.
    #[must_use]
    pub fn index_offset_bytes(&self, layer: LayerIdx) -> usize {
        self.block_rows[layer.index()].index_offset_bytes
    }

    /// Rows of a ring and elements of a row, when the layer has a ring of that kind.
    #[must_use]
    pub fn ring_rows(&self, layer: LayerIdx, kind: RingKind) -> Option<(usize, usize)> {
        self.ring(layer, kind).map(|ring| (ring.n_rows, ring.width))
    }

    /// The positions whose rows a sequence of `n_tokens` tokens still needs in a layer's rings of that kind.
    #[must_use]
    pub fn kept_positions(&self, layer: LayerIdx, kind: RingKind, n_tokens: usize) -> Range<usize> {
        match (kind, self.shape.ratios[layer.index()]) {
            (RingKind::Window, _) => n_tokens.saturating_sub(self.shape.window)..n_tokens,
            (_, 0) => 0..0,
            (_, ratio) => first_raw_position(ratio, n_tokens)..n_tokens,
        }
    }

    fn ring(&self, layer: LayerIdx, kind: RingKind) -> Option<RingSpec> {
        let rings = self.rings.get(layer.index())?;
        match kind {
            RingKind::Window => Some(rings.window),
            RingKind::Raw => rings.raw,
            RingKind::RawIndex => rings.raw_index,
        }
    }

    /// Every ring's rows that a sequence of `n_tokens` tokens still needs, in the order in which a checkpoint holds them.
    fn kept_rows(&self, n_tokens: usize) -> impl Iterator<Item = KeptRows> + '_ {
        const KINDS: [RingKind; 3] = [RingKind::Window, RingKind::Raw, RingKind::RawIndex];
        let rings = (0..).map(LayerIdx).take(self.rings.len()).flat_map(|layer| KINDS.map(|kind| (layer, kind)));
        rings.filter_map(move |(layer, kind)| {
            let ring = self.ring(layer, kind)?;
            Some(KeptRows { kind, ring, positions: self.kept_positions(layer, kind, n_tokens) })
        })
    }
}

struct KeptRows {
    kind: RingKind,
    ring: RingSpec,
    positions: Range<usize>,
}

impl RingSpec {
    const fn row_offset(&self, position: usize) -> usize {
        self.offset + (position % self.n_rows) * self.width
    }
}

impl<'a> Ring<'a> {
    /// Columns of a row.
    #[must_use]
    pub const fn width(&self) -> usize {
        self.width
    }

    /// The row of `position`, `[width]`; it holds that position only while no later one has taken its place.
    #[must_use]
    pub fn row(&self, position: usize) -> &'a [f32] {
        let start = position % (self.rows.len() / self.width) * self.width;
        &self.rows[start..start + self.width]
    }
}

impl Cache {
    /// Storage for `places`, zeroed.
    #[must_use]
    pub fn new(layout: CacheLayout, places: CachePlaces) -> Self {
        Self {
            blocks: vec![0; places.n_blocks * layout.block_bytes],
            slots: vec![0.0; places.n_slots * layout.slot_floats],
            checkpoints: vec![Checkpoint::default(); places.n_checkpoints],
            layout,
        }
    }

    /// Its layout.
    #[must_use]
    pub const fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// A ring of a slot, when the layer has one of that kind.
    #[must_use]
    pub fn ring(&self, slot: SlotIdx, layer: LayerIdx, kind: RingKind) -> Option<Ring<'_>> {
        let spec = self.layout.ring(layer, kind)?;
        let start = slot.index() * self.layout.slot_floats + spec.offset;
        Some(Ring { rows: &self.slots[start..start + spec.n_rows * spec.width], width: spec.width })
    }

    /// Puts consecutive rows that begin at `first_pos` into a ring, the last ones only when there are more than it holds. A row
    /// is given in equal parts: `parts` are the arrays of first parts, of second parts and so on.
    pub fn write_ring(
        &mut self,
        slot: SlotIdx,
        layer: LayerIdx,
        kind: RingKind,
        first_pos: usize,
        parts: &[&[f32]], // [n_parts][n, width / n_parts] f32
    ) {
        let Some(spec) = self.layout.ring(layer, kind) else { return };
        let base = slot.index() * self.layout.slot_floats;
        let part_width = spec.width / parts.len();
        for (part_idx, part) in parts.iter().enumerate() {
            let n_rows = part.len() / part_width;
            for i in n_rows.saturating_sub(spec.n_rows)..n_rows {
                let at = base + spec.row_offset(first_pos + i) + part_idx * part_width;
                self.slots[at..at + part_width].copy_from_slice(&part[i * part_width..(i + 1) * part_width]);
            }
        }
    }

    /// Reads the compressed row of group `group` of the sequence whose block table is `blocks` into `row` `[head_dim]`.
    pub fn read_kv_row(&self, blocks: &[BlockId], layer: LayerIdx, group: usize, row: &mut [f32]) {
        let range = self.row_range(blocks, layer, group, false);
        self.layout.shape.format.decode_kv(self.layout.shape.dims, &self.blocks[range], row);
    }

    /// As [`Cache::read_kv_row`], the indexer key of the group, `[index_head_dim]`.
    pub fn read_index_row(&self, blocks: &[BlockId], layer: LayerIdx, group: usize, row: &mut [f32]) {
        let range = self.row_range(blocks, layer, group, true);
        self.layout.shape.format.decode_index(self.layout.shape.dims, &self.blocks[range], row);
    }

    /// Copies the stored indexer keys of groups 0, 1 and on, as many as `out` has room for.
    pub fn copy_index_rows(&self, blocks: &[BlockId], layer: LayerIdx, out: &mut [u8]) {
        let shape = &self.layout.shape;
        let rows = &self.layout.block_rows[layer.index()];
        let bytes_of_block = BLOCK_TOKENS / rows.ratio * shape.format.index_row_bytes(shape.dims);
        for (part, block) in out.chunks_mut(bytes_of_block).zip(blocks) {
            let start = block.index() * self.layout.block_bytes + rows.index_offset_bytes;
            part.copy_from_slice(&self.blocks[start..start + part.len()]);
        }
    }

    /// Stores the compressed row `[head_dim]` of a group.
    pub fn write_kv_row(&mut self, blocks: &[BlockId], layer: LayerIdx, group: usize, row: &[f32]) {
        let range = self.row_range(blocks, layer, group, false);
        self.layout.shape.format.encode_kv(self.layout.shape.dims, row, &mut self.blocks[range]);
    }

    /// Stores the indexer key `[index_head_dim]` of a group.
    pub fn write_index_row(&mut self, blocks: &[BlockId], layer: LayerIdx, group: usize, row: &[f32]) {
        let range = self.row_range(blocks, layer, group, true);
        self.layout.shape.format.encode_index(self.layout.shape.dims, row, &mut self.blocks[range]);
    }

    /// Copies a whole block.
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) {
        let n = self.layout.block_bytes;
        self.blocks.copy_within(from.index() * n..(from.index() + 1) * n, to.index() * n);
    }

    /// Copies what a sequence of exactly `n_tokens` tokens needs of its slot. The slot may have seen up to [`RING_SLACK`] later
    /// positions (rejected drafts).
    pub fn save(&mut self, slot: SlotIdx, checkpoint: CheckpointId, n_tokens: usize) {
        let shape = &self.layout.shape;
        let row_bytes = shape.format.kv_row_bytes(shape.dims);
        let base = slot.index() * self.layout.slot_floats;
        let saved = &mut self.checkpoints[checkpoint.index()];
        saved.n_tokens = n_tokens;
        saved.window.clear();
        saved.raw.clear();
        for kept in self.layout.kept_rows(n_tokens) {
            for position in kept.positions.clone() {
                let at = base + kept.ring.row_offset(position);
                let row = &self.slots[at..at + kept.ring.width];
                if kept.kind == RingKind::Window {
                    let start = saved.window.len();
                    saved.window.resize(start + row_bytes, 0);
                    shape.format.encode_kv(shape.dims, row, &mut saved.window[start..]);
                } else {
                    saved.raw.extend_from_slice(row);
                }
            }
        }
    }

    /// Puts a checkpoint's rows into a slot; the sequence then has the checkpoint's number of tokens, which is returned.
    pub fn restore(&mut self, checkpoint: CheckpointId, slot: SlotIdx) -> usize {
        let shape = &self.layout.shape;
        let row_bytes = shape.format.kv_row_bytes(shape.dims);
        let base = slot.index() * self.layout.slot_floats;
        let saved = &self.checkpoints[checkpoint.index()];
        let (mut window, mut raw) = (saved.window.as_slice(), saved.raw.as_slice());
        for kept in self.layout.kept_rows(saved.n_tokens) {
            for position in kept.positions.clone() {
                let at = base + kept.ring.row_offset(position);
                let row = &mut self.slots[at..at + kept.ring.width];
                if kept.kind == RingKind::Window {
                    let (bytes, rest) = window.split_at(row_bytes);
                    shape.format.decode_kv(shape.dims, bytes, row);
                    window = rest;
                } else {
                    let (values, rest) = raw.split_at(kept.ring.width);
                    row.copy_from_slice(values);
                    raw = rest;
                }
            }
        }
        saved.n_tokens
    }

    fn row_range(&self, blocks: &[BlockId], layer: LayerIdx, group: usize, is_index: bool) -> Range<usize> {
        let shape = &self.layout.shape;
        let rows = &self.layout.block_rows[layer.index()];
        let n_rows = BLOCK_TOKENS / rows.ratio;
        let (offset, row_bytes) = if is_index {
            (rows.index_offset_bytes, shape.format.index_row_bytes(shape.dims))
        } else {
            (rows.kv_offset_bytes, shape.format.kv_row_bytes(shape.dims))
        };
        let block = blocks[group / n_rows];
        let start = block.index() * self.layout.block_bytes + offset + group % n_rows * row_bytes;
        start..start + row_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(format: RowFormat) -> CacheLayout {
        let dims = RowDims { head_dim: 512, rope_dim: 64, index_head_dim: 128 };
        CacheLayout::new(CacheShape { ratios: vec![0, 4, 128], dims, window: 128, format })
    }

    #[test]
    fn sizes_of_the_official_shape() {
        let dims = RowDims { head_dim: 512, rope_dim: 64, index_head_dim: 128 };
        let ratios = (0..43).map(|i| if i < 2 { 0 } else { [4, 128][i % 2] }).collect();
        let layout = CacheLayout::new(CacheShape { ratios, dims, window: 128, format: RowFormat::Kvq });
        assert_eq!(layout.block_bytes(), 21 * 64 * (712 + 68) + 20 * 2 * 712);
        // At a page boundary: the windows, and the four rows that the next ratio-4 groups overlap with.
        let page = 43 * 128 * 712 + 21 * 4 * (2048 + 512) * 4;
        assert_eq!(layout.checkpoint_bytes(512), page);
        let tail = 43 * 128 * 712 + 21 * 7 * (2048 + 512) * 4 + 20 * 127 * 1024 * 4;
        assert_eq!(layout.max_checkpoint_bytes(), tail);
        assert_eq!((0..2000).map(|n| layout.checkpoint_bytes(n)).max(), Some(tail));
    }

    #[test]
    fn raw_rows_needed_by_length() {
        assert_eq!([0, 1, 3, 4, 5, 7, 8, 9, 130].map(|n| first_raw_position(4, n)), [0, 0, 0, 0, 0, 0, 4, 4, 124]);
        assert_eq!([0, 127, 128, 255, 256].map(|n| first_raw_position(128, n)), [0, 0, 128, 128, 256]);
    }

    #[test]
    fn a_ring_keeps_the_last_rows_by_position() {
        let layout = layout(RowFormat::Exact);
        let places = CachePlaces { n_blocks: 1, n_slots: 3, n_checkpoints: 1 };
        let mut cache = Cache::new(layout, places);
        let rows: Vec<f32> = (0..1000usize).flat_map(|p| vec![p as f32; 512]).collect();
        cache.write_ring(SlotIdx(1), LayerIdx(2), RingKind::Window, 0, &[&rows]);
        let ring = cache.ring(SlotIdx(1), LayerIdx(2), RingKind::Window).unwrap();
        for p in 1000 - 128 - RING_SLACK..1000 {
            assert_eq!(ring.row(p), &vec![p as f32; 512][..]);
        }
        assert!(cache.ring(SlotIdx(0), LayerIdx(0), RingKind::Raw).is_none());
        assert!(cache.ring(SlotIdx(0), LayerIdx(2), RingKind::RawIndex).is_none());
    }

    #[test]
    fn rows_of_a_block_table_do_not_overlap() {
        let mut cache = Cache::new(layout(RowFormat::Exact), CachePlaces { n_blocks: 5, n_slots: 1, n_checkpoints: 0 });
        let blocks = [BlockId(4), BlockId(1)];
        for group in 0..128 {
            cache.write_kv_row(&blocks, LayerIdx(1), group, &[group as f32; 512]);
            cache.write_index_row(&blocks, LayerIdx(1), group, &[-(group as f32); 128]);
        }
        for group in 0..4 {
            cache.write_kv_row(&blocks, LayerIdx(2), group, &[1000.0 + group as f32; 512]);
        }
        cache.copy_block(BlockId(1), BlockId(0));
        let (mut row, mut key) = ([0.0; 512], [0.0; 128]);
        for blocks in [blocks, [BlockId(4), BlockId(0)]] {
            for group in 0..128 {
                cache.read_kv_row(&blocks, LayerIdx(1), group, &mut row);
                cache.read_index_row(&blocks, LayerIdx(1), group, &mut key);
                assert_eq!((row, key), ([group as f32; 512], [-(group as f32); 128]));
            }
            cache.read_kv_row(&blocks, LayerIdx(2), 3, &mut row);
            assert_eq!(row, [1003.0; 512]);
        }
    }
}
