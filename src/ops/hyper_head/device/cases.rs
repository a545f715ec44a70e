//! Cases of `hyper_head`: against f64 sums; rows in any order, alone and among others.

use super::{HyperHeadArgs, launch};
use crate::device::Device;
use crate::ops::case::data::{Noise, download, nan_buffer, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::hyper_head::{HyperHeadParams, reference};
use crate::ops::hyper_mix::HC;
use crate::ops::step::{Step, StepCounts};
use crate::tensor::format::bf16_to_f32;

const EPS: f32 = 1e-6;
const SCALE: f32 = 0.7;

pub(super) fn cases() -> Vec<OpCase> {
    let shapes = [(1, 4096), (5, 256), (0, 128), (3, 40), (9, 1), (2, 300)];
    let case = |(n_rows, n_cols)| {
        OpCase::new("hyper_head", format!("{n_rows} rows of {n_cols}"), move |device| compare(device, n_rows, n_cols))
    };
    shapes.into_iter().map(case).collect()
}

/// What the kernel reads, on the host; the step has two rows more than are wanted, taken in reverse.
struct Inputs {
    residual: Vec<f32>,
    mix: Vec<f32>,
    base: Vec<f32>,
    norm: Vec<f32>,
    logit_rows: Vec<u32>,
}

fn compare(device: &Device, n_rows: usize, n_cols: usize) -> Result<Deviation, CaseError> {
    let mut noise = Noise::new(81);
    let inputs = Inputs {
        residual: noise.floats((n_rows + 2) * HC * n_cols),
        mix: noise.floats(HC * HC * n_cols).iter().map(|m| m / (n_cols as f32).sqrt()).collect(),
        base: noise.floats(HC),
        norm: noise.floats(n_cols),
        logit_rows: (1..=n_rows as u32).rev().collect(),
    };
    let all = on_device(device, &inputs, &inputs.logit_rows, n_cols)?;
    if on_device(device, &inputs, &inputs.logit_rows, n_cols)? != all {
        return Err(CaseError::Rule("a second run gives other bits".to_owned()));
    }
    for (i, row) in inputs.logit_rows.iter().enumerate() {
        if on_device(device, &inputs, &[*row], n_cols)? != all[i * n_cols..][..n_cols] {
            return Err(CaseError::Rule(format!("row {row} alone gives other bits")));
        }
    }
    let got: Vec<f32> = all.iter().map(|y| bf16_to_f32(*y)).collect();
    let want = expected(&inputs, n_cols);
    let scale = want.iter().fold(1e-30f64, |m, w| m.max(w.abs()));
    // Half a unit of BF16 of the largest, and f32 sums of up to 16,384 products beside it.
    Ok(Deviation::scaled(&got, &want, scale, 1.02 / 256.0))
}

/// y of the given rows; checks that nothing is written past them.
fn on_device(device: &Device, inputs: &Inputs, logit_rows: &[u32], n_cols: usize) -> Result<Vec<u16>, CaseError> {
    let n_rows = logit_rows.len();
    let counts = upload(device, &[StepCounts { n_logit_rows: n_rows as u32, ..StepCounts::default() }])?;
    let rows = upload(device, &[logit_rows, &[u32::MAX; 2]].concat())?;
    let residual = upload(device, &inputs.residual)?;
    let (mix, base) = (upload(device, &inputs.mix)?, upload(device, &inputs.base)?);
    let (scale, norm) = (upload(device, &[SCALE])?, upload(device, &inputs.norm)?);
    let y = nan_buffer(device, 2 * (n_rows + 2) * n_cols)?;
    let args = HyperHeadArgs {
        step: Step { counts: counts.address(), ..Step::default() },
        logit_rows: rows.address(),
        residual: residual.address(),
        mix: mix.address(),
        base: base.address(),
        scale: scale.address(),
        norm: norm.address(),
        y: y.address(),
        n_cols: n_cols as u32,
        norm_eps: EPS,
        hc_eps: EPS,
        pad: 0,
    };
    launch(device, &args, n_rows as u32 + 2)?;
    let mut all: Vec<u16> = download(device, &y, (n_rows + 2) * n_cols)?;
    if all.split_off(n_rows * n_cols).iter().any(|v| *v != u16::MAX) {
        return Err(CaseError::Rule("a row past the count is written".to_owned()));
    }
    Ok(all)
}

/// The op's reference on f64 mixes, then the norm.
fn expected(inputs: &Inputs, n_cols: usize) -> Vec<f64> {
    let n = HC * n_cols;
    let mut want = Vec::new();
    for row in &inputs.logit_rows {
        let x = &inputs.residual[*row as usize * n..][..n];
        let dot = |mix: &[f32]| mix.iter().zip(x).map(|(m, x)| f64::from(*m) * f64::from(*x)).sum::<f64>() as f32;
        let mixes: Vec<f32> = inputs.mix.chunks(n).map(dot).collect();
        let params = HyperHeadParams {
            n_cols,
            residual: x,
            mixes: &mixes,
            base: &inputs.base,
            scale: SCALE,
            norm_eps: EPS,
            hc_eps: EPS,
            sums: None,
        };
        let mut mixed = vec![0.0; n_cols];
        reference(&params, &mut mixed);
        let mean = mixed.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n_cols as f64;
        let inverse = 1.0 / (mean + f64::from(EPS)).sqrt();
        want.extend(mixed.iter().zip(&inputs.norm).map(|(v, w)| f64::from(*v) * inverse * f64::from(*w)));
    }
    want
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_agrees_with_the_reference() {
        crate::device::testing::run_cases(&super::cases());
    }
}
