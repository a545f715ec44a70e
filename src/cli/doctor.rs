//! `flashd doctor`: what this machine can run, and why not.

use std::io::{IsTerminal, Write};
use std::path::Path;

use comfy_table::{ContentArrangement, Table, presets};

use super::{forms, machine};
use crate::checkpoint::Checkpoint;
use crate::config;
use crate::device::cpu::Cpu;
use crate::model::shape::ModelShape;
use crate::tokenizer::Tokenizer;

/// Flags of `flashd doctor`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct DoctorArgs {
    /// Checkpoint folder to check as well, every tensor's form included [default: demo]
    #[arg(short, long)]
    pub model: Option<String>,
    /// Read every FP8 code and scale of the checkpoint, about a tenth of it, in search of NaN; `serve` does so at each start
    #[arg(long)]
    pub full: bool,
}

/// What a check found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ok,
    /// Works, with something to know.
    Note,
    /// Not usable here; nothing that this build needs.
    No,
    /// This build can't serve with it.
    Fault,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Check {
    name: &'static str,
    state: State,
    finding: String,
}

/// Prints the table.
///
/// # Errors
/// When something that this build needs to serve is missing or broken.
pub fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    let mut checks = vec![build(), cpu(), memory(), shared_memory(), open_files()];
    checks.push(hip());
    checks.push(cuda());
    checks.push(metal());
    let name = args.model.as_deref().unwrap_or(config::model::DEMO);
    checks.extend(model(name, args.full));
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_content_arrangement(ContentArrangement::Dynamic);
    if !std::io::stdout().is_terminal() {
        table.set_width(110);
    }
    table.set_header(["", "check", "finding"]);
    for check in &checks {
        table.add_row([mark(check.state), check.name, &check.finding]);
    }
    writeln!(std::io::stdout(), "{table}")?;
    let n_faults = checks.iter().filter(|check| check.state == State::Fault).count();
    anyhow::ensure!(n_faults == 0, "{n_faults} of {} checks failed: see the table", checks.len());
    writeln!(std::io::stdout(), "flashd serve --model {name} can run here, on the CPU.")?;
    Ok(())
}

const fn mark(state: State) -> &'static str {
    match state {
        State::Ok => "ok",
        State::Note => "note",
        State::No => "no",
        State::Fault => "FAULT",
    }
}

fn check(name: &'static str, state: State, finding: impl Into<String>) -> Check {
    Check { name, state, finding: finding.into() }
}

fn build() -> Check {
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    check(
        "flashd",
        State::Ok,
        format!("version {} for {os} on {arch}; devices in this build: cpu", env!("CARGO_PKG_VERSION")),
    )
}

fn cpu() -> Check {
    let name = machine::cpu_name().unwrap_or_else(|| "unknown processor".to_owned());
    match Cpu::detect() {
        Ok(cpu) => {
            let finding = format!("{name}; {} threads; {:?}", cpu.n_threads(), cpu.level().simd());
            check("cpu", State::Ok, finding)
        }
        Err(error) => check("cpu", State::Fault, format!("{name}: {error}")),
    }
}

fn memory() -> Check {
    match machine::memory() {
        Some(memory) => {
            let state = if memory.available_bytes < 1 << 30 { State::Note } else { State::Ok };
            let (total, available) = (gib(memory.total_bytes), gib(memory.available_bytes));
            check("memory", state, format!("{available} of {total} available to this process"))
        }
        None => check("memory", State::Note, "unknown: /proc/meminfo can't be read"),
    }
}

fn shared_memory() -> Check {
    match machine::shm_bytes() {
        Some(bytes) if bytes < 1 << 30 => {
            let finding = format!("/dev/shm has {}; offloading KV will want more (docker: --shm-size)", gib(bytes));
            check("shared memory", State::Note, finding)
        }
        Some(bytes) => check("shared memory", State::Ok, format!("/dev/shm has {}", gib(bytes))),
        None => check("shared memory", State::Note, "/dev/shm is not mounted; nothing in this build needs it"),
    }
}

fn open_files() -> Check {
    match machine::limit("Max open files") {
        Some(n) if n < 1024 => {
            check("open files", State::Note, format!("limit {n}: every connection takes one (ulimit -n 65536)"))
        }
        Some(n) => check("open files", State::Ok, format!("limit {n}")),
        None => check("open files", State::Ok, "no limit known"),
    }
}

fn hip() -> Check {
    let devices = [node(Path::new("/dev/kfd")), node(Path::new("/dev/dri"))];
    let library = library("libamdhip64.so");
    check("hip", State::No, format!("{}; {library}; this build has no HIP device yet", devices.join("; ")))
}

fn cuda() -> Check {
    let device = node(Path::new("/dev/nvidia0"));
    let libraries = [library("libcuda.so"), library("libnvrtc.so")];
    check("cuda", State::No, format!("{device}; {}; this build has no CUDA device yet", libraries.join("; ")))
}

fn metal() -> Check {
    let finding = if cfg!(target_os = "macos") { "this build has no Metal device yet" } else { "only on macOS" };
    check("metal", State::No, finding)
}

/// A device node, and whether this user may open it: a missing group shows up as "out of resources" much later.
fn node(path: &Path) -> String {
    let shown = path.display();
    match std::fs::metadata(path) {
        Err(_) => format!("{shown} is not there (no driver, or not passed to this container)"),
        Ok(meta) if meta.is_dir() => format!("{shown} is there"),
        Ok(_) => match std::fs::OpenOptions::new().read(true).write(true).open(path) {
            Ok(_) => format!("{shown} can be opened"),
            Err(error) => format!("{shown} can't be opened: {error} (groups video and render?)"),
        },
    }
}

fn library(stem: &str) -> String {
    match machine::find_library(&config::library_folders(), stem) {
        Some(path) => path.display().to_string(),
        None => format!("{stem} was not found"),
    }
}

fn model(name: &str, is_full: bool) -> Vec<Check> {
    let dir = match config::model::find(name) {
        Ok(dir) => dir,
        Err(error) => return vec![check("model", State::Fault, error.to_string())],
    };
    let mut checks = vec![check("model", State::Ok, dir.display().to_string())];
    checks.push(match checkpoint(&dir, is_full) {
        Ok(finding) => check("checkpoint", State::Ok, finding),
        Err(error) => check("checkpoint", State::Fault, super::describe(&error)),
    });
    checks.push(match Tokenizer::load(&dir) {
        Ok(tokenizer) => check("tokenizer", State::Ok, format!("{} ids", tokenizer.vocab_size())),
        Err(error) => check("tokenizer", State::Fault, error.to_string()),
    });
    checks
}

/// Opens the checkpoint and checks every shard's length and every tensor's form; with `is_full` the codes too.
fn checkpoint(dir: &Path, is_full: bool) -> anyhow::Result<String> {
    let checkpoint = Checkpoint::open(dir)?;
    let shape = ModelShape::from_json(checkpoint.config_json())?;
    let said = forms::check(&checkpoint, &shape, is_full)?;
    let mut finding = format!(
        "{} tensors in {} shards, {}; {} layers, {} experts, vocabulary {}, context {}",
        checkpoint.n_tensors(),
        checkpoint.shards().len(),
        gib(checkpoint.tensor_bytes()),
        shape.num_hidden_layers,
        shape.n_routed_experts,
        shape.vocab_size,
        shape.max_position_embeddings,
    );
    for line in &said {
        finding.push_str(&format!("; {line}"));
    }
    let available = machine::memory().map_or(u64::MAX, |memory| memory.available_bytes);
    if checkpoint.tensor_bytes() > available {
        finding.push_str(&format!(
            "; larger than the available memory ({}): it will be read again and again",
            gib(available)
        ));
    }
    Ok(finding)
}

fn gib(bytes: u64) -> String {
    if bytes < 1 << 30 {
        return format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20));
    }
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_model_has_no_fault() {
        let checks = model("demo", false);
        assert_eq!(checks.len(), 3);
        assert!(checks.iter().all(|check| check.state == State::Ok), "{checks:?}");
    }

    #[test]
    fn faults_say_what_is_wrong() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        let checks = model(dir.path().to_str().unwrap(), true);
        assert_eq!(checks[1].state, State::Fault);
        assert!(checks[1].finding.contains("safetensors"), "{checks:?}");
        assert_eq!(checks[2].state, State::Fault);
        assert_eq!(model("/no/such/folder", false)[0].state, State::Fault);
    }

    #[test]
    fn a_missing_node_says_so() {
        assert!(node(Path::new("/dev/no-such-device")).contains("not there"));
        assert!(node(Path::new("/dev/null")).contains("can be opened"));
    }

    #[test]
    fn sizes_are_readable() {
        assert_eq!(gib(64 << 20), "64 MiB");
        assert_eq!(gib(3 << 29), "1.5 GiB");
    }
}
