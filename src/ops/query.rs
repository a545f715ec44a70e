//! Queries of the attention: each head's norm without a weight, rotation of its last 64 dims, rounded to bf16.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::step::Step;

/// Dims of a head that the kernel is written for.
const HEAD_DIM: u32 = 512;
/// Heads of a block, one a wave of 32 (on wider waves a wave takes two, one after the other).
const HEADS_PER_BLOCK: u32 = 8;
/// Threads of a block.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct QueryArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The projected heads.
    pub q: u64, // [T, H, DH] f32
    /// The finished queries.
    pub out: u64, // [T, H, DH] bf16
    /// Radians a position.
    pub freqs: u64, // [32] f32
    /// H.
    pub n_heads: u32,
    /// DH, 512.
    pub head_dim: u32,
    /// Epsilon of the norm.
    pub eps: f32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<QueryArgs>() == 72);

/// Finishes the heads of `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &QueryArgs, n_rows: u32) -> Result<(), DeviceError> {
    assert!(args.head_dim == HEAD_DIM, "query: DH: {}, want {HEAD_DIM}", args.head_dim);
    let grid = [args.n_heads.div_ceil(HEADS_PER_BLOCK), n_rows, 1];
    device.launch(device.kernel("query")?, grid, N_THREADS, args)
}
