//! Attention on a device: arguments and launches of the kernels `attention`, or `attention_chunks` and `attention_merge`.

use std::f64::consts::LN_2;

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::attention::CHUNK_ROWS;
use crate::ops::case::batch::{
    Batch, N_SLOTS, Runs, Worst, block, decode_kv, home, n_blocks as n_cache_blocks, output, rope_table,
    rounded_to_bf16, row_noise, run_everywhere, slot, to_bf16, values_of,
};
use crate::ops::case::data::{Noise, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::ring_store::RingStoreArgs;
use crate::ops::rope;
use crate::ops::round_fp8::{CACHE_DIMS, CACHE_ROW_BYTES};
use crate::ops::step::Step;
use crate::tensor::format::{bf16_to_f32, f32_to_bf16};

/// Heads of a block: the rows of the matrix instruction.
const HEADS_PER_BLOCK: u32 = 16;
/// Threads of a block, which computes some heads of one row.
const N_THREADS: u32 = 256;
/// Heads of a block of `attention_merge`.
const MERGE_HEADS: u32 = 2;

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
    /// Scratch of [`launch_split`], at 16 bytes: each chunk's sums.
    pub parts: u64, // [T, n_chunks, H, DH] f32
    /// Scratch of [`launch_split`]: each chunk's largest exponent and total.
    pub part_totals: u64, // [T, n_chunks, H, 2] f32
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
    /// Chunks of the longest list of any row, which [`launch_split`] has scratch for; [`launch`] needs none.
    pub n_chunks: u32,
}

/// Arguments of the kernel `attention_merge`, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct AttentionMergeArgs {
    attention: AttentionArgs,
    rings: RingStoreArgs,
}

const _: () = assert!(size_of::<AttentionArgs>() == 160 && size_of::<AttentionMergeArgs>() == 304);

/// Attends from `n_rows` rows (those of the bucket, of which the step's real ones are written), each of whose lists one block walks
/// for 16 heads.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &AttentionArgs, n_rows: u32) -> Result<(), DeviceError> {
    args.check();
    device.launch(device.kernel("attention")?, [args.n_head_blocks(), n_rows, 1], N_THREADS, args)
}

/// As [`launch`], with a block for every chunk of a list, which few rows need to fill a device; the bits are the same. Then the rings
/// take the step's rows, as by [`ring_store::launch`].
///
/// # Errors
/// As [`launch`].
pub fn launch_split(
    device: &Device,
    args: &AttentionArgs,
    rings: &RingStoreArgs,
    n_rows: u32,
) -> Result<(), DeviceError> {
    args.check();
    let grid = [args.n_head_blocks() * args.n_chunks, n_rows, 1];
    device.launch(device.kernel("attention_chunks")?, grid, N_THREADS, args)?;
    let grid = [args.n_heads.div_ceil(MERGE_HEADS) + 1, n_rows, 1];
    let args = AttentionMergeArgs { attention: *args, rings: *rings };
    device.launch(device.kernel("attention_merge")?, grid, N_THREADS, &args)
}

/// Blocks that [`launch`] makes: a device is full with about two for each of its multiprocessors.
#[must_use]
pub const fn n_blocks(n_heads: u32, n_rows: u32) -> u32 {
    n_heads.div_ceil(HEADS_PER_BLOCK) * n_rows
}

impl AttentionArgs {
    fn check(&self) {
        assert!(self.head_dim as usize == CACHE_DIMS, "attention: DH: {}, want {CACHE_DIMS}", self.head_dim);
    }

    const fn n_head_blocks(&self) -> u32 {
        n_blocks(self.n_heads, 1)
    }
}

/// Some heads of one row, as the kernels round, with f64 sums: of e^score = m 2^n, m is rounded to bf16.
#[must_use]
pub fn reference(q: &[f32], rows: &[Vec<f32>], sink: &[f32], scale: f32) -> Vec<f64> {
    let d = q.len() / sink.len();
    let mut out = Vec::with_capacity(q.len());
    for (q, sink) in q.chunks(d).zip(sink) {
        let dot = |row: &Vec<f32>| q.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let scores: Vec<f64> = rows.iter().map(|row| dot(row) * f64::from(scale)).collect();
        let top = scores.iter().fold(f64::from(*sink), |m, s| if *s > m { *s } else { m });
        let top_exponent = (top / LN_2).round();
        let (mut total, mut sums) = ((f64::from(*sink) - top_exponent * LN_2).exp(), vec![0.0f64; d]);
        for (score, row) in scores.iter().zip(rows) {
            let exponent = (score / LN_2).round();
            let mantissa = f64::from(bf16_to_f32(f32_to_bf16((score - exponent * LN_2).exp() as f32)));
            let p = mantissa * (exponent - top_exponent).exp2();
            total += p;
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += p * f64::from(*x));
        }
        out.extend(sums.iter().map(|sum| sum / total));
    }
    out
}

/// The share of a head's rows whose m lies so near the middle of two bf16 values that a score summed in f32 may round it the other way.
fn ambiguous_shares(q: &[f32], rows: &[Vec<f32>], sink: &[f32], scale: f32) -> Vec<f64> {
    let d = q.len() / sink.len();
    let of_head = |(q, sink): (&[f32], &f32)| {
        let products =
            |row: &[f32]| q.iter().zip(row).map(|(a, b)| f64::from(*a) * f64::from(*b)).collect::<Vec<f64>>();
        let (mut total, mut ambiguous) = (0.0, 0.0);
        let scores: Vec<[f64; 2]> = rows
            .iter()
            .map(|row| products(row).iter().fold([0.0, 0.0], |[sum, size], p| [sum + p, size + p.abs()]))
            .map(|both| both.map(|x| x * f64::from(scale)))
            .collect();
        let top = scores.iter().fold(f64::from(*sink), |m, s| m.max(s[0]));
        for [score, size] in scores {
            let weight = (score - top).exp();
            let mantissa = (score - (score / LN_2).round() * LN_2).exp();
            // A step of the tile truncates to 2^-23 of the products' sizes, sixteen times at most.
            let error = size * 2e-6;
            let rounded = [1.0 - error, 1.0 + error].map(|factor| f32_to_bf16((mantissa * factor) as f32));
            total += weight;
            ambiguous += if rounded[0] == rounded[1] { 0.0 } else { weight };
        }
        ambiguous / (total + (f64::from(*sink) - top).exp())
    };
    q.chunks(d).zip(sink).map(of_head).collect()
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

    /// How many rows a row attends to.
    fn list_len(self, position: usize) -> usize {
        let n = self.n_visible(position);
        WINDOW.min(position + 1) + if self.k == 0 { n } else { n.min(self.k) }
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
        let mut blocks = vec![0xFFu8; n_cache_blocks(most) * self.block_stride()];
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

/// The output of every row, the same from both forms.
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
    // A chunk more than any list has.
    let n_chunks = batch.rows().iter().map(|row| layer.list_len(row.1).div_ceil(CHUNK_ROWS)).max().unwrap_or(0) + 1;
    let parts = output::<f32>(device, n * n_chunks * width)?;
    let part_totals = output::<f32>(device, n * n_chunks * layer.n_heads * 2)?;
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
        parts: parts.address(),
        part_totals: part_totals.address(),
        n_heads: layer.n_heads as u32,
        head_dim: CACHE_DIMS as u32,
        window: WINDOW as u32,
        n_ring: N_RING as u32,
        ratio: layer.ratio as u32,
        k: layer.k as u32,
        scale: SCALE,
        n_chunks: n_chunks as u32,
    };
    launch(device, &args, n as u32)?;
    let whole = home(device, &out)?;
    device.fill(&out, 0, out.n_bytes(), 0xFF)?;
    launch_split(device, &args, &RingStoreArgs { step: step.step, ..RingStoreArgs::default() }, n as u32)?;
    if home::<u8>(device, &out)? != whole {
        return Err(CaseError::Rule("the chunks of a list differ from the whole".into()));
    }
    Ok(whole)
}

fn check(device: &Device, layer: Layer, batch: &Batch) -> Result<Deviation, CaseError> {
    let got = run_everywhere(batch, |batch| run(device, layer, batch))?;
    let (sink, table, mut worst) = (sinks(layer), rope_table(), Worst::default());
    for ((seq, position), got) in batch.rows().into_iter().zip(got.chunks(2 * layer.n_heads * CACHE_DIMS)) {
        let rows = layer.list(seq, position);
        let want = reference(&query(layer, seq, position), &rows, &sink, SCALE);
        let ambiguous = ambiguous_shares(&query(layer, seq, position), &rows, &sink, SCALE);
        let top = f64::from(rows.iter().flatten().fold(0.0f32, |m, x| m.max(x.abs())));
        let heads = want.chunks(CACHE_DIMS).zip(got.chunks(2 * CACHE_DIMS)).zip(ambiguous);
        for ((want, got), ambiguous) in heads {
            let want: Vec<f32> = want.iter().map(|x| *x as f32).collect();
            // Scores of up to hundreds carry errors of 1e-5, which the rows' shares take; a weight that rounds the other way moves its
            // row's share by up to 2^-7, and the result by as much of a distance of two values.
            let noise = 3e-4 * top + ambiguous * 2.0 * top / 128.0;
            for (got, want) in values_of::<u16>(got).iter().zip(rope::reference(&table, position, &want, true)) {
                worst.add_bf16(*got, want, noise);
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
