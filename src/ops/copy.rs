//! Copies between places in device memory: whole KV blocks, and slots' rings to and from checkpoints.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::batch::home;
use crate::ops::case::data::{Noise, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};

/// Threads of a block.
const N_THREADS: u32 = 256;
/// Bytes that one block copies.
const PART_BYTES: u64 = 64 * 1024;

/// One copy; source and destination must not overlap, nor may any destination overlap another copy's source or destination.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct CopyItem {
    /// Address to read, a multiple of 4.
    pub src: u64,
    /// Address to write, a multiple of 4.
    pub dst: u64,
    /// Bytes, a multiple of 4.
    pub n_bytes: u64,
}

const _: () = assert!(size_of::<CopyItem>() == 24);

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct CopyArgs {
    /// The copies.
    pub items: u64, // [n] CopyItem
    /// Copies.
    pub n: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<CopyArgs>() == 16);

/// Runs the copies, the longest of which has `max_bytes` bytes.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &CopyArgs, max_bytes: u64) -> Result<(), DeviceError> {
    if args.n == 0 || max_bytes == 0 {
        return Ok(());
    }
    let n_parts = u32::try_from(max_bytes.div_ceil(PART_BYTES)).unwrap_or(u32::MAX);
    device.launch(device.kernel("copy")?, [n_parts, args.n, 1], N_THREADS, args)
}

/// The copies on the host: `place` finds an address in the bytes of all memory.
pub fn reference(items: &[CopyItem], memory: &mut [u8], place: impl Fn(u64) -> usize) {
    for item in items {
        let from = place(item.src);
        memory.copy_within(from..from + item.n_bytes as usize, place(item.dst));
    }
}

/// Sources, destinations and bytes of a case.
type Copies = &'static [(u64, u64, u64)];

/// The kernel's cases: nothing, one word, more than a part, addresses that fit 4 bytes only.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    let lists: [(&str, Copies); 4] = [
        ("none", &[]),
        ("empty, words, sixteens", &[(0, 512, 0), (0, 512, 4), (16, 528, 16), (64, 576, 60)]),
        ("off sixteen", &[(4, 1024, 32), (32, 2052, 64), (8, 4104, 1000)]),
        ("more than a part", &[(0, 300_000, 65_552), (70_000, 400_000, 131_072), (36, 600_020, 70_004)]),
    ];
    let case = |(name, list): (&'static str, Copies)| OpCase::new("copy", name, move |device| check(device, list));
    lists.map(case).into()
}

fn check(device: &Device, list: Copies) -> Result<Deviation, CaseError> {
    let mut memory: Vec<u8> = (0..800_000).map(|i| Noise::new(i / 8).next_u64() as u8 ^ i as u8).collect();
    let buffer = upload(device, &memory)?;
    let base = buffer.address();
    let item = |&(src, dst, n_bytes): &(u64, u64, u64)| CopyItem { src: base + src, dst: base + dst, n_bytes };
    let items: Vec<CopyItem> = list.iter().map(item).collect();
    let on_device = upload(device, &items)?;
    let args = CopyArgs { items: on_device.address(), n: items.len() as u32, pad: 0 };
    launch(device, &args, list.iter().map(|item| item.2).max().unwrap_or(0))?;
    reference(&items, &mut memory, |address| (address - base) as usize);
    Ok(Deviation::exact(&home::<u8>(device, &buffer)?, &memory))
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_pass() {
        crate::device::testing::run_cases(&super::cases());
    }
}
