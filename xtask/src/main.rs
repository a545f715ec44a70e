//! `cargo xtask`: the gate (`ci`), the house rules (`tidy`) and the device kernels (`kernels`) of flashd.

mod ci;
mod commands;
mod kernels;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};

/// Build chores of flashd.
#[derive(Parser)]
#[command(name = "cargo xtask", disable_help_subcommand = true)]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run the gate: format, lints, house rules, tests, documented commands, client tests.
    Ci(ci::CiArgs),
    /// Check the house rules that a compiler does not know.
    Tidy,
    /// Build the device kernels and print what each needs.
    Kernels(kernels::KernelsArgs),
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<bool> {
    let root = repository_root()?;
    match args.task {
        Task::Ci(options) => ci::run(&root, &options),
        Task::Tidy => tidy::run(&root),
        Task::Kernels(options) => kernels::run(&root, &options),
    }
}

fn repository_root() -> anyhow::Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(here.parent().context("xtask lies in the repository")?.to_path_buf())
}
