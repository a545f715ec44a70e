//! Compressed rows on a device: arguments and launch of the kernel `compress`, which pools, norms, rotates and stores.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::step::Step;

/// Threads of a block, which makes the row of one completed group.
const N_THREADS: u32 = 512;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct CompressArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// Values of the step's rows.
    pub a: u64, // [T, CW] f32
    /// Logits of the step's rows, without the positional term.
    pub s: u64, // [T, CW] f32
    /// Positional term of each place in a group.
    pub ape: u64, // [ratio, CW] f32
    /// Weight of the norm.
    pub norm: u64, // [RD] f32
    /// Radians a position.
    pub freqs: u64, // [32] f32
    /// Slot 0's ring of raw rows: values, then logits with the positional term.
    pub ring: u64, // [n_ring, 2*CW] f32
    /// This layer's rows in block 0.
    pub blocks: u64, // [256/ratio, row_bytes] u8
    /// From a slot's ring to the next slot's.
    pub slot_stride_bytes: u64,
    /// From a block's rows to the next block's.
    pub block_stride_bytes: u64,
    /// Tokens of a group: 4 (overlapping) or 128.
    pub ratio: u32,
    /// RD: 512, or 128 for indexer keys.
    pub row_dim: u32,
    /// Rows of a ring.
    pub n_ring: u32,
    /// Bytes of a stored row: 584, or 68 for indexer keys.
    pub row_bytes: u32,
    /// 1 for indexer keys, else 0.
    pub is_index: u32,
    /// CW: twice RD where groups overlap, else RD.
    pub n_cols: u32,
    /// Epsilon of the norm.
    pub eps: f32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<CompressArgs>() == 136);

/// Stores the row of every group that one of `n_rows` rows (those of the bucket) completes.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &CompressArgs, n_rows: u32) -> Result<(), DeviceError> {
    let want = if args.is_index == 0 { (512, 584) } else { (128, 68) };
    let got = (args.row_dim, args.row_bytes);
    assert!(got == want, "compress: RD, row bytes: {got:?}, want {want:?}");
    let n_cols = if args.ratio == 4 { 2 * args.row_dim } else { args.row_dim };
    assert!(args.n_cols == n_cols, "compress: CW: {}, want {n_cols}", args.n_cols);
    device.launch(device.kernel("compress")?, [n_rows, 1, 1], N_THREADS, args)
}
