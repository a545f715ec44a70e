//! Indexer scores on a device: arguments and launch of the kernel `index_score`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::batch::{
    Batch, Runs, Worst, block, decode_key, home, n_blocks, output, row_noise, run_everywhere, to_bf16, values_of,
};
use crate::ops::case::data::upload;
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::index_score::reference;
use crate::ops::round_fp4::{KEY_DIMS, KEY_ROW_BYTES};
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

/// Bytes before the layer's keys in a block, and after them.
const MARGIN_BYTES: usize = 16;
const BLOCK_STRIDE: usize = 64 * KEY_ROW_BYTES + 2 * MARGIN_BYTES;

/// What a case scores with.
#[derive(Clone, Copy)]
struct Shape {
    n_heads: usize,
    max_groups: usize,
    k: usize,
    /// Rows of a launch.
    n_tile_rows: usize,
}

/// The kernel's cases: one head, odd numbers, the model's; no visible group, one, a block's worth and one more, several blocks;
/// rows that share keys and rows of other runs between them; rows with few enough groups; launches over parts of the rows.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let of = |name: &str, n_heads: usize, k: usize, n_tile_rows: usize, runs: Runs| {
        let batch = Batch::new(runs);
        let most = batch.rows().iter().map(|row| (row.1 + 1) / 4).max().unwrap_or(0);
        let shape = Shape { n_heads, max_groups: most + 3, k, n_tile_rows };
        OpCase::new("index_score", name, move |device| check(device, shape, &batch))
    };
    vec![
        of("64 heads, decode rows", 64, 0, 100, &[(0, 255, 1), (1, 0, 1), (2, 3, 1), (3, 1023, 1)]),
        of("4 heads, around a block of keys", 4, 0, 100, &[(0, 250, 12), (1, 2, 4)]),
        of("1 head, several blocks", 1, 0, 100, &[(2, 1500, 3)]),
        of("7 heads, launches of 3 rows", 7, 0, 3, &[(0, 250, 7), (1, 90, 2)]),
        of("35 heads, rows that share keys", 35, 0, 1000, &[(0, 240, 50), (1, 600, 30)]),
        of("2 heads, few groups are passed over", 2, 16, 100, &[(0, 60, 12)]),
        of("4 heads, no row", 4, 0, 100, &[]),
    ]
}

/// A stored key with scales that differ by up to 2^4, so that every dot is exact.
fn key(seq: usize, group: usize) -> Vec<u8> {
    let mut noise = row_noise(50, seq, group);
    (0..KEY_ROW_BYTES)
        .map(|i| if i < 64 { noise.next_u64() as u8 } else { 123 + (noise.next_u64() % 5) as u8 })
        .collect()
}

/// The queries of a row, decoded.
fn queries(n_heads: usize, seq: usize, position: usize) -> Vec<f32> {
    (0..n_heads).flat_map(|head| decode_key(&key(seq + 100 * (head + 1), position))).collect()
}

fn weights(n_heads: usize, seq: usize, position: usize) -> Vec<f32> {
    row_noise(51, seq, position).floats(n_heads)
}

const SCALE: f32 = 0.011;

/// Every row's `max_groups` scores.
fn run(device: &Device, shape: Shape, batch: &Batch) -> Result<Vec<u8>, CaseError> {
    let (step, Shape { n_heads, max_groups, k, n_tile_rows }) = (batch.upload(device, |_, _| 0)?, shape);
    let iq = batch.values(n_heads * KEY_DIMS, |seq, position| queries(n_heads, seq, position));
    let w = batch.values(n_heads, |seq, position| weights(n_heads, seq, position));
    let mut bytes = vec![0xFFu8; n_blocks(4 * max_groups) * BLOCK_STRIDE];
    for run in &batch.runs {
        for group in 0..(run.first_pos + run.n_rows) / 4 {
            let at = block(run.seq, group / 64) * BLOCK_STRIDE + MARGIN_BYTES + group % 64 * KEY_ROW_BYTES;
            bytes[at..at + KEY_ROW_BYTES].copy_from_slice(&key(run.seq, group));
        }
    }
    let (iq, w, blocks) = (upload(device, &to_bf16(&iq))?, upload(device, &w)?, upload(device, &bytes)?);
    let mut all = Vec::new();
    for first_row in (0..batch.n_bucket()).step_by(n_tile_rows) {
        let n_tile_rows = n_tile_rows.min(batch.n_bucket() - first_row);
        let scores = output::<f32>(device, n_tile_rows * max_groups)?;
        let args = IndexScoreArgs {
            step: step.step,
            iq: iq.address(),
            w: w.address(),
            blocks: blocks.address() + MARGIN_BYTES as u64,
            block_stride_bytes: BLOCK_STRIDE as u64,
            scores: scores.address(),
            first_row: first_row as u32,
            n_tile_rows: n_tile_rows as u32,
            n_heads: n_heads as u32,
            head_dim: KEY_DIMS as u32,
            max_groups: max_groups as u32,
            ratio: 4,
            scale: SCALE,
            k: k as u32,
            rows_per_block: 0,
            pad: 0,
        };
        launch(device, &args)?;
        all.extend(home::<u8>(device, &scores)?);
    }
    Ok(all)
}

fn check(device: &Device, shape: Shape, batch: &Batch) -> Result<Deviation, CaseError> {
    let got = run_everywhere(batch, |batch| run(device, shape, batch))?;
    let mut worst = Worst::default();
    for ((seq, position), got) in batch.rows().into_iter().zip(got.chunks(4 * shape.max_groups)) {
        let n_visible = (position + 1) / 4;
        let n_scored = if n_visible > shape.k { n_visible } else { 0 };
        let keys: Vec<f32> = (0..n_scored).flat_map(|group| decode_key(&key(seq, group))).collect();
        let w: Vec<f32> = weights(shape.n_heads, seq, position).iter().map(|w| w * SCALE).collect();
        let want = reference(&queries(shape.n_heads, seq, position), &w, &keys);
        let top = want.iter().fold(1e-6f64, |m, x| m.max(x.abs()));
        let got = values_of::<f32>(got);
        for (got, want) in got.iter().zip(&want) {
            // Dots are exact; one rounding a head.
            worst.add(*got, *want, 4e-6 * top);
        }
        if got[n_scored..].iter().any(|score| score.to_bits() != u32::MAX) {
            return Err(CaseError::Rule("a score of a group that is not visible".into()));
        }
    }
    Ok(worst.deviation())
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_pass() {
        crate::device::testing::run_cases(&super::cases());
    }
}
