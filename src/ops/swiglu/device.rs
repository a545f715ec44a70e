//! The experts' activation on a device: arguments, launch and cases of `swiglu`. Its result is rounded to BF16, the next product's input.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::OpCase;

mod cases;

/// Threads of a block, and the columns it takes.
const N_THREADS: u32 = 256;
pub(in crate::ops) const BLOCK_COLS: u32 = 4 * N_THREADS;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct SwigluArgs {
    /// w1 x.
    pub gate: u64, // [R, F] f32
    /// w3 x.
    pub up: u64, // [R, F] f32
    /// Routing weight of each row; 0: 1.
    pub weight: u64, // [R] f32
    /// Result.
    pub out: u64, // [R, F] bf16
    /// Address of a row count, such as that of `StepCounts::n_rows`.
    pub n_rows: u64, // [1] u32
    /// Rows are `*n_rows` times this: the choices of a row, or 1.
    pub multiplier: u32,
    /// F.
    pub n_cols: u32,
    /// The config's swiglu_limit.
    pub limit: f32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<SwigluArgs>() == 56);

/// Computes at most `max_rows` rows.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &SwigluArgs, max_rows: u32) -> Result<(), DeviceError> {
    if max_rows == 0 {
        return Ok(());
    }
    device.launch(device.kernel("swiglu")?, [max_rows, args.n_cols.div_ceil(BLOCK_COLS), 1], N_THREADS, args)
}

/// The cases of the kernel.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    cases::cases()
}
