//! The engine's metrics under vLLM's names, labels and buckets, in a registry of their own.
//!
//! Dashboards and routers made for vLLM read them unchanged. Times are in seconds, as Prometheus asks. Names, labels and
//! buckets follow vLLM 0.27; counters carry the `_total` that its exporter adds.

use std::collections::HashMap;
use std::sync::Arc;

use prometheus::{
    Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};

/// Seconds from arrival to the first token.
const TTFT_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Seconds between tokens.
const ITL_BUCKETS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
/// Seconds of a whole request or one of its phases.
const REQUEST_BUCKETS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
/// Tokens of a step.
const ITERATION_BUCKETS: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
/// Tokens of a request: 1, 2, 5, … up to the model's context.
const TOKEN_BUCKETS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];
/// Choices of a request.
const N_BUCKETS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];

/// How a request ended, as the label `finished_reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A stop token or stop string.
    Stop,
    /// max_tokens or the context's end.
    Length,
    /// The client went away.
    Abort,
    /// It failed.
    Error,
}

impl Outcome {
    /// Every value of the label; each series exists from the start.
    pub const ALL: [Self; 4] = [Self::Stop, Self::Length, Self::Abort, Self::Error];

    /// The label's value.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
            Self::Error => "error",
        }
    }
}

/// What the KV cache was built with: the labels of `vllm:cache_config_info`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheConfigInfo {
    /// Tokens of a block.
    pub block_size: usize,
    /// Blocks of the device's pool.
    pub num_gpu_blocks: usize,
    /// Whether full blocks are shared.
    pub enable_prefix_caching: bool,
}

/// All metrics of one engine.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    model_name: String,
    cache_config_info: IntGaugeVec,
    /// Sequences in the running batch.
    pub num_requests_running: IntGauge,
    /// Sequences that wait.
    pub num_requests_waiting: IntGauge,
    waiting_by_reason: IntGaugeVec,
    /// Share of KV blocks held by running sequences, 0 to 1.
    pub kv_cache_usage_perc: Gauge,
    /// Arrival to first token.
    pub time_to_first_token_seconds: Histogram,
    /// Between the tokens of a choice.
    pub inter_token_latency_seconds: Histogram,
    /// Mean time a token of a finished request, without the first.
    pub request_time_per_output_token_seconds: Histogram,
    /// Arrival to end.
    pub e2e_request_latency_seconds: Histogram,
    /// Arrival to first scheduled.
    pub request_queue_time_seconds: Histogram,
    /// First scheduled to first token.
    pub request_prefill_time_seconds: Histogram,
    /// First token to last token.
    pub request_decode_time_seconds: Histogram,
    /// First scheduled to last token.
    pub request_inference_time_seconds: Histogram,
    /// Prompt tokens of requests whose prefill is done.
    pub prompt_tokens_total: IntCounter,
    prompt_tokens_by_source: IntCounterVec,
    /// Prompt tokens that came from the prefix cache.
    pub prompt_tokens_cached_total: IntCounter,
    /// Tokens generated.
    pub generation_tokens_total: IntCounter,
    /// Prompt tokens of a finished request.
    pub request_prompt_tokens: Histogram,
    /// Generated tokens of a finished request.
    pub request_generation_tokens: Histogram,
    /// Longest choice of a finished request.
    pub request_max_num_generation_tokens: Histogram,
    /// Prompt tokens a finished request really computed.
    pub request_prefill_kv_computed_tokens: Histogram,
    /// Tokens of a step, prompt and generated.
    pub iteration_tokens_total: Histogram,
    /// The field n.
    pub request_params_n: Histogram,
    /// The field max_tokens.
    pub request_params_max_tokens: Histogram,
    request_success: IntCounterVec,
    /// Sequences thrown out to make room.
    pub num_preemptions_total: IntCounter,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_cache_queries_total: IntCounter,
    /// Prompt tokens found in it.
    pub prefix_cache_hits_total: IntCounter,
    /// Rows whose logits were not numbers (`flashd:` has no peer in vLLM).
    pub numerics_errors_total: IntCounter,
    /// Steps that overran the watchdog's deadline.
    pub stalled_steps_total: IntCounter,
    /// Host time of a step: planning and bookkeeping, without waiting for the device.
    pub step_host_seconds: Histogram,
}

impl Metrics {
    /// Registers every metric with the labels `model_name` and `engine="0"`.
    #[must_use]
    pub fn new(model_name: &str) -> Arc<Self> {
        let make = Maker { registry: Registry::new(), model_name };
        let metrics = Self::build(&make);
        for outcome in Outcome::ALL {
            metrics.request_success.with_label_values(&[outcome.label()]);
        }
        metrics.set_waiting_by_reason(0, 0);
        metrics.add_prompt_source(0, 0);
        Arc::new(metrics)
    }

    /// The registry, so that the HTTP side can add its own.
    #[must_use]
    pub const fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The value of the label `model_name`.
    #[must_use]
    pub fn model_name(&self) -> &str {
        &self.model_name
    }

    /// Everything in Prometheus' text format (version 0.0.4).
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        if let Err(error) = TextEncoder::new().encode_utf8(&self.registry.gather(), &mut text) {
            tracing::error!(%error, "metrics cannot be rendered");
        }
        text
    }

    /// Says what the cache was built with.
    pub fn set_cache_config(&self, info: &CacheConfigInfo) {
        self.cache_config_info.reset();
        let caching = if info.enable_prefix_caching { "True" } else { "False" };
        let (block_size, num_gpu_blocks) = (info.block_size.to_string(), info.num_gpu_blocks.to_string());
        self.cache_config_info.with_label_values(&[block_size.as_str(), &num_gpu_blocks, caching]).set(1);
    }

    /// Splits the waiting sequences: for want of room, and choices that wait for their sibling's prefill.
    pub fn set_waiting_by_reason(&self, capacity: i64, deferred: i64) {
        self.waiting_by_reason.with_label_values(&["capacity"]).set(capacity);
        self.waiting_by_reason.with_label_values(&["deferred"]).set(deferred);
    }

    /// Counts prompt tokens by where their state came from.
    pub fn add_prompt_source(&self, local_compute: u64, local_cache_hit: u64) {
        self.prompt_tokens_by_source.with_label_values(&["local_compute"]).inc_by(local_compute);
        self.prompt_tokens_by_source.with_label_values(&["local_cache_hit"]).inc_by(local_cache_hit);
    }

    /// Counts an ended request.
    pub fn count_outcome(&self, outcome: Outcome) {
        self.request_success.with_label_values(&[outcome.label()]).inc();
    }

    /// Ended requests of one outcome.
    #[must_use]
    pub fn outcome_count(&self, outcome: Outcome) -> u64 {
        self.request_success.with_label_values(&[outcome.label()]).get()
    }

    fn build(make: &Maker<'_>) -> Self {
        Self {
            registry: make.registry.clone(),
            model_name: make.model_name.to_owned(),
            cache_config_info: make.gauges(
                "vllm:cache_config_info",
                "Information of the LLMEngine CacheConfig",
                &["block_size", "num_gpu_blocks", "enable_prefix_caching"],
            ),
            num_requests_running: make.gauge("vllm:num_requests_running", "Sequences in the running batch."),
            num_requests_waiting: make.gauge("vllm:num_requests_waiting", "Sequences that wait to be run."),
            waiting_by_reason: make.gauges(
                "vllm:num_requests_waiting_by_reason",
                "Waiting sequences by reason.",
                &["reason"],
            ),
            kv_cache_usage_perc: make.ratio("vllm:kv_cache_usage_perc", "KV cache in use; 1 is all of it."),
            time_to_first_token_seconds: make.histogram(
                "vllm:time_to_first_token_seconds",
                "Arrival to first token.",
                TTFT_BUCKETS,
            ),
            inter_token_latency_seconds: make.histogram(
                "vllm:inter_token_latency_seconds",
                "Time between the tokens of a choice.",
                ITL_BUCKETS,
            ),
            request_time_per_output_token_seconds: make.histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time a generated token after the first.",
                ITL_BUCKETS,
            ),
            e2e_request_latency_seconds: make.latency("vllm:e2e_request_latency_seconds", "Arrival to end."),
            request_queue_time_seconds: make.latency("vllm:request_queue_time_seconds", "Arrival to first scheduled."),
            request_prefill_time_seconds: make
                .latency("vllm:request_prefill_time_seconds", "First scheduled to first token."),
            request_decode_time_seconds: make.latency("vllm:request_decode_time_seconds", "First token to last token."),
            request_inference_time_seconds: make
                .latency("vllm:request_inference_time_seconds", "First scheduled to last token."),
            prompt_tokens_total: make.counter("vllm:prompt_tokens_total", "Prompt tokens processed."),
            prompt_tokens_by_source: make.counters(
                "vllm:prompt_tokens_by_source_total",
                "Prompt tokens by where their state came from.",
                "source",
            ),
            prompt_tokens_cached_total: make
                .counter("vllm:prompt_tokens_cached_total", "Prompt tokens taken from the prefix cache."),
            generation_tokens_total: make.counter("vllm:generation_tokens_total", "Tokens generated."),
            request_prompt_tokens: make.tokens("vllm:request_prompt_tokens", "Prompt tokens of a finished request."),
            request_generation_tokens: make
                .tokens("vllm:request_generation_tokens", "Generated tokens of a finished request."),
            request_max_num_generation_tokens: make
                .tokens("vllm:request_max_num_generation_tokens", "Tokens of a finished request's longest choice."),
            request_prefill_kv_computed_tokens: make.tokens(
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens computed for a finished request, without cached ones.",
            ),
            iteration_tokens_total: make.histogram(
                "vllm:iteration_tokens_total",
                "Tokens of a step.",
                ITERATION_BUCKETS,
            ),
            request_params_n: make.histogram("vllm:request_params_n", "The request field n.", N_BUCKETS),
            request_params_max_tokens: make.tokens("vllm:request_params_max_tokens", "The request field max_tokens."),
            request_success: make.counters("vllm:request_success_total", "Ended requests.", "finished_reason"),
            num_preemptions_total: make.counter("vllm:num_preemptions_total", "Sequences preempted."),
            prefix_cache_queries_total: make
                .counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
            prefix_cache_hits_total: make
                .counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
            numerics_errors_total: make
                .counter("flashd:numerics_errors_total", "Rows whose logits were not finite numbers."),
            stalled_steps_total: make.counter("flashd:stalled_steps_total", "Steps that overran their deadline."),
            step_host_seconds: make.histogram(
                "flashd:step_host_seconds",
                "Host time of a step: planning and bookkeeping.",
                &[1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1],
            ),
        }
    }
}

/// Makes and registers metrics with the common labels.
struct Maker<'a> {
    registry: Registry,
    model_name: &'a str,
}

impl Maker<'_> {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_labels(self.labels())
    }

    fn labels(&self) -> HashMap<String, String> {
        HashMap::from([("model_name".to_owned(), self.model_name.to_owned()), ("engine".to_owned(), "0".to_owned())])
    }

    fn add<C: prometheus::core::Collector + Clone + 'static>(&self, made: prometheus::Result<C>) -> C {
        let metric = constant(made);
        constant(self.registry.register(Box::new(metric.clone())));
        metric
    }

    fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.add(IntGauge::with_opts(self.opts(name, help)))
    }

    fn ratio(&self, name: &str, help: &str) -> Gauge {
        self.add(Gauge::with_opts(self.opts(name, help)))
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.add(IntGaugeVec::new(self.opts(name, help), labels))
    }

    fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.add(IntCounter::with_opts(self.opts(name, help)))
    }

    fn counters(&self, name: &str, help: &str, label: &str) -> IntCounterVec {
        self.add(IntCounterVec::new(self.opts(name, help), &[label]))
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        let opts = HistogramOpts::new(name, help).const_labels(self.labels()).buckets(buckets.to_vec());
        self.add(Histogram::with_opts(opts))
    }

    fn latency(&self, name: &str, help: &str) -> Histogram {
        self.histogram(name, help, REQUEST_BUCKETS)
    }

    fn tokens(&self, name: &str, help: &str) -> Histogram {
        self.histogram(name, help, TOKEN_BUCKETS)
    }
}

/// Unwraps what only a wrong constant in this file can break.
#[allow(clippy::expect_used)] // Names, labels and buckets are constants, and this file's tests register all of them.
fn constant<T>(made: prometheus::Result<T>) -> T {
    made.expect("a metric's constant name, label or bucket list is wrong")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: &[&str] = &[
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",
        "vllm:prompt_tokens_total",
        "vllm:prompt_tokens_by_source_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:generation_tokens_total",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:request_max_num_generation_tokens",
        "vllm:request_prefill_kv_computed_tokens",
        "vllm:iteration_tokens_total",
        "vllm:request_params_n",
        "vllm:request_params_max_tokens",
        "vllm:request_success_total",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "flashd:numerics_errors_total",
        "flashd:stalled_steps_total",
        "flashd:step_host_seconds",
    ];

    fn metrics() -> Arc<Metrics> {
        let metrics = Metrics::new("deepseek-v4-flash");
        let info = CacheConfigInfo { block_size: 256, num_gpu_blocks: 7, enable_prefix_caching: true };
        metrics.set_cache_config(&info);
        metrics
    }

    #[test]
    fn every_name_is_rendered_once_with_the_labels() {
        let text = metrics().render();
        for name in NAMES {
            assert_eq!(text.matches(&format!("# TYPE {name} ")).count(), 1, "{name}");
        }
        assert_eq!(text.matches("# TYPE ").count(), NAMES.len());
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert!(line.contains("engine=\"0\"") && line.contains("model_name=\"deepseek-v4-flash\""), "{line}");
        }
    }

    #[test]
    fn every_line_parses() {
        for line in metrics().render().lines().filter(|line| !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').expect(line);
            assert!(value.parse::<f64>().is_ok(), "{line}");
            let (name, labels) = series.split_once('{').expect(line);
            assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':'), "{line}");
            assert!(labels.ends_with('}'), "{line}");
        }
    }

    #[test]
    fn odd_model_names_are_escaped() {
        let text = Metrics::new("a\"b\\c\nd").render();
        assert!(text.contains(r#"model_name="a\"b\\c\nd""#), "{text}");
    }

    #[test]
    fn every_outcome_exists_from_the_start_and_counts() {
        let metrics = metrics();
        for outcome in Outcome::ALL {
            assert!(metrics.render().contains(&format!("finished_reason=\"{}\"", outcome.label())));
            assert_eq!(metrics.outcome_count(outcome), 0);
            metrics.count_outcome(outcome);
            assert_eq!(metrics.outcome_count(outcome), 1);
        }
    }

    #[test]
    fn the_cache_config_is_one_series() {
        let metrics = metrics();
        let info = CacheConfigInfo { block_size: 256, num_gpu_blocks: 9, enable_prefix_caching: false };
        metrics.set_cache_config(&info);
        let text = metrics.render();
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("vllm:cache_config_info{")).collect();
        assert_eq!(lines.len(), 1);
        assert!(lines[0].contains("num_gpu_blocks=\"9\"") && lines[0].contains("enable_prefix_caching=\"False\""));
    }
}
