//! Rows of f32 rounded to bf16 (nearest, ties to even), as the input of the next matrix product on a device.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::{Deviation, OpCase};
use crate::ops::step::{Step, StepCounts, StepRow};
use crate::tensor::format::f32_to_bf16;

const N_THREADS: u32 = 256;
const COLS_PER_THREAD: u32 = 4;

/// What the kernel takes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct ToBf16Args {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The rows.
    pub x: u64, // [T, N] f32
    /// The rounded rows.
    pub out: u64, // [T, N] bf16
    /// N, a multiple of 4.
    pub n_cols: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<ToBf16Args>() == 56);

/// Rounds the step's rows.
///
/// # Errors
/// When the device is lost.
pub fn launch(device: &Device, args: &ToBf16Args, n_rows: u32) -> Result<(), DeviceError> {
    assert!(args.n_cols.is_multiple_of(COLS_PER_THREAD), "to_bf16: N: {}, want a multiple of 4", args.n_cols);
    let grid = [args.n_cols.div_ceil(N_THREADS * COLS_PER_THREAD), n_rows, 1];
    device.launch(device.kernel("to_bf16")?, grid, N_THREADS, args)
}

/// The rounded values.
#[must_use]
pub fn reference(x: &[f32]) -> Vec<u16> {
    x.iter().copied().map(f32_to_bf16).collect()
}

/// The kernel's tests.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let shapes = [(1, 4), (3, 128), (2, 1028), (5, 4096)];
    let case = |(n_rows, n_cols): (usize, usize)| OpCase {
        op: "to_bf16",
        name: format!("{n_rows} rows of {n_cols}, two rows of padding"),
        run: Box::new(move |device| run_case(device, n_rows, n_cols).map_err(Into::into)),
    };
    shapes.map(case).into()
}

/// Every kind of value, ties of both parities among them; rows beyond the step's must stay as they are.
fn run_case(device: &Device, n_rows: usize, n_cols: usize) -> Result<Deviation, DeviceError> {
    const UNTOUCHED: u16 = 0x7FA5;
    let n_padded = n_rows + 2;
    let x: Vec<f32> = (0..n_padded * n_cols)
        .map(|i| match i % 5 {
            0 => f32::from_bits(0x3F80_8000 + ((i as u32) << 16)),
            1 => f32::from_bits((i as u32).wrapping_mul(0x9E37_79B9) & 0xBF7F_FFFF),
            2 => f32::INFINITY,
            3 => f32::NAN,
            _ => -0.0,
        })
        .collect();
    let rows = vec![StepRow::default(); n_padded];
    let counts = [StepCounts { n_rows: n_rows as u32, n_runs: 1, ..StepCounts::default() }];
    let put = |bytes: &[u8]| -> Result<_, DeviceError> {
        let buffer = device.alloc(bytes.len())?;
        device.upload(&buffer, 0, bytes)?;
        Ok(buffer)
    };
    let (rows, counts) = (put(bytemuck::cast_slice(&rows))?, put(bytemuck::cast_slice(&counts))?);
    let (from, to) = (put(bytemuck::cast_slice(&x))?, put(bytemuck::cast_slice(&vec![UNTOUCHED; x.len()]))?);
    let step = Step { rows: rows.address(), counts: counts.address(), ..Step::default() };
    let args = ToBf16Args { step, x: from.address(), out: to.address(), n_cols: n_cols as u32, pad: 0 };
    launch(device, &args, n_padded as u32)?;
    let mut got = vec![0u16; x.len()];
    device.download(&to, 0, bytemuck::cast_slice_mut(&mut got))?;
    let mut want = reference(&x[..n_rows * n_cols]);
    want.resize(x.len(), UNTOUCHED);
    // A NaN may have any payload.
    let is_nan = |bits: u16| bits & 0x7FFF > 0x7F80;
    for (got, want) in got.iter_mut().zip(&want) {
        if is_nan(*got) && is_nan(*want) {
            *got = *want;
        }
    }
    Ok(Deviation::exact(&got, &want))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_rounds_as_the_host() {
        crate::device::testing::run_cases(&cases());
    }
}
