//! The caches in device memory: where blocks, rings and checkpoints lie, and the copies between them.
//!
//! Blocks are those of [`CacheLayout`]. A slot holds each ring in the form in which kernels read it: window rows as stored rows,
//! raw rows in f32. A checkpoint has a fixed place for the most rows that each ring can have to keep.

use crate::device::{Buffer, Device, DeviceError};
use crate::ids::{BlockId, CheckpointId, LayerIdx, SlotIdx};
use crate::model::batch::Capacity;
use crate::model::cache::{BLOCK_TOKENS, CacheLayout, CacheShape, RingKind, RowFormat, is_overlapping};
use crate::model::shape::ModelShape;
use crate::ops::copy::CopyItem;
use crate::ops::fill::{self, CacheRows, FillArgs, Parts};

/// Rings and checkpoints begin at multiples of this.
const ALIGN_BYTES: usize = 256;

const RING_KINDS: [RingKind; 3] = [RingKind::Window, RingKind::Raw, RingKind::RawIndex];

/// Offsets and sizes of everything, a pure function of the model's shape.
#[derive(Clone, Debug)]
pub struct DeviceLayout {
    rows: CacheLayout,
    rings: Vec<[Option<RingBytes>; RING_KINDS.len()]>, // [L][kind]
    slot_bytes: usize,
    checkpoint_bytes: usize,
}

/// One ring of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RingBytes {
    /// From the start of a slot.
    offset_bytes: usize,
    n_rows: usize,
    row_bytes: usize,
    /// From the start of a checkpoint.
    saved_offset_bytes: usize,
}

/// A ring of every slot, as kernels take it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RingView {
    /// Address of slot 0's ring; 0: the layer has none.
    pub base: u64,
    /// Rows of a ring.
    pub n_rows: u32,
}

/// The caches of one executor.
#[derive(Debug)]
pub(super) struct DeviceCache {
    layout: DeviceLayout,
    blocks: Buffer,      // [n_blocks, block_bytes]
    slots: Buffer,       // [n_slots, slot_bytes]
    checkpoints: Buffer, // [n_checkpoints, checkpoint_bytes]
    /// Tokens that each checkpoint describes.
    n_tokens: Vec<usize>, // [n_checkpoints]
}

impl DeviceLayout {
    /// Lays the caches out.
    #[must_use]
    pub fn new(shape: &ModelShape) -> Self {
        let rows = CacheLayout::new(CacheShape::new(shape, RowFormat::Device));
        let kv_row_bytes = RowFormat::Device.kv_row_bytes(rows.shape().dims);
        let (mut slot_bytes, mut checkpoint_bytes) = (0, 0);
        let mut ring = |layer: LayerIdx, kind: RingKind| {
            let (n_rows, width) = rows.ring_rows(layer, kind)?;
            let row_bytes = if kind == RingKind::Window { kv_row_bytes } else { width * 4 };
            let ring = RingBytes { offset_bytes: slot_bytes, n_rows, row_bytes, saved_offset_bytes: checkpoint_bytes };
            slot_bytes += (n_rows * row_bytes).next_multiple_of(ALIGN_BYTES);
            let n_saved = most_kept(&rows, layer, kind);
            checkpoint_bytes += (n_saved * row_bytes).next_multiple_of(ALIGN_BYTES);
            Some(ring)
        };
        let layers = (0..).map(LayerIdx).take(rows.shape().ratios.len());
        let rings = layers.map(|layer| RING_KINDS.map(|kind| ring(layer, kind))).collect();
        Self { rows, rings, slot_bytes, checkpoint_bytes }
    }

    /// Blocks, and which rows a sequence keeps.
    #[must_use]
    pub const fn rows(&self) -> &CacheLayout {
        &self.rows
    }

    /// Bytes of one slot.
    #[must_use]
    pub const fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Bytes of one checkpoint.
    #[must_use]
    pub const fn checkpoint_bytes(&self) -> usize {
        self.checkpoint_bytes
    }

    fn ring(&self, layer: LayerIdx, kind: RingKind) -> Option<RingBytes> {
        self.rings[layer.index()][kind as usize]
    }
}

impl DeviceCache {
    /// Allocates the caches of an executor. What they hold at first is never read.
    ///
    /// # Errors
    /// When the device has not enough memory.
    pub fn new(device: &Device, layout: DeviceLayout, capacity: &Capacity) -> Result<Self, DeviceError> {
        let alloc = |n: usize, n_bytes: usize| device.alloc((n * n_bytes).max(ALIGN_BYTES));
        Ok(Self {
            blocks: alloc(capacity.n_blocks, layout.rows.block_bytes())?,
            slots: alloc(capacity.n_slots, layout.slot_bytes)?,
            checkpoints: alloc(capacity.n_checkpoints, layout.checkpoint_bytes)?,
            n_tokens: vec![0; capacity.n_checkpoints],
            layout,
        })
    }

    /// Bytes from one slot's ring to the next slot's.
    pub fn slot_stride_bytes(&self) -> u64 {
        self.layout.slot_bytes as u64
    }

    /// Bytes from one block's rows to the next block's.
    pub fn block_stride_bytes(&self) -> u64 {
        self.layout.rows.block_bytes() as u64
    }

    /// Bytes of one indexer key.
    pub fn index_row_bytes(&self) -> u32 {
        let shape = self.layout.rows.shape();
        shape.format.index_row_bytes(shape.dims) as u32
    }

    /// A layer's compressed rows in block 0.
    pub fn kv_rows(&self, layer: LayerIdx) -> u64 {
        self.blocks.address() + self.layout.rows.kv_offset_bytes(layer) as u64
    }

    /// A layer's indexer keys in block 0.
    pub fn index_rows(&self, layer: LayerIdx) -> u64 {
        self.blocks.address() + self.layout.rows.index_offset_bytes(layer) as u64
    }

    /// A ring of a layer.
    pub fn ring(&self, layer: LayerIdx, kind: RingKind) -> RingView {
        let view = |ring: RingBytes| RingView {
            base: self.slots.address() + ring.offset_bytes as u64,
            n_rows: ring.n_rows as u32,
        };
        self.layout.ring(layer, kind).map(view).unwrap_or_default()
    }

    /// The copy of a whole block.
    pub fn copy_block(&self, from: BlockId, to: BlockId) -> CopyItem {
        let at = |block: BlockId| self.blocks.address() + u64::from(block.0) * self.block_stride_bytes();
        CopyItem { src: at(from), dst: at(to), n_bytes: self.block_stride_bytes() }
    }

    /// Fills every block and every ring with rows without pattern, as if long sequences had left them.
    ///
    /// # Errors
    /// When the device is lost, or there are more blocks than one launch fills.
    pub fn fill(&self, device: &Device, capacity: &Capacity) -> Result<(), DeviceError> {
        let count = |n: usize| {
            let reason = || format!("{n} blocks or slots to fill; at most {}", u16::MAX);
            u16::try_from(n).map_err(|_| DeviceError::Step { device: device.label().to_owned(), reason: reason() })
        };
        let (n_blocks, n_slots) = (count(capacity.n_blocks)?, count(capacity.n_slots)?);
        let shape = self.layout.rows.shape();
        let mut seed = 0;
        let mut fill = |rows: CacheRows, parts: Parts| {
            seed += 1;
            fill::launch(device, &FillArgs::of_rows(rows, seed), parts)
        };
        for (layer, ratio) in (0..).map(LayerIdx).zip(&shape.ratios) {
            let n_rows = BLOCK_TOKENS.checked_div(*ratio).unwrap_or(0);
            let in_blocks = |out: u64, row_bytes: usize| Parts {
                out,
                n_bytes: (n_rows * row_bytes) as u64,
                stride_bytes: self.block_stride_bytes(),
                n: n_blocks,
            };
            fill(CacheRows::Kv, in_blocks(self.kv_rows(layer), shape.format.kv_row_bytes(shape.dims)))?;
            if is_overlapping(*ratio) {
                fill(CacheRows::Index, in_blocks(self.index_rows(layer), shape.format.index_row_bytes(shape.dims)))?;
            }
            for kind in RING_KINDS {
                let Some(ring) = self.layout.ring(layer, kind) else { continue };
                let rows = if kind == RingKind::Window { CacheRows::Kv } else { CacheRows::Raw };
                let parts = Parts {
                    out: self.slots.address() + ring.offset_bytes as u64,
                    n_bytes: (ring.n_rows * ring.row_bytes) as u64,
                    stride_bytes: self.slot_stride_bytes(),
                    n: n_slots,
                };
                fill(rows, parts)?;
            }
        }
        Ok(())
    }

    /// Copies that keep what a sequence of exactly `n_tokens` tokens needs of its slot.
    pub fn save(&mut self, slot: SlotIdx, checkpoint: CheckpointId, n_tokens: usize, list: &mut Vec<CopyItem>) {
        self.n_tokens[checkpoint.index()] = n_tokens;
        self.for_kept_rows(slot, checkpoint, |in_slot, saved, n_bytes| {
            list.push(CopyItem { src: in_slot, dst: saved, n_bytes });
        });
    }

    /// Copies that put a checkpoint's rows into a slot.
    pub fn restore(&self, checkpoint: CheckpointId, slot: SlotIdx, list: &mut Vec<CopyItem>) {
        self.for_kept_rows(slot, checkpoint, |in_slot, saved, n_bytes| {
            list.push(CopyItem { src: saved, dst: in_slot, n_bytes });
        });
    }

    /// Address in the slot, address in the checkpoint and bytes of every piece that is consecutive in both.
    fn for_kept_rows(&self, slot: SlotIdx, checkpoint: CheckpointId, mut visit: impl FnMut(u64, u64, u64)) {
        let slot = self.slots.address() + u64::from(slot.0) * self.slot_stride_bytes();
        let n_tokens = self.n_tokens[checkpoint.index()];
        let checkpoint = self.checkpoints.address() + u64::from(checkpoint.0) * self.layout.checkpoint_bytes as u64;
        for layer in (0..).map(LayerIdx).take(self.layout.rings.len()) {
            for kind in RING_KINDS {
                let Some(ring) = self.layout.ring(layer, kind) else { continue };
                let positions = self.layout.rows.kept_positions(layer, kind, n_tokens);
                let mut position = positions.start;
                while position < positions.end {
                    let row = position % ring.n_rows;
                    let n_rows = (positions.end - position).min(ring.n_rows - row);
                    let in_slot = ring.offset_bytes + row * ring.row_bytes;
                    let saved = ring.saved_offset_bytes + (position - positions.start) * ring.row_bytes;
                    visit(slot + in_slot as u64, checkpoint + saved as u64, (n_rows * ring.row_bytes) as u64);
                    position += n_rows;
                }
            }
        }
    }
}

/// The most rows that a ring has to keep at any length.
fn most_kept(rows: &CacheLayout, layer: LayerIdx, kind: RingKind) -> usize {
    let longest = 4 * rows.shape().window.max(rows.shape().ratios[layer.index()]);
    (0..longest).map(|n| rows.kept_positions(layer, kind, n).len()).max().unwrap_or(0)
}
