//! The way out of a sublayer on a device: arguments and launch of the kernel `hyper_post`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::batch::{Batch, Runs, Worst, home, row_noise, run_everywhere, values_of};
use crate::ops::case::data::upload;
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::hyper_mix::{HC, MIXES};
use crate::ops::hyper_post::{HyperPostParams, reference};
use crate::ops::step::Step;

/// Threads of a block; each updates 4 columns of every copy.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct HyperPostArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The sublayer's output.
    pub output: u64, // [T, D] f32
    /// What `hyper_mix` made.
    pub weights: u64, // [T, 24] f32
    /// The copies, updated in place.
    pub residual: u64, // [T, HC, D] f32
    /// D, a multiple of 4.
    pub n_cols: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<HyperPostArgs>() == 64);

/// Updates `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &HyperPostArgs, n_rows: u32) -> Result<(), DeviceError> {
    assert!(args.n_cols.is_multiple_of(4), "hyper_post: D: {}, want a multiple of 4", args.n_cols);
    let grid = [args.n_cols.div_ceil(4 * N_THREADS), n_rows, 1];
    device.launch(device.kernel("hyper_post")?, grid, N_THREADS, args)
}

/// The kernel's cases: the model's width, just past a block, the least.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let batches: [(usize, Runs); 4] =
        [(4096, &[(0, 5, 1), (2, 0, 2)]), (1028, &[(1, 0, 3)]), (4, &[(3, 7, 8)]), (128, &[])];
    let case = |(n_cols, runs): (usize, Runs)| {
        let batch = Batch::new(runs);
        let name = format!("D {n_cols}, {} rows", batch.rows().len());
        OpCase::new("hyper_post", name, move |device| check(device, n_cols, &batch))
    };
    batches.map(case).into()
}

fn numbers(seed: u64, n: usize, seq: usize, position: usize) -> Vec<f32> {
    row_noise(seed, seq, position).floats(n)
}

fn run(device: &Device, n_cols: usize, batch: &Batch) -> Result<Vec<u8>, CaseError> {
    let (step, n) = (batch.upload(device, |_, _| 0)?, batch.n_bucket());
    let made = batch.values(n_cols, |seq, position| numbers(5, n_cols, seq, position));
    let weights = batch.values(MIXES, |seq, position| numbers(6, MIXES, seq, position));
    let mut copies = batch.values(HC * n_cols, |seq, position| numbers(7, HC * n_cols, seq, position));
    // The padding is garbage that must stay as it is.
    copies[batch.rows().len() * HC * n_cols..].fill(f32::from_bits(u32::MAX));
    let (made, weights, residual) = (upload(device, &made)?, upload(device, &weights)?, upload(device, &copies)?);
    let args = HyperPostArgs {
        step: step.step,
        output: made.address(),
        weights: weights.address(),
        residual: residual.address(),
        n_cols: n_cols as u32,
        pad: 0,
    };
    launch(device, &args, n as u32)?;
    home(device, &residual)
}

fn check(device: &Device, n_cols: usize, batch: &Batch) -> Result<Deviation, CaseError> {
    let got = run_everywhere(batch, |batch| run(device, n_cols, batch))?;
    let mut worst = Worst::default();
    for ((seq, position), got) in batch.rows().into_iter().zip(got.chunks(4 * HC * n_cols)) {
        let (output, weights) = (numbers(5, n_cols, seq, position), numbers(6, MIXES, seq, position));
        let mut want = numbers(7, HC * n_cols, seq, position);
        reference(&HyperPostParams { n_cols, output: &output, weights: &weights }, &mut want);
        for (got, want) in values_of::<f32>(got).iter().zip(want) {
            // Five products of at most 1 each.
            worst.add(*got, f64::from(want), 1e-6);
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
