//! The way into a sublayer on a device: arguments and launches of the kernels `hyper_dots` and `hyper_mix`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Buffer, Device, DeviceError};
use crate::ops::case::batch::{
    Batch, Runs, StepBuffers, Worst, home, interleave, output, row_noise, run_everywhere, values_of,
};
use crate::ops::case::data::{Noise, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::combine::{self, CombineArgs};
use crate::ops::hyper_mix::{HC, HyperMixParams, MIXES, reference};
use crate::ops::hyper_post::device::{self as hyper_post, HyperPostArgs};
use crate::ops::rms_norm;
use crate::ops::step::Step;

/// Columns of the flattened copies whose products one block of `hyper_dots` sums: fixed, so that the order of a sum depends on
/// the width of the model alone.
pub const PART_COLS: u32 = 1024;
/// Floats of one part: the mixes' partial dots, the partial sum of squares, zeros.
pub const PART_STRIDE: u32 = 32;
/// Rows that a block of `hyper_dots` takes at most, so that they share its part of the matrix; up to as many blocks take one each.
const MAX_DOTS_ROWS: u32 = 8;
/// Threads of a block of either kernel.
const N_THREADS: u32 = 256;

/// Arguments of both kernels, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct HyperMixArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The copies, which take the output of the sublayer before if there is one.
    pub residual: u64, // [T, HC, D] f32
    /// The matrix of the mixes.
    pub mix: u64, // [24, HC*D] f32
    /// Added to the scaled mixes.
    pub base: u64, // [24] f32
    /// Factors of pre, post and comb.
    pub scale: u64, // [3] f32
    /// Weight of the sublayer's norm.
    pub norm: u64, // [D] f32
    /// pre, post and comb of each row: those of the sublayer before, then this one's.
    pub weights: u64, // [T, 24] f32
    /// The sublayer's input: mixed and normed.
    pub y: u64, // [T, D] bf16
    /// Scratch of `hyper_dots`, [`partials_bytes`] long.
    pub partials: u64, // [T, n_parts, 32] f32
    /// Output of the sublayer before, which the copies have still to take; 0: the copies are whole.
    pub output: u64, // [T, D] f32
    /// Experts' results that are to be added up to that output first; 0: it is there.
    pub routed: u64, // [T * K, D] f32
    /// The sorted row of each (row, choice).
    pub row_of: u64, // [T, K] u32
    /// Results of the shared expert.
    pub shared: u64, // [T, D] f32
    /// D, a multiple of 4.
    pub n_cols: u32,
    /// Normalisations of comb, at least 1.
    pub n_iters: u32,
    /// K.
    pub top_k: u32,
    /// Rows of a block of `hyper_dots`, which [`launch`] sets.
    pub rows_per_block: u32,
    /// Epsilon of both norms.
    pub norm_eps: f32,
    /// Epsilon of the hyper-connection.
    pub hc_eps: f32,
}

const _: () = assert!(size_of::<HyperMixArgs>() == 152);

/// Parts into which the dots of a model of `n_cols` columns are cut.
#[must_use]
pub const fn n_parts(n_cols: u32) -> u32 {
    (HC as u32 * n_cols).div_ceil(PART_COLS)
}

/// Bytes of `HyperMixArgs::partials` for `n_rows` rows.
#[must_use]
pub const fn partials_bytes(n_rows: u32, n_cols: u32) -> usize {
    n_rows as usize * n_parts(n_cols) as usize * PART_STRIDE as usize * 4
}

/// Mixes `n_rows` rows (those of the bucket, of which the step's real ones are written): the dots, then the rest.
///
/// # Errors
/// When the device refuses a launch.
pub fn launch(device: &Device, args: &HyperMixArgs, n_rows: u32) -> Result<(), DeviceError> {
    assert!(args.n_cols.is_multiple_of(4), "hyper_mix: D: {}, want a multiple of 4", args.n_cols);
    let rows_per_block = n_rows.div_ceil(MAX_DOTS_ROWS).min(MAX_DOTS_ROWS);
    let args = HyperMixArgs { rows_per_block, ..*args };
    let grid = [n_parts(args.n_cols), n_rows.div_ceil(rows_per_block), 1];
    device.launch(device.kernel("hyper_dots")?, grid, N_THREADS, &args)?;
    device.launch(device.kernel("hyper_mix")?, [n_rows, 1, 1], N_THREADS, &args)
}

/// The kernels' cases: the model's width, one of several parts with a rest, the least; rows past a tile of 8.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let batches: [(usize, Runs); 5] = [
        (4096, &[(0, 5, 1), (2, 0, 1)]),
        (1028, &[(1, 0, 9)]),
        (256, &[(1, 0, 17), (0, 9, 2)]),
        (4, &[(3, 7, 8)]),
        (128, &[]),
    ];
    let case = |(n_cols, runs): (usize, Runs)| {
        let batch = Batch::new(runs);
        let name = format!("D {n_cols}, {} rows", batch.rows().len());
        OpCase::new("hyper_mix", name, move |device| check(device, n_cols, &batch))
    };
    let joined = |(n_cols, runs): (usize, Runs)| {
        let batch = Batch::new(runs);
        let name = format!("D {n_cols}, {} rows after a sublayer", batch.rows().len());
        OpCase::new("hyper_mix", name, move |device| after_a_sublayer(device, n_cols, &batch))
    };
    let all: Vec<OpCase> = batches.map(case).into();
    let joined = [batches[0], batches[1], batches[2], (2048, MANY)].map(joined);
    all.into_iter().chain(joined).collect()
}

/// More rows than there are blocks of one.
const MANY: Runs = &[(1, 3, 77)];

/// The weights of a case.
struct Weights {
    mix: Vec<f32>,  // [MIXES, HC*D] f32
    base: Vec<f32>, // [MIXES] f32
    scale: [f32; 3],
    norm: Vec<f32>, // [D] f32
}

fn residual(n_cols: usize, seq: usize, position: usize) -> Vec<f32> {
    row_noise(3, seq, position).floats(HC * n_cols)
}

fn run(device: &Device, n_cols: usize, w: &Weights, batch: &Batch) -> Result<Vec<u8>, CaseError> {
    let (step, n) = (batch.upload(device, |_, _| 0)?, batch.n_bucket());
    let residual = upload(device, &batch.values(HC * n_cols, |seq, position| residual(n_cols, seq, position)))?;
    let (mix, base) = (upload(device, &w.mix)?, upload(device, &w.base)?);
    let (scale, norm) = (upload(device, &w.scale)?, upload(device, &w.norm)?);
    let (weights, y) = (output::<f32>(device, n * MIXES)?, output::<u16>(device, n * n_cols)?);
    let partials = output::<u8>(device, partials_bytes(n as u32, n_cols as u32))?;
    let args = HyperMixArgs {
        step: step.step,
        residual: residual.address(),
        mix: mix.address(),
        base: base.address(),
        scale: scale.address(),
        norm: norm.address(),
        weights: weights.address(),
        y: y.address(),
        partials: partials.address(),
        n_cols: n_cols as u32,
        n_iters: 20,
        norm_eps: 1e-6,
        hc_eps: 1e-6,
        ..HyperMixArgs::default()
    };
    launch(device, &args, n as u32)?;
    Ok(interleave(&[home(device, &weights)?, home(device, &y)?], n))
}

fn check(device: &Device, n_cols: usize, batch: &Batch) -> Result<Deviation, CaseError> {
    let (mut noise, gain) = (Noise::new(4), 8.0 / (n_cols as f32).sqrt());
    let w = Weights {
        mix: noise.floats(MIXES * HC * n_cols).iter().map(|x| x * gain).collect(),
        base: noise.floats(MIXES),
        scale: [0.6, 0.7, 0.5],
        norm: noise.floats(n_cols),
    };
    let got = run_everywhere(batch, |batch| run(device, n_cols, &w, batch))?;
    let mut worst = Worst::default();
    for ((seq, position), got) in batch.rows().into_iter().zip(got.chunks(4 * MIXES + 2 * n_cols)) {
        let x = residual(n_cols, seq, position);
        let dot = |m: &[f32]| m.iter().zip(&x).map(|(m, x)| f64::from(*m) * f64::from(*x)).sum::<f64>() as f32;
        let mut weights: Vec<f32> = w.mix.chunks(HC * n_cols).map(dot).collect();
        let p = HyperMixParams {
            n_cols,
            residual: &x,
            base: &w.base,
            scale: &w.scale,
            norm_eps: 1e-6,
            hc_eps: 1e-6,
            n_iters: 20,
            wave: None,
        };
        let mut row = vec![0.0; n_cols];
        reference(&p, &mut weights, &mut row);
        let (got_weights, got_row) = got.split_at(4 * MIXES);
        for (got, want) in values_of::<f32>(got_weights).iter().zip(&weights) {
            // Dots of thousands of terms, then 40 normalisations of one rounding each.
            worst.add(*got, f64::from(*want), 2e-5);
        }
        let want = rms_norm::reference(&row, Some(&w.norm), 1e-6);
        for (got, want) in values_of::<u16>(got_row).iter().zip(want) {
            // The weights' error, on values of a few units.
            worst.add_bf16(*got, want, 1e-4);
        }
    }
    Ok(worst.deviation())
}

/// Experts of a row in the cases after a sublayer.
const TOP_K: usize = 3;

/// What a sublayer of a case leaves, and the weights of the next one.
struct Left {
    n_rows: usize,
    n_cols: usize,
    step: StepBuffers,
    next: [Buffer; 4], // mix, base, scale, norm
    routed: Buffer,
    row_of: Buffer,
    shared: Buffer,
    copies: Vec<f32>,
    weights: Vec<f32>,
}

impl Left {
    fn new(device: &Device, n_cols: usize, batch: &Batch) -> Result<Self, CaseError> {
        let n_rows = batch.n_bucket();
        let mut noise = Noise::new(14);
        let mut floats = |n: usize| upload(device, &noise.floats(n));
        Ok(Self {
            n_rows,
            n_cols,
            step: batch.upload(device, |_, _| 0)?,
            next: [floats(MIXES * HC * n_cols)?, floats(MIXES)?, floats(3)?, floats(n_cols)?],
            routed: floats(n_rows * TOP_K * n_cols)?,
            row_of: upload(device, &(0..(n_rows * TOP_K) as u32).rev().collect::<Vec<u32>>())?,
            shared: floats(n_rows * n_cols)?,
            copies: batch.values(HC * n_cols, |seq, position| residual(n_cols, seq, position)),
            weights: batch.values(MIXES, |seq, position| row_noise(15, seq, position).floats(MIXES)),
        })
    }

    /// Every byte that comes of it when so much is done by the kernels of those names: nothing, `combine`, `hyper_post` too.
    fn run(&self, device: &Device, n_done: usize) -> Result<Vec<u32>, CaseError> {
        let (n, step, n_cols, top_k) = (self.n_rows, self.step.step, self.n_cols as u32, TOP_K as u32);
        let (residual, weights) = (upload(device, &self.copies)?, upload(device, &self.weights)?);
        let (y, made) = (output::<u16>(device, n * self.n_cols)?, output::<f32>(device, n * self.n_cols)?);
        let partials = output::<u8>(device, partials_bytes(n as u32, n_cols))?;
        let (routed, row_of, shared) = (self.routed.address(), self.row_of.address(), self.shared.address());
        if n_done >= 1 {
            let args = CombineArgs { step, routed, row_of, shared, out: made.address(), n_cols, top_k };
            combine::launch(device, &args, n as u32)?;
        }
        let (residual_at, weights_at, made_at) = (residual.address(), weights.address(), made.address());
        if n_done >= 2 {
            let (output, weights, residual) = (made_at, weights_at, residual_at);
            hyper_post::launch(device, &HyperPostArgs { step, output, weights, residual, n_cols, pad: 0 }, n as u32)?;
        }
        let [mix, base, scale, norm] = [0, 1, 2, 3].map(|i: usize| self.next[i].address());
        let args = HyperMixArgs {
            step,
            residual: residual_at,
            mix,
            base,
            scale,
            norm,
            weights: weights_at,
            y: y.address(),
            partials: partials.address(),
            output: if n_done >= 2 { 0 } else { made_at },
            routed: if n_done >= 1 { 0 } else { routed },
            row_of,
            shared,
            n_cols,
            n_iters: 20,
            top_k,
            rows_per_block: 0,
            norm_eps: 1e-6,
            hc_eps: 1e-6,
        };
        launch(device, &args, n as u32)?;
        let all = [&residual, &weights, &y, &made].map(|buffer| home(device, buffer));
        Ok(all.into_iter().collect::<Result<Vec<Vec<u32>>, CaseError>>()?.concat())
    }
}

/// With its experts to be added up, with its output, and with the residual whole, a sublayer leaves the same bytes.
fn after_a_sublayer(device: &Device, n_cols: usize, batch: &Batch) -> Result<Deviation, CaseError> {
    let left = Left::new(device, n_cols, batch)?;
    let whole = left.run(device, 2)?;
    Ok(Deviation::exact(&[left.run(device, 0)?, left.run(device, 1)?].concat(), &[&whole[..], &whole[..]].concat()))
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_pass() {
        crate::device::testing::run_cases(&super::cases());
    }
}
