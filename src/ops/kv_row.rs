//! Rows of the window as they are stored: norm with a weight, rotation, FP8 in groups of 64, bf16 for the rotary dims.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::batch::{Batch, Runs, Worst, home, output, rope_table, row_noise, run_everywhere};
use crate::ops::case::data::{Noise, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::rms_norm;
use crate::ops::rope::{self, RopeTable};
use crate::ops::round_fp8::{CACHE_DIMS, CACHE_ROW_BYTES};
use crate::ops::step::Step;

/// Rows of a block.
const ROWS_PER_BLOCK: u32 = 4;
/// Threads of a block: a wave of 32 a row (on wider waves a wave takes two, one after the other).
const N_THREADS: u32 = 128;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct KvRowArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The projected rows.
    pub x: u64, // [T, DH] f32
    /// Weight of the norm.
    pub weight: u64, // [DH] f32
    /// Radians a position.
    pub freqs: u64, // [32] f32
    /// The stored rows.
    pub rows: u64, // [T, 584] u8
    /// DH, 512.
    pub head_dim: u32,
    /// Epsilon of the norm.
    pub eps: f32,
}

const _: () = assert!(size_of::<KvRowArgs>() == 72);

/// Makes `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &KvRowArgs, n_rows: u32) -> Result<(), DeviceError> {
    assert!(args.head_dim as usize == CACHE_DIMS, "kv_row: DH: {}, want {CACHE_DIMS}", args.head_dim);
    device.launch(device.kernel("kv_row")?, [n_rows.div_ceil(ROWS_PER_BLOCK), 1, 1], N_THREADS, args)
}

/// One row in f64, before it is rounded.
#[must_use]
pub fn reference(row: &[f32], weight: &[f32], position: usize, table: &RopeTable, eps: f32) -> Vec<f64> {
    let normed: Vec<f32> = rms_norm::reference(row, Some(weight), eps).iter().map(|x| *x as f32).collect();
    rope::reference(table, position, &normed, false)
}

/// The kernel's cases: rows past a block; near and far positions; rows of zeros, of NaN, and with a group of tiny values.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let batches: [(&str, Runs); 4] = [
        ("five rows", &[(0, 126, 3), (2, 1_048_575, 1), (1, 4, 1)]),
        ("zeros and NaN", &[(1, 0, 4)]),
        ("one row", &[(3, 65_536, 1)]),
        ("none", &[]),
    ];
    let case = |(name, runs): (&str, Runs)| {
        let batch = Batch::new(runs);
        OpCase::new("kv_row", name, move |device| check(device, &batch))
    };
    batches.map(case).into()
}

fn numbers(seq: usize, position: usize) -> Vec<f32> {
    let mut row = row_noise(11, seq, position).floats(CACHE_DIMS);
    match position {
        1 => row.fill(0.0),
        2 => row[70] = f32::NAN,
        3 => row[64..128].iter_mut().for_each(|x| *x *= 1e-9),
        _ => {}
    }
    row
}

fn check(device: &Device, batch: &Batch) -> Result<Deviation, CaseError> {
    let (table, weight) = (rope_table(), Noise::new(12).floats(CACHE_DIMS));
    let run = |batch: &Batch| {
        let (step, n) = (batch.upload(device, |_, _| 0)?, batch.n_bucket());
        let x = upload(device, &batch.values(CACHE_DIMS, numbers))?;
        let (weight, freqs) = (upload(device, &weight)?, upload(device, table.freqs())?);
        let rows = output::<u8>(device, n * CACHE_ROW_BYTES)?;
        let args = KvRowArgs {
            step: step.step,
            x: x.address(),
            weight: weight.address(),
            freqs: freqs.address(),
            rows: rows.address(),
            head_dim: CACHE_DIMS as u32,
            eps: 1e-6,
        };
        launch(device, &args, n as u32)?;
        home(device, &rows)
    };
    let got = run_everywhere(batch, run)?;
    let mut worst = Worst::default();
    for ((seq, position), got) in batch.rows().into_iter().zip(got.chunks(CACHE_ROW_BYTES)) {
        // A handful of roundings before the row's own.
        worst.add_kv_row(got, &reference(&numbers(seq, position), &weight, position, &table, 1e-6), 2e-6);
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
