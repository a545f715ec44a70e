//! The way into a sublayer on a device: arguments and launches of the kernels `hyper_dots` and `hyper_mix`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::hyper_mix::HC;
use crate::ops::step::Step;

/// Columns of the flattened copies whose products one block of `hyper_dots` sums: fixed, so that the order of a sum depends on
/// the width of the model alone.
pub const PART_COLS: u32 = 1024;
/// Floats of one part: the mixes' partial dots, the partial sum of squares, zeros.
pub const PART_STRIDE: u32 = 32;
/// Rows that a block of `hyper_dots` takes, so that they share its part of the matrix.
const DOTS_ROWS: u32 = 8;
/// Threads of a block of either kernel.
const N_THREADS: u32 = 256;

/// Arguments of both kernels, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct HyperMixArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The copies.
    pub residual: u64, // [T, HC, D] f32
    /// The matrix of the mixes.
    pub mix: u64, // [24, HC*D] f32
    /// Added to the scaled mixes.
    pub base: u64, // [24] f32
    /// Factors of pre, post and comb.
    pub scale: u64, // [3] f32
    /// Weight of the sublayer's norm.
    pub norm: u64, // [D] f32
    /// pre, post and comb of each row, for `hyper_post`.
    pub weights_out: u64, // [T, 24] f32
    /// The sublayer's input: mixed and normed.
    pub y: u64, // [T, D] bf16
    /// Scratch of `hyper_dots`, [`partials_bytes`] long.
    pub partials: u64, // [T, n_parts, 32] f32
    /// D, a multiple of 4.
    pub n_cols: u32,
    /// Normalisations of comb, at least 1.
    pub n_iters: u32,
    /// Epsilon of both norms.
    pub norm_eps: f32,
    /// Epsilon of the hyper-connection.
    pub hc_eps: f32,
}

const _: () = assert!(size_of::<HyperMixArgs>() == 112);

/// Parts into which the dots of a model of `n_cols` columns are cut.
#[must_use]
pub const fn n_parts(n_cols: u32) -> u32 {
    (HC as u32 * n_cols).div_ceil(PART_COLS)
}

/// Bytes of `HyperMixArgs::partials` for `n_rows` rows.
#[must_use]
pub const fn partials_bytes(n_rows: u32, n_cols: u32) -> usize {
    n_rows as usize * n_parts(n_cols) as usize * PART_STRIDE as usize * 4
}

/// Mixes `n_rows` rows (those of the bucket, of which the step's real ones are written): the dots, then the rest.
///
/// # Errors
/// When the device refuses a launch.
pub fn launch(device: &Device, args: &HyperMixArgs, n_rows: u32) -> Result<(), DeviceError> {
    assert!(args.n_cols.is_multiple_of(4), "hyper_mix: D: {}, want a multiple of 4", args.n_cols);
    let grid = [n_parts(args.n_cols), n_rows.div_ceil(DOTS_ROWS), 1];
    device.launch(device.kernel("hyper_dots")?, grid, N_THREADS, args)?;
    device.launch(device.kernel("hyper_mix")?, [n_rows, 1, 1], N_THREADS, args)
}
