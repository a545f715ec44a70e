//! Cases of `combine`: against f64 sums, with rows that only fill the bucket.

use super::{CombineArgs, launch, reference};
use crate::device::Device;
use crate::ops::case::data::{Noise, download, nan_buffer, same_bits, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::step::{Step, StepCounts};

pub(super) fn cases() -> Vec<OpCase> {
    let shapes = [(1, 4096, 6), (9, 256, 2), (3, 1025, 6), (0, 128, 2), (5, 1, 1), (64, 40, 7)];
    let case = |(n_rows, n_cols, top_k)| {
        let name = format!("{n_rows} rows of {n_cols}, {top_k} experts");
        OpCase::new("combine", name, move |device| compare(device, n_rows, n_cols, top_k))
    };
    shapes.into_iter().map(case).collect()
}

fn compare(device: &Device, n_rows: usize, n_cols: usize, top_k: usize) -> Result<Deviation, CaseError> {
    let mut noise = Noise::new(51);
    let n_pairs = n_rows * top_k;
    let (routed, shared) = (noise.floats(n_pairs * n_cols), noise.floats(n_rows * n_cols));
    // Rows in reverse: any order of theirs is a permutation.
    let row_of: Vec<u32> = (0..n_pairs as u32).rev().collect();
    let counts = upload(device, &[StepCounts { n_rows: n_rows as u32, ..StepCounts::default() }])?;
    let (routed_buffer, shared_buffer) = (upload(device, &routed)?, upload(device, &shared)?);
    let row_of_buffer = upload(device, &[&row_of[..], &[u32::MAX; 32]].concat())?;
    let n_all = (n_rows + 3) * n_cols;
    let out = nan_buffer(device, 4 * n_all)?;
    let args = CombineArgs {
        step: Step { counts: counts.address(), ..Step::default() },
        routed: routed_buffer.address(),
        row_of: row_of_buffer.address(),
        shared: shared_buffer.address(),
        out: out.address(),
        n_cols: n_cols as u32,
        top_k: top_k as u32,
    };
    launch(device, &args, n_rows as u32 + 3)?;
    let got: Vec<f32> = download(device, &out, n_all)?;
    launch(device, &args, n_rows as u32 + 3)?;
    same_bits("a second run", &download::<f32>(device, &out, n_all)?, &got)?;
    let (got, padding) = got.split_at(n_rows * n_cols);
    if padding.iter().any(|v| v.to_bits() != u32::MAX) {
        return Err(CaseError::Rule("a row of padding is written".to_owned()));
    }
    // At most eight additions of numbers below 1: sums stay below 8, half a unit of theirs is 2^-22.
    Ok(Deviation::absolute(got, &reference(&routed, &row_of, &shared, n_cols, top_k), 8.0 / f64::from(1 << 22)))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_agrees_with_the_reference() {
        crate::device::testing::run_cases(&super::cases());
    }
}
