//! Indexer scores on a device: arguments and launch of the kernel `index_score`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::round_fp4::KEY_DIMS;
use crate::ops::step::Step;

/// Keys that a block scores for one row.
const KEYS_PER_BLOCK: u32 = 64;
/// Threads of a block.
const N_THREADS: u32 = 128;
/// Rows up to which each has blocks of its own.
const SPREAD_ROWS: u32 = 64;
/// Rows that share a block's keys above that.
const SHARED_ROWS: u32 = 8;
/// Heads that the kernel is written for, at most.
const MAX_HEADS: u32 = 64;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct IndexScoreArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// Finished queries.
    pub iq: u64, // [T, IH, ID] bf16
    /// Head weights, not yet scaled.
    pub w: u64, // [T, IH] f32
    /// This layer's keys in block 0.
    pub blocks: u64, // [256/ratio, 68] u8
    /// From a block's keys to the next block's.
    pub block_stride_bytes: u64,
    /// Scores of rows `first_row` and on; row t's visible groups are written, and only where it has more than `k`.
    pub scores: u64, // [n_tile_rows, max_groups] f32
    /// First row that is scored.
    pub first_row: u32,
    /// Rows that are scored.
    pub n_tile_rows: u32,
    /// IH, at most 64.
    pub n_heads: u32,
    /// ID, 128.
    pub head_dim: u32,
    /// Floats from one row of scores to the next: at least every row's visible groups.
    pub max_groups: u32,
    /// Tokens of a group.
    pub ratio: u32,
    /// Factor of the head weights, (ID * IH)^-0.5.
    pub scale: f32,
    /// Rows with at most this many visible groups are passed over; 0 scores every row.
    pub k: u32,
    /// Rows that share the keys of a block; [`launch`] sets it. It changes no result.
    pub rows_per_block: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<IndexScoreArgs>() == 112);

/// Scores the rows of the tile.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &IndexScoreArgs) -> Result<(), DeviceError> {
    assert!(args.head_dim as usize == KEY_DIMS, "index_score: ID: {}, want {KEY_DIMS}", args.head_dim);
    assert!(args.n_heads <= MAX_HEADS, "index_score: IH: {}, want at most {MAX_HEADS}", args.n_heads);
    // A few rows are spread out; many share the expansion of the keys.
    let rows_per_block = if args.n_tile_rows > SPREAD_ROWS { SHARED_ROWS } else { 1 };
    let args = IndexScoreArgs { rows_per_block, ..*args };
    let grid = [args.max_groups.div_ceil(KEYS_PER_BLOCK), args.n_tile_rows.div_ceil(rows_per_block), 1];
    device.launch(device.kernel("index_score")?, grid, N_THREADS, &args)
}
