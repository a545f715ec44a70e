//! The experts' results of each row added up: in the order of its choice, then the shared expert's.
//!
//! Bits: from +0, one addition at a time.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::OpCase;
use crate::ops::step::Step;

mod cases;

/// Threads of a block, and the columns it takes.
const N_THREADS: u32 = 256;
const BLOCK_COLS: u32 = 4 * N_THREADS;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct CombineArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// Results of the sorted rows.
    pub routed: u64, // [T * K, D] f32
    /// The sorted row of each (row, choice).
    pub row_of: u64, // [T, K] u32
    /// Results of the shared expert.
    pub shared: u64, // [T, D] f32
    /// Sums.
    pub out: u64, // [T, D] f32
    /// D.
    pub n_cols: u32,
    /// K.
    pub top_k: u32,
}

const _: () = assert!(size_of::<CombineArgs>() == 72);

/// The contract with f64 sums.
#[must_use]
pub fn reference(
    routed: &[f32], // [T * K, D]
    row_of: &[u32], // [T, K]
    shared: &[f32], // [T, D]
    n_cols: usize,
    top_k: usize,
) -> Vec<f64> {
    let at = |i: usize| {
        let rows = &row_of[i / n_cols * top_k..][..top_k];
        let routed: f64 = rows.iter().map(|row| f64::from(routed[*row as usize * n_cols + i % n_cols])).sum();
        routed + f64::from(shared[i])
    };
    (0..shared.len()).map(at).collect()
}

/// Adds up `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &CombineArgs, n_rows: u32) -> Result<(), DeviceError> {
    if n_rows == 0 {
        return Ok(());
    }
    device.launch(device.kernel("combine")?, [n_rows, args.n_cols.div_ceil(BLOCK_COLS), 1], N_THREADS, args)
}

/// The cases of the kernel.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    cases::cases()
}
