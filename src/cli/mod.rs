//! The command line: one file a subcommand. Exit codes: see [`code`].

use std::ffi::OsString;
use std::io::ErrorKind;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::checkpoint::CheckpointError;
use crate::config::ConfigError;
use crate::config::args::ServeArgs;
use crate::device::DeviceError;
use crate::device::plan::PlanError;
use crate::engine::request::RejectReason;
use crate::model::bind::BindError;
use crate::model::runner::RunnerError;
use crate::model::shape::ShapeError;
use crate::tokenizer::TokenizerError;

pub mod bench;
pub mod chat;
pub mod complete;
pub mod debug;
pub mod doctor;
pub mod event_stream;
pub mod forms;
pub mod inspect;
pub mod interrupt;
pub mod machine;
pub mod places;
pub mod reply;
pub mod sampling;
pub mod selftest;
pub mod serve;
pub mod start;
pub mod synth;

use serve::{AddressError, EngineDied};
use start::MismatchedTokenizer;

/// What the process says with its exit code.
pub mod code {
    /// It did what was asked.
    pub const OK: u8 = 0;
    /// It began and failed; the message says how.
    pub const FAILED: u8 = 1;
    /// The command line, the settings file or the environment can't be used (clap uses 2 as well).
    pub const USAGE: u8 = 2;
    /// The device failed or is not there.
    pub const DEVICE: u8 = 3;
    /// The checkpoint is not there, damaged, or not this model's.
    pub const CHECKPOINT: u8 = 4;
    /// The address can't be listened on.
    pub const ADDRESS: u8 = 5;
}

/// Shown below the help of `flashd`.
const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  failed while running
  2  command line or settings can't be used
  3  device failed or missing
  4  checkpoint missing, damaged or not this model's
  5  address can't be listened on";

/// Serves one model, DeepSeek-V4-Flash
#[derive(Debug, Parser)]
#[command(name = "flashd", version, propagate_version = true, max_term_width = 110, after_help = EXIT_CODES)]
#[command(subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the model over HTTP, as OpenAI's API
    Serve(Box<ServeArgs>),
    /// Talk with the model at the terminal
    Chat(Box<chat::ChatArgs>),
    /// Answer one prompt and end
    Complete(Box<complete::CompleteArgs>),
    /// Write a synthetic checkpoint
    Synth(synth::SynthArgs),
    /// Print a checkpoint's tensors and bytes; write or verify checksums
    Inspect(inspect::InspectArgs),
    /// Measure a running server, or a device with synthetic weights
    Bench(Box<bench::BenchArgs>),
    /// Show what this machine can run, and why not
    Doctor(doctor::DoctorArgs),
    /// Run the kernels of a device against their references
    #[command(subcommand)]
    Selftest(selftest::SelftestCommand),
    /// Look at one part of the server: prompts, completions
    #[command(subcommand)]
    Debug(debug::DebugCommand),
}

/// Runs a command line (the program's name first) to its end.
#[must_use]
pub fn main(argv: impl IntoIterator<Item = OsString>) -> ExitCode {
    let command = match Cli::try_parse_from(argv) {
        Ok(cli) => cli.command,
        Err(error) => {
            // Help and version are "errors" that go to stdout and exit with 0; a closed pipe is no fault of theirs.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(code::USAGE));
        }
    };
    let result = match command {
        Command::Serve(args) => serve::run(*args),
        Command::Chat(args) => chat::run(&args),
        Command::Complete(args) => complete::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Selftest(command) => selftest::run(&command),
        Command::Debug(command) => debug::run(&command),
    };
    match result {
        Ok(()) => ExitCode::from(code::OK),
        Err(error) => ExitCode::from(report(&error)),
    }
}

/// Says what went wrong on standard error and returns the exit code. A reader that has closed the pipe wants no more.
fn report(error: &anyhow::Error) -> u8 {
    if error.chain().any(is_broken_pipe) {
        return code::OK;
    }
    // Nothing is left to do when stderr is closed too.
    let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("flashd: {}\n", describe(error)));
    exit_code(error)
}

/// The error and its causes in one line; many errors tell their cause themselves, and once is enough.
fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

fn is_broken_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}

/// The code of the first cause that has one.
fn exit_code(error: &anyhow::Error) -> u8 {
    error.chain().find_map(code_of).unwrap_or(code::FAILED)
}

fn code_of(error: &(dyn std::error::Error + 'static)) -> Option<u8> {
    if error.is::<ConfigError>() || error.is::<RejectReason>() {
        return Some(code::USAGE);
    }
    let is_runner = matches!(error.downcast_ref(), Some(RunnerError::Device(_) | RunnerError::Memory(_)));
    if error.is::<DeviceError>() || error.is::<PlanError>() || is_runner || error.is::<EngineDied>() {
        return Some(code::DEVICE);
    }
    if error.is::<AddressError>() {
        return Some(code::ADDRESS);
    }
    let is_checkpoint = error.is::<CheckpointError>()
        || error.is::<BindError>()
        || error.is::<ShapeError>()
        || error.is::<TokenizerError>()
        || error.is::<MismatchedTokenizer>();
    is_checkpoint.then_some(code::CHECKPOINT)
}

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn causes_have_codes_wherever_they_stand_in_the_chain() {
        let config = ConfigError::DemoNotFound { looked: Vec::new() };
        let device = DeviceError::Step { device: "cpu".to_owned(), reason: "x".to_owned() };
        let checkpoint = CheckpointError::NoWeights { dir: "d".into() };
        assert_eq!(exit_code(&anyhow::Error::from(config)), code::USAGE);
        assert_eq!(exit_code(&Err::<(), _>(device).context("step").unwrap_err()), code::DEVICE);
        let deep = Err::<(), _>(checkpoint).context("opening").context("starting").unwrap_err();
        assert_eq!(exit_code(&deep), code::CHECKPOINT);
        assert_eq!(exit_code(&anyhow::anyhow!("x")), code::FAILED);
    }

    #[test]
    fn a_cause_is_told_once() {
        let read = std::io::Error::other("no room");
        let error = CheckpointError::Io { path: "/m/config.json".into(), source: read };
        let error = anyhow::Error::from(error).context("loading");
        assert_eq!(describe(&error), "loading: /m/config.json: no room");
    }

    #[test]
    fn a_closed_pipe_is_success() {
        let error = anyhow::Error::from(std::io::Error::from(ErrorKind::BrokenPipe)).context("writing");
        assert_eq!(report(&error), code::OK);
    }
}
