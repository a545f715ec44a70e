//! The latent row of the queries: RMSNorm with a weight, rounded to bf16.

use bytemuck::{Pod, Zeroable};

use crate::device::Device;
use crate::ops::case::batch::{Batch, Runs, Worst, home, output, row_noise, run_everywhere, values_of};
use crate::ops::case::data::{Noise, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::latent::{LatentArgs, launch};
use crate::ops::rms_norm;

/// Where the row comes from and goes, a part of [`LatentArgs`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct NormArgs {
    /// The rows; 0: none are made.
    pub x: u64, // [T, N] f32
    /// The weight.
    pub weight: u64, // [N] f32
    /// The normed rows.
    pub out: u64, // [T, N] bf16
    /// N.
    pub n_cols: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<NormArgs>() == 32);

/// One row in f64, before it is rounded to bf16.
#[must_use]
pub fn reference(row: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    rms_norm::reference(row, Some(weight), eps)
}

/// The cases of the norm: the model's width, just past a block, one column.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let batches: [(usize, Runs); 4] =
        [(1024, &[(0, 126, 3), (2, 9, 1)]), (257, &[(1, 0, 2)]), (1, &[(3, 5, 5)]), (64, &[])];
    let case = |(n_cols, runs): (usize, Runs)| {
        let batch = Batch::new(runs);
        let name = format!("norm, N {n_cols}, {} rows", batch.rows().len());
        OpCase::new("latent", name, move |device| check(device, n_cols, &batch))
    };
    batches.map(case).into()
}

fn check(device: &Device, n_cols: usize, batch: &Batch) -> Result<Deviation, CaseError> {
    let weight = Noise::new(9).floats(n_cols);
    let row = |seq: usize, position: usize| row_noise(10, seq, position).floats(n_cols);
    let run = |batch: &Batch| {
        let (step, n) = (batch.upload(device, |_, _| 0)?, batch.n_bucket());
        let x = upload(device, &batch.values(n_cols, row))?;
        let (weight, out) = (upload(device, &weight)?, output::<u16>(device, n * n_cols)?);
        let norm =
            NormArgs { x: x.address(), weight: weight.address(), out: out.address(), n_cols: n_cols as u32, pad: 0 };
        let args = LatentArgs { step: step.step, norm, eps: 1e-6, ..LatentArgs::default() };
        launch(device, &args, n as u32)?;
        home(device, &out)
    };
    let got = run_everywhere(batch, run)?;
    let mut worst = Worst::default();
    for ((seq, position), got) in batch.rows().into_iter().zip(got.chunks(2 * n_cols)) {
        for (got, want) in values_of::<u16>(got).iter().zip(reference(&row(seq, position), &weight, 1e-6)) {
            // A handful of roundings on values of up to 2.
            worst.add_bf16(*got, want, 2e-6);
        }
    }
    Ok(worst.deviation())
}
