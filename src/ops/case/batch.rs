//! Steps of ragged runs for device cases, and how the rows of their results are compared.
//!
//! Cases think of sequences whose rows are known at every position. A [`Batch`] takes runs of some of them; the same position
//! must come out with the same bits in every batch that holds it.

use bytemuck::Pod;

use crate::device::{Buffer, Device};
use crate::ops::case::CaseError;
use crate::ops::case::data::{Noise, download, nan_buffer, upload};
use crate::ops::rope::{RopeParams, RopeTable, YarnParams};
use crate::ops::round_fp4::{FP4_GROUP, KEY_CODES_BYTES, KEY_DIMS};
use crate::ops::round_fp8::{CACHE_DIMS, CACHE_FP8_DIMS, CACHE_GROUP, CACHE_ROW_BYTES, CACHE_SCALES_BYTES};
use crate::ops::step::{NO_RUN, Step, StepCounts, StepRow, StepRun};
use crate::tensor::format::{bf16_to_f32, e2m1_to_f32, e8m0_to_f32, f8e4m3fn_to_f32, f32_to_bf16};

/// Slots, more than the sequences of any case.
pub const N_SLOTS: usize = 5;
/// Blocks of each sequence at most.
const MAX_BLOCKS: usize = 1 << 12;
/// What unread memory and outputs hold before a kernel runs: every float of it is NaN.
const GARBAGE: u8 = 0xFF;

/// Rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// The sequence.
    pub seq: usize,
    /// Position of the first row.
    pub first_pos: usize,
    /// Rows.
    pub n_rows: usize,
}

/// Runs of (sequence, first position, rows), as cases list them.
pub type Runs = &'static [(usize, usize, usize)];

/// A step, as cases say it.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The runs.
    pub runs: Vec<Run>,
    /// Rows that fill the bucket.
    pub n_padding: usize,
}

/// A batch's metadata on a device.
pub struct StepBuffers {
    /// Where they are.
    pub step: Step,
    /// Kept for their memory.
    _buffers: [Buffer; 4],
}

/// The largest of several errors, each as a share of its own limit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Worst(pub f64);

impl Batch {
    /// Runs of (sequence, first position, rows), and three rows of padding.
    #[must_use]
    pub fn new(runs: &[(usize, usize, usize)]) -> Self {
        let runs = runs.iter().map(|&(seq, first_pos, n_rows)| Run { seq, first_pos, n_rows }).collect();
        Self { runs, n_padding: 3 }
    }

    /// Every row's sequence and position.
    #[must_use]
    pub fn rows(&self) -> Vec<(usize, usize)> {
        self.runs.iter().flat_map(|run| (0..run.n_rows).map(|i| (run.seq, run.first_pos + i))).collect()
    }

    /// Rows of the bucket (T).
    #[must_use]
    pub fn n_bucket(&self) -> usize {
        self.rows().len() + self.n_padding
    }

    /// The values of all rows of the bucket, `width` each: `row(seq, position)`, and NaN for the padding.
    pub fn values(&self, width: usize, mut row: impl FnMut(usize, usize) -> Vec<f32>) -> Vec<f32> {
        let mut all: Vec<f32> = self.rows().into_iter().flat_map(|(seq, position)| row(seq, position)).collect();
        all.resize(self.n_bucket() * width, f32::NAN);
        all
    }

    /// Rows of the step as batches of their own, with their numbers: all of them while they are few, else some, the first and the
    /// last of every run among them.
    #[must_use]
    pub fn alone(&self) -> Vec<(usize, Self)> {
        let rows = self.rows();
        let spread = rows.len().div_ceil(8).max(1);
        let is_edge =
            |t: usize| t == 0 || t + 1 == rows.len() || rows[t - 1].0 != rows[t].0 || rows[t + 1].0 != rows[t].0;
        let one = |t: usize| {
            let (seq, first_pos) = rows[t];
            (t, Self { runs: vec![Run { seq, first_pos, n_rows: 1 }], n_padding: 0 })
        };
        (0..rows.len()).filter(|t| t % spread == 0 || is_edge(*t)).map(one).collect()
    }

    /// Puts the metadata on a device; `token` gives each row's id.
    ///
    /// # Errors
    /// When the device fails.
    pub fn upload(&self, device: &Device, token: impl Fn(usize, usize) -> u32) -> Result<StepBuffers, CaseError> {
        let (mut rows, mut runs) = (Vec::new(), Vec::new());
        // Nothing may take the table's start for granted.
        let mut block_ids = vec![u32::MAX; 3];
        for (run_idx, run) in self.runs.iter().enumerate() {
            let n_blocks = (run.first_pos + run.n_rows).div_ceil(256);
            runs.push(StepRun {
                slot: slot(run.seq) as u32,
                first_pos: run.first_pos as u32,
                first_row: rows.len() as u32,
                n_rows: run.n_rows as u32,
                first_block: block_ids.len() as u32,
                n_blocks: n_blocks as u32,
                pad: [0; 2],
            });
            block_ids.extend((0..n_blocks).map(|i| block(run.seq, i) as u32));
            rows.extend((run.first_pos..run.first_pos + run.n_rows).map(|position| StepRow {
                token_id: token(run.seq, position),
                position: position as u32,
                run: run_idx as u32,
                slot: slot(run.seq) as u32,
            }));
        }
        let counts = StepCounts { n_rows: rows.len() as u32, n_runs: runs.len() as u32, n_logit_rows: 0, pad: 0 };
        rows.resize(self.n_bucket(), StepRow { run: NO_RUN, token_id: u32::MAX, position: u32::MAX, slot: u32::MAX });
        let buffers =
            [upload(device, &rows)?, upload(device, &runs)?, upload(device, &block_ids)?, upload(device, &[counts])?];
        let [rows, runs, block_ids, counts] = [0, 1, 2, 3].map(|i: usize| buffers[i].address());
        Ok(StepBuffers { step: Step { rows, runs, block_ids, counts }, _buffers: buffers })
    }
}

impl Worst {
    /// Takes one error; what is not finite is infinitely wrong, unless it was wanted.
    pub fn add(&mut self, got: f32, want: f64, limit: f64) {
        let error = (f64::from(got) - want).abs();
        if got.is_nan() && want.is_nan() {
            return;
        }
        self.0 = if error.is_nan() { f64::INFINITY } else { self.0.max(error / limit) };
    }

    /// Rounded to BF16 by the device: half a unit in the last of 8 bits, and `noise` for what was rounded.
    pub fn add_bf16(&mut self, got: u16, want: f64, noise: f64) {
        self.add(bf16_to_f32(got), want, want.abs() / 256.0 + noise);
    }

    /// As a deviation from 0 to 1.
    #[must_use]
    pub const fn deviation(self) -> crate::ops::case::Deviation {
        crate::ops::case::Deviation { worst: self.0, limit: 1.0 }
    }
}

/// The slot of a sequence: not its number.
#[must_use]
pub const fn slot(seq: usize) -> usize {
    N_SLOTS - 1 - seq
}

/// Block i of a sequence's table: sequences' blocks lie between each other's, later ones before earlier ones.
#[must_use]
pub const fn block(seq: usize, i: usize) -> usize {
    debug_assert!(i < MAX_BLOCKS);
    (i ^ 1) * N_SLOTS + slot(seq)
}

/// Blocks of the pool when every sequence has `n_tokens` tokens.
#[must_use]
pub const fn n_blocks(n_tokens: usize) -> usize {
    (n_tokens.div_ceil(256) + 1) * N_SLOTS
}

/// The numbers of one row of one sequence, the same in every batch.
#[must_use]
pub fn row_noise(seed: u64, seq: usize, position: usize) -> Noise {
    let mut noise = Noise::new(seed ^ ((seq as u64) << 40) ^ position as u64);
    Noise::new(noise.next_u64())
}

/// A buffer of garbage for `n` values.
///
/// # Errors
/// When the device fails.
pub fn output<T>(device: &Device, n: usize) -> Result<Buffer, CaseError> {
    Ok(nan_buffer(device, n * size_of::<T>())?)
}

/// All that a buffer holds.
///
/// # Errors
/// When the device fails.
pub fn home<T: Pod>(device: &Device, buffer: &Buffer) -> Result<Vec<T>, CaseError> {
    Ok(download(device, buffer, buffer.n_bytes() / size_of::<T>())?)
}

/// Runs a batch twice and rows of it alone. `run` gives the bytes of the output's rows, those of the padding last: the
/// same every time, garbage in the padding. Returns the batch's bytes without the padding's.
///
/// # Errors
/// When the device fails or a rule is broken.
pub fn run_everywhere(batch: &Batch, run: impl Fn(&Batch) -> Result<Vec<u8>, CaseError>) -> Result<Vec<u8>, CaseError> {
    let mut all = run(batch)?;
    if all != run(batch)? {
        return Err(CaseError::Rule("two runs differ".into()));
    }
    let row_bytes = all.len() / batch.n_bucket().max(1);
    let padding = all.split_off(row_bytes * batch.rows().len());
    if padding.iter().any(|byte| *byte != GARBAGE) {
        return Err(CaseError::Rule("a padding row was written".into()));
    }
    for (t, alone) in batch.alone() {
        if run(&alone)? != all[t * row_bytes..(t + 1) * row_bytes] {
            return Err(CaseError::Rule(format!("row {t} alone differs from row {t} among others")));
        }
    }
    Ok(all)
}

/// Bytes as values, without a rule of alignment.
#[must_use]
pub fn values_of<T: Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// BF16 of values.
#[must_use]
pub fn to_bf16(values: &[f32]) -> Vec<u16> {
    values.iter().map(|x| f32_to_bf16(*x)).collect()
}

/// The values that BF16 leaves.
#[must_use]
pub fn rounded_to_bf16(values: &[f32]) -> Vec<f32> {
    values.iter().map(|x| bf16_to_f32(f32_to_bf16(*x))).collect()
}

/// Whether bytes are as no kernel left them.
#[must_use]
pub fn is_garbage(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == GARBAGE)
}

/// The parts' rows beside each other: row t of the result is row t of every part.
#[must_use]
pub fn interleave(parts: &[Vec<u8>], n_rows: usize) -> Vec<u8> {
    let row = |t: usize| {
        parts.iter().flat_map(move |part| part[t * part.len() / n_rows..(t + 1) * part.len() / n_rows].iter())
    };
    (0..n_rows).flat_map(row).copied().collect()
}

/// Rotary frequencies as in layers with compressed rows.
#[must_use]
pub fn rope_table() -> RopeTable {
    let yarn = YarnParams { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_max_position_embeddings: 65536 };
    RopeTable::new(&RopeParams { n_dims: 64, theta: 160_000.0, yarn: Some(yarn) })
}

/// The values of a stored row.
#[must_use]
pub fn decode_kv(bytes: &[u8]) -> Vec<f32> {
    let value = |d: usize| match d {
        0..CACHE_FP8_DIMS => {
            let scale = bytes[CACHE_ROW_BYTES - CACHE_SCALES_BYTES + d / CACHE_GROUP];
            f8e4m3fn_to_f32(bytes[d]) * e8m0_to_f32(scale)
        }
        _ => {
            let at = CACHE_FP8_DIMS + 2 * (d - CACHE_FP8_DIMS);
            bf16_to_f32(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
        }
    };
    (0..CACHE_DIMS).map(value).collect()
}

/// The values of a stored key.
#[must_use]
pub fn decode_key(bytes: &[u8]) -> Vec<f32> {
    let value =
        |d: usize| e2m1_to_f32(bytes[d / 2] >> (d % 2 * 4) & 15) * e8m0_to_f32(bytes[KEY_CODES_BYTES + d / FP4_GROUP]);
    (0..KEY_DIMS).map(value).collect()
}

impl Worst {
    /// A stored row and what it should hold: rotary columns rounded to bf16, the others to FP8 under the scale of their group.
    pub fn add_kv_row(&mut self, bytes: &[u8], want: &[f64], noise: f64) {
        let got = decode_kv(bytes);
        for (got, want) in got[..CACHE_FP8_DIMS].chunks(CACHE_GROUP).zip(want.chunks(CACHE_GROUP)) {
            // A NaN makes its whole group NaN.
            let amax = want.iter().fold(1e-4f64, |m, x| if x.is_nan() { f64::NAN } else { m.max(x.abs()) });
            let scale = 2f64.powi((amax / 448.0).log2().ceil() as i32);
            for (got, want) in got.iter().zip(want) {
                let want = if amax.is_nan() { f64::NAN } else { *want };
                // Half the distance of two codes: 3 bits below the leading one, or 2^-9. At the edge of a scale the group may
                // have the next one.
                let step = (want.abs() / 8.0).max(scale / 256.0);
                self.add(*got, want, step / 2.0 + noise);
            }
        }
        for (got, want) in got[CACHE_FP8_DIMS..].iter().zip(&want[CACHE_FP8_DIMS..]) {
            self.add(*got, *want, want.abs() / 256.0 + noise);
        }
        self.add(f32::from(bytes[CACHE_ROW_BYTES - 1]), 0.0, 0.5);
    }

    /// Values rounded to E2M1 in groups of 32, and what they were before.
    pub fn add_e2m1(&mut self, got: &[f32], want: &[f64], noise: f64) {
        for (got, want) in got.chunks(FP4_GROUP).zip(want.chunks(FP4_GROUP)) {
            let amax = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let scale = if amax == 0.0 { 0.0 } else { 2f64.powi((amax / 6.0).log2().ceil() as i32) };
            for (got, want) in got.iter().zip(want) {
                // Half the distance of two codes.
                let half = match want.abs() / scale {
                    m if m > 4.0 => 1.0,
                    m if m > 2.0 => 0.5,
                    _ => 0.25,
                };
                self.add(*got, *want, half * scale + noise);
            }
        }
    }
}
