//! Queries of the attention: each head's norm without a weight, rotation of its last 64 dims, rounded to bf16.

use crate::device::Device;
use crate::ops::case::batch::{Batch, Runs, Worst, home, output, rope_table, row_noise, run_everywhere, values_of};
use crate::ops::case::data::upload;
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::query::{QueryArgs, launch};
use crate::ops::rms_norm;
use crate::ops::rope::{self, RopeTable};
use crate::ops::round_fp8::CACHE_DIMS;

/// Dims of a head that the kernel is written for.
const HEAD_DIM: u32 = CACHE_DIMS as u32;

/// One head in f64, before it is rounded to bf16.
#[must_use]
pub fn reference(head: &[f32], position: usize, table: &RopeTable, eps: f32) -> Vec<f64> {
    let normed: Vec<f32> = rms_norm::reference(head, None, eps).iter().map(|x| *x as f32).collect();
    rope::reference(table, position, &normed, false)
}

/// The cases of heads: one head, the model's number, one past a block; near and far positions; a row of zeros.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let batches: [(usize, Runs); 4] =
        [(64, &[(0, 126, 3), (2, 1_048_575, 1)]), (9, &[(1, 0, 2)]), (1, &[(3, 65_536, 5)]), (4, &[])];
    let case = |(n_heads, runs): (usize, Runs)| {
        let batch = Batch::new(runs);
        let name = format!("H {n_heads}, {} rows", batch.rows().len());
        OpCase::new("query", name, move |device| check(device, n_heads, &batch))
    };
    batches.map(case).into()
}

fn heads(n_heads: usize, seq: usize, position: usize) -> Vec<f32> {
    let gain = if position == 1 { 0.0 } else { 30.0 };
    row_noise(8, seq, position).floats(n_heads * HEAD_DIM as usize).iter().map(|x| x * gain).collect()
}

fn check(device: &Device, n_heads: usize, batch: &Batch) -> Result<Deviation, CaseError> {
    let (table, width) = (rope_table(), n_heads * HEAD_DIM as usize);
    let run = |batch: &Batch| {
        let (step, n) = (batch.upload(device, |_, _| 0)?, batch.n_bucket());
        let q = upload(device, &batch.values(width, |seq, position| heads(n_heads, seq, position)))?;
        let (freqs, out) = (upload(device, table.freqs())?, output::<u16>(device, n * width)?);
        let args = QueryArgs {
            step: step.step,
            q: q.address(),
            out: out.address(),
            freqs: freqs.address(),
            n_heads: n_heads as u32,
            head_dim: HEAD_DIM,
            eps: 1e-6,
            ..QueryArgs::default()
        };
        launch(device, &args, n as u32)?;
        home(device, &out)
    };
    let got = run_everywhere(batch, run)?;
    let mut worst = Worst::default();
    for ((seq, position), got) in batch.rows().into_iter().zip(got.chunks(2 * width)) {
        let want = heads(n_heads, seq, position);
        let want = want.chunks(HEAD_DIM as usize).flat_map(|head| reference(head, position, &table, 1e-6));
        for (got, want) in values_of::<u16>(got).iter().zip(want) {
            // A handful of roundings on values of up to 2.
            worst.add_bf16(*got, want, 2e-6);
        }
    }
    Ok(worst.deviation())
}
