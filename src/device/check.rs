//! Checks of a device itself: memory, copies, events, graphs; run as tests and by `flashd selftest ops` on real hardware.

use super::{Device, DeviceError};

/// Bytes of a copy that passes through the staging memory more than once around, with an odd end.
const LARGE_BYTES: usize = (24 << 20) + 12_345;

/// Small uploads in a row, each its own.
const N_SMALL: usize = 3000;

/// A device that does not do what it should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    /// A call failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A call returned something else.
    #[error("{0}")]
    Wrong(String),
}

/// One check, by name.
pub type Check = (&'static str, fn(&Device) -> Result<(), CheckError>);

/// All checks. They need no kernel.
pub const CHECKS: [Check; 9] = [
    ("memory is aligned, counted and given back", memory),
    ("large copies keep every byte", large_copies),
    ("many small uploads keep their order", small_uploads),
    ("fills and copies touch their ranges only", ranges),
    ("pinned memory carries both ways", pinned),
    ("wrong ranges and foreign handles are refused", refusals),
    ("events time the stream", events),
    ("graphs replay what was recorded", graphs),
    ("a recording that fails leaves the device usable", failed_recordings),
];

fn memory(device: &Device) -> Result<(), CheckError> {
    let before = device.memory()?;
    expect("memory in all", before.total_bytes, device.info().memory_bytes)?;
    let buffers = (0..4).map(|idx| device.alloc(idx * 1000)).collect::<Result<Vec<_>, _>>()?;
    for (idx, buffer) in buffers.iter().enumerate() {
        expect("bytes", buffer.n_bytes(), idx * 1000)?;
        expect("address modulo 256", buffer.address() % 256, 0)?;
        expect("null addresses", buffer.address() == 0, false)?;
    }
    let want_bytes = usize::try_from(before.total_bytes).unwrap_or(usize::MAX).saturating_mul(2);
    match device.alloc(want_bytes) {
        Err(DeviceError::OutOfMemory { want_bytes: told, .. }) => expect("bytes wanted", told, want_bytes as u64)?,
        other => return Err(CheckError::Wrong(format!("{want_bytes} bytes of memory: {other:?}"))),
    }
    // The device goes on after it.
    device.alloc(1 << 20)?;
    Ok(())
}

fn large_copies(device: &Device) -> Result<(), CheckError> {
    let bytes = pattern(LARGE_BYTES, 1);
    let buffer = device.alloc(LARGE_BYTES + 3)?;
    device.upload(&buffer, 3, &bytes)?;
    let mut home = vec![0; LARGE_BYTES];
    device.download(&buffer, 3, &mut home)?;
    expect_equal("a large copy", &home, &bytes)
}

fn small_uploads(device: &Device) -> Result<(), CheckError> {
    let n_bytes = 5000;
    let buffer = device.alloc(N_SMALL * n_bytes)?;
    let all = pattern(N_SMALL * n_bytes, 2);
    let mut source = vec![0; n_bytes];
    for idx in 0..N_SMALL {
        // The source is written again at once, as upload allows.
        source.copy_from_slice(&all[idx * n_bytes..(idx + 1) * n_bytes]);
        device.upload(&buffer, idx * n_bytes, &source)?;
    }
    let mut home = vec![0; all.len()];
    device.download(&buffer, 0, &mut home)?;
    expect_equal("many uploads", &home, &all)?;
    for byte in 0..100 {
        device.upload(&buffer, 7, &[byte])?;
    }
    device.download(&buffer, 7, &mut home[..1])?;
    expect("the last upload", home[0], 99)
}

fn ranges(device: &Device) -> Result<(), CheckError> {
    let buffer = device.alloc(64)?;
    device.fill(&buffer, 0, 64, 0xA5)?;
    device.fill(&buffer, 3, 5, 0)?;
    device.upload(&buffer, 8, &[1, 2, 3])?;
    device.copy(&buffer, 20, &buffer, 8..11)?;
    device.fill(&buffer, 64, 0, 1)?;
    device.upload(&buffer, 64, &[])?;
    device.copy(&buffer, 64, &buffer, 0..0)?;
    let mut want = [0xA5; 64];
    want[3..8].fill(0);
    want[8..11].copy_from_slice(&[1, 2, 3]);
    want[20..23].copy_from_slice(&[1, 2, 3]);
    let mut home = [0; 64];
    device.download(&buffer, 0, &mut home)?;
    expect_equal("ranges", &home, &want)
}

fn pinned(device: &Device) -> Result<(), CheckError> {
    let buffer = device.alloc(1 << 20)?;
    let mut source = device.alloc_pinned(1 << 20)?;
    let mut target = device.alloc_pinned(1 << 20)?;
    expect("new pinned memory", target.bytes()?.iter().all(|byte| *byte == 0), true)?;
    for round in 0..4 {
        let bytes = pattern(1 << 20, 10 + round);
        source.bytes_mut()?.copy_from_slice(&bytes);
        device.upload_pinned(&buffer, 0, &mut source, 0..1 << 20)?;
        device.download_pinned(&buffer, 100..1 << 20, &mut target)?;
        expect_equal("pinned copies", &target.bytes()?[..(1 << 20) - 100], &bytes[100..])?;
    }
    Ok(())
}

fn refusals(device: &Device) -> Result<(), CheckError> {
    let buffer = device.alloc(16)?;
    let mut pinned = device.alloc_pinned(16)?;
    let mut home = [0; 16];
    let results = [
        ("upload past the end", device.upload(&buffer, 1, &[0; 16])),
        ("upload far past the end", device.upload(&buffer, usize::MAX, &[0])),
        ("download past the end", device.download(&buffer, 16, &mut home[..1])),
        ("fill past the end", device.fill(&buffer, 0, 17, 0)),
        ("copy past the end", device.copy(&buffer, 8, &buffer, 0..9)),
        ("overlapping copy", device.copy(&buffer, 1, &buffer, 0..2)),
        ("pinned past the end", device.upload_pinned(&buffer, 0, &mut pinned, 10..17)),
        ("pinned past the buffer", device.download_pinned(&buffer, 10..17, &mut pinned)),
    ];
    for (what, result) in results {
        if !matches!(result, Err(DeviceError::BadArgument { .. })) {
            return Err(CheckError::Wrong(format!("{what}: {result:?}")));
        }
    }
    match device.kernel("no_such_kernel") {
        Err(DeviceError::KernelMissing { .. }) => Ok(()),
        other => Err(CheckError::Wrong(format!("no_such_kernel: {other:?}"))),
    }
}

fn events(device: &Device) -> Result<(), CheckError> {
    let buffer = device.alloc(1 << 20)?;
    let start = device.record()?;
    device.fill(&buffer, 0, 1 << 20, 1)?;
    let end = device.record()?;
    let ms = start.elapsed_ms(&end)?;
    expect("whether time passes forwards", ms.is_finite() && ms >= 0.0, true)
}

fn graphs(device: &Device) -> Result<(), CheckError> {
    let source = device.alloc(256)?;
    let target = device.alloc(256)?;
    device.fill(&source, 0, 256, 1)?;
    device.fill(&target, 0, 256, 7)?;
    let graph = device.capture(|| {
        device.copy(&target, 0, &source, 0..128)?;
        device.fill(&target, 64, 8, 9)
    })?;
    let mut home = [0; 256];
    device.download(&target, 0, &mut home)?;
    expect("a recording runs nothing", home.iter().all(|byte| *byte == 7), true)?;
    for byte in 2..5 {
        device.fill(&source, 0, 256, byte)?;
        graph.launch()?;
        device.download(&target, 0, &mut home)?;
        let mut want = [7; 256];
        want[..128].fill(byte);
        want[64..72].fill(9);
        expect_equal("a replay", &home, &want)?;
    }
    Ok(())
}

fn failed_recordings(device: &Device) -> Result<(), CheckError> {
    let buffer = device.alloc(64)?;
    let refused = device.capture(|| device.upload(&buffer, 0, &[1]));
    if !matches!(refused, Err(DeviceError::BadArgument { .. })) {
        return Err(CheckError::Wrong(format!("an upload in a recording: {refused:?}")));
    }
    let inner = device.capture(|| device.capture(|| Ok(())).map(drop));
    if !matches!(inner, Err(DeviceError::BadArgument { .. })) {
        return Err(CheckError::Wrong(format!("a recording in a recording: {inner:?}")));
    }
    let dropped = device.alloc(64)?;
    let graph = device.capture(|| {
        device.fill(&buffer, 0, 64, 3)?;
        // Buffers that have nothing to do with the graph may go while it is recorded.
        drop(dropped);
        Ok(())
    })?;
    graph.launch()?;
    drop(graph);
    let mut home = [0; 64];
    device.download(&buffer, 0, &mut home)?;
    expect_equal("after recordings", &home, &[3; 64])
}

fn pattern(n_bytes: usize, seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(n_bytes).collect()
}

fn expect<T: PartialEq + std::fmt::Debug>(what: &str, got: T, want: T) -> Result<(), CheckError> {
    if got == want {
        return Ok(());
    }
    Err(CheckError::Wrong(format!("{what}: got {got:?}, want {want:?}")))
}

fn expect_equal(what: &str, got: &[u8], want: &[u8]) -> Result<(), CheckError> {
    expect(&format!("{what}: bytes"), got.len(), want.len())?;
    match got.iter().zip(want).position(|(got, want)| got != want) {
        None => Ok(()),
        Some(at) => {
            Err(CheckError::Wrong(format!("{what}: byte {at} of {}: got {}, want {}", got.len(), got[at], want[at])))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::testing::{code_objects, for_each_device, sim};
    use crate::device::{CodeObjects, DeviceKind, SimWave};

    #[test]
    fn every_device_passes_every_check() {
        for_each_device(|device| {
            for (name, check) in CHECKS {
                check(device).unwrap_or_else(|error| panic!("{} {name}: {error}", device.label()));
            }
        });
    }

    #[test]
    fn handles_of_another_device_are_refused() {
        let (one, other) = (sim(SimWave::W32), sim(SimWave::W64));
        let buffer = other.alloc(16).unwrap();
        let mut pinned = other.alloc_pinned(16).unwrap();
        let own = one.alloc(16).unwrap();
        for result in [
            one.upload(&buffer, 0, &[1]),
            one.copy(&own, 0, &buffer, 0..1),
            one.upload_pinned(&own, 0, &mut pinned, 0..1),
            one.record().unwrap().elapsed_ms(&other.record().unwrap()).map(drop),
        ] {
            assert!(matches!(result, Err(DeviceError::BadArgument { .. })), "{result:?}");
        }
    }

    #[test]
    fn other_threads_may_not_join_a_recording() {
        let device = sim(SimWave::W64);
        let buffer = device.alloc(16).unwrap();
        let graph = device.capture(|| {
            let theirs = std::thread::scope(|scope| scope.spawn(|| device.fill(&buffer, 0, 16, 1)).join().unwrap());
            assert!(matches!(theirs, Err(DeviceError::BadArgument { .. })), "{theirs:?}");
            device.fill(&buffer, 0, 16, 2)
        });
        graph.unwrap().launch().unwrap();
        let mut home = [0; 16];
        device.download(&buffer, 0, &mut home).unwrap();
        assert_eq!(home, [2; 16]);
    }

    #[test]
    fn a_panic_in_a_recording_ends_it() {
        let device = sim(SimWave::W32);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            device.capture(|| panic!("in the recording")).map(drop)
        }));
        assert!(panicked.is_err());
        graphs(&device).unwrap();
    }

    #[test]
    fn a_device_is_used_from_several_threads() {
        let device = sim(SimWave::W32);
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let device = device.clone();
                scope.spawn(move || {
                    let bytes = pattern(100_000, seed);
                    let buffer = device.alloc(bytes.len()).unwrap();
                    for _ in 0..10 {
                        device.upload(&buffer, 0, &bytes).unwrap();
                        let mut home = vec![0; bytes.len()];
                        device.download(&buffer, 0, &mut home).unwrap();
                        assert!(home == bytes);
                    }
                });
            }
        });
    }

    #[test]
    fn arguments_of_another_size_are_refused() {
        for_each_device(|device| {
            let kernel = device.kernel("copy").unwrap();
            let size = size_of::<crate::ops::copy::CopyArgs>();
            assert_ne!(size, size_of::<[u64; 3]>());
            let result = device.launch(kernel, [1, 1, 1], 64, &[0_u64; 3]);
            let is_refused = matches!(result, Err(DeviceError::Launch { .. } | DeviceError::BadArgument { .. }));
            assert!(is_refused, "{result:?}");
            assert_eq!(device.lost(), None);
            device.synchronize().unwrap();
        });
    }

    #[test]
    fn a_grid_or_block_that_no_device_takes_is_refused() {
        let (device, other) = (sim(SimWave::W32), sim(SimWave::W64));
        let kernel = device.kernel("copy").unwrap();
        let args = crate::ops::copy::CopyArgs::default();
        let launches = [
            device.launch(kernel, [0, 1, 1], 64, &args),
            device.launch(kernel, [1, 1, 1], 0, &args),
            device.launch(kernel, [1, 1, 1], 1025, &args),
            other.launch(kernel, [1, 1, 1], 64, &args),
        ];
        for result in launches {
            assert!(matches!(result, Err(DeviceError::BadArgument { .. })), "{result:?}");
        }
    }

    #[test]
    fn a_device_that_is_not_there_is_refused() {
        let error = Device::open(DeviceKind::Sim, 7, &code_objects()).unwrap_err();
        assert!(matches!(error, DeviceError::NoDevice { .. }), "{error}");
        assert!(error.to_string().contains("device 7"), "{error}");
    }

    #[test]
    fn a_damaged_code_object_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let code = code_objects();
        let library = code.sim_library().unwrap();
        for name in ["sim", "sim32"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        // A link and no copy: kernels of a second engine in this process would take the first one's state for theirs.
        std::os::unix::fs::symlink(library, folder.path().join("sim/libamdhip64.so")).unwrap();
        let path = folder.path().join("sim32/flashd.so");
        std::fs::write(&path, b"\x7fELF but cut short, long enough for a header of sixty-four bytes....").unwrap();
        let code = CodeObjects { folders: vec![folder.path().to_owned()], ..code };
        let error = Device::open(DeviceKind::Sim, 0, &code).unwrap_err();
        assert!(matches!(&error, DeviceError::CodeRefused { path: told, .. } if *told == path), "{error}");
    }
}
