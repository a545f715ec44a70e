//! The way out of a sublayer on a device: arguments and launch of the kernel `hyper_post`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::step::Step;

/// Threads of a block; each updates 4 columns of every copy.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct HyperPostArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The sublayer's output.
    pub output: u64, // [T, D] f32
    /// What `hyper_mix` made.
    pub weights: u64, // [T, 24] f32
    /// The copies, updated in place.
    pub residual: u64, // [T, HC, D] f32
    /// D, a multiple of 4.
    pub n_cols: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<HyperPostArgs>() == 64);

/// Updates `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &HyperPostArgs, n_rows: u32) -> Result<(), DeviceError> {
    assert!(args.n_cols.is_multiple_of(4), "hyper_post: D: {}, want a multiple of 4", args.n_cols);
    let grid = [args.n_cols.div_ceil(4 * N_THREADS), n_rows, 1];
    device.launch(device.kernel("hyper_post")?, grid, N_THREADS, args)
}
