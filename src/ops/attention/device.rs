//! Attention on a device: arguments and launch of the kernel `attention`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::round_fp8::CACHE_DIMS;
use crate::ops::step::Step;

/// Heads of a block: the rows of the matrix instruction.
const HEADS_PER_BLOCK: u32 = 16;
/// Threads of a block, which computes some heads of one row.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct AttentionArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// Finished queries.
    pub q: u64, // [T, H, DH] bf16
    /// Learned logit of each head.
    pub sink: u64, // [H] f32
    /// The step's own window rows.
    pub own_rows: u64, // [T, 584] u8
    /// Slot 0's ring of window rows.
    pub window_ring: u64, // [n_ring, 584] u8
    /// From a slot's ring to the next slot's.
    pub slot_stride_bytes: u64,
    /// This layer's compressed rows in block 0.
    pub blocks: u64, // [256/ratio, 584] u8
    /// From a block's rows to the next block's.
    pub block_stride_bytes: u64,
    /// Groups chosen for rows that see more than k, or 0 where every row sees all.
    pub chosen: u64, // [T, k] u32
    /// Radians a position, for the inverse rotation.
    pub freqs: u64, // [32] f32
    /// The heads' results, rotated back.
    pub out: u64, // [T, H, DH] bf16
    /// H, at least 1.
    pub n_heads: u32,
    /// DH, 512.
    pub head_dim: u32,
    /// Window rows that a query sees, itself included.
    pub window: u32,
    /// Rows of a ring.
    pub n_ring: u32,
    /// Tokens of a group; 0 in layers without compressed rows.
    pub ratio: u32,
    /// Groups that a row attends to at most where `chosen` is not 0.
    pub k: u32,
    /// Factor of the dot products, DH^-0.5.
    pub scale: f32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<AttentionArgs>() == 144);

/// Attends from `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &AttentionArgs, n_rows: u32) -> Result<(), DeviceError> {
    assert!(args.head_dim as usize == CACHE_DIMS, "attention: DH: {}, want {CACHE_DIMS}", args.head_dim);
    let grid = [args.n_heads.div_ceil(HEADS_PER_BLOCK), n_rows, 1];
    device.launch(device.kernel("attention")?, grid, N_THREADS, args)
}
