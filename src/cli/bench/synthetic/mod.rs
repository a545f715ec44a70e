//! `flashd bench --synthetic`: the steps of a model with synthetic weights on a device, beside the byte floor of the same run.

mod drive;
mod parts;
mod table;

use std::io::Write;
use std::time::Instant;

use anyhow::{Context, ensure};
use clap::ValueEnum;

use self::drive::Driver;
use self::parts::Bench;
use self::table::Report;
use super::BenchArgs;
use crate::checkpoint::Checkpoint;
use crate::cli::selftest::KernelDevice;
use crate::cli::synth::bytes_bar;
use crate::config;
use crate::device::{Device, DeviceKind};
use crate::model::cache::BLOCK_TOKENS;
use crate::model::device::runner::{DeviceRunner, DeviceRunnerSpec, ReadRate};
use crate::model::device::{DeviceLayout, WeightSource};
use crate::model::inventory;
use crate::model::runner::RunnerPlaces;
use crate::model::shape::{ModelShape, OFFICIAL_CONFIG};
use crate::model::weights::Weights;

/// The value of `--synthetic` that means the official shape.
const REAL: &str = "real";
/// Rows of a step at most, as `serve` has by default.
const ROW_BUDGET: usize = 2048;
/// Steps before those that are timed; the first records a graph.
const N_WARM_UP: usize = 3;
/// Streams of the sweep over contexts.
const CONTEXT_STREAMS: [usize; 2] = [1, 8];
/// Bytes whose reading is timed, if the weights are as large.
const READ_BYTES: u64 = 10 << 30;
/// Routed experts that kernels take at most.
const MAX_EXPERTS: usize = 512;

/// Flags of `flashd bench --synthetic`.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Synthetic weights")]
pub struct SyntheticArgs {
    /// Measure no server but the steps of a model with synthetic weights on a device of this machine: `real` for the official
    /// shape, or a config.json
    #[arg(long, value_name = "real|CONFIG.json", requires = "device", conflicts_with_all = [
        "base_url", "model", "api_key", "concurrency", "prompt_tokens", "output_tokens", "requests", "warmup", "temperature",
        "max_token_id", "timeout_s",
    ])]
    pub synthetic: Option<String>,
    /// Where the model runs
    #[arg(long, requires = "synthetic")]
    pub device: Option<KernelDevice>,
    /// Routed experts of a layer, when the device's memory does not hold all; a token takes as many as before
    #[arg(long, value_name = "N", requires = "synthetic")]
    pub experts: Option<usize>,
    /// Measure only these; all if not given
    #[arg(long, value_name = "PART,…", value_delimiter = ',', requires = "synthetic")]
    pub only: Vec<Part>,
    /// Timed steps of each decode row
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=1000), requires = "synthetic")]
    pub steps: u16,
    /// Streams that decode at the first context
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,2,4,8,16,32,64", value_parser = clap::value_parser!(u16).range(1..=1024), requires = "synthetic")]
    pub streams: Vec<u16>,
    /// Contexts in tokens at which 1 and 8 streams decode
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1024,8192,32768,131072", value_parser = clap::value_parser!(u32).range(1..=4_000_000), requires = "synthetic")]
    pub contexts: Vec<u32>,
    /// Prompts in tokens
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1024,2048,8192,32768", value_parser = clap::value_parser!(u32).range(1..=4_000_000), requires = "synthetic")]
    pub prefills: Vec<u32>,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Decode by streams, after real prompts.
    Decode,
    /// Decode by context, after caches that a kernel has filled.
    Context,
    /// Prompts alone.
    Prefill,
    /// Time by kernel in one step.
    Ops,
}

/// What is to be measured, checked against the model.
struct Plan {
    parts: Vec<Part>,
    n_steps: usize,
    streams: Vec<usize>,
    contexts: Vec<usize>,
    prefills: Vec<usize>,
    /// Lengths that the model does not have.
    left_out: Vec<usize>,
}

/// Runs the command.
///
/// # Errors
/// The shape is refused, the device is missing, too small or lost, or the CSV file can't be written.
pub(super) fn run(args: &BenchArgs, shape: &str) -> anyhow::Result<()> {
    measure(args, shape, &mut std::io::stdout().lock())
}

fn measure(args: &BenchArgs, shape: &str, out: &mut dyn Write) -> anyhow::Result<()> {
    let own = &args.synthetic;
    let config_json = config_json(shape, own.experts)?;
    let shape = ModelShape::from_json(&config_json)?;
    ensure!(shape.n_routed_experts <= MAX_EXPERTS, "{} experts; at most {MAX_EXPERTS}", shape.n_routed_experts);
    let plan = Plan::new(own, &shape)?;
    let seed = args.seed.unwrap_or(0);
    let device = open(own.device.context("--device is missing")?)?;
    let mut report = Report::new(out, args.csv.as_deref(), &device, &shape, seed)?;
    for n_tokens in &plan.left_out {
        report.note(&format!("{n_tokens} tokens are left out: the model takes {}", shape.max_position_embeddings))?;
    }
    let runner = load(device, &config_json, &shape, plan.places(&shape), seed, &mut report)?;
    let rate = runner.read_rate(READ_BYTES)?;
    report_rate(&mut report, rate)?;
    let driver = Driver::new(runner, &shape, seed);
    Bench { driver, report, shape: &shape, plan: &plan, rate: rate.bytes_per_s() }.run()
}

/// The bytes of config.json, with another number of experts where wanted.
fn config_json(shape: &str, experts: Option<usize>) -> anyhow::Result<Vec<u8>> {
    let text = if shape == REAL {
        OFFICIAL_CONFIG.to_owned()
    } else {
        std::fs::read_to_string(shape)
            .with_context(|| format!("--synthetic {shape}: neither `{REAL}` nor a config.json that can be read"))?
    };
    let Some(n_experts) = experts else { return Ok(text.into_bytes()) };
    let mut config: serde_json::Value = serde_json::from_str(&text).with_context(|| shape.to_owned())?;
    config["n_routed_experts"] = n_experts.into();
    Ok(config.to_string().into_bytes())
}

fn open(device: KernelDevice) -> anyhow::Result<Device> {
    let kind = match device {
        KernelDevice::Cuda => DeviceKind::Cuda,
        KernelDevice::Hip => DeviceKind::Hip,
        KernelDevice::Sim => DeviceKind::Sim,
    };
    Ok(Device::open(kind, 0, &config::code_objects())?)
}

/// Makes the executor and fills its weights.
fn load(
    device: Device,
    config_json: &[u8],
    shape: &ModelShape,
    places: RunnerPlaces,
    seed: u64,
    report: &mut Report<'_>,
) -> anyhow::Result<DeviceRunner> {
    // The draft stages are not run, so they are not there.
    let tensors = inventory::tensors(shape, false);
    let checkpoint = Checkpoint::by_formula(config_json, &tensors, seed, shape.n_routed_experts)?;
    let weights = Weights::bind(&checkpoint, shape)?;
    let bar = bytes_bar(0);
    let progress = |done: usize, of: usize| {
        bar.set_length(of as u64);
        bar.set_position(done as u64);
    };
    let started = Instant::now();
    let runner = DeviceRunner::new(DeviceRunnerSpec {
        device,
        weights: &weights,
        source: WeightSource::Formula { seed },
        shape: shape.clone(),
        places,
        use_graphs: true,
        progress: &progress,
    })
    .with_context(|| format!("{} experts a layer", shape.n_routed_experts))?;
    let seconds = started.elapsed().as_secs_f64();
    bar.finish_and_clear();
    let gigabytes = runner.weight_bytes() as f64 / 1e9;
    let rate = gigabytes / seconds;
    report.note(&format!(
        "weights: {gigabytes:.2} GB allocated, filled by formula and repacked in {seconds:.2} s ({rate:.1} GB/s)"
    ))?;
    Ok(runner)
}

fn report_rate(report: &mut Report<'_>, rate: ReadRate) -> anyhow::Result<()> {
    let ReadRate { n_bytes, ms } = rate;
    report.note(&format!(
        "plain read of {:.2} GB of the weights: {ms:.3} ms, {:.1} GB/s; floors are bytes at this rate",
        n_bytes as f64 / 1e9,
        rate.bytes_per_s() / 1e9
    ))
}

impl Plan {
    fn new(args: &SyntheticArgs, shape: &ModelShape) -> anyhow::Result<Self> {
        let n_steps = usize::from(args.steps);
        let mut streams: Vec<usize> = args.streams.iter().map(|n| usize::from(*n)).collect();
        streams.sort_unstable();
        streams.dedup();
        // Room for the steps behind the first context of every number of streams.
        let n_spare = (N_WARM_UP + n_steps) * streams.len() + 1;
        let fits = |n: &usize| n + n_spare <= shape.max_position_embeddings;
        let lengths = |list: &[u32]| -> (Vec<usize>, Vec<usize>) { list.iter().map(|n| *n as usize).partition(fits) };
        let ((contexts, longer), (prefills, others)) = (lengths(&args.contexts), lengths(&args.prefills));
        ensure!(
            !contexts.is_empty() && !prefills.is_empty(),
            "every length of --contexts or --prefills and {n_spare} tokens more are longer than the model's {} tokens",
            shape.max_position_embeddings
        );
        let all = [Part::Decode, Part::Context, Part::Prefill, Part::Ops];
        let parts = all.into_iter().filter(|part| args.only.is_empty() || args.only.contains(part)).collect();
        let mut left_out = [longer, others].concat();
        left_out.sort_unstable();
        left_out.dedup();
        Ok(Self { parts, n_steps, streams, contexts, prefills, left_out })
    }

    fn has(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    fn max_streams(&self) -> usize {
        self.streams.last().copied().unwrap_or(1)
    }

    /// Streams of the sweep over contexts.
    fn context_streams(&self) -> impl Iterator<Item = usize> {
        let max = self.max_streams();
        CONTEXT_STREAMS.into_iter().filter(move |n| *n <= max)
    }

    /// Tokens of the longest sequence of decode at the first context.
    fn decode_tokens(&self) -> usize {
        self.contexts[0] + (N_WARM_UP + self.n_steps) * self.streams.len() + 1
    }

    /// Tokens of the longest sequence at a context that a kernel fills.
    fn context_tokens(&self) -> usize {
        self.contexts.iter().max().unwrap_or(&0) + N_WARM_UP + self.n_steps + 1
    }

    fn prefill_tokens(&self) -> usize {
        self.prefills.iter().max().unwrap_or(&0) + 1
    }

    /// Rows of the largest step.
    fn max_rows(&self) -> usize {
        let of_prompts = self.prefill_tokens().max(self.max_streams() * self.contexts[0]);
        of_prompts.min(ROW_BUDGET).max(self.max_streams())
    }

    /// Room for the largest of the parts.
    fn places(&self, shape: &ModelShape) -> RunnerPlaces {
        let n_context_streams = self.context_streams().max().unwrap_or(1);
        let parts = [
            (Part::Decode, self.max_streams(), self.decode_tokens()),
            (Part::Context, n_context_streams, self.context_tokens()),
            (Part::Prefill, 1, self.prefill_tokens()),
            (Part::Ops, self.max_streams(), self.decode_tokens().max(self.max_rows())),
        ];
        let used = || parts.iter().filter(|(part, ..)| self.has(*part));
        let n_blocks = used().map(|(_, n, n_tokens)| n * n_tokens.div_ceil(BLOCK_TOKENS)).max().unwrap_or(1);
        RunnerPlaces {
            n_slots: self.max_streams(),
            kv_bytes: n_blocks * DeviceLayout::new(shape).rows().block_bytes().max(1),
            n_checkpoints: 0,
            max_rows: self.max_rows(),
            max_tokens: used().map(|(.., n_tokens)| *n_tokens).max().unwrap_or(1),
        }
    }
}

#[cfg(test)]
mod tests;
