//! The row of the window as it is stored: norm with a weight, rotation, FP8 in groups of 64, bf16 for the rotary dims.

use bytemuck::{Pod, Zeroable};

use crate::device::Device;
use crate::ops::case::batch::{Batch, Runs, Worst, home, output, rope_table, row_noise, run_everywhere};
use crate::ops::case::data::{Noise, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::latent::{LatentArgs, launch};
use crate::ops::rms_norm;
use crate::ops::rope::{self, RopeTable};
use crate::ops::round_fp8::{CACHE_DIMS, CACHE_ROW_BYTES};

/// Where the row comes from and goes, a part of [`LatentArgs`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct WindowArgs {
    /// The projected rows; 0: none are made.
    pub x: u64, // [T, DH] f32
    /// Weight of the norm.
    pub weight: u64, // [DH] f32
    /// The stored rows.
    pub rows: u64, // [T, 584] u8
}

const _: () = assert!(size_of::<WindowArgs>() == 24);

/// One row in f64, before it is rounded.
#[must_use]
pub fn reference(row: &[f32], weight: &[f32], position: usize, table: &RopeTable, eps: f32) -> Vec<f64> {
    let normed: Vec<f32> = rms_norm::reference(row, Some(weight), eps).iter().map(|x| *x as f32).collect();
    rope::reference(table, position, &normed, false)
}

/// The cases of the window: rows past a block; near and far positions; rows of zeros, of NaN, and with a group of tiny values.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let batches: [(&str, Runs); 5] = [
        ("five rows", &[(0, 126, 3), (2, 1_048_575, 1), (1, 4, 1)]),
        ("past a block", &[(0, 30, 17)]),
        ("zeros and NaN", &[(1, 0, 4)]),
        ("one row", &[(3, 65_536, 1)]),
        ("none", &[]),
    ];
    let case = |(name, runs): (&str, Runs)| {
        let batch = Batch::new(runs);
        OpCase::new("latent", format!("window, {name}"), move |device| check(device, &batch))
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
        let window = WindowArgs { x: x.address(), weight: weight.address(), rows: rows.address() };
        let freqs = freqs.address();
        let args = LatentArgs { step: step.step, window, freqs, eps: 1e-6, ..LatentArgs::default() };
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
