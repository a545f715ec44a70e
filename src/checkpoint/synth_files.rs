//! Writes a synthetic checkpoint: shards, index and config appear together, under their final name, or not at all.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use safetensors::SafeTensorError;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::json;

use super::spec::TensorSpec;
use super::synth::Generator;
use super::{CONFIG_FILE, INDEX_FILE};

/// Bytes generated between two writes: all the memory that a tensor of any size takes.
const BUFFER_BYTES: usize = 32 << 20;
/// Bytes one task fills.
const TASK_BYTES: usize = 256 << 10;

/// What to write.
pub struct SynthPlan<'a> {
    /// The bytes of config.json.
    pub config_json: &'a [u8],
    /// The tensors of each shard.
    pub shards: &'a [Vec<TensorSpec>],
    /// Seed of the weights.
    pub seed: u64,
    /// Routed experts of a layer.
    pub n_experts: usize,
    /// Real headers and lengths, but holes for data.
    pub is_sparse: bool,
}

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Shards.
    pub n_shards: usize,
    /// Tensors.
    pub n_tensors: usize,
    /// Bytes of all tensors, without headers.
    pub tensor_bytes: u64,
}

/// Why a synthetic checkpoint wasn't written; nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// The system refused an operation.
    #[error("{}: {source}", path.display())]
    Io {
        /// On which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// Something is there already.
    #[error("{}: already exists and isn't an empty directory", dir.display())]
    Exists {
        /// Where.
        dir: PathBuf,
    },
    /// A tensor that the formula doesn't know.
    #[error("{tensor} ({form}): the synthetic formula has no rule for it")]
    NoRule {
        /// Its name.
        tensor: String,
        /// Its element type and shape.
        form: String,
    },
    /// Hash tables step through the experts by odd numbers.
    #[error(
        "n_routed_experts is {n_experts} with {n_cols} experts a token; synthetic hash tables want a multiple of {}, a power of two",
        n_cols.next_power_of_two()
    )]
    Experts {
        /// Experts of a layer.
        n_experts: usize,
        /// Experts of a token.
        n_cols: usize,
    },
    /// No memory for a checkpoint without files.
    #[error("{n_bytes} bytes of zeros can't be mapped: {source}")]
    Memory {
        /// How many.
        n_bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// A header that can't be built.
    #[error("{}: {source}", path.display())]
    Header {
        /// Of which shard.
        path: PathBuf,
        /// What is wrong.
        source: SafeTensorError,
    },
}

/// Writes the checkpoint into a hidden directory beside `dir` and renames it at the end. `progress` is told of tensor bytes
/// as they are done.
///
/// # Errors
/// [`SynthError`]; `dir` is then as it was.
pub fn write(dir: &Path, plan: &SynthPlan<'_>, progress: &(dyn Fn(u64) + Sync)) -> Result<Written, SynthError> {
    let is_taken = |mut entries: std::fs::ReadDir| entries.next().is_some();
    if dir.is_file() || std::fs::read_dir(dir).is_ok_and(is_taken) {
        return Err(SynthError::Exists { dir: dir.to_owned() });
    }
    let generator = Generator::new(plan.seed, plan.n_experts);
    if !plan.is_sparse {
        // Before anything is written.
        plan.shards.iter().flatten().try_for_each(|spec| generator.check(spec))?;
    }
    let partial = partial_dir(dir)?;
    let mut written = Written::default();
    let mut weight_map = BTreeMap::new();
    for (shard_idx, specs) in plan.shards.iter().enumerate() {
        let file_name = format!("model-{:05}-of-{:05}.safetensors", shard_idx + 1, plan.shards.len());
        let specs = in_file_order(specs);
        let fill = if plan.is_sparse { None } else { Some(&generator) };
        write_shard(&partial.path().join(&file_name), &specs, fill, progress)?;
        written.n_shards += 1;
        written.n_tensors += specs.len();
        written.tensor_bytes += specs.iter().map(|spec| spec.n_bytes() as u64).sum::<u64>();
        weight_map.extend(specs.iter().map(|spec| (spec.name.clone(), file_name.clone())));
    }
    let index = json!({"metadata": {"total_size": written.tensor_bytes}, "weight_map": weight_map});
    write_file(&partial.path().join(INDEX_FILE), format!("{index:#}\n").as_bytes())?;
    write_file(&partial.path().join(CONFIG_FILE), plan.config_json)?;
    std::fs::rename(partial.path(), dir).map_err(|source| io_error(dir, source))?;
    // The directory has its final name: nothing to remove any more.
    let _ = partial.keep();
    Ok(written)
}

fn partial_dir(dir: &Path) -> Result<tempfile::TempDir, SynthError> {
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(|source| io_error(parent, source))?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".flashd-synth-").permissions(std::fs::Permissions::from_mode(0o755));
    builder.tempdir_in(parent).map_err(|source| io_error(parent, source))
}

/// Wide elements first, so that every tensor is aligned to its element.
fn in_file_order(specs: &[TensorSpec]) -> Vec<&TensorSpec> {
    let mut specs: Vec<&TensorSpec> = specs.iter().collect();
    specs.sort_by(|a, b| b.element_bytes().cmp(&a.element_bytes()).then_with(|| a.name.cmp(&b.name)));
    specs
}

fn write_shard(
    path: &Path,
    specs: &[&TensorSpec],
    generator: Option<&Generator>,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), SynthError> {
    let header = header(path, specs)?;
    let mut file = File::create_new(path).map_err(|source| io_error(path, source))?;
    file.write_all(&header).map_err(|source| io_error(path, source))?;
    match generator {
        Some(generator) => {
            specs.iter().try_for_each(|spec| write_tensor(&mut file, path, spec, generator, progress))?
        }
        None => {
            let data_bytes: u64 = specs.iter().map(|spec| spec.n_bytes() as u64).sum();
            file.set_len(header.len() as u64 + data_bytes).map_err(|source| io_error(path, source))?;
            progress(data_bytes);
        }
    }
    file.sync_all().map_err(|source| io_error(path, source))
}

fn write_tensor(
    file: &mut File,
    path: &Path,
    spec: &TensorSpec,
    generator: &Generator,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<(), SynthError> {
    let n_bytes = spec.n_bytes();
    let mut buffer = vec![0; n_bytes.min(BUFFER_BYTES)];
    for start in (0..n_bytes).step_by(BUFFER_BYTES) {
        let part = &mut buffer[..BUFFER_BYTES.min(n_bytes - start)];
        part.par_chunks_mut(TASK_BYTES).enumerate().try_for_each(|(task_idx, chunk)| {
            generator.fill(spec, (start + task_idx * TASK_BYTES) / spec.element_bytes(), chunk)
        })?;
        file.write_all(part).map_err(|source| io_error(path, source))?;
        progress(part.len() as u64);
    }
    Ok(())
}

/// Length field and JSON, padded with spaces to a multiple of 8.
fn header(path: &Path, specs: &[&TensorSpec]) -> Result<Vec<u8>, SynthError> {
    let mut end = 0;
    let infos = specs.iter().map(|spec| {
        let start = end;
        end += spec.n_bytes();
        (spec.name.clone(), TensorInfo { dtype: spec.dtype, shape: spec.shape.clone(), data_offsets: (start, end) })
    });
    let kind = [("format".to_owned(), "pt".to_owned())].into();
    let header_error = |source| SynthError::Header { path: path.to_owned(), source };
    let metadata = Metadata::new(Some(kind), infos.collect()).map_err(header_error)?;
    let mut json = serde_json::to_vec(&metadata).map_err(|error| header_error(error.into()))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<(), SynthError> {
    let write = || {
        let mut file = File::create_new(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|source| io_error(path, source))
}

fn io_error(path: &Path, source: io::Error) -> SynthError {
    SynthError::Io { path: path.to_owned(), source }
}
