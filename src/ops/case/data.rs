//! What device cases are made of: numbers without pattern, buffers filled from slices, and slices read back.

use bytemuck::Pod;

use super::CaseError;
use crate::device::{Buffer, Device, DeviceError};
use crate::tensor::format::f32_to_bf16;

/// A fixed generator (splitmix64).
#[derive(Clone, Debug)]
pub struct Noise(u64);

impl Noise {
    /// The sequence of a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u32) -> u32 {
        (self.next_u64() % u64::from(end.max(1))) as u32
    }

    /// A number of -1 .. 1.
    pub fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// `n` numbers of -1 .. 1.
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }

    /// `n` numbers of -1 .. 1, as the bits of BF16.
    pub fn bf16s(&mut self, n: usize) -> Vec<u16> {
        (0..n).map(|_| f32_to_bf16(self.unit())).collect()
    }

    /// `n` bytes.
    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next_u64() as u8).collect()
    }
}

/// A buffer that holds the slice.
///
/// # Errors
/// When the device has no room or is lost.
pub fn upload<T: Pod>(device: &Device, values: &[T]) -> Result<Buffer, DeviceError> {
    let buffer = device.alloc(size_of_val(values))?;
    device.upload(&buffer, 0, bytemuck::cast_slice(values))?;
    Ok(buffer)
}

/// A buffer of bytes 0xFF, which are NaN in F32 and BF16: what a kernel does not write stays so, and what it should not read shows.
///
/// # Errors
/// When the device has no room or is lost.
pub fn nan_buffer(device: &Device, n_bytes: usize) -> Result<Buffer, DeviceError> {
    let buffer = device.alloc(n_bytes)?;
    if n_bytes > 0 {
        device.fill(&buffer, 0, n_bytes, 0xFF)?;
    }
    Ok(buffer)
}

/// The first `n` values of a buffer; waits for the device.
///
/// # Errors
/// When the buffer is shorter or the device is lost.
pub fn download<T: Pod>(device: &Device, buffer: &Buffer, n: usize) -> Result<Vec<T>, DeviceError> {
    let mut values = vec![T::zeroed(); n];
    device.download(buffer, 0, bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}

/// Rows of BF16 in a wider buffer: `n` numbers of -1 .. 1 at the start of each of `n_rows` rows, NaN in the rest of `n_all_rows` rows.
pub fn bf16_rows(noise: &mut Noise, [n_rows, n_all_rows]: [usize; 2], n: usize, stride: usize) -> Vec<u16> {
    let mut all = vec![u16::MAX; n_all_rows * stride];
    for row in all.chunks_exact_mut(stride.max(1)).take(n_rows) {
        row[..n].copy_from_slice(&noise.bf16s(n));
    }
    all
}

/// Bits, for comparison: equal floats may differ in the sign of a zero, and a NaN equals nothing.
#[must_use]
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The rule that two results are the same to the bit.
///
/// # Errors
/// The first place where they differ.
pub fn same_bits(what: &str, got: &[f32], want: &[f32]) -> Result<(), CaseError> {
    let differs = |i: &usize| got.get(*i).map(|v| v.to_bits()) != want.get(*i).map(|v| v.to_bits());
    match (0..got.len().max(want.len())).find(differs) {
        None => Ok(()),
        Some(i) => Err(CaseError::Rule(format!("{what}: element {i}: {:?}, want {:?}", got.get(i), want.get(i)))),
    }
}
