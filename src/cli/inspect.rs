//! `flashd inspect`: what a checkpoint holds and costs; its files' sums, written or verified.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use comfy_table::{CellAlignment, Table, presets};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::manifest::{self, Verdict};
use crate::checkpoint::spec::TensorSpec;
use crate::cli::forms;
use crate::cli::synth::bytes_bar;
use crate::model::cache::{BLOCK_TOKENS, CacheLayout, CacheShape, RowDims, RowFormat};
use crate::model::cost;
use crate::model::shape::ModelShape;

/// Show what a checkpoint holds: tensors, bytes by type and by part, bytes read for a decoded token.
#[derive(Clone, Debug, clap::Args)]
pub struct InspectArgs {
    /// The checkpoint's directory.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Write SHA-256 sums of the shards, config, index and tokenizer, as sha256sum does, to FILE or to stdout.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", conflicts_with = "verify")]
    pub sums: Option<PathBuf>,
    /// Check the files against sums in FILE; fails naming every bad file.
    #[arg(long, value_name = "FILE")]
    pub verify: Option<PathBuf>,
    /// Read every FP8 code and scale, about a tenth of a real checkpoint, in search of NaN; without it only headers are read.
    #[arg(long, conflicts_with_all = ["sums", "verify"])]
    pub full: bool,
}

/// Runs the command.
///
/// # Errors
/// The checkpoint is refused, a file can't be read, or a sum differs.
pub fn run(args: &InspectArgs) -> anyhow::Result<()> {
    match (&args.sums, &args.verify) {
        (Some(file), _) => write_sums(&args.dir, file),
        (None, Some(file)) => verify(&args.dir, file),
        (None, None) => show(&args.dir, args.full),
    }
}

fn write_sums(dir: &Path, file: &Path) -> anyhow::Result<()> {
    let file_names = manifest::files(dir)?;
    let bar = bytes_bar(manifest::total_bytes(dir, file_names.iter().map(String::as_str)));
    let sums = manifest::sums(dir, &file_names, &|n_bytes| bar.inc(n_bytes))?;
    bar.finish_and_clear();
    let text: String = sums.iter().map(|sum| sum.line() + "\n").collect();
    if file == Path::new("-") {
        std::io::stdout().write_all(text.as_bytes()).context("stdout")
    } else {
        std::fs::write(file, text).with_context(|| file.display().to_string())
    }
}

fn verify(dir: &Path, file: &Path) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let sums = manifest::parse(&text).with_context(|| file.display().to_string())?;
    let bar = bytes_bar(manifest::total_bytes(dir, sums.iter().map(|sum| sum.file_name.as_str())));
    let checked = manifest::verify(dir, &sums, &|n_bytes| bar.inc(n_bytes))?;
    bar.finish_and_clear();
    let mut out = std::io::stdout().lock();
    let mut bad = Vec::new();
    for one in &checked {
        let text = match &one.verdict {
            Verdict::Ok => "OK".to_owned(),
            Verdict::Differs { got } => format!("FAILED, its sum is {got}"),
            Verdict::Unreadable { reason } => format!("FAILED, {reason}"),
            Verdict::Unlisted => "FAILED, this shard isn't listed".to_owned(),
        };
        writeln!(out, "{}: {text}", one.file_name)?;
        if one.verdict != Verdict::Ok {
            bad.push(one.file_name.as_str());
        }
    }
    if bad.is_empty() { Ok(()) } else { bail!("{} of {} files are bad: {}", bad.len(), checked.len(), bad.join(", ")) }
}

fn show(dir: &Path, is_full: bool) -> anyhow::Result<()> {
    let checkpoint = Checkpoint::open(dir)?;
    let shape = ModelShape::from_json(checkpoint.config_json())?;
    let specs: Vec<TensorSpec> = checkpoint
        .tensors()
        .map(|(name, view)| TensorSpec { name: name.to_owned(), dtype: view.dtype, shape: view.shape.to_vec() })
        .collect();
    let mut out = std::io::stdout().lock();
    writeln!(out, "model id        {}", checkpoint.model_id())?;
    writeln!(out, "layers          {} and {} draft stages", shape.num_hidden_layers, shape.n_draft_stages())?;
    writeln!(out, "shards          {}", checkpoint.shards().len())?;
    writeln!(out, "tensors         {}", grouped(checkpoint.n_tensors() as u64))?;
    writeln!(out, "tensor bytes    {}", grouped(checkpoint.tensor_bytes()))?;
    writeln!(out, "\n{}", dtype_table(&specs))?;
    writeln!(out, "\n{}", subsystem_table(&shape, &specs))?;
    writeln!(out, "\n{}", kv_lines(&shape))?;
    for line in forms::check(&checkpoint, &shape, is_full)? {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

fn dtype_table(specs: &[TensorSpec]) -> Table {
    let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for spec in specs {
        let sum = sums.entry(spec.dtype.to_string()).or_default();
        *sum = (sum.0 + 1, sum.1 + spec.n_bytes() as u64);
    }
    let mut rows: Vec<_> = sums.into_iter().collect();
    rows.sort_by_key(|(_, (_, n_bytes))| std::cmp::Reverse(*n_bytes));
    let mut table = table(["type", "tensors", "bytes"]);
    for (dtype, (n_tensors, n_bytes)) in rows {
        table.add_row([dtype, grouped(n_tensors), grouped(n_bytes)]);
    }
    table
}

fn subsystem_table(shape: &ModelShape, specs: &[TensorSpec]) -> Table {
    let sums = cost::by_subsystem(shape, specs);
    let mut table = table(["part", "tensors", "bytes", "read a decoded token"]);
    for sum in &sums {
        table.add_row([
            sum.subsystem.label().to_owned(),
            grouped(sum.n_tensors as u64),
            grouped(sum.stored_bytes),
            grouped(sum.read_bytes),
        ]);
    }
    table.add_row([
        "total".to_owned(),
        grouped(sums.iter().map(|sum| sum.n_tensors as u64).sum()),
        grouped(sums.iter().map(|sum| sum.stored_bytes).sum()),
        grouped(sums.iter().map(|sum| sum.read_bytes).sum()),
    ]);
    table
}

/// The caches as this program stores them.
fn kv_lines(shape: &ModelShape) -> String {
    let layout = CacheLayout::new(CacheShape {
        ratios: shape.compress_ratios[..shape.num_hidden_layers].to_vec(),
        dims: RowDims {
            head_dim: shape.head_dim,
            rope_dim: shape.qk_rope_head_dim,
            index_head_dim: shape.index_head_dim,
        },
        window: shape.sliding_window,
        format: RowFormat::Kvq,
    });
    format!(
        "KV cache        {} bytes a token ({} a block of {BLOCK_TOKENS}), {} a running sequence",
        grouped(layout.block_bytes() as u64 / BLOCK_TOKENS as u64),
        grouped(layout.block_bytes() as u64),
        grouped(layout.slot_bytes() as u64)
    )
}

fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY).set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Digits in groups of three.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped() {
        assert_eq!([0, 999, 1000, 166_878_536_440].map(grouped), ["0", "999", "1,000", "166,878,536,440"]);
    }
}
