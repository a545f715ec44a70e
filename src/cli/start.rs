//! From checked settings to a running engine: what `serve`, `chat` and `complete` share.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use indicatif::ProgressBar;

use super::machine;
use super::places::{self, Places, Room};
use super::serve::EngineDied;
use crate::checkpoint::Checkpoint;
use crate::config::args::{Count, DeviceChoice, LocalArgs, RoundingChoice, Settings, ThinkingChoice};
use crate::config::{self, Config, ConfigError, ModelConfig, generation};
use crate::device::cpu::{Cpu, Level};
use crate::device::plan::margin_bytes;
use crate::device::{Device, DeviceError};
use crate::engine::handle::{EngineHandle, EngineHealth, EngineSide};
use crate::engine::scheduler::SchedulerConfig;
use crate::engine::tick::{Engine, EngineConfig, EngineThread};
use crate::ids::TokenId;
use crate::kv::identity::CacheIdentity;
use crate::model::batch::Executor;
use crate::model::cache::{CacheLayout, CacheShape, RowFormat};
use crate::model::device::runner::{DeviceRunner, DeviceRunnerSpec, workspace_bytes};
use crate::model::device::{DeviceLayout, WeightSource};
use crate::model::forward::Rounding;
use crate::model::runner::{CpuRunner, CpuRunnerSpec, RunnerPlaces};
use crate::model::shape::ModelShape;
use crate::model::weights::Weights;
use crate::sample::params::SamplingParams;
use crate::telemetry::log;
use crate::telemetry::metrics::Metrics;
use crate::tokenizer::Tokenizer;

/// Names what the bits of cached state depend on beside model and row format; a change of the arithmetic changes it.
const NUMERICS_ID: &str = "cpu-1";

/// As [`NUMERICS_ID`], of the kernels; the architecture follows.
const DEVICE_NUMERICS_ID: &str = "kernels-1";

/// Rows of a step of a model that one person talks to.
const LOCAL_STEP_TOKENS: u64 = 256;

/// How often the spinner turns.
const SPINNER_TICK: Duration = Duration::from_millis(120);

/// The tokenizer is not this model's.
#[derive(Debug, thiserror::Error)]
#[error("tokenizer.json has {got}, but config.json says {want}")]
pub struct MismatchedTokenizer {
    want: String,
    got: String,
}

/// What a front end needs of an engine that may still be loading.
#[derive(Clone, Debug)]
pub struct Door {
    /// Where requests go.
    pub engine: EngineHandle,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Metrics of the engine.
    pub metrics: Arc<Metrics>,
    /// Sampling of requests that do not say.
    pub default_sampling: SamplingParams,
}

/// A model whose settings fit it; the weights have not been read.
pub struct Prepared {
    model: ModelConfig,
    shape: ModelShape,
    checkpoint: Checkpoint,
    places: RunnerPlaces,
    engine: EngineConfig,
    metrics: Arc<Metrics>,
    side: EngineSide,
    device: Option<Device>,
}

/// A model in this process, ready for requests.
#[derive(Debug)]
pub struct Local {
    /// What to call it.
    pub name: String,
    /// Where requests go.
    pub engine: EngineHandle,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Sampling of requests that do not say.
    pub default_sampling: SamplingParams,
    /// Thinking of requests that do not say.
    pub default_thinking: ThinkingChoice,
    /// Keeps the engine's thread.
    _thread: EngineThread,
}

impl Prepared {
    /// Checks everything that can be checked without reading the weights: the files' lengths, the shape, the tokenizer,
    /// the sizes.
    ///
    /// # Errors
    /// When the checkpoint or the settings can't be used.
    pub fn new(config: &Config) -> anyhow::Result<(Self, Door)> {
        let dir = &config.model.dir;
        let checkpoint = Checkpoint::open(dir)?;
        let shape = ModelShape::from_json(checkpoint.config_json()).with_context(|| dir.display().to_string())?;
        let tokenizer = Arc::new(Tokenizer::load(dir)?);
        check_tokenizer(&tokenizer, &shape)?;
        let open = |kind| Device::open(kind, 0, &config::code_objects());
        let device = config.model.device.kind()?.map(open).transpose()?;
        let room = match &device {
            Some(device) => device_room(device, config, &shape, &checkpoint)?,
            None => host_room(config, &shape, &checkpoint),
        };
        let places = Places::plan(&config.engine, room)?;
        let engine = engine_config(config, &shape, &checkpoint, device.as_ref());
        let (handle, side) = EngineHandle::new(engine.limits(places.capacity(&config.engine, shape.vocab_size)));
        let metrics = Metrics::new(config.server.served_model_names.first().map_or("", String::as_str));
        let door = Door {
            engine: handle,
            tokenizer,
            metrics: Arc::clone(&metrics),
            default_sampling: default_sampling(&config.model)?,
        };
        log_places(&places, &config.engine);
        let places = places.for_runner(&config.engine, room.bytes);
        Ok((Self { model: config.model.clone(), shape, checkpoint, places, engine, metrics, side, device }, door))
    }

    /// Reads the weights and starts the engine on a thread of its own.
    ///
    /// # Errors
    /// When the checkpoint does not fit its config.json, or the device fails.
    pub fn start(self) -> anyhow::Result<EngineThread> {
        let weights = Weights::bind(&self.checkpoint, &self.shape)?;
        for warning in &weights.warnings {
            tracing::warn!("{warning}");
        }
        let runner: Box<dyn Executor> = match self.device {
            Some(device) => Box::new(device_runner(device, &weights, self.shape, self.places)?),
            None => Box::new(cpu_runner(&self.model, weights, self.shape, self.places)?),
        };
        Ok(Engine::spawn_behind(self.side, runner, self.engine, self.metrics)?)
    }
}

impl Local {
    /// Starts a model and waits until it is ready.
    ///
    /// # Errors
    /// As [`Prepared::new`] and [`Prepared::start`].
    pub fn start(args: &LocalArgs) -> anyhow::Result<Self> {
        let settings = Settings {
            log_filter: Some("warn".to_owned()),
            max_num_seqs: Some(1),
            // Short steps show progress and end soon after Ctrl-C; the text does not depend on them.
            max_num_batched_tokens: Some(Count(LOCAL_STEP_TOKENS)),
            ..args.settings()
        };
        let config = Config::from_settings(settings)?;
        log::init(&config.log)?;
        let spinner = ProgressBar::new_spinner().with_message(format!("loading {}", config.model.dir.display()));
        spinner.enable_steady_tick(SPINNER_TICK);
        let (prepared, door) = Prepared::new(&config)?;
        let thread = prepared.start()?;
        wait_until_ready(&door.engine)?;
        spinner.finish_and_clear();
        Ok(Self {
            name: if config.model.is_demo { "demo".to_owned() } else { config.model.dir.display().to_string() },
            engine: door.engine,
            tokenizer: door.tokenizer,
            default_sampling: door.default_sampling,
            default_thinking: config.server.default_thinking,
            _thread: thread,
        })
    }
}

fn wait_until_ready(engine: &EngineHandle) -> anyhow::Result<()> {
    loop {
        match engine.health() {
            EngineHealth::Starting => std::thread::sleep(Duration::from_millis(5)),
            EngineHealth::Dead(reason) => return Err(EngineDied(reason).into()),
            EngineHealth::Ready | EngineHealth::Draining | EngineHealth::Stalled => return Ok(()),
        }
    }
}

/// A tokenizer of another model would send ids that the embedding lacks, or never see the end.
fn check_tokenizer(tokenizer: &Tokenizer, shape: &ModelShape) -> Result<(), MismatchedTokenizer> {
    let fits = tokenizer.vocab_size() <= shape.vocab_size
        && tokenizer.bos().0 == shape.bos_token_id
        && tokenizer.eos().0 == shape.eos_token_id;
    if fits {
        return Ok(());
    }
    let describe = |n: usize, bos: u32, eos: u32| format!("{n} ids, {bos} to begin and {eos} to end a text");
    Err(MismatchedTokenizer {
        want: describe(shape.vocab_size, shape.bos_token_id, shape.eos_token_id),
        got: describe(tokenizer.vocab_size(), tokenizer.bos().0, tokenizer.eos().0),
    })
}

fn default_sampling(model: &ModelConfig) -> Result<SamplingParams, ConfigError> {
    if model.use_generation_config {
        return Ok(generation::defaults(&model.dir)?);
    }
    Ok(SamplingParams::default())
}

fn cpu_runner(
    model: &ModelConfig,
    weights: Weights,
    shape: ModelShape,
    places: RunnerPlaces,
) -> anyhow::Result<CpuRunner> {
    let cpu = match model.n_threads {
        Some(n) => Cpu::with_level(Level::best().simd(), n),
        None => Cpu::detect(),
    }?;
    tracing::info!(threads = cpu.n_threads(), simd = ?cpu.level().simd(), "device: cpu");
    let (weights, rounding) = (Arc::new(weights), rounding(model.rounding));
    Ok(CpuRunner::new(CpuRunnerSpec { weights, shape, rounding, cpu, places })?)
}

fn device_runner(
    device: Device,
    weights: &Weights,
    shape: ModelShape,
    places: RunnerPlaces,
) -> anyhow::Result<DeviceRunner> {
    let info = device.info();
    tracing::info!(name = info.name, arch = info.arch, memory_bytes = info.memory_bytes, "device: {}", device.label());
    let progress = |done: usize, of: usize| tracing::debug!("weights: {done} of {of} bytes");
    let source = WeightSource::Checkpoint;
    Ok(DeviceRunner::new(DeviceRunnerSpec {
        device,
        weights,
        source,
        shape,
        places,
        use_graphs: true,
        progress: &progress,
    })?)
}

/// What the machine's memory holds beside the weights.
fn host_room(config: &Config, shape: &ModelShape, checkpoint: &Checkpoint) -> Room {
    let caches = CacheLayout::new(CacheShape::new(shape, rounding(config.model.rounding).row_format()));
    let free_bytes = machine::memory().map(|m| m.available_bytes.saturating_sub(checkpoint.tensor_bytes()));
    Room {
        bytes: places::host_bytes(&caches),
        max_position_embeddings: shape.max_position_embeddings,
        free_bytes,
        share: places::HOST_SHARE,
    }
}

/// What the device's memory holds beside weights and scratch. The runner counts again, to the byte.
fn device_room(
    device: &Device,
    config: &Config,
    shape: &ModelShape,
    checkpoint: &Checkpoint,
) -> Result<Room, DeviceError> {
    let memory = device.memory()?;
    let max_tokens = config.engine.max_model_len.unwrap_or(shape.max_position_embeddings);
    let workspace_bytes = workspace_bytes(shape, config.engine.max_num_batched_tokens, max_tokens) as u64;
    let taken_bytes = checkpoint.tensor_bytes() + workspace_bytes + margin_bytes(memory.total_bytes);
    Ok(Room {
        bytes: places::device_bytes(&DeviceLayout::new(shape)),
        max_position_embeddings: shape.max_position_embeddings,
        free_bytes: Some(memory.free_bytes.saturating_sub(taken_bytes)),
        // The simulator's memory is the machine's.
        share: if config.model.device == DeviceChoice::Sim { places::HOST_SHARE } else { 1 },
    })
}

fn engine_config(
    config: &Config,
    shape: &ModelShape,
    checkpoint: &Checkpoint,
    device: Option<&Device>,
) -> EngineConfig {
    let rounding = config.model.rounding;
    let (row_format, numerics_id) = match device {
        Some(device) => (RowFormat::Device, format!("{DEVICE_NUMERICS_ID}/{}", device.info().arch)),
        None => (self::rounding(rounding).row_format(), format!("{NUMERICS_ID}/{rounding:?}").to_lowercase()),
    };
    let identity = CacheIdentity {
        model_id: checkpoint.model_id().to_string(),
        row_format: format!("{row_format:?}").to_lowercase(),
        numerics_id,
    };
    let engine = &config.engine;
    EngineConfig {
        scheduler: SchedulerConfig {
            max_num_seqs: engine.max_num_seqs,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            long_prefill_token_threshold: engine.long_prefill_token_threshold,
            prefill_step_time: engine.prefill_step_time,
            enable_prefix_caching: engine.enable_prefix_caching,
            ..SchedulerConfig::default()
        },
        max_queued: engine.max_queued,
        ..EngineConfig::new(identity, TokenId(shape.eos_token_id))
    }
}

const fn rounding(choice: RoundingChoice) -> Rounding {
    match choice {
        RoundingChoice::Exact => Rounding::Exact,
        RoundingChoice::Kvq => Rounding::Kvq,
        RoundingChoice::Official => Rounding::Official,
    }
}

/// What operators look for after a start; the words are vLLM's where it has them.
fn log_places(places: &Places, engine: &config::EngineConfig) {
    let n_tokens = places.layout.n_tokens();
    tracing::info!("KV cache size: {n_tokens} tokens ({} bytes)", places.layout.used_bytes);
    let n_full = n_tokens as f64 / places.max_model_len as f64;
    tracing::info!("Maximum concurrency for {} tokens per request: {n_full:.2}x", places.max_model_len);
    tracing::info!(
        max_num_seqs = engine.max_num_seqs,
        max_num_batched_tokens = engine.max_num_batched_tokens,
        n_checkpoints = places.layout.n_checkpoints,
        "scheduler"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demo(change: impl FnOnce(&mut Settings)) -> Config {
        let mut settings = Settings::default();
        change(&mut settings);
        Config::from_settings(settings).unwrap()
    }

    #[test]
    fn the_demo_model_is_prepared_with_its_own_sampling() {
        let (_, door) = Prepared::new(&demo(|_| {})).unwrap();
        assert_eq!(door.default_sampling.temperature, 0.6);
        assert_eq!(door.engine.limits().max_model_len, 65_536);
        assert_eq!(door.engine.limits().vocab_size, 3072);
        assert_eq!(door.engine.health(), EngineHealth::Starting);
        let (_, door) = Prepared::new(&demo(|s| s.generation_config = Some("vllm".to_owned()))).unwrap();
        assert_eq!(door.default_sampling, SamplingParams::default());
    }

    #[test]
    fn the_limits_before_the_start_are_those_of_the_runner() {
        let config = demo(|s| {
            s.max_num_seqs = Some(4);
            s.kv_cache_memory_bytes = Some("64MiB".parse().unwrap());
        });
        let (prepared, door) = Prepared::new(&config).unwrap();
        let thread = prepared.start().unwrap();
        wait_until_ready(&door.engine).unwrap();
        let limits = door.engine.limits();
        assert!(limits.max_model_len <= limits.max_kv_tokens, "{limits:?}");
        door.engine.drain(std::time::Instant::now());
        thread.join().unwrap();
    }

    #[test]
    fn a_tokenizer_of_another_model_is_refused() {
        let dir = config::model::find("demo").unwrap();
        let tokenizer = Tokenizer::load(&dir).unwrap();
        let mut shape = ModelShape::from_json(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
        assert!(check_tokenizer(&tokenizer, &shape).is_ok());
        shape.vocab_size = 100;
        let error = check_tokenizer(&tokenizer, &shape).unwrap_err().to_string();
        assert!(error.contains("100 ids"), "{error}");
        shape.vocab_size = 3072;
        shape.eos_token_id = 5;
        assert!(check_tokenizer(&tokenizer, &shape).is_err());
    }
}
