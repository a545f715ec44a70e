//! `flashd synth`: writes a synthetic checkpoint for any supported config.json.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};

use crate::checkpoint::synth::{self, SynthPlan};
use crate::model::inventory;
use crate::model::shape::ModelShape;

/// Write a synthetic checkpoint: every weight a formula of seed, name and index.
#[derive(Clone, Debug, clap::Args)]
pub struct SynthArgs {
    /// The config.json that gives the shape; it is copied into the checkpoint.
    #[arg(long, value_name = "CONFIG.json")]
    pub config: PathBuf,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Directory to make; it must not exist yet (or be empty).
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Write real headers and lengths but no data: the files have holes and take next to no room on disk.
    #[arg(long)]
    pub sparse: bool,
}

/// Runs the command.
///
/// # Errors
/// The config is refused, or a file can't be written; nothing is left behind then.
pub fn run(args: &SynthArgs) -> anyhow::Result<()> {
    let config_json = std::fs::read(&args.config).with_context(|| args.config.display().to_string())?;
    let shape = ModelShape::from_json(&config_json)?;
    let shards = inventory::shards(&shape);
    let total_bytes = shards.iter().flatten().map(|spec| spec.n_bytes() as u64).sum();
    let bar = bytes_bar(total_bytes);
    let plan = SynthPlan {
        config_json: &config_json,
        shards: &shards,
        seed: args.seed,
        n_experts: shape.n_routed_experts,
        is_sparse: args.sparse,
    };
    let written = synth::write(&args.out, &plan, &|n_bytes| bar.inc(n_bytes))?;
    bar.finish_and_clear();
    writeln!(
        std::io::stdout(),
        "{}: {} tensors, {} bytes in {} shards{}",
        args.out.display(),
        written.n_tensors,
        written.tensor_bytes,
        written.n_shards,
        if args.sparse { " (sparse: data are holes)" } else { "" }
    )?;
    Ok(())
}

/// A progress bar over bytes; it draws nothing where stderr isn't a terminal.
pub(super) fn bytes_bar(total_bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(total_bytes);
    if let Ok(style) =
        ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta} {msg}")
    {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}
