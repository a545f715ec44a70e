//! `flashd selftest`: whether a device's kernels compute what they should.

use std::io::{IsTerminal, Write};
use std::time::Instant;

use anyhow::{bail, ensure};
use clap::ValueEnum;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use crate::config;
use crate::device::check::{CHECKS, CheckError};
use crate::device::{Device, DeviceError, DeviceKind, SimWave};
use crate::ops::case::{self, CaseError, Deviation, OpCase};

/// What to test.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum SelftestCommand {
    /// Run every kernel on shapes and data that are hard for it; fails when a result is outside its limit
    Ops(OpsArgs),
}

/// Flags of `flashd selftest ops`.
#[derive(Clone, Debug, clap::Args)]
pub struct OpsArgs {
    /// Which kind of device
    #[arg(long)]
    pub device: KernelDevice,
    /// Which one of them
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub ordinal: usize,
    /// Only the cases of this op, such as `linear`, or `device` for the checks of the device itself; may be repeated
    #[arg(long, value_name = "NAME")]
    pub op: Vec<String>,
    /// Print only what is wrong, and the sums
    #[arg(long, short)]
    pub quiet: bool,
}

/// Devices that run kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KernelDevice {
    /// NVIDIA GPUs.
    Cuda,
    /// AMD GPUs.
    Hip,
    /// The simulator, with waves of 32 and then of 64 lanes.
    Sim,
}

/// The name under which the checks of the device itself are listed.
const DEVICE_CHECKS: &str = "device";

/// One line of the table.
struct Row {
    op: String,
    case: String,
    /// Deviation, or what went wrong.
    result: Result<Deviation, String>,
    ms: f64,
}

/// What ended a run early.
struct Ended {
    rows: Vec<Row>,
    lost: Option<DeviceError>,
}

/// Runs the command.
///
/// # Errors
/// The device can't be opened or is lost, or a case fails.
pub fn run(command: &SelftestCommand) -> anyhow::Result<()> {
    match command {
        SelftestCommand::Ops(args) => ops(args),
    }
}

fn ops(args: &OpsArgs) -> anyhow::Result<()> {
    let cases = select(&args.op)?;
    let code = config::code_objects();
    let (kind, waves) = match args.device {
        KernelDevice::Cuda => (DeviceKind::Cuda, &[SimWave::W32][..]),
        KernelDevice::Hip => (DeviceKind::Hip, &[SimWave::W64][..]),
        KernelDevice::Sim => (DeviceKind::Sim, &[SimWave::W32, SimWave::W64][..]),
    };
    let (mut n_cases, mut n_failed) = (0, 0);
    for wave in waves {
        let device = Device::open(kind, args.ordinal, &code.clone().with_sim_wave(*wave))?;
        let ended = run_all(&device, &cases);
        print(&device, &ended.rows, args.quiet)?;
        n_cases += ended.rows.len();
        n_failed += ended.rows.iter().filter(|row| !row.is_ok()).count();
        if let Some(lost) = ended.lost {
            return Err(lost.into());
        }
    }
    writeln!(std::io::stdout(), "{} passed, {n_failed} failed", n_cases - n_failed)?;
    if n_failed > 0 {
        bail!("{n_failed} of {n_cases} cases failed: see the table");
    }
    Ok(())
}

/// The cases of the ops asked for; of all when none is.
fn select(ops: &[String]) -> anyhow::Result<Vec<OpCase>> {
    let mut cases: Vec<OpCase> = CHECKS
        .into_iter()
        .map(|(name, check)| {
            OpCase::new(DEVICE_CHECKS, name, move |device| match check(device) {
                Ok(()) => Ok(Deviation { worst: 0.0, limit: 0.0 }),
                Err(CheckError::Device(error)) => Err(error.into()),
                Err(CheckError::Wrong(what)) => Err(CaseError::Rule(what)),
            })
        })
        .collect();
    cases.extend(case::all());
    let mut known: Vec<&str> = cases.iter().map(|case| case.op).collect();
    known.dedup();
    for op in ops {
        ensure!(known.contains(&op.as_str()), "--op {op}: no such op; there are {}", known.join(", "));
    }
    cases.retain(|case| ops.is_empty() || ops.iter().any(|op| op == case.op));
    Ok(cases)
}

/// Runs the cases until the end, or until the device is lost: then no later result would mean anything.
fn run_all(device: &Device, cases: &[OpCase]) -> Ended {
    let mut rows = Vec::new();
    for case in cases {
        let start = Instant::now();
        let result = (case.run)(device).map_err(|error| error.to_string());
        let ms = start.elapsed().as_secs_f64() * 1e3;
        rows.push(Row { op: case.op.to_owned(), case: case.name.clone(), result, ms });
        if let Some(lost) = device.lost() {
            return Ended { rows, lost: Some(lost) };
        }
    }
    Ended { rows, lost: None }
}

impl Row {
    fn is_ok(&self) -> bool {
        self.result.as_ref().is_ok_and(|deviation| deviation.is_ok())
    }

    /// Worst deviation, limit, and whether it is right.
    fn cells(&self) -> [String; 3] {
        match &self.result {
            Ok(deviation) if deviation.limit == 0.0 && deviation.worst == 0.0 => ["0".into(), "0".into(), "ok".into()],
            Ok(deviation) => {
                let mark = if deviation.is_ok() { "ok" } else { "WRONG" };
                [format!("{:.2e}", deviation.worst), format!("{:.2e}", deviation.limit), mark.into()]
            }
            Err(what) => ["".into(), "".into(), format!("FAILED: {what}")],
        }
    }
}

fn print(device: &Device, rows: &[Row], quiet: bool) -> anyhow::Result<()> {
    let info = device.info();
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{} ({}): {}, waves of {}, {} multiprocessors, {:.1} GiB",
        device.label(),
        info.name,
        info.arch,
        info.wave,
        info.n_multiprocessors,
        info.memory_bytes as f64 / f64::from(1 << 30),
    )?;
    let shown: Vec<&Row> = rows.iter().filter(|row| !quiet || !row.is_ok()).collect();
    if shown.is_empty() {
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_content_arrangement(ContentArrangement::Dynamic);
    if !std::io::stdout().is_terminal() {
        table.set_width(140);
    }
    table.set_header(["op", "case", "worst", "limit", "", "ms"]);
    for row in shown {
        let [worst, limit, mark] = row.cells();
        table.add_row([row.op.clone(), row.case.clone(), worst, limit, mark, format!("{:.1}", row.ms)]);
    }
    for idx in [2, 3, 5] {
        if let Some(column) = table.column_mut(idx) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    writeln!(out, "{table}")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_op_is_refused_with_those_there_are() {
        let text = select(&["lineer".to_owned()]).err().unwrap().to_string();
        assert!(text.contains("lineer") && text.contains("device"), "{text}");
    }

    #[test]
    fn ops_select_their_cases() {
        let cases = select(&[DEVICE_CHECKS.to_owned()]).unwrap();
        assert_eq!(cases.len(), CHECKS.len());
        assert_eq!(select(&[]).unwrap().len(), CHECKS.len() + case::all().len());
    }

    #[test]
    fn a_result_outside_its_limit_is_wrong() {
        let row = |result| Row { op: "x".to_owned(), case: "y".to_owned(), result, ms: 0.0 };
        assert!(row(Ok(Deviation { worst: 1e-3, limit: 1e-3 })).is_ok());
        for wrong in [
            row(Ok(Deviation { worst: 1.1e-3, limit: 1e-3 })),
            row(Ok(Deviation { worst: f64::NAN, limit: 1e-3 })),
            row(Err("lost".to_owned())),
        ] {
            assert!(!wrong.is_ok());
            assert_ne!(wrong.cells()[2], "ok");
        }
    }
}
