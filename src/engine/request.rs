//! A request that the engine has agreed to: every limit and every refusal is here.

use std::sync::Arc;

use crate::ids::TokenId;
use crate::sample::params::SamplingParams;

/// What a front end asks for: a tokenised prompt and settings, not yet checked against this engine.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// The id clients see; also in logs.
    pub id: String,
    /// Prompt ids.
    pub prompt: Arc<[TokenId]>,
    /// Tokens to generate at most; `None`: what the context leaves. 0 prefills (and scores) only.
    pub max_tokens: Option<u32>,
    /// Independent choices.
    pub n: u32,
    /// Sampling settings.
    pub sampling: SamplingParams,
    /// Ids that end a choice; the id itself is delivered as the last token event and counted, its text is not shown.
    pub stop_token_ids: Vec<TokenId>,
    /// Go on past EOS.
    pub ignore_eos: bool,
    /// EOS and stop ids are banned before this many tokens.
    pub min_tokens: u32,
    /// Log-probabilities with each generated token: how many of the most likely (0: the sampled one alone).
    pub logprobs: Option<u32>,
    /// The same for each prompt token but the first.
    pub prompt_logprobs: Option<u32>,
    /// Separates prefix caches: only equal salts share.
    pub cache_salt: Option<String>,
    /// Lower runs earlier; equal priorities in order of arrival.
    pub priority: i32,
}

/// Limits of an engine, known to the front end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineLimits {
    /// Longest prompt plus output in tokens.
    pub max_model_len: usize,
    /// Vocabulary entries.
    pub vocab_size: usize,
    /// Most tokens the KV pool can hold for one sequence.
    pub max_kv_tokens: usize,
    /// Choices a request may ask for.
    pub max_n: u32,
    /// Log-probabilities a position may return.
    pub max_logprobs: u32,
    /// Requests accepted and not yet finished, waiting ones included; beyond it `RejectReason::QueueFull`.
    pub max_queued: usize,
    /// End-of-sequence id of the model.
    pub eos_token_id: TokenId,
}

/// A checked request; only this can be submitted.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidRequest {
    inner: GenerateRequest,
    max_tokens: u32,
}

impl ValidRequest {
    /// Checks a request against the engine's limits.
    ///
    /// # Errors
    /// The first limit that it breaks, with the field, the limit and the value.
    pub fn new(request: GenerateRequest, limits: &EngineLimits) -> Result<Self, RejectReason> {
        let n_prompt = request.prompt.len();
        if n_prompt == 0 {
            return Err(RejectReason::EmptyPrompt);
        }
        let room = limits.max_model_len.saturating_sub(n_prompt);
        let wanted = request.max_tokens.map_or(usize::MAX, |n| n as usize);
        let max_tokens = u32::try_from(wanted.min(room)).unwrap_or(u32::MAX);
        Ok(Self { inner: request, max_tokens })
    }

    /// The request as it was asked for.
    #[must_use]
    pub const fn get(&self) -> &GenerateRequest {
        &self.inner
    }

    /// Tokens each choice may generate: what was asked for, inside the context.
    #[must_use]
    pub const fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    /// Events the request can cause at most: the capacity of its channel.
    #[must_use]
    pub fn max_events(&self) -> usize {
        // Tokens and ends of choices, prefill progress (one a chunk, at most one a prompt token), and the single ones.
        (self.max_tokens as usize + 1) * self.inner.n as usize + self.inner.prompt.len() + 4
    }
}

/// Why a request was not taken; http::error maps each to a status.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RejectReason {
    /// No tokens.
    #[error("prompt: must hold at least one token")]
    EmptyPrompt,
    /// Prompt and output do not fit.
    #[error("the prompt has {n_prompt} tokens, but this model's maximum context length is {max_model_len} tokens")]
    ContextLength {
        /// Prompt tokens.
        n_prompt: usize,
        /// The limit.
        max_model_len: usize,
    },
    /// Would wait for ever (faults E7).
    #[error("the request needs {needed} KV tokens, but the pool holds {available}")]
    NeverFits {
        /// Tokens needed.
        needed: usize,
        /// Tokens the pool holds.
        available: usize,
    },
    /// A token id that the model does not have.
    #[error("{field}: token id {value} is not below the vocabulary size {vocab_size}")]
    TokenId {
        /// Which field.
        field: &'static str,
        /// The id.
        value: u32,
        /// The limit.
        vocab_size: usize,
    },
    /// A number outside its range.
    #[error("{field}: must be {range}, got {value}")]
    OutOfRange {
        /// Which field.
        field: &'static str,
        /// The range in words.
        range: String,
        /// The value.
        value: String,
    },
    /// Too many unfinished requests.
    #[error("too many requests: {max_queued} are queued or running")]
    QueueFull {
        /// The limit.
        max_queued: usize,
    },
    /// Loading, draining or dead.
    #[error("the server is not serving: {0:?}")]
    NotServing(super::handle::EngineHealth),
}
