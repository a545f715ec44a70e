//! Copies between places in device memory: whole KV blocks, and slots' rings to and from checkpoints.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};

/// Threads of a block.
const N_THREADS: u32 = 256;
/// Bytes that one block copies.
const PART_BYTES: u64 = 64 * 1024;

/// One copy; source and destination must not overlap, nor may any destination overlap another copy's source or destination.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct CopyItem {
    /// Address to read, a multiple of 4.
    pub src: u64,
    /// Address to write, a multiple of 4.
    pub dst: u64,
    /// Bytes, a multiple of 4.
    pub n_bytes: u64,
}

const _: () = assert!(size_of::<CopyItem>() == 24);

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct CopyArgs {
    /// The copies.
    pub items: u64, // [n] CopyItem
    /// Copies.
    pub n: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<CopyArgs>() == 16);

/// Runs the copies, the longest of which has `max_bytes` bytes.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &CopyArgs, max_bytes: u64) -> Result<(), DeviceError> {
    if args.n == 0 || max_bytes == 0 {
        return Ok(());
    }
    let n_parts = u32::try_from(max_bytes.div_ceil(PART_BYTES)).unwrap_or(u32::MAX);
    device.launch(device.kernel("copy")?, [n_parts, args.n, 1], N_THREADS, args)
}
