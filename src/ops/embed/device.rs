//! The embedding on a device: arguments and launch of the kernel `embed`.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::batch::{Batch, N_SLOTS, Runs, home, interleave, output, run_everywhere, slot};
use crate::ops::case::data::{Noise, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::hyper_mix::HC;
use crate::ops::step::{Step, TOKEN_OF_SLOT};
use crate::tensor::format::bf16_to_f32;

/// Threads of a block, which expands one row.
const N_THREADS: u32 = 256;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct EmbedArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// Last token of each slot, for rows that name no token.
    pub slot_tokens: u64, // [n_slots] u32
    /// The embedding.
    pub table: u64, // [V, D] bf16
    /// Every row's token, found or given; one outside the vocabulary becomes 0.
    pub ids_out: u64, // [T] u32
    /// Each row's embedding, once a copy.
    pub residual: u64, // [T, HC, D] f32
    /// D.
    pub n_cols: u32,
    /// V.
    pub vocab_size: u32,
}

const _: () = assert!(size_of::<EmbedArgs>() == 72);

/// Expands `n_rows` rows (those of the bucket, of which the step's real ones are written).
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &EmbedArgs, n_rows: u32) -> Result<(), DeviceError> {
    device.launch(device.kernel("embed")?, [n_rows, 1, 1], N_THREADS, args)
}

/// The kernel's cases: the model's width, odd ones, one row and many; ids from slots and outside the vocabulary.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let batches: [(usize, Runs); 4] =
        [(4096, &[(0, 5, 3), (2, 0, 1)]), (130, &[(1, 0, 17), (0, 9, 2)]), (1, &[(3, 7, 1)]), (257, &[])];
    let case = |(n_cols, runs): (usize, Runs)| {
        let batch = Batch::new(runs);
        OpCase::new("embed", format!("D {n_cols}, {} rows", batch.rows().len()), move |device| {
            check(device, n_cols, &batch)
        })
    };
    batches.map(case).into()
}

/// Ids of a case: some from the slot, some outside the vocabulary of 11.
fn token(seq: usize, position: usize) -> u32 {
    match position % 5 {
        0 => TOKEN_OF_SLOT,
        3 => 8 + position as u32,
        _ => (7 * seq + position) as u32 % 11,
    }
}

fn check(device: &Device, n_cols: usize, batch: &Batch) -> Result<Deviation, CaseError> {
    let table = Noise::new(1).floats(11 * n_cols).iter().map(|x| x.to_bits() as u16 & 0xBFFF).collect::<Vec<u16>>();
    let slot_tokens: [u32; N_SLOTS] = [3, 10, 99, 0, 5];
    let run = |batch: &Batch| {
        let step = batch.upload(device, token)?;
        let (slot_tokens, table) = (upload(device, &slot_tokens)?, upload(device, &table)?);
        let n = batch.n_bucket();
        let (ids, residual) = (output::<u32>(device, n)?, output::<f32>(device, n * HC * n_cols)?);
        let args = EmbedArgs {
            step: step.step,
            slot_tokens: slot_tokens.address(),
            table: table.address(),
            ids_out: ids.address(),
            residual: residual.address(),
            n_cols: n_cols as u32,
            vocab_size: 11,
        };
        launch(device, &args, n as u32)?;
        Ok(interleave(&[home(device, &ids)?, home(device, &residual)?], n))
    };
    let got = run_everywhere(batch, run)?;
    let want: Vec<u8> = batch
        .rows()
        .into_iter()
        .flat_map(|(seq, position)| {
            let token = match token(seq, position) {
                TOKEN_OF_SLOT => slot_tokens[slot(seq)],
                token => token,
            };
            let token = if token < 11 { token } else { 0 };
            let row =
                table[token as usize * n_cols..][..n_cols].iter().flat_map(|bits| bf16_to_f32(*bits).to_le_bytes());
            let row: Vec<u8> = row.collect();
            [&token.to_le_bytes()[..], &row.repeat(HC)].concat()
        })
        .collect();
    Ok(Deviation::exact(&got, &want))
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_pass() {
        crate::device::testing::run_cases(&super::cases());
    }
}
