//! The slots' rings take the last rows of every run, once no query of the step needs the rows they replace.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::step::Step;

/// Threads of a block, which stores one row.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field. A ring whose address is 0 does not exist in the layer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct RingStoreArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The step's window rows.
    pub rows: u64, // [T, 584] u8
    /// Slot 0's ring of window rows.
    pub window_ring: u64, // [n_window_ring, 584] u8
    /// The compressor's values.
    pub a: u64, // [T, CW] f32
    /// Its logits, without the positional term.
    pub s: u64, // [T, CW] f32
    /// Its positional term.
    pub ape: u64, // [ratio, CW] f32
    /// Slot 0's ring of raw rows: values, then logits with the positional term.
    pub raw_ring: u64, // [n_raw_ring, 2*CW] f32
    /// As `a`, of the indexer's compressor.
    pub ia: u64, // [T, IW] f32
    /// As `s`, of the indexer's compressor.
    pub is: u64, // [T, IW] f32
    /// As `ape`, of the indexer's compressor.
    pub iape: u64, // [ratio, IW] f32
    /// As `raw_ring`, of the indexer's compressor.
    pub index_ring: u64, // [n_index_ring, 2*IW] f32
    /// From a slot's rings to the next slot's.
    pub slot_stride_bytes: u64,
    /// Rows of the window ring.
    pub n_window_ring: u32,
    /// Rows of the raw ring.
    pub n_raw_ring: u32,
    /// Rows of the indexer's raw ring.
    pub n_index_ring: u32,
    /// CW.
    pub n_raw_cols: u32,
    /// IW.
    pub n_index_cols: u32,
    /// Tokens of a group; 0 where there is no raw ring.
    pub ratio: u32,
}

const _: () = assert!(size_of::<RingStoreArgs>() == 144);

/// Stores what the rings hold of `n_rows` rows (those of the bucket).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &RingStoreArgs, n_rows: u32) -> Result<(), DeviceError> {
    device.launch(device.kernel("ring_store")?, [n_rows, 1, 1], N_THREADS, args)
}
