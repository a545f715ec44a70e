//! Devices for tests: every device test runs on the simulator at both wave widths, and on CUDA where asked.

use std::path::Path;

use super::{CodeObjects, Device, DeviceKind, SimWave};

/// The environment variable that adds the first CUDA device.
const CUDA_VARIABLE: &str = "FLASHD_TEST_CUDA";

/// Where this build's kernels are.
pub fn code_objects() -> CodeObjects {
    CodeObjects::beside(std::env::current_exe().ok().as_deref().map(Path::new))
}

/// The simulator at one wave width. Without its files the test fails, naming the command that makes them.
pub fn sim(wave: SimWave) -> Device {
    Device::open(DeviceKind::Sim, 0, &code_objects().with_sim_wave(wave)).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs a test on sim32, on sim64, and on the first CUDA device when FLASHD_TEST_CUDA is set.
pub fn for_each_device(test: impl Fn(&Device)) {
    test(&sim(SimWave::W32));
    test(&sim(SimWave::W64));
    if std::env::var_os(CUDA_VARIABLE).is_some() {
        test(&Device::open(DeviceKind::Cuda, 0, &code_objects()).unwrap_or_else(|error| panic!("{error}")));
    }
}

/// Runs the cases of an op as a test does: each on each device.
pub fn run_cases(cases: &[crate::ops::case::OpCase]) {
    assert!(!cases.is_empty());
    for_each_device(|device| {
        for case in cases {
            let label = format!("{} on {}: {}", case.op, device.info().arch, case.name);
            let deviation = (case.run)(device).unwrap_or_else(|error| panic!("{label}: {error}"));
            assert!(deviation.is_ok(), "{label}: {} where {} is the limit", deviation.worst, deviation.limit);
        }
    });
}
