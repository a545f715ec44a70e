//! The embedding on a device: arguments and launch of the kernel `embed`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::step::Step;

/// Threads of a block, which expands one row.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct EmbedArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// Last token of each slot, for rows that name no token.
    pub slot_tokens: u64, // [n_slots] u32
    /// The embedding.
    pub table: u64, // [V, D] bf16
    /// Every row's token, found or given; one outside the vocabulary becomes 0.
    pub ids_out: u64, // [T] u32
    /// Each row's embedding, once a copy.
    pub residual: u64, // [T, HC, D] f32
    /// D.
    pub n_cols: u32,
    /// V.
    pub vocab_size: u32,
}

const _: () = assert!(size_of::<EmbedArgs>() == 72);

/// Expands `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &EmbedArgs, n_rows: u32) -> Result<(), DeviceError> {
    device.launch(device.kernel("embed")?, [n_rows, 1, 1], N_THREADS, args)
}
