//! Scratch of the forward pass in one allocation: the buffers of attention and of the experts share their bytes.

use crate::device::{Buffer, Device, DeviceError};
use crate::model::cache::raw_dim;
use crate::model::shape::{HC_MULT, ModelShape};
use crate::ops::attention::CHUNK_ROWS;
use crate::ops::hyper_mix::MIXES;
use crate::ops::hyper_mix::device::partials_bytes;

/// Rows whose indexer scores exist at once.
pub(super) const SCORE_TILE: usize = 64;
/// Rows whose logits exist at once.
pub(super) const LOGIT_TILE: usize = 64;
/// Rows are padded to this, so that a kernel may load a whole tile of tokens.
const ROW_TILE: usize = 64;
const ALIGN_BYTES: u64 = 256;
/// The overlapping ratio, which has the widest raw rows.
pub(super) const OVERLAPPING: usize = 4;

/// What the sizes depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkspaceSpec<'a> {
    pub shape: &'a ModelShape,
    /// Rows a step may have (T).
    pub max_rows: usize,
    /// Longest sequence in tokens.
    pub max_tokens: usize,
}

/// The buffer and the addresses in it.
#[derive(Debug)]
pub(super) struct Workspace {
    pub at: Scratch,
    buffer: Buffer,
}

/// Addresses. Letters as in weights.rs; T rows, R = [`LOGIT_TILE`].
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Scratch {
    pub ids: u64,      // [T] u32
    pub residual: u64, // [T, HC, D] f32
    pub mixes: u64,    // [T, MIXES] f32
    pub partials: u64, // [T, n_parts, 32] f32
    pub y: u64,        // [T, D] bf16
    pub output: u64,   // [T, D] f32
    pub attention: AttentionAt,
    pub moe: MoeAt,
    pub head: HeadAt,
}

/// Attention's part.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AttentionAt {
    pub qr: u64,          // [T, QR] f32
    pub qr_normed: u64,   // [T, QR] bf16
    pub q: u64,           // [T, H, DH] f32; once the queries are finished [n_parts, H, DH], attention's parts
    pub q_finished: u64,  // [T, H, DH] bf16
    pub kv: u64,          // [T, DH] f32
    pub rows: u64,        // [T, 584] u8
    pub a: u64,           // [T, CW] f32
    pub s: u64,           // [T, CW] f32
    pub ia: u64,          // [T, IW] f32
    pub is: u64,          // [T, IW] f32
    pub iw: u64,          // [T, IH] f32
    pub iq: u64,          // [T, IH, ID] f32
    pub iq_finished: u64, // [T, IH, ID] bf16
    pub scores: u64,      // [SCORE_TILE, max_groups] f32
    pub chosen: u64,      // [T, index_topk] u32
    pub part_totals: u64, // [n_parts, H, 2] f32
    pub heads: u64,       // [T, H, DH] bf16
    pub groups: u64,      // [T, G*OR] bf16
    /// Chunks of rows' lists that there is room for.
    pub n_parts: usize,
}

/// The experts' part.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MoeAt {
    pub logits: u64,        // [T, E] f32
    pub experts: u64,       // [T, K] u32
    pub weights: u64,       // [T, K] f32
    pub row_of: u64,        // [T, K] u32
    pub row_token: u64,     // [T*K] u32
    pub row_weight: u64,    // [T*K] f32
    pub expert_first: u64,  // [E+1] u32
    pub items: u64,         // [max_items, 2] u32
    pub n_items: u64,       // [1] u32
    pub hidden: u64,        // [T*K, F] bf16
    pub routed: u64,        // [T*K, D] f32
    pub shared_gate: u64,   // [T, F] f32
    pub shared_up: u64,     // [T, F] f32
    pub shared_hidden: u64, // [T, F] bf16
    pub shared: u64,        // [T, D] f32
}

/// The head's part.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HeadAt {
    pub y: u64,      // [R, D] bf16
    pub logits: u64, // [R, V] f32
}

/// Hands out addresses one after the other.
struct Cursor(u64);

impl Workspace {
    /// Bytes of the allocation.
    pub fn n_bytes(spec: WorkspaceSpec<'_>) -> usize {
        Scratch::lay_out(0, spec).1 as usize
    }

    /// Allocates it.
    ///
    /// # Errors
    /// When the device has not enough memory.
    pub fn new(device: &Device, spec: WorkspaceSpec<'_>) -> Result<Self, DeviceError> {
        let buffer = device.alloc(Self::n_bytes(spec))?;
        Ok(Self { at: Scratch::lay_out(buffer.address(), spec).0, buffer })
    }

    /// Brings home values at one of the scratch's addresses, when all is done that was launched before.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn download(&self, device: &Device, address: u64, values: &mut [f32]) -> Result<(), DeviceError> {
        let offset_bytes = (address - self.buffer.address()) as usize;
        device.download(&self.buffer, offset_bytes, bytemuck::cast_slice_mut(values))
    }
}

impl Workspace {
    /// Brings home the experts that the rows of the last layer chose, `[n_rows, K]`.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn download_experts(&self, device: &Device, experts: &mut [u32]) -> Result<(), DeviceError> {
        let offset_bytes = (self.at.moe.experts - self.buffer.address()) as usize;
        device.download(&self.buffer, offset_bytes, bytemuck::cast_slice_mut(experts))
    }
}

impl WorkspaceSpec<'_> {
    /// Rows of the buffers.
    pub fn n_rows(&self) -> usize {
        self.max_rows.next_multiple_of(ROW_TILE)
    }

    /// The most groups that a row of an overlapping layer sees, rounded up as graphs do.
    pub fn max_groups(&self) -> usize {
        self.max_tokens.div_ceil(OVERLAPPING).next_power_of_two()
    }
}

impl Scratch {
    /// Addresses from `base` on, and the end's distance from it.
    fn lay_out(base: u64, spec: WorkspaceSpec<'_>) -> (Self, u64) {
        let (shape, n) = (spec.shape, spec.n_rows());
        let mut next = Cursor(base);
        let mut at = Self {
            ids: next.take(n, 4),
            residual: next.take(n * HC_MULT * shape.hidden_size, 4),
            mixes: next.take(n * MIXES, 4),
            partials: next.take(partials_bytes(n as u32, shape.hidden_size as u32), 1),
            y: next.take(n * shape.hidden_size, 2),
            output: next.take(n * shape.hidden_size, 4),
            ..Self::default()
        };
        let shared = next.0;
        let mut end = shared;
        let mut part = |lay_out: &mut dyn FnMut(&mut Cursor)| {
            let mut next = Cursor(shared);
            lay_out(&mut next);
            end = end.max(next.0);
        };
        part(&mut |next| at.attention = AttentionAt::lay_out(next, spec));
        part(&mut |next| at.moe = MoeAt::lay_out(next, spec));
        part(&mut |next| at.head = HeadAt::lay_out(next, spec));
        (at, end - base)
    }
}

impl AttentionAt {
    fn lay_out(next: &mut Cursor, spec: WorkspaceSpec<'_>) -> Self {
        let (shape, n) = (spec.shape, spec.n_rows());
        let n_heads_cols = shape.num_attention_heads * shape.head_dim;
        let (raw, raw_index) = (raw_dim(OVERLAPPING, shape.head_dim), raw_dim(OVERLAPPING, shape.index_head_dim));
        let n_index_cols = shape.index_n_heads * shape.index_head_dim;
        let n_groups_cols = shape.o_groups * shape.o_lora_rank;
        // At least one row's, whatever its layer.
        let lists = shape.compress_ratios.iter().map(|ratio| n_chunks(shape, *ratio, spec.max_tokens));
        let n_parts = lists.max().unwrap_or(0).max(n);
        Self {
            qr: next.take(n * shape.q_lora_rank, 4),
            qr_normed: next.take(n * shape.q_lora_rank, 2),
            q: next.take(n_parts * n_heads_cols, 4),
            q_finished: next.take(n * n_heads_cols, 2),
            kv: next.take(n * shape.head_dim, 4),
            rows: next.take(n * ROW_BYTES, 1),
            a: next.take(n * raw, 4),
            s: next.take(n * raw, 4),
            ia: next.take(n * raw_index, 4),
            is: next.take(n * raw_index, 4),
            iw: next.take(n * shape.index_n_heads, 4),
            iq: next.take(n * n_index_cols, 4),
            iq_finished: next.take(n * n_index_cols, 2),
            scores: next.take(SCORE_TILE * spec.max_groups(), 4),
            chosen: next.take(n * shape.index_topk, 4),
            part_totals: next.take(n_parts * shape.num_attention_heads * 2, 4),
            heads: next.take(n * n_heads_cols, 2),
            groups: next.take(n * n_groups_cols, 2),
            n_parts,
        }
    }
}

/// Chunks of the longest list that a row of a layer attends to, where it sees up to `n_tokens` tokens.
pub(super) fn n_chunks(shape: &ModelShape, ratio: usize, n_tokens: usize) -> usize {
    let n_groups = n_tokens.checked_div(ratio).unwrap_or(0);
    let n_chosen = if ratio == OVERLAPPING { n_groups.min(shape.index_topk) } else { n_groups };
    (n_tokens.min(shape.sliding_window) + n_chosen).div_ceil(CHUNK_ROWS)
}

/// Bytes of a stored KV row.
pub(super) const ROW_BYTES: usize = 584;

impl MoeAt {
    fn lay_out(next: &mut Cursor, spec: WorkspaceSpec<'_>) -> Self {
        let (shape, n) = (spec.shape, spec.n_rows());
        let (n_experts, n_routed) = (shape.n_routed_experts, n * shape.num_experts_per_tok);
        let (d, f) = (shape.hidden_size, shape.moe_intermediate_size);
        Self {
            logits: next.take(n * n_experts, 4),
            experts: next.take(n_routed, 4),
            weights: next.take(n_routed, 4),
            row_of: next.take(n_routed, 4),
            row_token: next.take(n_routed, 4),
            row_weight: next.take(n_routed, 4),
            expert_first: next.take(n_experts + 1, 4),
            items: next.take(2 * n_routed, 4),
            n_items: next.take(1, 4),
            hidden: next.take(n_routed * f, 2),
            routed: next.take(n_routed * d, 4),
            shared_gate: next.take(n * f, 4),
            shared_up: next.take(n * f, 4),
            shared_hidden: next.take(n * f, 2),
            shared: next.take(n * d, 4),
        }
    }
}

impl HeadAt {
    fn lay_out(next: &mut Cursor, spec: WorkspaceSpec<'_>) -> Self {
        Self {
            y: next.take(LOGIT_TILE * spec.shape.hidden_size, 2),
            logits: next.take(LOGIT_TILE * spec.shape.vocab_size, 4),
        }
    }
}

impl Cursor {
    fn take(&mut self, n: usize, element_bytes: usize) -> u64 {
        let at = self.0;
        self.0 = (at + (n * element_bytes) as u64).next_multiple_of(ALIGN_BYTES);
        at
    }
}
