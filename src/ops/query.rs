//! Queries of a layer, made in one launch from their projections: the heads of the attention, and those of the indexer.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::OpCase;
use crate::ops::round_fp4::KEY_DIMS;
use crate::ops::round_fp8::CACHE_DIMS;
use crate::ops::step::Step;

pub mod heads;
pub mod index;

/// Heads of a block, one a wave of 32 (on wider waves a wave takes two, one after the other).
const HEADS_PER_BLOCK: u32 = 8;
/// Threads of a block.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct QueryArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The projected heads.
    pub q: u64, // [T, H, DH] f32
    /// The finished queries.
    pub out: u64, // [T, H, DH] bf16
    /// The indexer's projected heads.
    pub iq: u64, // [T, IH, ID] f32
    /// The indexer's finished queries.
    pub index_out: u64, // [T, IH, ID] bf16
    /// Radians a position.
    pub freqs: u64, // [32] f32
    /// H; 0: none are made.
    pub n_heads: u32,
    /// DH, 512.
    pub head_dim: u32,
    /// IH; 0: none are made.
    pub n_index_heads: u32,
    /// ID, 128.
    pub index_head_dim: u32,
    /// Epsilon of the norm.
    pub eps: f32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<QueryArgs>() == 96);

/// Finishes the heads of `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &QueryArgs, n_rows: u32) -> Result<(), DeviceError> {
    let is_right = |n_heads: u32, got: u32, want: usize| n_heads == 0 || got as usize == want;
    assert!(is_right(args.n_heads, args.head_dim, CACHE_DIMS), "query: DH: {}, want {CACHE_DIMS}", args.head_dim);
    let index_dim = args.index_head_dim;
    assert!(is_right(args.n_index_heads, index_dim, KEY_DIMS), "query: ID: {index_dim}, want {KEY_DIMS}");
    let n_blocks = args.n_heads.div_ceil(HEADS_PER_BLOCK) + args.n_index_heads.div_ceil(HEADS_PER_BLOCK);
    device.launch(device.kernel("query")?, [n_blocks, n_rows, 1], N_THREADS, args)
}

/// The kernel's cases.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    [heads::cases(), index::cases()].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_pass() {
        crate::device::testing::run_cases(&super::cases());
    }
}
