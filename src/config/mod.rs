//! Settings: flags and environment (args), a YAML file (file), checked and split into each module's own struct.
//!
//! A flag beats the file, the file beats the environment, and that beats the defaults. This is the only reader of the
//! environment, and it reads few names: a variable for every flag would collide with those that container platforms set
//! for a service called flashd (`FLASHD_PORT=tcp://…`).

use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use crate::device::{CodeObjects, DeviceKind};
use crate::telemetry::log::{LogConfig, LogError, LogFormat, check_filter};
use args::{Count, DeviceChoice, LogFormatChoice, RoundingChoice, ServeArgs, Settings, ThinkingChoice};

pub mod args;
pub mod file;
pub mod generation;
pub mod model;

/// Settings that can't be used; what starts with them ends with exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A value outside its range.
    #[error("--{flag}: must be {range}, got {value}")]
    OutOfRange {
        /// Which setting.
        flag: &'static str,
        /// The range in words.
        range: String,
        /// The value.
        value: String,
    },
    /// A value that this build does not offer.
    #[error("--{flag} {value}: {reason}")]
    Unsupported {
        /// Which setting.
        flag: &'static str,
        /// The value.
        value: String,
        /// Why not, and what to do.
        reason: String,
    },
    /// The positional model and --model differ.
    #[error("the model is given twice: {positional} and --model {flag}")]
    TwoModels {
        /// Without a flag.
        positional: String,
        /// With --model.
        flag: String,
    },
    /// The demo model is nowhere.
    #[error("the demo model was not found; looked for config.json in: {}", looked.join(", "))]
    DemoNotFound {
        /// Where.
        looked: Vec<String>,
    },
    /// The settings file.
    #[error("--config {0}")]
    File(#[from] file::FileError),
    /// generation_config.json.
    #[error(transparent)]
    Generation(#[from] generation::GenerationConfigError),
    /// The log's filter.
    #[error("--log-filter: {0}")]
    Log(#[from] LogError),
}

/// Which checkpoint, and how to run it.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The checkpoint's folder.
    pub dir: PathBuf,
    /// Whether it is the demo model.
    pub is_demo: bool,
    /// Whether generation_config.json sets the defaults of sampling.
    pub use_generation_config: bool,
    /// Where intermediate values are rounded.
    pub rounding: RoundingChoice,
    /// Worker threads; `None`: one for each core.
    pub n_threads: Option<usize>,
    /// Where to run.
    pub device: DeviceChoice,
}

/// What the engine may use; `None` is settled when the model's shape and the machine's memory are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Longest prompt plus output.
    pub max_model_len: Option<usize>,
    /// Bytes of the KV cache.
    pub kv_cache_bytes: Option<u64>,
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Rows of one step.
    pub max_num_batched_tokens: usize,
    /// Prompt rows of one sequence in a step while others wait; at most `max_num_batched_tokens`.
    pub long_prefill_token_threshold: usize,
    /// Time of a step that prompts may fill while others run or wait; zero: no limit.
    pub prefill_step_time: Duration,
    /// Unfinished requests, waiting ones included.
    pub max_queued: usize,
    /// Whether equal prefixes share their state.
    pub enable_prefix_caching: bool,
}

/// The HTTP front end.
#[derive(Clone, PartialEq)]
pub struct ServerConfig {
    /// Address to listen on.
    pub host: String,
    /// Port to listen on; 0 takes a free one.
    pub port: u16,
    /// Names clients may use; never empty.
    pub served_model_names: Vec<String>,
    /// Keys that open the API; none: open to all.
    pub api_keys: Vec<String>,
    /// Origins browsers may call from.
    pub allowed_origins: Vec<String>,
    /// Thinking of requests that do not say.
    pub default_thinking: ThinkingChoice,
    /// Largest body.
    pub max_body_bytes: usize,
    /// Silence before a comment line; zero: never.
    pub sse_keep_alive: Duration,
    /// Time that running requests get at the end.
    pub drain_timeout: Duration,
    /// Whether prompts and answers are logged.
    pub log_requests: bool,
}

/// Everything `serve` needs, checked.
#[derive(Clone, PartialEq)]
pub struct Config {
    /// Which checkpoint.
    pub model: ModelConfig,
    /// What the engine may use.
    pub engine: EngineConfig,
    /// The HTTP front end.
    pub server: ServerConfig,
    /// The log.
    pub log: LogConfig,
    /// What the operator should know about settings that have no effect, for the log.
    pub notes: Vec<String>,
}

impl Config {
    /// The settings of `flashd serve`, from its command line, the file it names, and the environment.
    ///
    /// # Errors
    /// The first setting that can't be used.
    pub fn from_serve(args: ServeArgs) -> Result<Self, ConfigError> {
        let mut settings = args.settings;
        if let Some(positional) = args.model_tag {
            if let Some(flag) = settings.model.as_ref().filter(|flag| **flag != positional) {
                return Err(ConfigError::TwoModels { positional, flag: flag.clone() });
            }
            settings.model = Some(positional);
        }
        if args.no_enable_prefix_caching {
            settings.enable_prefix_caching = Some(false);
        }
        if let Some(path) = &args.config {
            settings = settings.or(file::read(path)?);
        }
        Self::from_settings(settings.or(environment(|name| std::env::var(name).ok())))
    }

    /// Checks settings from any source.
    ///
    /// # Errors
    /// As [`Config::from_serve`].
    pub fn from_settings(settings: Settings) -> Result<Self, ConfigError> {
        let notes = compatibility(&settings)?;
        let model = model_config(&settings)?;
        Ok(Self {
            engine: engine_config(&settings)?,
            server: server_config(&settings, model.is_demo)?,
            log: log_config(&settings)?,
            model,
            notes,
        })
    }
}

impl DeviceChoice {
    /// The runtime of the device; `None`: the processor, which is also what `auto` is so far.
    ///
    /// # Errors
    /// [`ConfigError::Unsupported`] for a device that this build has no kernels for.
    pub fn kind(self) -> Result<Option<DeviceKind>, ConfigError> {
        match self {
            Self::Auto | Self::Cpu => Ok(None),
            Self::Hip => Ok(Some(DeviceKind::Hip)),
            Self::Cuda => Ok(Some(DeviceKind::Cuda)),
            Self::Sim => Ok(Some(DeviceKind::Sim)),
            Self::Metal => Err(ConfigError::Unsupported {
                flag: "device",
                value: "metal".to_owned(),
                reason:
                    "this build has no Metal kernels; use --device cpu or auto (`flashd doctor` shows this machine)"
                        .to_owned(),
            }),
        }
    }
}

/// Folders that may hold the libraries of a device's driver.
#[must_use]
pub fn library_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        std::env::var_os("LD_LIBRARY_PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default();
    folders.retain(|folder| !folder.as_os_str().is_empty());
    folders.extend(
        ["ROCM_PATH", "CUDA_HOME"].iter().filter_map(std::env::var_os).map(|root| PathBuf::from(root).join("lib")),
    );
    let usual = [
        "/opt/rocm/lib",
        "/usr/local/cuda/lib64",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/lib/wsl/lib",
    ];
    folders.extend(usual.map(PathBuf::from));
    folders
}

/// Where this machine's code objects and device libraries are: `FLASHD_KERNELS` names the folder that holds
/// `<arch>/flashd.*`, before those beside the binary.
#[must_use]
pub fn code_objects() -> CodeObjects {
    let mut code = CodeObjects::beside(std::env::current_exe().ok().as_deref());
    let named = std::env::var_os("FLASHD_KERNELS").filter(|folder| !folder.is_empty());
    code.folders.splice(0..0, named.map(PathBuf::from));
    code.library_folders = library_folders();
    code
}

/// Where `chat` keeps the lines that were typed: in `XDG_STATE_HOME`, or `~/.local/state`. `None` without a home.
#[must_use]
pub fn history_file() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|folder| folder.is_absolute());
    let state = folder("XDG_STATE_HOME").or_else(|| folder("HOME").map(|home| home.join(".local/state")))?;
    Some(state.join("flashd/chat_history"))
}

/// What the environment says: `FLASHD_API_KEY` (or `VLLM_API_KEY`) and `FLASHD_LOG`. An empty value says nothing.
fn environment(lookup: impl Fn(&str) -> Option<String>) -> Settings {
    let get = |name| lookup(name).filter(|value| !value.trim().is_empty());
    Settings {
        api_key: get("FLASHD_API_KEY").or_else(|| get("VLLM_API_KEY")).map(|key| vec![key.trim().to_owned()]),
        log_filter: get("FLASHD_LOG"),
        ..Settings::default()
    }
}

fn model_config(settings: &Settings) -> Result<ModelConfig, ConfigError> {
    check_device(settings)?;
    let name = settings.model.as_deref().unwrap_or(model::DEMO);
    let use_generation_config = match settings.generation_config.as_deref() {
        None | Some("auto") => true,
        Some("vllm") => false,
        Some(other) => return Err(out_of_range("generation-config", "auto or vllm", other)),
    };
    let n_threads = settings.threads.map(|n| in_range("threads", n, 1, 1024)).transpose()?;
    Ok(ModelConfig {
        dir: model::find(name)?,
        is_demo: name == model::DEMO,
        use_generation_config,
        rounding: settings.rounding.unwrap_or(RoundingChoice::Kvq),
        n_threads,
        device: settings.device.unwrap_or(DeviceChoice::Auto),
    })
}

fn check_device(settings: &Settings) -> Result<(), ConfigError> {
    let n_cards = [
        ("tensor-parallel-size", settings.tensor_parallel_size),
        ("pipeline-parallel-size", settings.pipeline_parallel_size),
        ("data-parallel-size", settings.data_parallel_size),
    ];
    for (flag, n) in n_cards {
        if let Some(n) = n.filter(|n| *n != 1) {
            let reason = "the model runs on one device in this version; start one server for each device".to_owned();
            return Err(ConfigError::Unsupported { flag, value: n.to_string(), reason });
        }
    }
    settings.device.unwrap_or(DeviceChoice::Auto).kind().map(|_| ())
}

fn engine_config(settings: &Settings) -> Result<EngineConfig, ConfigError> {
    let max_num_seqs = in_range("max-num-seqs", settings.max_num_seqs.unwrap_or(64), 1, 1024)?;
    let batched = to_usize(settings.max_num_batched_tokens, 2048);
    if batched < max_num_seqs || batched > 1 << 20 {
        let range = format!("between --max-num-seqs ({max_num_seqs}) and 1048576");
        return Err(out_of_range("max-num-batched-tokens", &range, batched));
    }
    let long_prefill = match to_usize(settings.long_prefill_token_threshold, 1024) {
        0 => batched,
        n => n.min(batched),
    };
    let max_model_len = settings.max_model_len.map(|n| in_range("max-model-len", n.0, 2, u64::from(u32::MAX) / 2));
    let kv_cache_bytes =
        settings.kv_cache_memory_bytes.map(|n| in_range("kv-cache-memory-bytes", n.0, 1, u64::MAX / 2));
    Ok(EngineConfig {
        max_model_len: max_model_len.transpose()?.map(|n| n as usize),
        kv_cache_bytes: kv_cache_bytes.transpose()?,
        max_num_seqs,
        max_num_batched_tokens: batched,
        long_prefill_token_threshold: long_prefill,
        prefill_step_time: seconds("prefill-step-time", settings.prefill_step_time, 0.25)?,
        max_queued: in_range("max-num-queued-reqs", settings.max_num_queued_reqs.unwrap_or(1024), 1, 1_000_000)?,
        enable_prefix_caching: settings.enable_prefix_caching.unwrap_or(true),
    })
}

fn server_config(settings: &Settings, is_demo: bool) -> Result<ServerConfig, ConfigError> {
    let names = settings.served_model_name.clone().unwrap_or_else(|| vec!["deepseek-v4-flash".to_owned()]);
    if names.is_empty() || names.iter().any(|name| name.trim().is_empty()) {
        return Err(out_of_range("served-model-name", "one name or more, none of them empty", format!("{names:?}")));
    }
    let api_keys = settings.api_key.clone().unwrap_or_default();
    if settings.api_key.is_some() && (api_keys.is_empty() || api_keys.iter().any(|key| key.trim().is_empty())) {
        // An empty key must not open the API, nor be shown.
        return Err(out_of_range("api-key", "one key or more, none of them empty", "an empty one"));
    }
    let thinking = if is_demo { ThinkingChoice::Off } else { ThinkingChoice::High };
    let max_body = in_range("max-body-bytes", to_usize(settings.max_body_bytes, 64 << 20), 1024, 1 << 40)?;
    Ok(ServerConfig {
        host: settings.host.clone().unwrap_or_else(|| "127.0.0.1".to_owned()),
        port: settings.port.unwrap_or(8000),
        served_model_names: names,
        api_keys,
        allowed_origins: origins(settings.allowed_origins.as_deref())?,
        default_thinking: settings.default_thinking.unwrap_or(thinking),
        max_body_bytes: max_body,
        sse_keep_alive: seconds("sse-keep-alive-interval", settings.sse_keep_alive_interval, 5.0)?,
        drain_timeout: seconds("shutdown-timeout", settings.shutdown_timeout, 12.0)?,
        log_requests: settings.enable_log_requests.unwrap_or(false),
    })
}

/// vLLM takes a JSON list, most others words.
fn origins(values: Option<&[String]>) -> Result<Vec<String>, ConfigError> {
    let Some(values) = values else {
        return Ok(vec!["*".to_owned()]);
    };
    let mut origins = Vec::new();
    for value in values {
        if value.trim_start().starts_with('[') {
            let list: Vec<String> = serde_json::from_str(value)
                .map_err(|_| out_of_range("allowed-origins", "words or a JSON list of strings", value))?;
            origins.extend(list);
        } else {
            origins.push(value.clone());
        }
    }
    Ok(origins)
}

fn log_config(settings: &Settings) -> Result<LogConfig, ConfigError> {
    let filter = settings.log_filter.clone().unwrap_or_else(|| "info".to_owned());
    check_filter(&filter)?;
    let format = match settings.log_format {
        Some(LogFormatChoice::Json) => LogFormat::Json,
        Some(LogFormatChoice::Text) | None => LogFormat::Text,
    };
    Ok(LogConfig { format, filter })
}

/// Settings that exist so that vLLM's command lines work: refused where ignoring them would change what clients see,
/// noted where not.
fn compatibility(settings: &Settings) -> Result<Vec<String>, ConfigError> {
    if let Some(size) = settings.block_size.filter(|size| *size != 256) {
        return Err(out_of_range("block-size", "256", size));
    }
    let dtypes = ["auto", "fp8", "fp8_e4m3", "fp8_ds_mla"];
    if let Some(dtype) = settings.kv_cache_dtype.as_deref().filter(|dtype| !dtypes.contains(dtype)) {
        return Err(out_of_range("kv-cache-dtype", "auto, fp8 or fp8_ds_mla", dtype));
    }
    if settings.enable_chunked_prefill == Some(false) {
        let reason = "it is always on; it does not change what is computed".to_owned();
        return Err(ConfigError::Unsupported { flag: "enable-chunked-prefill", value: "false".to_owned(), reason });
    }
    let parsers = "the tokenizer, the chat encoding and the parsers are always DeepSeek-V4's";
    let kernels = "kernels are chosen by the device";
    let offload = "KV is not offloaded in this version: what does not fit is computed again";
    let policy = "requests wait by priority, and by arrival where it is equal";
    let table = [
        ("scheduling-policy", settings.scheduling_policy.is_some(), policy),
        ("trust-remote-code", settings.trust_remote_code.is_some(), "no code is loaded from a checkpoint"),
        ("tokenizer-mode", settings.tokenizer_mode.is_some(), parsers),
        ("tool-call-parser", settings.tool_call_parser.is_some(), parsers),
        ("reasoning-parser", settings.reasoning_parser.is_some(), parsers),
        ("enable-auto-tool-choice", settings.enable_auto_tool_choice.is_some(), "tool_choice auto is always on"),
        ("enable-prompt-tokens-details", settings.enable_prompt_tokens_details.is_some(), "usage always has them"),
        ("enable-per-request-metrics", settings.enable_per_request_metrics.is_some(), "answers carry no metrics yet"),
        ("moe-backend", settings.moe_backend.is_some(), kernels),
        ("linear-backend", settings.linear_backend.is_some(), kernels),
        ("dtype", settings.dtype.is_some(), "weights stay in the checkpoint's formats"),
        ("gpu-memory-utilization", settings.gpu_memory_utilization.is_some(), "use --kv-cache-memory-bytes"),
        ("kv-offloading-size", settings.kv_offloading_size.is_some(), offload),
        ("kv-offloading-backend", settings.kv_offloading_backend.is_some(), offload),
        ("kv-transfer-config", settings.kv_transfer_config.is_some(), offload),
        ("speculative-config", settings.speculative_config.is_some(), "tokens are not drafted in this version"),
    ];
    let given = table.into_iter().filter(|(_, is_given, _)| *is_given);
    Ok(given.map(|(flag, _, why)| format!("--{flag} has no effect: {why}")).collect())
}

fn out_of_range(flag: &'static str, range: &str, value: impl Display) -> ConfigError {
    ConfigError::OutOfRange { flag, range: range.to_owned(), value: value.to_string() }
}

fn in_range<T: PartialOrd + Display>(flag: &'static str, value: T, min: T, max: T) -> Result<T, ConfigError> {
    if value < min || value > max {
        return Err(out_of_range(flag, &format!("between {min} and {max}"), value));
    }
    Ok(value)
}

fn seconds(flag: &'static str, value: Option<f64>, default: f64) -> Result<Duration, ConfigError> {
    let value = value.unwrap_or(default);
    if !(0.0..=86_400.0).contains(&value) {
        return Err(out_of_range(flag, "between 0 and 86400 seconds", value));
    }
    Ok(Duration::from_secs_f64(value))
}

fn to_usize(count: Option<Count>, default: usize) -> usize {
    count.map_or(default, |count| usize::try_from(count.0).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(change: impl FnOnce(&mut Settings)) -> Result<Config, ConfigError> {
        let mut settings = Settings::default();
        change(&mut settings);
        Config::from_settings(settings)
    }

    fn refusal(change: impl FnOnce(&mut Settings)) -> String {
        checked(change).err().unwrap().to_string()
    }

    #[test]
    fn defaults_serve_the_demo_model_on_loopback_without_thinking() {
        let config = checked(|_| {}).unwrap();
        assert!(config.model.is_demo && config.model.dir.join("config.json").is_file());
        assert_eq!((config.server.host.as_str(), config.server.port), ("127.0.0.1", 8000));
        assert_eq!(config.server.served_model_names, ["deepseek-v4-flash"]);
        assert_eq!(config.server.default_thinking, ThinkingChoice::Off);
        assert!(config.server.api_keys.is_empty() && !config.server.log_requests && config.notes.is_empty());
        assert_eq!(config.engine.max_num_seqs, 64);
        assert_eq!(config.engine.max_num_batched_tokens, 2048);
        assert_eq!(config.engine.long_prefill_token_threshold, 1024);
        assert_eq!(config.engine.prefill_step_time, Duration::from_millis(250));
    }

    #[test]
    fn a_real_model_thinks_unless_told_otherwise() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_str().unwrap().to_owned();
        let config = checked(|s| s.model = Some(path.clone())).unwrap();
        assert_eq!((config.server.default_thinking, config.model.is_demo), (ThinkingChoice::High, false));
        let config = checked(|s| (s.model, s.default_thinking) = (Some(path), Some(ThinkingChoice::Low))).unwrap();
        assert_eq!(config.server.default_thinking, ThinkingChoice::Low);
        let config = checked(|s| s.default_thinking = Some(ThinkingChoice::Max)).unwrap();
        assert_eq!(config.server.default_thinking, ThinkingChoice::Max);
    }

    #[test]
    fn flags_beat_the_file_and_the_file_beats_the_environment() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("flashd.yaml");
        std::fs::write(&path, "port: 2\nmax-num-seqs: 3\napi-key: from-file\n").unwrap();
        let environment = environment(|name| match name {
            "FLASHD_API_KEY" => Some("from-environment".to_owned()),
            "FLASHD_LOG" => Some("debug".to_owned()),
            _ => None,
        });
        let flags = Settings { port: Some(1), ..Settings::default() };
        let config = Config::from_settings(flags.or(file::read(&path).unwrap()).or(environment.clone())).unwrap();
        assert_eq!((config.server.port, config.engine.max_num_seqs), (1, 3));
        assert_eq!(config.server.api_keys, ["from-file"]);
        assert_eq!(config.log.filter, "debug");
        assert_eq!(Config::from_settings(environment).unwrap().server.api_keys, ["from-environment"]);
    }

    #[test]
    fn the_environment_gives_one_key_and_an_empty_value_says_nothing() {
        let both = environment(|name| (name != "FLASHD_LOG").then(|| format!(" {name} ")));
        assert_eq!(both.api_key.unwrap(), ["FLASHD_API_KEY"]);
        let vllm = environment(|name| (name == "VLLM_API_KEY").then(|| "k".to_owned()));
        assert_eq!(vllm.api_key.unwrap(), ["k"]);
        assert_eq!(environment(|_| Some(String::new())), Settings::default());
    }

    #[test]
    fn refusals_name_the_flag_the_limit_and_the_value() {
        type Change = fn(&mut Settings);
        let cases: [(&str, &str, Change); 12] = [
            ("--max-num-seqs", "0", |s| s.max_num_seqs = Some(0)),
            ("--max-num-batched-tokens", "64", |s| s.max_num_batched_tokens = Some(Count(63))),
            ("--max-model-len", "1", |s| s.max_model_len = Some(Count(1))),
            ("--threads", "0", |s| s.threads = Some(0)),
            ("--tensor-parallel-size 2", "one device", |s| s.tensor_parallel_size = Some(2)),
            ("--device metal", "no Metal kernels", |s| s.device = Some(DeviceChoice::Metal)),
            ("--block-size", "16", |s| s.block_size = Some(16)),
            ("--kv-cache-dtype", "bf16", |s| s.kv_cache_dtype = Some("bf16".to_owned())),
            ("--generation-config", "/x", |s| s.generation_config = Some("/x".to_owned())),
            ("--shutdown-timeout", "-1", |s| s.shutdown_timeout = Some(-1.0)),
            ("--sse-keep-alive-interval", "NaN", |s| s.sse_keep_alive_interval = Some(f64::NAN)),
            ("--enable-chunked-prefill", "always on", |s| s.enable_chunked_prefill = Some(false)),
        ];
        for (flag, word, change) in cases {
            let text = refusal(change);
            assert!(text.starts_with(flag) && text.contains(word), "{text}");
        }
        assert!(refusal(|s| s.log_filter = Some("flashd=loud".to_owned())).contains("loud"));
    }

    #[test]
    fn an_empty_key_is_refused_and_never_opens_the_api() {
        for keys in [vec![], vec![String::new()], vec!["good".to_owned(), " ".to_owned()]] {
            let text = refusal(|s| s.api_key = Some(keys));
            assert!(text.contains("--api-key") && !text.contains("good"), "{text}");
        }
    }

    #[test]
    fn flags_of_vllm_without_effect_are_noted() {
        let config = checked(|s| {
            s.trust_remote_code = Some(true);
            s.tool_call_parser = Some("deepseek_v4".to_owned());
            s.block_size = Some(256);
            s.kv_cache_dtype = Some("fp8".to_owned());
            s.enable_prefix_caching = Some(true);
        });
        let notes = config.unwrap().notes;
        assert_eq!(notes.len(), 2);
        assert!(notes[0].contains("--trust-remote-code") && notes[1].contains("--tool-call-parser"));
    }

    #[test]
    fn origins_are_words_or_a_json_list() {
        let words = ["https://a".to_owned(), "[\"https://b\", \"https://c\"]".to_owned()];
        assert_eq!(origins(Some(&words)).unwrap(), ["https://a", "https://b", "https://c"]);
        assert_eq!(origins(None).unwrap(), ["*"]);
        assert!(origins(Some(&["[1]".to_owned()])).is_err());
    }

    #[test]
    fn a_threshold_of_zero_is_no_limit() {
        let config = checked(|s| s.long_prefill_token_threshold = Some(Count(0))).unwrap();
        assert_eq!(config.engine.long_prefill_token_threshold, 2048);
    }

    #[test]
    fn a_model_given_twice_is_refused_unless_it_is_the_same() {
        let args = |tag: &str, flag: &str| ServeArgs {
            model_tag: Some(tag.to_owned()),
            settings: Settings { model: Some(flag.to_owned()), ..Settings::default() },
            ..ServeArgs::default()
        };
        assert!(Config::from_serve(args("demo", "demo")).is_ok());
        let text = Config::from_serve(args("demo", "/other")).err().unwrap().to_string();
        assert!(text.contains("demo") && text.contains("/other"), "{text}");
    }
}
