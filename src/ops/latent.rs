//! The latent rows of a layer, made in one launch from the projections of its input: queries' row, window row, compressed rows.
//!
//! Bits: each part's own; none depends on which others are made with it.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::OpCase;
use crate::ops::step::Step;

pub mod group;
pub mod norm;
pub mod window;

use group::GroupArgs;
use norm::NormArgs;
use window::WindowArgs;

/// Compressors of a layer at most: that of KV rows and the indexer's.
pub const MAX_GROUPS: usize = 2;
/// Threads of a block.
const N_THREADS: u32 = 512;
/// Rows of the window that a block makes.
const WINDOW_ROWS: u32 = 16;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct LatentArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The latent row of the queries.
    pub norm: NormArgs,
    /// The row of the window.
    pub window: WindowArgs,
    /// The compressors, the first `n_groups` of which there are.
    pub groups: [GroupArgs; MAX_GROUPS],
    /// Radians a position.
    pub freqs: u64, // [32] f32
    /// From a slot's rings to the next slot's.
    pub slot_stride_bytes: u64,
    /// From a block's rows to the next block's.
    pub block_stride_bytes: u64,
    /// T, which [`launch`] sets.
    pub n_rows: u32,
    /// Compressors.
    pub n_groups: u32,
    /// Tokens of a group: 4 (overlapping) or 128; any number where there is no compressor.
    pub ratio: u32,
    /// Epsilon of all norms.
    pub eps: f32,
}

const _: () = assert!(size_of::<LatentArgs>() == 272);

/// Makes `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch. Panics on shapes that don't fit: a bug in the caller.
pub fn launch(device: &Device, args: &LatentArgs, n_rows: u32) -> Result<(), DeviceError> {
    args.groups[..args.n_groups as usize].iter().for_each(|group| group.check(args.ratio));
    let args = LatentArgs { n_rows, ..*args };
    let n_blocks = (args.n_groups + 1) * n_rows + n_rows.div_ceil(WINDOW_ROWS);
    device.launch(device.kernel("latent")?, [n_blocks, 1, 1], N_THREADS, &args)
}

/// The kernel's cases.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    [norm::cases(), window::cases(), group::cases()].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_pass() {
        crate::device::testing::run_cases(&super::cases());
    }
}
