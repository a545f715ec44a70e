//! `flashd debug logits`: the logits after a prompt and after each of some forced tokens, in any rounding mode.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, ensure};
use safetensors::tensor::{Dtype, TensorView};
use serde::Deserialize;

use crate::checkpoint::Checkpoint;
use crate::config;
use crate::config::args::DeviceChoice;
use crate::device::cpu::Cpu;
use crate::device::{Device, DeviceKind, SimWave};
use crate::ids::{BlockId, SlotIdx, TokenId};
use crate::model::batch::{Batch, Executor, RowKind, Run, StepPlan, TokenSource};
use crate::model::cache::{BLOCK_TOKENS, Cache, CacheLayout, CachePlaces, CacheShape};
use crate::model::device::runner::{DeviceRunner, DeviceRunnerSpec};
use crate::model::device::{DeviceLayout, WeightSource};
use crate::model::forward::{Forward, Rounding, Trace, TracePoint};
use crate::model::runner::RunnerPlaces;
use crate::model::shape::ModelShape;
use crate::model::weights::Weights;

/// Rows of a prompt chunk unless `--chunk` says otherwise; the logits do not depend on it.
const DEFAULT_CHUNK: usize = 512;

/// Write the logits after a prompt, then after each forced token.
#[derive(Clone, Debug, clap::Args)]
pub struct LogitsArgs {
    /// The checkpoint's directory.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Which roundings the arithmetic of the CPU contains; kernels have their own.
    #[arg(long, value_enum, required_unless_present = "device")]
    pub mode: Option<Mode>,
    /// Where to run: cpu, hip, cuda or sim.
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: DeviceChoice,
    /// The tokens: {"prompt": [ids], "then": [ids]}.
    #[arg(long, value_name = "FILE.json")]
    pub tokens: PathBuf,
    /// Where to write `logits`, F32 [1 + len(then), vocab].
    #[arg(long, value_name = "FILE.safetensors")]
    pub out: PathBuf,
    /// Write what every layer makes of every row, too: `attention.N`, `experts.N` [rows, hidden], `residual.N` [rows, copies, hidden].
    #[arg(long)]
    pub trace: bool,
    /// Prompt tokens of a step.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CHUNK)]
    pub chunk: usize,
}

/// [`Rounding`] as a value of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// Nothing is rounded but the weights.
    Exact,
    /// Cache rows and indexer queries are rounded as they are stored.
    Kvq,
    /// Caches, and the inputs of FP8 and MXFP4 products, as the published reference implementation does.
    Official,
    /// As kernels round and add with waves of 32, for comparing with CUDA.
    Device,
    /// The same with waves of 64, for comparing with ROCm.
    Device64,
}

#[derive(Debug, Deserialize)]
struct Tokens {
    prompt: Vec<TokenId>,
    #[serde(default)]
    then: Vec<TokenId>,
}

/// One sequence and its caches.
struct Session {
    place: Place,
    /// What the layers made so far, where asked.
    traces: Option<BTreeMap<TracePoint, Vec<f32>>>,
    blocks: Vec<BlockId>,
    n_tokens: usize,
}

/// Where it runs.
enum Place {
    Cpu { forward: Box<Forward>, cache: Cache },
    Device(Box<DeviceRunner>),
}

impl From<Mode> for Rounding {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Exact => Self::Exact,
            Mode::Kvq => Self::Kvq,
            Mode::Official => Self::Official,
            Mode::Device => Self::Device(SimWave::W32),
            Mode::Device64 => Self::Device(SimWave::W64),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// The checkpoint is refused, a file can't be read or written, or a token is outside the vocabulary.
pub fn run(args: &LogitsArgs) -> anyhow::Result<()> {
    let path = args.tokens.display();
    let text = std::fs::read(&args.tokens).with_context(|| path.to_string())?;
    let tokens: Tokens = serde_json::from_slice(&text).with_context(|| path.to_string())?;
    let checkpoint = Checkpoint::open(&args.model)?;
    let shape = ModelShape::from_json(checkpoint.config_json())?;
    check(&tokens, &shape).with_context(|| path.to_string())?;
    ensure!(args.chunk > 0, "--chunk is 0; want at least 1");
    let weights = Arc::new(Weights::bind(&checkpoint, &shape)?);
    let n_tokens = tokens.prompt.len() + tokens.then.len();
    let (vocab_size, hidden_size) = (shape.vocab_size, shape.hidden_size);
    let mut session = Session::new(args, weights, shape, n_tokens)?;
    let mut logits = Vec::with_capacity((1 + tokens.then.len()) * vocab_size);
    let mut last = Vec::new();
    for chunk in tokens.prompt.chunks(args.chunk) {
        last = session.feed(chunk, RowKind::Prefill)?;
    }
    logits.append(&mut last);
    for token in &tokens.then {
        logits.append(&mut session.feed(&[*token], RowKind::Decode)?);
    }
    let mut tensors = vec![("logits".to_owned(), vec![logits.len() / vocab_size, vocab_size], logits)];
    for (point, values) in session.traces.unwrap_or_default() {
        tensors.push(named(point, values, n_tokens, hidden_size));
    }
    write(&args.out, &tensors)
}

fn check(tokens: &Tokens, shape: &ModelShape) -> anyhow::Result<()> {
    ensure!(!tokens.prompt.is_empty(), "prompt is empty; want at least 1 token");
    let n_tokens = tokens.prompt.len() + tokens.then.len();
    let max_tokens = shape.max_position_embeddings;
    ensure!(n_tokens <= max_tokens, "{n_tokens} tokens; the model takes at most {max_tokens}");
    let is_outside = |id: &&TokenId| id.index() >= shape.vocab_size;
    let outside = tokens.prompt.iter().chain(&tokens.then).find(is_outside);
    if let Some(id) = outside {
        anyhow::bail!("token {id}; the vocabulary has {}", shape.vocab_size);
    }
    Ok(())
}

impl Session {
    fn new(args: &LogitsArgs, weights: Arc<Weights>, shape: ModelShape, n_tokens: usize) -> anyhow::Result<Self> {
        let n_blocks = n_tokens.div_ceil(BLOCK_TOKENS);
        let blocks = (0..u32::try_from(n_blocks)?).map(BlockId).collect();
        let place = match args.device.kind()? {
            Some(kind) => Place::Device(Box::new(device_runner(kind, args, &weights, shape, n_tokens)?)),
            None => {
                let rounding: Rounding = args.mode.context("--mode is missing; the CPU has several")?.into();
                let layout = CacheLayout::new(CacheShape::new(&shape, rounding.row_format()));
                let cache = Cache::new(layout, CachePlaces { n_blocks, n_slots: 1, n_checkpoints: 0 });
                let forward = Box::new(Forward::new(weights, shape, rounding, Cpu::detect()?));
                Place::Cpu { forward, cache }
            }
        };
        Ok(Self { place, traces: args.trace.then(BTreeMap::new), blocks, n_tokens: 0 })
    }

    /// The logits after the last of the next tokens.
    fn feed(&mut self, tokens: &[TokenId], kind: RowKind) -> anyhow::Result<Vec<f32>> {
        let n_rows = tokens.len();
        let run = Run {
            slot: SlotIdx(0),
            first_pos: self.n_tokens,
            n_rows,
            kind,
            tokens: TokenSource::Host { start: 0 },
            blocks: 0..self.blocks.len(),
            logit_rows: n_rows - 1..n_rows,
        };
        let batch = Batch { runs: vec![run], token_ids: tokens.to_vec(), block_ids: self.blocks.clone() };
        self.n_tokens += n_rows;
        let mut keep = self.traces.as_mut().map(|traces| {
            |point: TracePoint, values: &[f32]| traces.entry(point).or_default().extend_from_slice(values)
        });
        let trace = keep.as_mut().map(|keep| keep as Trace<'_>);
        match &mut self.place {
            Place::Cpu { forward, cache } => {
                forward.run_traced(&batch, tokens, cache, trace);
                Ok(forward.logits(0, n_rows - 1).to_vec())
            }
            Place::Device(runner) => {
                runner.launch_traced(&StepPlan { batch, ..StepPlan::default() }, trace)?;
                runner.finish()?;
                Ok(runner.logits(0, n_rows - 1).to_vec())
            }
        }
    }
}

/// A runner with room for the one sequence.
fn device_runner(
    kind: DeviceKind,
    args: &LogitsArgs,
    weights: &Weights,
    shape: ModelShape,
    n_tokens: usize,
) -> anyhow::Result<DeviceRunner> {
    let device = Device::open(kind, 0, &config::code_objects())?;
    let block_bytes = DeviceLayout::new(&shape).rows().block_bytes().max(1);
    let places = RunnerPlaces {
        n_slots: 1,
        kv_bytes: n_tokens.div_ceil(BLOCK_TOKENS) * block_bytes,
        n_checkpoints: 0,
        max_rows: args.chunk.min(n_tokens),
        max_tokens: n_tokens,
    };
    let source = WeightSource::Checkpoint;
    let (use_graphs, progress) = (true, &|_, _| ());
    let spec = DeviceRunnerSpec { device, weights, source, shape, places, use_graphs, progress };
    let mut runner = DeviceRunner::new(spec)?;
    runner.keep_logits();
    Ok(runner)
}

/// A tensor of the file: its name, shape and values.
type Named = (String, Vec<usize>, Vec<f32>);

fn named(point: TracePoint, values: Vec<f32>, n_rows: usize, n_cols: usize) -> Named {
    let copies = values.len() / (n_rows * n_cols);
    match point {
        TracePoint::Attention(layer) => (format!("attention.{layer}"), vec![n_rows, n_cols], values),
        TracePoint::Experts(layer) => (format!("experts.{layer}"), vec![n_rows, n_cols], values),
        TracePoint::Residual(layer) => (format!("residual.{layer}"), vec![n_rows, copies, n_cols], values),
    }
}

fn write(path: &Path, tensors: &[Named]) -> anyhow::Result<()> {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(_, _, values)| values.iter().flat_map(|value| value.to_le_bytes()).collect()).collect();
    let views = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, shape, _), bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)));
    let views: Vec<_> = views.collect::<anyhow::Result<_>>()?;
    safetensors::serialize_to_file(views, None, path).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_a_row_a_position_and_refuses_what_it_cannot_run() {
        let dir = tempfile::tempdir().unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut args = LogitsArgs {
            model: root.join("demo-model"),
            mode: Some(Mode::Kvq),
            device: DeviceChoice::Cpu,
            tokens: dir.path().join("tokens.json"),
            out: dir.path().join("logits.safetensors"),
            trace: false,
            chunk: 2,
        };
        std::fs::write(&args.tokens, r#"{"prompt": [0, 5, 9, 11], "then": [7, 8]}"#).unwrap();
        run(&args).unwrap();
        let first = std::fs::read(&args.out).unwrap();
        let file = safetensors::SafeTensors::deserialize(&first).unwrap();
        assert_eq!(file.tensor("logits").unwrap().shape(), [3, 3072]);
        args.chunk = 512;
        run(&args).unwrap();
        assert!(first == std::fs::read(&args.out).unwrap());
        for (text, want) in [
            (r#"{"prompt": []}"#, "prompt is empty"),
            (r#"{"prompt": [3072]}"#, "token 3072; the vocabulary has 3072"),
            (r#"{"prompt": [-1]}"#, "invalid value"),
        ] {
            std::fs::write(&args.tokens, text).unwrap();
            let error = format!("{:#}", run(&args).unwrap_err());
            assert!(error.contains(want), "{error}");
        }
    }
}
