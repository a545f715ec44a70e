//! Reading device memory as fast as it can be read: what byte floors are measured with.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::data::{Noise, download, nan_buffer, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};

/// Threads of a block.
const N_THREADS: u32 = 256;
/// Blocks of a multiprocessor: as many as run at once.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct ReadArgs {
    /// What is read, at a multiple of 16.
    pub from: u64, // [n_bytes] u8
    /// A word of each block: the exclusive or of all words that it read.
    pub out: u64, // [n_blocks] u32
    /// Bytes, a multiple of 16.
    pub n_bytes: u64,
}

const _: () = assert!(size_of::<ReadArgs>() == 24);

/// Blocks that a launch has on a device.
#[must_use]
pub fn n_blocks(device: &Device) -> u32 {
    device.info().n_multiprocessors.max(1) * BLOCKS_PER_MULTIPROCESSOR
}

/// Reads the range once.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &ReadArgs) -> Result<(), DeviceError> {
    let ReadArgs { from, n_bytes, .. } = *args;
    assert!(from.is_multiple_of(16) && n_bytes.is_multiple_of(16), "read: from: {from:#x}, {n_bytes}, want 16s");
    device.launch(device.kernel("read")?, [n_blocks(device), 1, 1], N_THREADS, args)
}

/// The exclusive or of all words: that of the blocks' words, however many there are.
#[must_use]
pub fn reference(words: &[u32]) -> u32 {
    words.iter().fold(0, |all, word| all ^ word)
}

/// The kernel's cases: nothing, less than a block, odd numbers of pieces, more than all blocks take in one round.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let case = |n_bytes: usize| OpCase::new("read", format!("{n_bytes} bytes"), move |device| check(device, n_bytes));
    [0, 16, 48, 4096, 100_016, 3 << 20].map(case).into()
}

fn check(device: &Device, n_bytes: usize) -> Result<Deviation, CaseError> {
    let words: Vec<u32> = {
        let mut noise = Noise::new(5);
        (0..n_bytes / 4).map(|_| noise.next_u64() as u32).collect()
    };
    let from = upload(device, &words)?;
    let n_out = n_blocks(device) as usize;
    let out = nan_buffer(device, 4 * n_out)?;
    launch(device, &ReadArgs { from: from.address(), out: out.address(), n_bytes: n_bytes as u64 })?;
    let got = download::<u32>(device, &out, n_out)?;
    Ok(Deviation::exact(&[reference(&got)], &[reference(&words)]))
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_word_is_read_once() {
        crate::device::testing::run_cases(&super::cases());
    }
}
