//! Queries of the indexer: rotation of the last 64 dims, Hadamard, rounding to E2M1, which bf16 holds exactly.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::round_fp4::KEY_DIMS;
use crate::ops::step::Step;

/// Heads of a block, one a wave of 32 (on wider waves a wave takes two, one after the other).
const HEADS_PER_BLOCK: u32 = 8;
/// Threads of a block.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct IndexQueryArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The projected heads.
    pub x: u64, // [T, IH, ID] f32
    /// The finished queries.
    pub out: u64, // [T, IH, ID] bf16
    /// Radians a position.
    pub freqs: u64, // [32] f32
    /// IH.
    pub n_heads: u32,
    /// ID, 128.
    pub head_dim: u32,
}

const _: () = assert!(size_of::<IndexQueryArgs>() == 64);

/// Finishes the heads of `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &IndexQueryArgs, n_rows: u32) -> Result<(), DeviceError> {
    assert!(args.head_dim as usize == KEY_DIMS, "index_query: ID: {}, want {KEY_DIMS}", args.head_dim);
    let grid = [args.n_heads.div_ceil(HEADS_PER_BLOCK), n_rows, 1];
    device.launch(device.kernel("index_query")?, grid, N_THREADS, args)
}
