//! The best groups of each row on a device: arguments and launch of the kernel `top_k`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::batch::{Batch, Runs, home, output, row_noise, run_everywhere, values_of};
use crate::ops::case::data::upload;
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::step::Step;
use crate::ops::top_k::reference;

/// Threads of a block, which takes one row.
const N_THREADS: u32 = 512;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct TopKArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// Scores of rows `first_row` and on.
    pub scores: u64, // [n_tile_rows, max_groups] f32
    /// The chosen groups of row t, ascending; written only where more than k are visible.
    pub chosen: u64, // [T, k] u32
    /// First row of the tile.
    pub first_row: u32,
    /// Rows of the tile.
    pub n_tile_rows: u32,
    /// Floats from one row of scores to the next.
    pub max_groups: u32,
    /// Groups to choose.
    pub k: u32,
    /// Tokens of a group.
    pub ratio: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<TopKArgs>() == 72);

/// Chooses for the rows of the tile.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &TopKArgs) -> Result<(), DeviceError> {
    device.launch(device.kernel("top_k")?, [args.n_tile_rows, 1, 1], N_THREADS, args)
}

/// What a case's scores look like.
#[derive(Clone, Copy)]
enum Scores {
    /// All different, nearly.
    Different,
    /// Few values: ties, zeros of both signs, infinities, NaN.
    Ties,
    /// One value.
    Same,
}

/// The kernel's cases: numbers of groups just above k, past a round of threads, the model's most; ties everywhere.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let of = |name: &str, k: usize, scores: Scores, runs: Runs| {
        let batch = Batch::new(runs);
        OpCase::new("top_k", name, move |device| check(device, k, scores, &batch))
    };
    vec![
        of("k 512 of 513 and of a few thousand", 512, Scores::Different, &[(0, 2047, 6), (1, 9001, 1)]),
        of("k 512, ties", 512, Scores::Ties, &[(0, 2051, 3), (1, 4099, 1), (2, 16_000, 1)]),
        of("k 128, one score", 128, Scores::Same, &[(0, 700, 2), (1, 2100, 1)]),
        of("k 16, few groups", 16, Scores::Ties, &[(0, 50, 30)]),
        of("k 1", 1, Scores::Different, &[(0, 3, 9)]),
        of("k 512 of 262144", 512, Scores::Different, &[(0, 1_048_575, 1)]),
        of("no row", 4, Scores::Same, &[]),
    ]
}

fn scores_of(kind: Scores, seq: usize, position: usize) -> Vec<f32> {
    let mut noise = row_noise(60, seq, position);
    let n = (position + 1) / 4;
    match kind {
        Scores::Different => noise.floats(n),
        Scores::Same => vec![0.25; n],
        Scores::Ties => (0..n)
            .map(|_| match noise.next_u64() % 24 {
                0 => f32::NAN,
                1 => f32::INFINITY,
                2 => f32::NEG_INFINITY,
                3..6 => -0.0,
                6..12 => 0.0,
                other => (other % 4) as f32 - 2.0,
            })
            .collect(),
    }
}

/// Every row's chosen groups.
fn run(device: &Device, k: usize, kind: Scores, batch: &Batch) -> Result<Vec<u8>, CaseError> {
    let (step, n) = (batch.upload(device, |_, _| 0)?, batch.n_bucket());
    let max_groups = batch.rows().iter().map(|row| (row.1 + 1) / 4).max().unwrap_or(0) + 2;
    // What is not visible would be chosen first.
    let scores = batch.values(max_groups, |seq, position| {
        let mut scores = scores_of(kind, seq, position);
        scores.resize(max_groups, f32::INFINITY);
        scores
    });
    let (scores, chosen) = (upload(device, &scores)?, output::<u32>(device, n * k)?);
    // Two launches, each over a part of the rows.
    for (first_row, n_tile_rows) in [(0, n.min(2)), (2, n.saturating_sub(2))].into_iter().filter(|part| part.1 > 0) {
        let args = TopKArgs {
            step: step.step,
            scores: scores.address() + (first_row * max_groups * 4) as u64,
            chosen: chosen.address(),
            first_row: first_row as u32,
            n_tile_rows: n_tile_rows as u32,
            max_groups: max_groups as u32,
            k: k as u32,
            ratio: 4,
            pad: 0,
        };
        launch(device, &args)?;
    }
    home(device, &chosen)
}

fn check(device: &Device, k: usize, kind: Scores, batch: &Batch) -> Result<Deviation, CaseError> {
    let got = run_everywhere(batch, |batch| run(device, k, kind, batch))?;
    let want: Vec<u32> = batch
        .rows()
        .into_iter()
        .flat_map(|(seq, position)| {
            let scores = scores_of(kind, seq, position);
            if scores.len() > k { reference(&scores, k) } else { vec![u32::MAX; k] }
        })
        .collect();
    Ok(Deviation::exact(&values_of::<u32>(&got), &want))
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_pass() {
        crate::device::testing::run_cases(&super::cases());
    }
}
