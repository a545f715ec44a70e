//! A request that the engine has agreed to: every limit and every refusal is here.

use std::sync::Arc;

use crate::ids::TokenId;
use crate::sample::params::SamplingParams;

/// Choices a request may ask for at most, whatever the configuration: `RequestControl` keeps one bit for each.
pub const MAX_N: u32 = 64;

/// Characters of a cache salt.
pub const MAX_SALT_CHARS: usize = 128;

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
    /// max_tokens is cut to what the context and the KV pool leave; logit_bias and stop ids come out sorted and without
    /// duplicates (of a token's biases, the last one counts).
    ///
    /// # Errors
    /// The first limit that it breaks, with the field, the limit and the value.
    pub fn new(mut request: GenerateRequest, limits: &EngineLimits) -> Result<Self, RejectReason> {
        let max_tokens = check_length(&request, limits)?;
        check_counts(&request, limits)?;
        check_token_ids(&request, limits.vocab_size)?;
        check_sampling(&request.sampling)?;
        normalise(&mut request);
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
        // Tokens and ends of choices, prefill progress (at most one a prompt token), and the single ones.
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
    #[error(
        "the request needs at least {} tokens ({n_prompt} of the prompt and {n_output} of output), but this model's \
         maximum context length is {max_model_len} tokens",
        n_prompt + n_output
    )]
    ContextLength {
        /// Prompt tokens.
        n_prompt: usize,
        /// Output tokens at least: one, unless none were asked for.
        n_output: usize,
        /// The limit.
        max_model_len: usize,
    },
    /// Would wait for ever.
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
    /// A text field that is too long, or empty where it may not be.
    #[error("{field}: must have 1 to {max_chars} characters, got {n_chars}")]
    TextLength {
        /// Which field.
        field: &'static str,
        /// The limit.
        max_chars: usize,
        /// What came.
        n_chars: usize,
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

/// Checks prompt and output against context and pool; returns the tokens each choice may generate.
fn check_length(request: &GenerateRequest, limits: &EngineLimits) -> Result<u32, RejectReason> {
    let n_prompt = request.prompt.len();
    if n_prompt == 0 {
        return Err(RejectReason::EmptyPrompt);
    }
    // A prompt that is only prefilled may fill the context; any other must leave room for one token.
    let n_output = usize::from(request.max_tokens != Some(0));
    if n_prompt + n_output > limits.max_model_len {
        return Err(RejectReason::ContextLength { n_prompt, n_output, max_model_len: limits.max_model_len });
    }
    if n_prompt > limits.max_kv_tokens {
        return Err(RejectReason::NeverFits { needed: n_prompt, available: limits.max_kv_tokens });
    }
    // The last token is sampled but never run, so it needs a place in the context but none in the pool.
    let room = limits.max_model_len.min(limits.max_kv_tokens + 1) - n_prompt;
    let wanted = request.max_tokens.map_or(usize::MAX, |n| n as usize);
    Ok(u32::try_from(wanted.min(room)).unwrap_or(u32::MAX))
}

fn check_counts(request: &GenerateRequest, limits: &EngineLimits) -> Result<(), RejectReason> {
    let max_n = limits.max_n.min(MAX_N);
    check_range("n", request.n, 1, max_n)?;
    if let Some(max_tokens) = request.max_tokens
        && request.min_tokens > max_tokens
    {
        return Err(RejectReason::OutOfRange {
            field: "min_tokens",
            range: format!("at most max_tokens ({max_tokens})"),
            value: request.min_tokens.to_string(),
        });
    }
    check_range("logprobs", request.logprobs.unwrap_or(0), 0, limits.max_logprobs)?;
    check_range("prompt_logprobs", request.prompt_logprobs.unwrap_or(0), 0, limits.max_logprobs)?;
    match request.cache_salt.as_deref().map(|salt| salt.chars().count()) {
        Some(n_chars) if n_chars == 0 || n_chars > MAX_SALT_CHARS => {
            Err(RejectReason::TextLength { field: "cache_salt", max_chars: MAX_SALT_CHARS, n_chars })
        }
        _ => Ok(()),
    }
}

fn check_token_ids(request: &GenerateRequest, vocab_size: usize) -> Result<(), RejectReason> {
    let check = |field: &'static str, token: TokenId| {
        if token.index() < vocab_size {
            Ok(())
        } else {
            Err(RejectReason::TokenId { field, value: token.0, vocab_size })
        }
    };
    request.prompt.iter().try_for_each(|&token| check("prompt", token))?;
    request.stop_token_ids.iter().try_for_each(|&token| check("stop_token_ids", token))?;
    request.sampling.logit_bias.iter().try_for_each(|&(token, _)| check("logit_bias", token))
}

fn check_sampling(sampling: &SamplingParams) -> Result<(), RejectReason> {
    check_range("temperature", sampling.temperature, 0.0, 2.0)?;
    check_range("min_p", sampling.min_p, 0.0, 1.0)?;
    check_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)?;
    check_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)?;
    check_above_zero("top_p", sampling.top_p, 1.0)?;
    check_above_zero("repetition_penalty", sampling.repetition_penalty, 2.0)?;
    sampling.logit_bias.iter().try_for_each(|&(_, bias)| check_range("logit_bias", bias, -100.0, 100.0))
}

/// NaN is outside every range.
fn check_range<T>(field: &'static str, value: T, min: T, max: T) -> Result<(), RejectReason>
where
    T: PartialOrd + std::fmt::Display,
{
    if value >= min && value <= max {
        return Ok(());
    }
    Err(RejectReason::OutOfRange { field, range: format!("from {min} to {max}"), value: value.to_string() })
}

fn check_above_zero(field: &'static str, value: f32, max: f32) -> Result<(), RejectReason> {
    if value > 0.0 && value <= max {
        return Ok(());
    }
    Err(RejectReason::OutOfRange { field, range: format!("above 0 and at most {max}"), value: value.to_string() })
}

fn normalise(request: &mut GenerateRequest) {
    request.stop_token_ids.sort_unstable();
    request.stop_token_ids.dedup();
    let bias = &mut request.sampling.logit_bias;
    // Stable sort of the reversed list: of equal tokens the last one comes first and is kept.
    bias.reverse();
    bias.sort_by_key(|&(token, _)| token);
    bias.dedup_by_key(|&mut (token, _)| token);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> EngineLimits {
        EngineLimits {
            max_model_len: 100,
            vocab_size: 50,
            max_kv_tokens: 1000,
            max_n: 4,
            max_logprobs: 20,
            max_queued: 8,
            eos_token_id: TokenId(1),
        }
    }

    fn request(n_prompt: usize) -> GenerateRequest {
        GenerateRequest {
            id: "r".to_owned(),
            prompt: vec![TokenId(7); n_prompt].into(),
            max_tokens: None,
            n: 1,
            sampling: SamplingParams::default(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            min_tokens: 0,
            logprobs: None,
            prompt_logprobs: None,
            cache_salt: None,
            priority: 0,
        }
    }

    fn refusal(change: impl FnOnce(&mut GenerateRequest)) -> RejectReason {
        let mut wanted = request(3);
        change(&mut wanted);
        ValidRequest::new(wanted, &limits()).expect_err("must be refused")
    }

    fn field(reason: &RejectReason) -> &'static str {
        match reason {
            RejectReason::OutOfRange { field, .. }
            | RejectReason::TokenId { field, .. }
            | RejectReason::TextLength { field, .. } => field,
            _ => panic!("{reason:?} has no field"),
        }
    }

    #[test]
    fn the_prompt_must_fit_the_context() {
        assert_eq!(refusal(|r| r.prompt = Arc::new([])), RejectReason::EmptyPrompt);
        let too_long = RejectReason::ContextLength { n_prompt: 100, n_output: 1, max_model_len: 100 };
        assert_eq!(ValidRequest::new(request(100), &limits()), Err(too_long.clone()));
        assert_eq!(
            too_long.to_string(),
            "the request needs at least 101 tokens (100 of the prompt and 1 of output), but this model's maximum context \
             length is 100 tokens"
        );
        assert_eq!(ValidRequest::new(request(99), &limits()).map(|r| r.max_tokens()), Ok(1));
        let prefill = |n| ValidRequest::new(GenerateRequest { max_tokens: Some(0), ..request(n) }, &limits());
        assert_eq!(prefill(100).map(|r| r.max_tokens()), Ok(0));
        assert!(matches!(prefill(101), Err(RejectReason::ContextLength { .. })));
    }

    #[test]
    fn a_prompt_larger_than_the_pool_is_refused_at_the_door() {
        let small = EngineLimits { max_kv_tokens: 64, ..limits() };
        let refused = ValidRequest::new(request(65), &small);
        assert_eq!(refused, Err(RejectReason::NeverFits { needed: 65, available: 64 }));
        // 64 prompt tokens and one that is sampled but never run.
        assert_eq!(ValidRequest::new(request(64), &small).map(|r| r.max_tokens()), Ok(1));
        assert_eq!(ValidRequest::new(request(60), &small).map(|r| r.max_tokens()), Ok(5));
    }

    #[test]
    fn max_tokens_stays_inside_the_context() {
        let with = |max_tokens| {
            let request = GenerateRequest { max_tokens, ..request(90) };
            ValidRequest::new(request, &limits()).expect("valid").max_tokens()
        };
        assert_eq!((with(None), with(Some(4)), with(Some(u32::MAX)), with(Some(0))), (10, 4, 10, 0));
    }

    #[test]
    fn counts_have_limits() {
        assert_eq!(field(&refusal(|r| r.n = 0)), "n");
        assert_eq!(field(&refusal(|r| r.n = 5)), "n");
        assert_eq!(field(&refusal(|r| r.logprobs = Some(21))), "logprobs");
        assert_eq!(field(&refusal(|r| r.prompt_logprobs = Some(21))), "prompt_logprobs");
        let min_tokens = refusal(|r| (r.min_tokens, r.max_tokens) = (5, Some(4)));
        assert_eq!(min_tokens.to_string(), "min_tokens: must be at most max_tokens (4), got 5");
        let mut wanted = request(3);
        (wanted.n, wanted.logprobs, wanted.min_tokens, wanted.max_tokens) = (4, Some(20), 4, Some(4));
        assert!(ValidRequest::new(wanted, &limits()).is_ok());
    }

    #[test]
    fn n_never_exceeds_the_control_bits() {
        let generous = EngineLimits { max_n: 1000, ..limits() };
        let with = |n| ValidRequest::new(GenerateRequest { n, ..request(3) }, &generous);
        assert!(with(MAX_N).is_ok());
        assert!(with(MAX_N + 1).is_err());
    }

    #[test]
    fn token_ids_are_below_the_vocabulary() {
        assert_eq!(field(&refusal(|r| r.prompt = vec![TokenId(0), TokenId(50)].into())), "prompt");
        assert_eq!(field(&refusal(|r| r.stop_token_ids = vec![TokenId(u32::MAX)])), "stop_token_ids");
        assert_eq!(field(&refusal(|r| r.sampling.logit_bias = vec![(TokenId(50), 0.0)])), "logit_bias");
    }

    #[test]
    fn sampling_ranges_exclude_nan_and_infinity() {
        type Set = fn(&mut SamplingParams, f32);
        let fields: [(&str, Set, &[f32], &[f32]); 7] = [
            ("temperature", |s, v| s.temperature = v, &[-0.1, 2.1], &[0.0, 2.0]),
            ("top_p", |s, v| s.top_p = v, &[0.0, 1.1], &[0.01, 1.0]),
            ("min_p", |s, v| s.min_p = v, &[-0.1, 1.1], &[0.0, 1.0]),
            ("presence_penalty", |s, v| s.presence_penalty = v, &[-2.1, 2.1], &[-2.0, 2.0]),
            ("frequency_penalty", |s, v| s.frequency_penalty = v, &[-2.1, 2.1], &[-2.0, 2.0]),
            ("repetition_penalty", |s, v| s.repetition_penalty = v, &[0.0, 2.1], &[0.01, 2.0]),
            ("logit_bias", |s, v| s.logit_bias = vec![(TokenId(1), v)], &[-100.5, 100.5], &[-100.0, 100.0]),
        ];
        for (name, set, bad, good) in fields {
            for &value in bad.iter().chain(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
                assert_eq!(field(&refusal(|r| set(&mut r.sampling, value))), name, "{name} {value}");
            }
            for &value in good {
                let mut wanted = request(3);
                set(&mut wanted.sampling, value);
                assert!(ValidRequest::new(wanted, &limits()).is_ok(), "{name} {value}");
            }
        }
    }

    #[test]
    fn salts_have_a_length() {
        let salt = |n: usize| GenerateRequest { cache_salt: Some("é".repeat(n)), ..request(3) };
        for (n, fits) in [(0, false), (1, true), (MAX_SALT_CHARS, true), (MAX_SALT_CHARS + 1, false)] {
            assert_eq!(ValidRequest::new(salt(n), &limits()).is_ok(), fits, "{n}");
        }
        assert_eq!(field(&refusal(|r| r.cache_salt = Some(String::new()))), "cache_salt");
    }

    #[test]
    fn lists_come_out_sorted_and_unique() {
        let mut wanted = request(3);
        wanted.stop_token_ids = [9, 2, 9].map(TokenId).to_vec();
        wanted.sampling.logit_bias = vec![(TokenId(5), 1.0), (TokenId(3), 2.0), (TokenId(5), 3.0)];
        let valid = ValidRequest::new(wanted, &limits()).expect("valid");
        assert_eq!(valid.get().stop_token_ids, [2, 9].map(TokenId));
        assert_eq!(valid.get().sampling.logit_bias, [(TokenId(3), 2.0), (TokenId(5), 3.0)]);
    }
}
