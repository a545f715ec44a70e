//! The best groups of each row on a device: arguments and launch of the kernel `top_k`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::step::Step;

/// Threads of a block, which takes one row.
const N_THREADS: u32 = 512;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct TopKArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// Scores of rows `first_row` and on.
    pub scores: u64, // [n_tile_rows, max_groups] f32
    /// The chosen groups of row t, ascending; written only where more than k are visible.
    pub chosen: u64, // [T, k] u32
    /// First row of the tile.
    pub first_row: u32,
    /// Rows of the tile.
    pub n_tile_rows: u32,
    /// Floats from one row of scores to the next.
    pub max_groups: u32,
    /// Groups to choose.
    pub k: u32,
    /// Tokens of a group.
    pub ratio: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<TopKArgs>() == 72);

/// Chooses for the rows of the tile.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &TopKArgs) -> Result<(), DeviceError> {
    device.launch(device.kernel("top_k")?, [args.n_tile_rows, 1, 1], N_THREADS, args)
}
