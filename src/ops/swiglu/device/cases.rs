//! Cases of `swiglu`: against the f64 reference, clamps, NaN, rows past the count.

use super::{SwigluArgs, launch};
use crate::device::Device;
use crate::ops::case::data::{Noise, download, nan_buffer, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::swiglu::reference;
use crate::tensor::format::bf16_to_f32;

const LIMIT: f32 = 10.0;

pub(super) fn cases() -> Vec<OpCase> {
    let shapes = [(2, 3, 2048), (5, 2, 256), (1, 1, 1), (3, 1, 1025), (0, 6, 64), (9, 6, 40)];
    let mut cases = Vec::new();
    for (n_rows, multiplier, n_cols) in shapes {
        for is_weighted in [false, true] {
            let name = format!("{n_rows} x {multiplier} rows of {n_cols}, weights: {is_weighted}");
            let run = move |device: &Device| compare(device, [n_rows, multiplier, n_cols], is_weighted);
            cases.push(OpCase::new("swiglu", name, run));
        }
    }
    cases
}

fn compare(
    device: &Device,
    [n_rows, multiplier, n_cols]: [usize; 3],
    is_weighted: bool,
) -> Result<Deviation, CaseError> {
    let mut noise = Noise::new(71);
    let all_rows = n_rows * multiplier;
    // Beyond both clamps on either side; the first pair is not a number.
    let mut values = |n: usize| -> Vec<f32> { noise.floats(n).iter().map(|x| x * 20.0).collect() };
    let (mut gate, up) = (values(all_rows * n_cols), values(all_rows * n_cols));
    if let Some(first) = gate.first_mut() {
        *first = f32::NAN;
    }
    let weights = noise.floats(all_rows);
    let (gate_buffer, up_buffer, weight_buffer) =
        (upload(device, &gate)?, upload(device, &up)?, upload(device, &weights)?);
    let count = upload(device, &[n_rows as u32])?;
    let out = nan_buffer(device, 2 * (all_rows + 2) * n_cols)?;
    let args = SwigluArgs {
        gate: gate_buffer.address(),
        up: up_buffer.address(),
        weight: if is_weighted { weight_buffer.address() } else { 0 },
        out: out.address(),
        n_rows: count.address(),
        multiplier: multiplier as u32,
        n_cols: n_cols as u32,
        limit: LIMIT,
        pad: 0,
    };
    launch(device, &args, all_rows as u32 + 2)?;
    let all: Vec<u16> = download(device, &out, (all_rows + 2) * n_cols)?;
    let (got, padding) = all.split_at(all_rows * n_cols);
    if padding.iter().any(|v| *v != u16::MAX) {
        return Err(CaseError::Rule("a row past the count is written".to_owned()));
    }
    let rows = gate.chunks(n_cols).zip(up.chunks(n_cols)).zip(&weights);
    let want =
        rows.flat_map(|((gate, up), weight)| reference(gate, up, LIMIT, if is_weighted { *weight } else { 1.0 }));
    let mut worst = 0f64;
    for (got, want) in got.iter().zip(want) {
        let got = f64::from(bf16_to_f32(*got));
        let error = (got - want).abs() / want.abs().max(1e-20);
        worst = if got.is_nan() != want.is_nan() { f64::INFINITY } else { worst.max(error) };
    }
    // Half a unit of BF16, and a little for f32's own roundings, which may tip a tie.
    Ok(Deviation { worst, limit: (1.0 + 1e-3) / 256.0 })
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_agrees_with_the_reference() {
        crate::device::testing::run_cases(&super::cases());
    }
}
