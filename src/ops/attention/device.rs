//! Attention on a device: arguments and launch of the kernel `attention`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::attention::DEVICE_TILE_ROWS;
use crate::ops::case::batch::{
    Batch, N_SLOTS, Runs, Worst, block, decode_kv, home, n_blocks, output, rope_table, rounded_to_bf16, row_noise,
    run_everywhere, slot, to_bf16, values_of,
};
use crate::ops::case::data::{Noise, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::rope;
use crate::ops::round_fp8::{CACHE_DIMS, CACHE_ROW_BYTES};
use crate::ops::step::Step;
use crate::tensor::format::{bf16_to_f32, f32_to_bf16};

/// Heads of a block: the rows of the matrix instruction.
const HEADS_PER_BLOCK: u32 = 16;
/// Threads of a block, which computes some heads of one row.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct AttentionArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// Finished queries.
    pub q: u64, // [T, H, DH] bf16
    /// Learned logit of each head.
    pub sink: u64, // [H] f32
    /// The step's own window rows.
    pub own_rows: u64, // [T, 584] u8
    /// Slot 0's ring of window rows.
    pub window_ring: u64, // [n_ring, 584] u8
    /// From a slot's ring to the next slot's.
    pub slot_stride_bytes: u64,
    /// This layer's compressed rows in block 0.
    pub blocks: u64, // [256/ratio, 584] u8
    /// From a block's rows to the next block's.
    pub block_stride_bytes: u64,
    /// Groups chosen for rows that see more than k, or 0 where every row sees all.
    pub chosen: u64, // [T, k] u32
    /// Radians a position, for the inverse rotation.
    pub freqs: u64, // [32] f32
    /// The heads' results, rotated back.
    pub out: u64, // [T, H, DH] bf16
    /// H, at least 1.
    pub n_heads: u32,
    /// DH, 512.
    pub head_dim: u32,
    /// Window rows that a query sees, itself included.
    pub window: u32,
    /// Rows of a ring.
    pub n_ring: u32,
    /// Tokens of a group; 0 in layers without compressed rows.
    pub ratio: u32,
    /// Groups that a row attends to at most where `chosen` is not 0.
    pub k: u32,
    /// Factor of the dot products, DH^-0.5.
    pub scale: f32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<AttentionArgs>() == 144);

/// Attends from `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &AttentionArgs, n_rows: u32) -> Result<(), DeviceError> {
    assert!(args.head_dim as usize == CACHE_DIMS, "attention: DH: {}, want {CACHE_DIMS}", args.head_dim);
    let grid = [args.n_heads.div_ceil(HEADS_PER_BLOCK), n_rows, 1];
    device.launch(device.kernel("attention")?, grid, N_THREADS, args)
}

/// Some heads of one row, as the kernel rounds, with f64 sums: p is rounded to bf16 relative to the largest score so far, the
/// sink included, in tiles of 64 rows.
#[must_use]
pub fn reference(q: &[f32], rows: &[Vec<f32>], sink: &[f32], scale: f32) -> Vec<f64> {
    let d = q.len() / sink.len();
    let mut out = Vec::with_capacity(q.len());
    for (q, sink) in q.chunks(d).zip(sink) {
        let dot = |row: &Vec<f32>| q.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let (mut top, mut total, mut sums) = (f64::from(*sink), 0.0f64, vec![0.0f64; d]);
        for tile in rows.chunks(DEVICE_TILE_ROWS) {
            let scores: Vec<f64> = tile.iter().map(|row| dot(row) * f64::from(scale)).collect();
            let now = scores.iter().fold(top, |m, s| if *s > m { *s } else { m });
            let factor = (top - now).exp();
            total *= factor;
            sums.iter_mut().for_each(|sum| *sum *= factor);
            for (score, row) in scores.iter().zip(tile) {
                let p = f64::from(bf16_to_f32(f32_to_bf16((score - now).exp() as f32)));
                total += p;
                sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += p * f64::from(*x));
            }
            top = now;
        }
        total += (f64::from(*sink) - top).exp();
        out.extend(sums.iter().map(|sum| sum / total));
    }
    out
}

/// Bytes before the layer's rows in a block, and after them.
const MARGIN_BYTES: usize = 16;
const WINDOW: usize = 128;
const N_RING: usize = 160;
const SLOT_STRIDE: usize = N_RING * CACHE_ROW_BYTES + MARGIN_BYTES;
const SCALE: f32 = 0.044_194_174;

/// A layer and a number of heads.
#[derive(Clone, Copy)]
struct Layer {
    n_heads: usize,
    ratio: usize,
    /// Groups that a row attends to at most; 0: all.
    k: usize,
}

/// The kernel's cases: numbers of heads around 16; the window's edges, the ring's wrap and runs that begin inside the window; all
/// groups and chosen ones; rows that see no group yet; lists of thousands of rows; scores that let one row or the sink win; NaN.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let of = |name: &str, layer: (usize, usize, usize), runs: Runs| {
        let (batch, (n_heads, ratio, k)) = (Batch::new(runs), layer);
        OpCase::new("attention", name, move |device| check(device, Layer { n_heads, ratio, k }, &batch))
    };
    vec![
        of("1 head, the first rows", (1, 0, 0), &[(0, 0, 3), (1, 0, 1)]),
        of("4 heads, the window's edges", (4, 0, 0), &[(0, 126, 4), (1, 62, 1), (2, 63, 1), (3, 64, 1)]),
        of("5 heads, the ring's wrap", (5, 0, 0), &[(0, 159, 3), (1, 287, 2), (4, 1000, 1)]),
        of("17 heads, a run that begins inside the window", (17, 0, 0), &[(2, 100, 4)]),
        of("2 heads, a chunk past a tile", (2, 0, 0), &[(2, 100, 66)]),
        of("64 heads, decode rows", (64, 4, 512), &[(0, 5, 1), (1, 700, 1)]),
        of("16 heads, ratio 4, all groups and chosen ones", (16, 4, 16), &[(0, 61, 9), (1, 1030, 2), (2, 2, 1)]),
        of("3 heads, ratio 128", (3, 128, 0), &[(0, 126, 3), (1, 1023, 2), (3, 40, 1)]),
        of("4 heads, thousands of groups", (4, 128, 0), &[(0, 300_000, 1)]),
        of("2 heads, NaN in a group", (2, 128, 0), &[(4, 1023, 1)]),
        of("4 heads, no row", (4, 4, 16), &[]),
    ]
}

/// A stored row: any codes but NaN, scales around 2^-9 so that values are near 1, rotary columns in [-1, 1).
fn stored_row(seed: u64, seq: usize, index: usize) -> Vec<u8> {
    let mut noise = row_noise(seed, seq, index);
    let mut code = || match noise.next_u64() as u8 {
        0x7F | 0xFF => 0x3A,
        byte => byte,
    };
    let mut row: Vec<u8> = (0..448).map(|_| code()).collect();
    row.extend(to_bf16(&noise.floats(64)).iter().flat_map(|bits| bits.to_le_bytes()));
    row.extend((0..7).map(|_| 116 + (noise.next_u64() % 4) as u8));
    row.push(0);
    if seq == 4 && seed == 71 && index == 2 {
        row[448 + 128 + 3] = 0xFF;
    }
    row
}

/// Queries that spread scores over a few units, over hundreds (every fifth row), or leave all to the sink (every seventh).
fn query(layer: Layer, seq: usize, position: usize) -> Vec<f32> {
    let gain = if position.is_multiple_of(5) { 40.0 } else { 2.0 };
    let q: Vec<f32> =
        row_noise(72, seq, position).floats(layer.n_heads * CACHE_DIMS).iter().map(|x| x * gain).collect();
    rounded_to_bf16(&q)
}

fn sinks(layer: Layer) -> Vec<f32> {
    Noise::new(73).floats(layer.n_heads).iter().enumerate().map(|(h, x)| if h == 2 { 60.0 } else { 3.0 * x }).collect()
}

impl Layer {
    fn block_stride(self) -> usize {
        256usize.checked_div(self.ratio).unwrap_or(0) * CACHE_ROW_BYTES + 2 * MARGIN_BYTES
    }

    fn n_visible(self, position: usize) -> usize {
        (position + 1).checked_div(self.ratio).unwrap_or(0)
    }

    /// Groups that a row attends to.
    fn groups(self, seq: usize, position: usize) -> Vec<usize> {
        let n = self.n_visible(position);
        if self.k == 0 || n <= self.k {
            return (0..n).collect();
        }
        let mut noise = row_noise(74, seq, position);
        (0..self.k).map(|i| i * n / self.k + noise.next_u64() as usize % (n / self.k)).collect()
    }

    /// The rows that a row attends to.
    fn list(self, seq: usize, position: usize) -> Vec<Vec<f32>> {
        let window = (position + 1).saturating_sub(WINDOW)..=position;
        let window = window.map(|position| decode_kv(&stored_row(70, seq, position)));
        window
            .chain(self.groups(seq, position).into_iter().map(|group| decode_kv(&stored_row(71, seq, group))))
            .collect()
    }

    /// Rings and blocks as the steps before left them; garbage everywhere else.
    fn caches(self, batch: &Batch) -> [Vec<u8>; 2] {
        let mut rings = vec![0xFFu8; N_SLOTS * SLOT_STRIDE];
        let most = batch.runs.iter().map(|run| run.first_pos + run.n_rows).max().unwrap_or(0);
        let mut blocks = vec![0xFFu8; n_blocks(most) * self.block_stride()];
        for run in &batch.runs {
            for position in run.first_pos.saturating_sub(WINDOW)..run.first_pos {
                let at = slot(run.seq) * SLOT_STRIDE + position % N_RING * CACHE_ROW_BYTES;
                rings[at..at + CACHE_ROW_BYTES].copy_from_slice(&stored_row(70, run.seq, position));
            }
            for group in 0..self.n_visible(run.first_pos + run.n_rows - 1) {
                let n_rows = 256 / self.ratio;
                let at = block(run.seq, group / n_rows) * self.block_stride() + group % n_rows * CACHE_ROW_BYTES;
                let at = at + MARGIN_BYTES;
                blocks[at..at + CACHE_ROW_BYTES].copy_from_slice(&stored_row(71, run.seq, group));
            }
        }
        [rings, blocks]
    }

    /// Every row's choice; garbage for rows that see all their groups.
    fn chosen(self, batch: &Batch) -> Vec<u32> {
        let row = |(seq, position): (usize, usize)| {
            let mut groups: Vec<u32> = self.groups(seq, position).iter().map(|group| *group as u32).collect();
            if self.n_visible(position) <= self.k {
                groups.clear();
            }
            groups.resize(self.k, u32::MAX);
            groups
        };
        let mut chosen: Vec<u32> = batch.rows().into_iter().flat_map(row).collect();
        chosen.resize(batch.n_bucket() * self.k, u32::MAX);
        chosen
    }
}

fn run(device: &Device, layer: Layer, batch: &Batch) -> Result<Vec<u8>, CaseError> {
    let (step, n) = (batch.upload(device, |_, _| 0)?, batch.n_bucket());
    let width = layer.n_heads * CACHE_DIMS;
    let q = to_bf16(&batch.values(width, |seq, position| query(layer, seq, position)));
    let mut own: Vec<u8> = batch.rows().into_iter().flat_map(|(seq, position)| stored_row(70, seq, position)).collect();
    own.resize(n * CACHE_ROW_BYTES, 0xFF);
    let [rings, blocks] = layer.caches(batch);
    let (q, own, sink) = (upload(device, &q)?, upload(device, &own)?, upload(device, &sinks(layer))?);
    let (rings, blocks) = (upload(device, &rings)?, upload(device, &blocks)?);
    let (chosen, freqs) = (upload(device, &layer.chosen(batch))?, upload(device, rope_table().freqs())?);
    let out = output::<u16>(device, n * width)?;
    let args = AttentionArgs {
        step: step.step,
        q: q.address(),
        sink: sink.address(),
        own_rows: own.address(),
        window_ring: rings.address(),
        slot_stride_bytes: SLOT_STRIDE as u64,
        blocks: blocks.address() + MARGIN_BYTES as u64,
        block_stride_bytes: layer.block_stride() as u64,
        chosen: if layer.k == 0 { 0 } else { chosen.address() },
        freqs: freqs.address(),
        out: out.address(),
        n_heads: layer.n_heads as u32,
        head_dim: CACHE_DIMS as u32,
        window: WINDOW as u32,
        n_ring: N_RING as u32,
        ratio: layer.ratio as u32,
        k: layer.k as u32,
        scale: SCALE,
        pad: 0,
    };
    launch(device, &args, n as u32)?;
    home(device, &out)
}

fn check(device: &Device, layer: Layer, batch: &Batch) -> Result<Deviation, CaseError> {
    let got = run_everywhere(batch, |batch| run(device, layer, batch))?;
    let (sink, table, mut worst) = (sinks(layer), rope_table(), Worst::default());
    for ((seq, position), got) in batch.rows().into_iter().zip(got.chunks(2 * layer.n_heads * CACHE_DIMS)) {
        let rows = layer.list(seq, position);
        let want = reference(&query(layer, seq, position), &rows, &sink, SCALE);
        let top = rows.iter().flatten().fold(0.0f32, |m, x| m.max(x.abs()));
        for (want, got) in want.chunks(CACHE_DIMS).zip(got.chunks(2 * CACHE_DIMS)) {
            let want: Vec<f32> = want.iter().map(|x| *x as f32).collect();
            for (got, want) in values_of::<u16>(got).iter().zip(rope::reference(&table, position, &want, true)) {
                // Scores of up to hundreds carry errors of 1e-5, which exp passes on; a p next to the middle of two bf16
                // values may go the other way, 2^-8 of one row's share.
                worst.add_bf16(*got, want, 3e-4 * f64::from(top));
            }
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
