//! The router on a device: arguments, launch and cases of `route`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::OpCase;
use crate::ops::step::Step;

mod cases;

/// Rows of a block, one a wave.
const BLOCK_ROWS: u32 = 4;
/// Experts and choices that the kernel has room for.
const MAX_EXPERTS: u32 = 512;
const MAX_TOP_K: u32 = 16;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct RouteArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// gate · y.
    pub logits: u64, // [T, E] f32
    /// Added for the choice alone; 0: none.
    pub bias: u64, // [E] f32
    /// Experts by token id; 0: by score.
    pub tid2eid: u64, // [V, K] u16
    /// Resolved token ids, below V.
    pub ids: u64, // [T] u32
    /// The experts, in order of choice.
    pub experts: u64, // [T, K] u32
    /// Their weights.
    pub weights: u64, // [T, K] f32
    /// E.
    pub n_experts: u32,
    /// K.
    pub top_k: u32,
    /// Factor on the weights.
    pub scale: f32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<RouteArgs>() == 96);

impl RouteArgs {
    /// Panics on more experts or choices than there is room for.
    pub(super) fn check(&self) {
        assert!(self.n_experts <= MAX_EXPERTS, "route: E: {}, want at most {MAX_EXPERTS}", self.n_experts);
        let most = MAX_TOP_K.min(self.n_experts);
        assert!(self.top_k > 0 && self.top_k <= most, "route: K: {}, want 1 to {most}", self.top_k);
    }
}

/// Routes `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch. Panics on more experts or choices than there is room for.
pub fn launch(device: &Device, args: &RouteArgs, n_rows: u32) -> Result<(), DeviceError> {
    args.check();
    if n_rows == 0 {
        return Ok(());
    }
    let grid = [n_rows.div_ceil(BLOCK_ROWS), 1, 1];
    device.launch(device.kernel("route")?, grid, BLOCK_ROWS * device.info().wave, args)
}

/// The cases of the kernels.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    [cases::cases(), super::dispatch::cases(), super::few::cases()].into_iter().flatten().collect()
}
