//! Queries of the indexer: rotation of the last 64 dims, Hadamard, rounding to E2M1, which bf16 holds exactly.

use crate::device::Device;
use crate::ops::case::batch::{Batch, Runs, Worst, home, output, rope_table, row_noise, run_everywhere, values_of};
use crate::ops::case::data::upload;
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::hadamard;
use crate::ops::query::{QueryArgs, launch};
use crate::ops::rope::{self, RopeTable};
use crate::ops::round_fp4::KEY_DIMS;
use crate::tensor::format::bf16_to_f32;

/// One head in f64, before it is rounded to E2M1.
#[must_use]
pub fn reference(head: &[f32], position: usize, table: &RopeTable) -> Vec<f64> {
    let rotated: Vec<f32> = rope::reference(table, position, head, false).iter().map(|x| *x as f32).collect();
    hadamard::reference(&rotated)
}

/// The cases of the indexer's heads: one head, the model's number, one past a block; near and far positions; a row of zeros.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let batches: [(usize, Runs); 4] =
        [(64, &[(0, 126, 3), (2, 1_048_575, 1)]), (9, &[(1, 0, 2)]), (1, &[(3, 65_536, 5)]), (4, &[])];
    let case = |(n_heads, runs): (usize, Runs)| {
        let batch = Batch::new(runs);
        let name = format!("IH {n_heads}, {} rows", batch.rows().len());
        OpCase::new("query", name, move |device| check(device, n_heads, &batch))
    };
    batches.map(case).into()
}

fn heads(n_heads: usize, seq: usize, position: usize) -> Vec<f32> {
    let gain = if position == 1 { 0.0 } else { 3.0 };
    row_noise(13, seq, position).floats(n_heads * KEY_DIMS).iter().map(|x| x * gain).collect()
}

fn check(device: &Device, n_heads: usize, batch: &Batch) -> Result<Deviation, CaseError> {
    let (table, width) = (rope_table(), n_heads * KEY_DIMS);
    let run = |batch: &Batch| {
        let (step, n) = (batch.upload(device, |_, _| 0)?, batch.n_bucket());
        let x = upload(device, &batch.values(width, |seq, position| heads(n_heads, seq, position)))?;
        let (freqs, out) = (upload(device, table.freqs())?, output::<u16>(device, n * width)?);
        let args = QueryArgs {
            step: step.step,
            iq: x.address(),
            index_out: out.address(),
            freqs: freqs.address(),
            n_index_heads: n_heads as u32,
            index_head_dim: KEY_DIMS as u32,
            ..QueryArgs::default()
        };
        launch(device, &args, n as u32)?;
        home(device, &out)
    };
    let got = run_everywhere(batch, run)?;
    let mut worst = Worst::default();
    for ((seq, position), got) in batch.rows().into_iter().zip(got.chunks(2 * width)) {
        let x = heads(n_heads, seq, position);
        for (head, got) in x.chunks(KEY_DIMS).zip(got.chunks(2 * KEY_DIMS)) {
            let got: Vec<f32> = values_of::<u16>(got).iter().map(|bits| bf16_to_f32(*bits)).collect();
            // Eight roundings on values of a few units before the row's own.
            worst.add_e2m1(&got, &reference(head, position, &table), 4e-6);
        }
    }
    Ok(worst.deviation())
}
