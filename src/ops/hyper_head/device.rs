//! The hyper-connection at the head on a device: arguments, launch and cases of `hyper_head`, which norms and rounds its rows, too.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::OpCase;
use crate::ops::step::Step;

mod cases;

/// Threads of a block, which takes one row.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct HyperHeadArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The step's rows whose logits are wanted.
    pub logit_rows: u64, // [R] u32
    /// The copies.
    pub residual: u64, // [T, HC, D] f32
    /// `fn`.
    pub mix: u64, // [HC, HC * D] f32
    /// Added to the scaled mixes.
    pub base: u64, // [HC] f32
    /// Their factor.
    pub scale: u64, // [1] f32
    /// Weight of the norm.
    pub norm: u64, // [D] f32
    /// The head's input.
    pub y: u64, // [R, D] bf16
    /// D.
    pub n_cols: u32,
    /// Epsilon of both norms.
    pub norm_eps: f32,
    /// Epsilon of the hyper-connection.
    pub hc_eps: f32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<HyperHeadArgs>() == 104);

/// Computes at most `max_rows` logit rows; the number there are is read on the device.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &HyperHeadArgs, max_rows: u32) -> Result<(), DeviceError> {
    if max_rows == 0 {
        return Ok(());
    }
    device.launch(device.kernel("hyper_head")?, [max_rows, 1, 1], N_THREADS, args)
}

/// The cases of the kernel.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    cases::cases()
}
