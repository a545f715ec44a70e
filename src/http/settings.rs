//! What an operator chooses about the API: names, keys, defaults and bounds.

use std::time::Duration;

use crate::chat::Effort;
use crate::sample::params::SamplingParams;

/// Whether and how hard the model thinks when a request does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DefaultThinking {
    /// Chat mode.
    Off,
    /// Thinking without a prefix.
    Low,
    /// Thinking at high, as the hosted API.
    #[default]
    High,
    /// Thinking at max.
    Max,
}

impl DefaultThinking {
    /// The effort, or `None` for chat mode.
    #[must_use]
    pub const fn effort(self) -> Option<Effort> {
        match self {
            Self::Off => None,
            Self::Low => Some(Effort::Low),
            Self::High => Some(Effort::High),
            Self::Max => Some(Effort::Max),
        }
    }
}

impl std::str::FromStr for DefaultThinking {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "off" => Ok(Self::Off),
            "low" => Ok(Self::Low),
            "high" => Ok(Self::High),
            "max" => Ok(Self::Max),
            other => Err(format!("must be one of off, low, high, max, got {other:?}")),
        }
    }
}

/// Settings of the HTTP front end, already checked.
#[derive(Clone)]
pub struct ApiConfig {
    /// Names clients may use for the model; the first is the one answers carry. Never empty.
    pub served_model_names: Vec<String>,
    /// Keys that open the API; none: no key is asked for.
    pub api_keys: Vec<String>,
    /// Thinking of requests that do not say.
    pub default_thinking: DefaultThinking,
    /// Sampling fields a request leaves out, from the model's generation_config.json.
    pub default_sampling: SamplingParams,
    /// Largest request body in bytes.
    pub max_body_bytes: usize,
    /// How long the head of a request may take; also how long a kept connection may idle before the next one.
    pub header_timeout: Duration,
    /// Silence after which a body that is not whole is given up.
    pub body_idle_timeout: Duration,
    /// Silence after which a stream gets a comment line; zero: never.
    pub sse_keep_alive: Duration,
    /// Origins that browsers may call from; `*` stands for all, none turns CORS off.
    pub allowed_origins: Vec<String>,
    /// How long a shutdown waits for running requests.
    pub drain_timeout: Duration,
    /// Write prompts and answers to the log. Off: never a word of them.
    pub log_requests: bool,
    /// Names the build and numerics in answers, so that clients see when outputs may change.
    pub system_fingerprint: String,
    /// Unix time in seconds that /v1/models gives as `created`.
    pub created_unix_s: u64,
}

impl ApiConfig {
    /// The default of `max_body_bytes`: 64 MiB holds a million tokens several times over.
    pub const DEFAULT_MAX_BODY_BYTES: usize = 64 << 20;
    /// The default of `header_timeout`.
    pub const DEFAULT_HEADER_TIMEOUT: Duration = Duration::from_secs(30);
    /// The default of `body_idle_timeout`.
    pub const DEFAULT_BODY_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
    /// The default of `sse_keep_alive`.
    pub const DEFAULT_SSE_KEEP_ALIVE: Duration = Duration::from_secs(5);
    /// The default of `drain_timeout`; container runtimes often kill 15 s after SIGTERM.
    pub const DEFAULT_DRAIN_TIMEOUT: Duration = Duration::from_secs(12);

    /// Defaults for one model name.
    #[must_use]
    pub fn new(model_name: &str) -> Self {
        Self {
            served_model_names: vec![model_name.to_owned()],
            api_keys: Vec::new(),
            default_thinking: DefaultThinking::default(),
            default_sampling: SamplingParams::default(),
            max_body_bytes: Self::DEFAULT_MAX_BODY_BYTES,
            header_timeout: Self::DEFAULT_HEADER_TIMEOUT,
            body_idle_timeout: Self::DEFAULT_BODY_IDLE_TIMEOUT,
            sse_keep_alive: Self::DEFAULT_SSE_KEEP_ALIVE,
            allowed_origins: vec!["*".to_owned()],
            drain_timeout: Self::DEFAULT_DRAIN_TIMEOUT,
            log_requests: false,
            system_fingerprint: concat!("flashd-", env!("CARGO_PKG_VERSION")).to_owned(),
            created_unix_s: 0,
        }
    }

    /// The name answers carry.
    #[must_use]
    pub fn primary_name(&self) -> &str {
        self.served_model_names.first().map_or("", String::as_str)
    }
}

impl std::fmt::Debug for ApiConfig {
    /// Never shows the keys.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiConfig")
            .field("served_model_names", &self.served_model_names)
            .field("n_api_keys", &self.api_keys.len())
            .field("default_thinking", &self.default_thinking)
            .field("default_sampling", &self.default_sampling)
            .field("max_body_bytes", &self.max_body_bytes)
            .field("header_timeout", &self.header_timeout)
            .field("body_idle_timeout", &self.body_idle_timeout)
            .field("sse_keep_alive", &self.sse_keep_alive)
            .field("allowed_origins", &self.allowed_origins)
            .field("drain_timeout", &self.drain_timeout)
            .field("log_requests", &self.log_requests)
            .finish_non_exhaustive()
    }
}
