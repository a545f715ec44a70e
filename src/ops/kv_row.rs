//! Rows of the window as they are stored: norm with a weight, rotation, FP8 in groups of 64, bf16 for the rotary dims.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::round_fp8::CACHE_DIMS;
use crate::ops::step::Step;

/// Rows of a block.
const ROWS_PER_BLOCK: u32 = 4;
/// Threads of a block: a wave of 32 a row (on wider waves a wave takes two, one after the other).
const N_THREADS: u32 = 128;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct KvRowArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The projected rows.
    pub x: u64, // [T, DH] f32
    /// Weight of the norm.
    pub weight: u64, // [DH] f32
    /// Radians a position.
    pub freqs: u64, // [32] f32
    /// The stored rows.
    pub rows: u64, // [T, 584] u8
    /// DH, 512.
    pub head_dim: u32,
    /// Epsilon of the norm.
    pub eps: f32,
}

const _: () = assert!(size_of::<KvRowArgs>() == 72);

/// Makes `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &KvRowArgs, n_rows: u32) -> Result<(), DeviceError> {
    assert!(args.head_dim as usize == CACHE_DIMS, "kv_row: DH: {}, want {CACHE_DIMS}", args.head_dim);
    device.launch(device.kernel("kv_row")?, [n_rows.div_ceil(ROWS_PER_BLOCK), 1, 1], N_THREADS, args)
}
