//! Every setting of `serve`, once: a flag, a key of the configuration file, and a field, all of the same name.
//!
//! Names are vLLM's where vLLM has the setting, so that a command line can be carried over.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;
use serde::de::{self, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

/// Where the model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// The best device that this build can use on this machine.
    Auto,
    /// The processor.
    Cpu,
    /// AMD GPUs.
    Hip,
    /// NVIDIA GPUs.
    Cuda,
    /// Apple GPUs.
    Metal,
    /// The kernel simulator, for tests.
    Sim,
}

/// How hard the model thinks when a request does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ThinkingChoice {
    /// It answers at once.
    Off,
    /// It thinks, without an effort prefix.
    Low,
    /// It thinks at high effort, as the hosted API.
    High,
    /// It thinks at the highest effort.
    Max,
}

/// Where intermediate values are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RoundingChoice {
    /// Nowhere beyond f32.
    Exact,
    /// Where the KV cache stores rows.
    Kvq,
    /// Everywhere the published implementation rounds.
    Official,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormatChoice {
    /// One line for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Order of requests that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SchedulingPolicy {
    /// By arrival.
    Fcfs,
    /// By the requests' `priority`, then by arrival.
    Priority,
}

/// A whole number that may carry a unit: `k m g t` are powers of 1000 (`25.6k` is 25600), `K M G T` powers of 1024, with an
/// optional `i` and `B` (`4GiB`), as vLLM reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count(pub u64);

impl FromStr for Count {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is not a whole number such as 8192, 8K, 25.6k or 4GiB");
        let text = text.trim();
        let n_digits = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(text.len());
        let (number, unit) = text.split_at(n_digits);
        let number = number.replace('_', "");
        let unit = unit.strip_suffix('B').unwrap_or(unit);
        let factor: u64 = match unit.strip_suffix('i').unwrap_or(unit) {
            "" => 1,
            "k" => 1_000,
            "m" => 1_000_000,
            "g" => 1_000_000_000,
            "t" => 1_000_000_000_000,
            "K" => 1 << 10,
            "M" => 1 << 20,
            "G" => 1 << 30,
            "T" => 1 << 40,
            _ => return Err(wrong()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(factor).map(Self).ok_or_else(wrong);
        }
        let value = number.parse::<f64>().map_err(|_| wrong())? * factor as f64;
        // Decimal fractions are not exact in binary, so 25.6k may be a hair off a whole number.
        if value.is_finite() && (value - value.round()).abs() < 1e-6 * value.max(1.0) && value < 9e15 {
            return Ok(Self(value.round() as u64));
        }
        Err(wrong())
    }
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CountVisitor)
    }
}

struct CountVisitor;

impl Visitor<'_> for CountVisitor {
    type Value = Count;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number such as 8192, 8K, 25.6k or 4GiB")
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Count, E> {
        Ok(Count(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Count, E> {
        u64::try_from(value).map(Count).map_err(|_| E::invalid_value(Unexpected::Signed(value), &self))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Count, E> {
        value.to_string().parse().map_err(|_| E::invalid_value(Unexpected::Float(value), &self))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Count, E> {
        text.parse().map_err(E::custom)
    }
}

macro_rules! settings {
    ($($(#[$meta:meta])* $name:ident: $type:ty,)+) => {
        /// The settings of one source (command line, file or environment): `None` where it says nothing.
        #[derive(Clone, Debug, Default, PartialEq, clap::Args, Deserialize)]
        #[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
        pub struct Settings {
            $($(#[$meta])* pub $name: Option<$type>,)+
        }

        impl Settings {
            /// These settings, and another source's where these say nothing.
            #[must_use]
            pub fn or(self, lower: Self) -> Self {
                Self { $($name: self.$name.or(lower.$name),)+ }
            }
        }
    };
}

settings! {
    /// Checkpoint folder, or `demo` for the small model that comes with flashd [default: demo]
    #[arg(long, help_heading = "Model")]
    model: String,
    /// Names that clients may use for the model; answers carry the first [default: deepseek-v4-flash]
    #[arg(long, num_args = 1.., value_name = "NAME", help_heading = "Model")]
    #[serde(deserialize_with = "one_or_many")]
    served_model_name: Vec<String>,
    /// Longest prompt and output together, in tokens [default: the model's, as far as the KV cache holds it]
    #[arg(long, value_name = "TOKENS", help_heading = "Model")]
    max_model_len: Count,
    /// Where default sampling settings come from: `auto` is the checkpoint's generation_config.json, `vllm` is OpenAI's defaults [default: auto]
    #[arg(long, value_name = "SOURCE", help_heading = "Model")]
    generation_config: String,
    /// Thinking of requests that do not say [default: high; off for the demo model]
    #[arg(long, help_heading = "Model")]
    default_thinking: ThinkingChoice,
    /// Where intermediate values are rounded; for comparing with the reference [default: kvq]
    #[arg(long, hide = true)]
    rounding: RoundingChoice,

    /// Where to run [default: auto]
    #[arg(long, help_heading = "Device")]
    device: DeviceChoice,
    /// Worker threads of the CPU device [default: one for each core that this process may use]
    #[arg(long, value_name = "N", help_heading = "Device")]
    threads: usize,
    /// Devices to spread one model over; only 1 so far
    #[arg(long, visible_alias = "tp", value_name = "N", help_heading = "Device")]
    tensor_parallel_size: usize,
    /// Bytes of the KV cache [default: a part of the free memory]
    #[arg(long, value_name = "BYTES", help_heading = "Device")]
    kv_cache_memory_bytes: Count,

    /// Sequences that run at once [default: 64]
    #[arg(long, value_name = "N", help_heading = "Scheduler")]
    max_num_seqs: usize,
    /// Rows (prompt and decode tokens) of one step [default: 2048]
    #[arg(long, value_name = "TOKENS", help_heading = "Scheduler")]
    max_num_batched_tokens: Count,
    /// Prompt rows of one sequence in a step while others wait; 0: no such limit [default: 1024]
    #[arg(long, value_name = "TOKENS", help_heading = "Scheduler")]
    long_prefill_token_threshold: Count,
    /// Seconds of a step that prompts may fill while other requests run or wait, so that these go on; 0: no such limit [default: 0.25]
    #[arg(long, value_name = "SECONDS", help_heading = "Scheduler")]
    prefill_step_time: f64,
    /// Unfinished requests, waiting ones included, beyond which 429 is answered [default: 1024]
    #[arg(long, value_name = "N", help_heading = "Scheduler")]
    max_num_queued_reqs: usize,
    /// Share the state of equal prefixes between requests [default: true]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Scheduler")]
    enable_prefix_caching: bool,

    /// Address to listen on [default: 127.0.0.1]
    #[arg(long, help_heading = "Server")]
    host: String,
    /// Port to listen on; 0 takes a free one [default: 8000]
    #[arg(long, help_heading = "Server")]
    port: u16,
    /// Keys that open the API, as Bearer or x-api-key; FLASHD_API_KEY or VLLM_API_KEY is better, since other users of the machine can read a command line
    #[arg(long, num_args = 1.., value_name = "KEY", help_heading = "Server")]
    #[serde(deserialize_with = "one_or_many")]
    api_key: Vec<String>,
    /// Origins that browsers may call from, separated by spaces or as a JSON list [default: *]
    #[arg(long, num_args = 1.., value_name = "ORIGIN", help_heading = "Server")]
    #[serde(deserialize_with = "one_or_many")]
    allowed_origins: Vec<String>,
    /// Largest request body [default: 64MiB]
    #[arg(long, value_name = "BYTES", help_heading = "Server")]
    max_body_bytes: Count,
    /// Seconds of silence after which a stream gets a comment line; 0: never [default: 5]
    #[arg(long, value_name = "SECONDS", help_heading = "Server")]
    sse_keep_alive_interval: f64,
    /// Seconds that running requests get to finish after SIGTERM or SIGINT; a second signal ends at once [default: 12]
    #[arg(long, value_name = "SECONDS", help_heading = "Server")]
    shutdown_timeout: f64,

    /// Form of the log [default: text]
    #[arg(long, help_heading = "Log")]
    log_format: LogFormatChoice,
    /// What to log, such as `info` or `flashd=debug`; also FLASHD_LOG [default: info]
    #[arg(long, value_name = "FILTER", help_heading = "Log")]
    log_filter: String,
    /// Log prompts and answers; never a word of them otherwise
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Log")]
    enable_log_requests: bool,

    /// Only 256
    #[arg(long, value_name = "TOKENS", help_heading = COMPATIBILITY)]
    block_size: usize,
    /// Only `auto`, `fp8` and `fp8_ds_mla`, which are the same here
    #[arg(long, value_name = "TYPE", help_heading = COMPATIBILITY)]
    kv_cache_dtype: String,
    /// Only 1
    #[arg(long, visible_alias = "pp", value_name = "N", help_heading = COMPATIBILITY)]
    pipeline_parallel_size: usize,
    /// Only 1
    #[arg(long, visible_alias = "dp", value_name = "N", help_heading = COMPATIBILITY)]
    data_parallel_size: usize,
    /// Requests wait by priority, and by arrival where it is equal
    #[arg(long, help_heading = COMPATIBILITY)]
    scheduling_policy: SchedulingPolicy,
    /// Always on
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = COMPATIBILITY)]
    enable_chunked_prefill: bool,
    /// Always on
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = COMPATIBILITY)]
    enable_auto_tool_choice: bool,
    /// Always on
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = COMPATIBILITY)]
    enable_prompt_tokens_details: bool,
    /// No effect yet
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = COMPATIBILITY)]
    enable_per_request_metrics: bool,
    /// No code is loaded from a checkpoint, so there is nothing to trust
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = COMPATIBILITY)]
    trust_remote_code: bool,
    /// The tokenizer, the chat encoding and the parsers are DeepSeek-V4's
    #[arg(long, value_name = "NAME", help_heading = COMPATIBILITY)]
    tokenizer_mode: String,
    /// As --tokenizer-mode
    #[arg(long, value_name = "NAME", help_heading = COMPATIBILITY)]
    tool_call_parser: String,
    /// As --tokenizer-mode
    #[arg(long, value_name = "NAME", help_heading = COMPATIBILITY)]
    reasoning_parser: String,
    /// Kernels are chosen by the device
    #[arg(long, value_name = "NAME", help_heading = COMPATIBILITY)]
    moe_backend: String,
    /// Kernels are chosen by the device
    #[arg(long, value_name = "NAME", help_heading = COMPATIBILITY)]
    linear_backend: String,
    /// Storage is the checkpoint's
    #[arg(long, value_name = "TYPE", help_heading = COMPATIBILITY)]
    dtype: String,
    /// Use --kv-cache-memory-bytes
    #[arg(long, value_name = "SHARE", help_heading = COMPATIBILITY)]
    gpu_memory_utilization: f64,
    /// No effect yet: KV leaves the device only when it is dropped
    #[arg(long, value_name = "GIB", help_heading = COMPATIBILITY)]
    kv_offloading_size: f64,
    /// As --kv-offloading-size
    #[arg(long, value_name = "NAME", help_heading = COMPATIBILITY)]
    kv_offloading_backend: String,
    /// As --kv-offloading-size
    #[arg(long, value_name = "JSON", help_heading = COMPATIBILITY)]
    kv_transfer_config: String,
    /// No effect yet: tokens are not drafted, and drafting would not change them
    #[arg(long, value_name = "JSON", help_heading = COMPATIBILITY)]
    speculative_config: String,
}

const COMPATIBILITY: &str = "Accepted from vLLM's command lines";

/// `flashd serve`.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
pub struct ServeArgs {
    /// The model, as --model
    #[arg(value_name = "MODEL")]
    pub model_tag: Option<String>,
    /// YAML file of settings, with the flags' names as keys; a flag beats the file, the file beats the environment
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// As --enable-prefix-caching=false
    #[arg(long, conflicts_with = "enable_prefix_caching", help_heading = "Scheduler")]
    pub no_enable_prefix_caching: bool,
    /// Everything else.
    #[command(flatten)]
    pub settings: Settings,
}

/// What the commands that run a model in their own process take.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
pub struct LocalArgs {
    /// Checkpoint folder, or `demo` for the small model that comes with flashd [default: demo]
    #[arg(short, long, help_heading = "Model")]
    pub model: Option<String>,
    /// Longest prompt and output together, in tokens [default: the model's, as far as the KV cache holds it]
    #[arg(long, value_name = "TOKENS", help_heading = "Model")]
    pub max_model_len: Option<Count>,
    /// Where to run [default: auto]
    #[arg(long, help_heading = "Model")]
    pub device: Option<DeviceChoice>,
    /// Worker threads of the CPU device [default: one for each core that this process may use]
    #[arg(short, long, value_name = "N", help_heading = "Model")]
    pub threads: Option<usize>,
    /// Bytes of the KV cache [default: a part of the free memory]
    #[arg(long, value_name = "BYTES", help_heading = "Model")]
    pub kv_cache_memory_bytes: Option<Count>,
    /// Where intermediate values are rounded; for comparing with the reference [default: kvq]
    #[arg(long, hide = true)]
    pub rounding: Option<RoundingChoice>,
}

impl LocalArgs {
    /// The same as settings of `serve`.
    #[must_use]
    pub fn settings(&self) -> Settings {
        Settings {
            model: self.model.clone(),
            max_model_len: self.max_model_len,
            device: self.device,
            threads: self.threads,
            kv_cache_memory_bytes: self.kv_cache_memory_bytes,
            rounding: self.rounding,
            ..Settings::default()
        }
    }
}

fn one_or_many<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<String>>, D::Error> {
    deserializer.deserialize_any(TextsVisitor).map(Some)
}

struct TextsVisitor;

impl<'de> Visitor<'de> for TextsVisitor {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a list of texts (numbers and true or false in quotes)")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<String>, E> {
        Ok(vec![text.to_owned()])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<String>, A::Error> {
        let mut texts = Vec::new();
        while let Some(text) = seq.next_element()? {
            texts.push(text);
        }
        Ok(texts)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn parse(line: &str) -> Result<ServeArgs, clap::Error> {
        Command::try_parse_from(std::iter::once("serve").chain(line.split_whitespace())).map(|command| command.args)
    }

    #[test]
    fn counts_read_units() {
        let cases = [
            ("8192", 8192),
            ("26_000_000_000", 26_000_000_000),
            ("8k", 8000),
            ("8K", 8192),
            ("25.6k", 25_600),
            ("4GiB", 4 << 30),
            ("4G", 4 << 30),
            ("1.5K", 1536),
            ("0", 0),
        ];
        for (text, want) in cases {
            assert_eq!(text.parse(), Ok(Count(want)), "{text}");
        }
        for wrong in ["", "-1", "x", "4Q", "1.5", "1.2.3k", "99999999999999999999", "20000000T", "k", "NaN", "inf"] {
            assert!(wrong.parse::<Count>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_production_command_line_of_vllm_is_taken() {
        let args = parse(
            "--host 0.0.0.0 --port 8000 --model /models/x --served-model-name deepseek-ai/DeepSeek-V4-Flash-0731 flash \
             --trust-remote-code --tokenizer-mode deepseek_v4 --reasoning-parser deepseek_v4 \
             --tool-call-parser deepseek_v4 --enable-auto-tool-choice --generation-config vllm \
             --enable-prompt-tokens-details --enable-per-request-metrics --scheduling-policy priority \
             --kv-cache-dtype fp8 --block-size 256 --max-model-len 524288 --kv-cache-memory-bytes 26000000000 \
             --kv-offloading-size 96 --kv-offloading-backend native --kv-transfer-config {} --max-num-seqs 64 \
             --max-num-batched-tokens 2048 --long-prefill-token-threshold 2048 --moe-backend triton \
             --linear-backend auto --tensor-parallel-size 1 --api-key a --api-key b c",
        );
        let args = args.unwrap();
        assert_eq!(args.settings.served_model_name.unwrap(), ["deepseek-ai/DeepSeek-V4-Flash-0731", "flash"]);
        assert_eq!(args.settings.api_key.unwrap(), ["a", "b", "c"]);
        assert_eq!(args.settings.max_model_len, Some(Count(524_288)));
        assert_eq!(args.settings.trust_remote_code, Some(true));
    }

    #[test]
    fn nothing_given_says_nothing() {
        assert_eq!(parse("").unwrap(), ServeArgs::default());
    }

    #[test]
    fn switches_can_be_turned_off() {
        assert_eq!(parse("--enable-log-requests=false").unwrap().settings.enable_log_requests, Some(false));
        assert_eq!(parse("--enable-log-requests demo").unwrap().model_tag.as_deref(), Some("demo"));
    }

    #[test]
    fn wrong_flags_are_refused() {
        for line in ["--port 70000", "--device tpu", "--no-such-flag", "--default-thinking medium", "--threads x"] {
            assert!(parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn every_flag_has_help() {
        use clap::CommandFactory;
        for arg in Command::command().get_arguments() {
            assert!(arg.get_help().is_some(), "{}", arg.get_id());
        }
    }

    #[test]
    fn a_source_speaks_only_where_the_one_above_is_silent() {
        let upper = parse("--port 1 --api-key a").unwrap().settings;
        let lower = parse("--port 2 --api-key b --host h").unwrap().settings;
        let merged = upper.or(lower);
        assert_eq!((merged.port, merged.host.as_deref()), (Some(1), Some("h")));
        assert_eq!(merged.api_key.unwrap(), ["a"]);
    }
}
