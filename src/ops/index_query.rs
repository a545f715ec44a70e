//! Queries of the indexer: rotation of the last 64 dims, Hadamard, rounding to E2M1, which bf16 holds exactly.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::batch::{Batch, Runs, Worst, home, output, rope_table, row_noise, run_everywhere, values_of};
use crate::ops::case::data::upload;
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::hadamard;
use crate::ops::rope::{self, RopeTable};
use crate::ops::round_fp4::KEY_DIMS;
use crate::ops::step::Step;
use crate::tensor::format::bf16_to_f32;

/// Heads of a block, one a wave of 32 (on wider waves a wave takes two, one after the other).
const HEADS_PER_BLOCK: u32 = 8;
/// Threads of a block.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct IndexQueryArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The projected heads.
    pub x: u64, // [T, IH, ID] f32
    /// The finished queries.
    pub out: u64, // [T, IH, ID] bf16
    /// Radians a position.
    pub freqs: u64, // [32] f32
    /// IH.
    pub n_heads: u32,
    /// ID, 128.
    pub head_dim: u32,
}

const _: () = assert!(size_of::<IndexQueryArgs>() == 64);

/// Finishes the heads of `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &IndexQueryArgs, n_rows: u32) -> Result<(), DeviceError> {
    assert!(args.head_dim as usize == KEY_DIMS, "index_query: ID: {}, want {KEY_DIMS}", args.head_dim);
    let grid = [args.n_heads.div_ceil(HEADS_PER_BLOCK), n_rows, 1];
    device.launch(device.kernel("index_query")?, grid, N_THREADS, args)
}

/// One head in f64, before it is rounded to E2M1.
#[must_use]
pub fn reference(head: &[f32], position: usize, table: &RopeTable) -> Vec<f64> {
    let rotated: Vec<f32> = rope::reference(table, position, head, false).iter().map(|x| *x as f32).collect();
    hadamard::reference(&rotated)
}

/// The kernel's cases: one head, the model's number, one past a block; near and far positions; a row of zeros.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let batches: [(usize, Runs); 4] =
        [(64, &[(0, 126, 3), (2, 1_048_575, 1)]), (9, &[(1, 0, 2)]), (1, &[(3, 65_536, 5)]), (4, &[])];
    let case = |(n_heads, runs): (usize, Runs)| {
        let batch = Batch::new(runs);
        let name = format!("IH {n_heads}, {} rows", batch.rows().len());
        OpCase::new("index_query", name, move |device| check(device, n_heads, &batch))
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
        let args = IndexQueryArgs {
            step: step.step,
            x: x.address(),
            out: out.address(),
            freqs: freqs.address(),
            n_heads: n_heads as u32,
            head_dim: KEY_DIMS as u32,
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

#[cfg(test)]
mod tests {
    #[test]
    fn cases_pass() {
        crate::device::testing::run_cases(&super::cases());
    }
}
