//! Faults of a device, injected into the simulator by its environment: the command ends soon, says why, and with code 3.

// Panicking is how a test fails, in its helpers too.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Nothing here takes long; a command that hangs must end.
const LIMIT: Duration = Duration::from_secs(60);

/// Exit code of a device that failed or is missing.
const DEVICE: Option<i32> = Some(3);

/// `flashd selftest ops --device sim` with one variable of the simulator.
fn selftest(name: &str, value: &str, args: &[&str]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_flashd"))
        .args(["selftest", "ops", "--device", "sim"])
        .args(args)
        .env(name, value)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let start = Instant::now();
    // The output is small enough for the pipes.
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!("{name}={value}: still running after {LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn assert_lost(output: &Output) {
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), DEVICE, "{stderr}");
    assert!(stderr.contains("is lost") && stderr.contains("hip"), "{stderr}");
}

#[test]
fn a_launch_that_fails_ends_the_run() {
    assert_lost(&selftest("FLASHD_SIM_FAIL_LAUNCH", "2", &["--op", "copy"]));
}

#[test]
fn a_lost_device_ends_the_run() {
    let output = selftest("FLASHD_SIM_LOSE_DEVICE", "1", &["--op", "copy"]);
    assert_lost(&output);
    // The cases after the loss were not run.
    assert_eq!(text(&output.stdout).matches("FAILED").count(), 1, "{}", text(&output.stdout));
}

#[test]
fn no_device_is_told_with_the_nodes() {
    let output = selftest("FLASHD_SIM_DEVICES", "0", &[]);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), DEVICE, "{stderr}");
    assert!(stderr.contains("/dev/"), "{stderr}");
}

#[test]
fn a_full_device_fails_cases_and_goes_on() {
    let output = selftest("FLASHD_SIM_MEMORY_BYTES", "3000000", &["--op", "device"]);
    let stdout = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let words: Vec<&str> = stdout.split_whitespace().collect();
    let stdout = words.join(" ");
    assert!(stdout.contains("FAILED") && stdout.contains("out of device memory"), "{stdout}");
    assert!(stdout.contains("ok"), "{stdout}");
}

#[test]
fn missing_kernels_are_told_with_the_command_that_makes_them() {
    let folder = tempfile::tempdir().unwrap();
    let empty: &Path = folder.path();
    let output = selftest("FLASHD_KERNELS", empty.to_str().unwrap(), &["--op", "no-such-op"]);
    // Wrong flags are told before the device is looked for.
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no such op"));
}
