//! RMSNorm of each row with a weight, rounded to bf16: the latent row of the queries on a device.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::step::Step;

/// Threads of a block, which takes one row.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct RowNormArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The rows.
    pub x: u64, // [T, N] f32
    /// The weight.
    pub weight: u64, // [N] f32
    /// The normed rows.
    pub out: u64, // [T, N] bf16
    /// N.
    pub n_cols: u32,
    /// Epsilon of the norm.
    pub eps: f32,
}

const _: () = assert!(size_of::<RowNormArgs>() == 64);

/// Norms `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &RowNormArgs, n_rows: u32) -> Result<(), DeviceError> {
    device.launch(device.kernel("row_norm")?, [n_rows, 1, 1], N_THREADS, args)
}
