//! Cases of `route`: choices equal to the reference's, weights near it; ties, tables, NaN.

use super::{RouteArgs, launch};
use crate::device::Device;
use crate::ids::TokenId;
use crate::ops::case::data::{Noise, download, nan_buffer, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::route::{RouteChoice, RouteParams, reference, run};
use crate::ops::step::{Step, StepCounts};

/// Token ids of the tables.
const VOCAB: u32 = 50;

pub(super) fn cases() -> Vec<OpCase> {
    let shapes = [(1, 256, 6), (9, 256, 6), (33, 8, 2), (0, 8, 2), (3, 1, 1), (7, 512, 16), (5, 65, 3)];
    let mut cases = Vec::new();
    for (n_rows, n_experts, top_k) in shapes {
        for is_table in [false, true] {
            let name =
                format!("{n_rows} rows, {top_k} of {n_experts}, by {}", if is_table { "table" } else { "score" });
            cases.push(OpCase::new("route", name, move |d| by_noise(d, n_rows, (n_experts, top_k), is_table)));
        }
    }
    cases.push(OpCase::new("route", "ties go to the lowest index", ties));
    cases.push(OpCase::new("route", "numbers that are not", not_numbers));
    cases
}

/// Runs the kernel on [T, E] logits with three rows of padding; checks padding and a second run.
fn on_device(device: &Device, p: &RouteParams<'_>) -> Result<(Vec<u32>, Vec<f32>), CaseError> {
    let n_rows = p.logits.len() / p.n_experts;
    let logits = upload(device, &[p.logits, &vec![f32::NAN; 3 * p.n_experts]].concat())?;
    let counts = upload(device, &[StepCounts { n_rows: n_rows as u32, ..StepCounts::default() }])?;
    let n = (n_rows + 3) * p.top_k;
    let (experts, weights) = (nan_buffer(device, 4 * n)?, nan_buffer(device, 4 * n)?);
    let (bias, table, ids) = match p.choice {
        RouteChoice::Score { bias } => (upload(device, bias)?, None, Vec::new()),
        RouteChoice::Table { tid2eid, token_ids } => {
            (upload::<f32>(device, &[])?, Some(upload(device, tid2eid)?), token_ids.iter().map(|id| id.0).collect())
        }
    };
    let ids = upload(device, &[&ids[..], &[u32::MAX; 3]].concat())?;
    let args = RouteArgs {
        step: Step { counts: counts.address(), ..Step::default() },
        logits: logits.address(),
        bias: if table.is_some() { 0 } else { bias.address() },
        tid2eid: table.as_ref().map_or(0, |table| table.address()),
        ids: ids.address(),
        experts: experts.address(),
        weights: weights.address(),
        n_experts: p.n_experts as u32,
        top_k: p.top_k as u32,
        scale: p.scale,
        pad: 0,
    };
    launch(device, &args, n_rows as u32 + 3)?;
    let mut got: (Vec<u32>, Vec<u32>) = (download(device, &experts, n)?, download(device, &weights, n)?);
    launch(device, &args, n_rows as u32 + 3)?;
    if (download(device, &experts, n)?, download(device, &weights, n)?) != got {
        return Err(CaseError::Rule("a second run gives other results".to_owned()));
    }
    if got.0.split_off(n_rows * p.top_k).iter().any(|e| *e != u32::MAX) {
        return Err(CaseError::Rule("a row of padding is written".to_owned()));
    }
    got.1.truncate(n_rows * p.top_k);
    Ok((got.0, got.1.into_iter().map(f32::from_bits).collect()))
}

/// Experts must be equal; weights within a limit relative to the scale.
fn judge(got: &(Vec<u32>, Vec<f32>), experts: &[u16], weights: &[f32]) -> Result<Deviation, CaseError> {
    let want: Vec<u32> = experts.iter().map(|e| u32::from(*e)).collect();
    if got.0 != want {
        return Err(CaseError::Rule(format!("experts {:?}, want {want:?}", got.0)));
    }
    let want: Vec<f64> = weights.iter().map(|w| f64::from(*w)).collect();
    // Exponential, logarithm and root within 3 units each, a sum of up to 16 and two more roundings; weights are at most 1.5.
    Ok(Deviation::absolute(&got.1, &want, 4e-6))
}

fn by_noise(
    device: &Device,
    n_rows: usize,
    (n_experts, top_k): (usize, usize),
    is_table: bool,
) -> Result<Deviation, CaseError> {
    let mut noise = Noise::new(61);
    // Steps of 1/64, so that scores are equal or far enough apart for the order to be the same in f32 and f64.
    let mut coarse = |n: usize| -> Vec<f32> { noise.floats(n).iter().map(|x| (x * 512.0).round() / 64.0).collect() };
    let (logits, bias) = (coarse(n_rows * n_experts), vec![0.25; n_experts]);
    let tid2eid: Vec<u16> = (0..VOCAB as usize * top_k).map(|_| noise.below(n_experts as u32) as u16).collect();
    let token_ids: Vec<TokenId> = (0..n_rows).map(|_| TokenId(noise.below(VOCAB))).collect();
    let choice = match is_table {
        true => RouteChoice::Table { tid2eid: &tid2eid, token_ids: &token_ids },
        false => RouteChoice::Score { bias: &bias },
    };
    let p = RouteParams { n_experts, top_k, scale: 1.5, logits: &logits, choice };
    let (mut experts, mut weights) = (vec![0; n_rows * top_k], vec![0.0; n_rows * top_k]);
    reference(&p, &mut experts, &mut weights);
    judge(&on_device(device, &p)?, &experts, &weights)
}

fn ties(device: &Device) -> Result<Deviation, CaseError> {
    let logits = [1.0, 2.0, 2.0, -30.0, 2.0, 0.5, 0.5, 40.0];
    let bias = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -100.0];
    let choice = RouteChoice::Score { bias: &bias };
    let p = RouteParams { n_experts: 8, top_k: 7, scale: 1.5, logits: &logits, choice };
    let (mut experts, mut weights) = ([0; 7], [0.0; 7]);
    reference(&p, &mut experts, &mut weights);
    judge(&on_device(device, &p)?, &experts, &weights)
}

/// The CPU's choice: NaN last, every index exists.
fn not_numbers(device: &Device) -> Result<Deviation, CaseError> {
    let logits = [f32::NAN, f32::NAN, 1.0, f32::NAN, f32::INFINITY];
    let choice = RouteChoice::Score { bias: &[0.0; 5] };
    let p = RouteParams { n_experts: 5, top_k: 4, scale: 1.0, logits: &logits, choice };
    let (mut experts, mut weights) = ([0; 4], [0.0; 4]);
    run(&p, &mut experts, &mut weights);
    judge(&on_device(device, &p)?, &experts, &weights)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernels_agree_with_the_reference() {
        crate::device::testing::run_cases(&super::super::cases());
    }
}
