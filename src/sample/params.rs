//! What a request asks of the sampler, already checked: every field is inside the range that its comment gives.

use std::sync::Arc;

use crate::ids::TokenId;

/// Sampling settings of one request. Order of processing: bias, penalties (repetition, then presence and frequency),
/// temperature, top-k, top-p, min-p.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy; otherwise logits are divided by it. In [0, 2].
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probability reaches this. In (0, 1].
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one. In [0, 1].
    pub min_p: f32,
    /// Subtracted from the logit of every token already generated. In [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted once per earlier occurrence among the generated tokens. In [-2, 2].
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in the prompt or the output. In (0, 2].
    pub repetition_penalty: f32,
    /// Added to the raw logit of each token, in [-100, 100]; sorted by token, no duplicates.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Key of the noise; the engine draws one when the client sent none.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    /// OpenAI's defaults: temperature 1 and no filter.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

/// A token and its log-probability (natural logarithm, of the raw logits).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoredToken {
    /// Which token.
    pub token: TokenId,
    /// Its log-probability.
    pub logprob: f32,
}

/// Log-probabilities at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Log-probability of the token that was sampled (or, for a prompt, of the token that stands there).
    pub chosen: ScoredToken,
    /// Position of the chosen token in the order by probability, from 1.
    pub rank: u32,
    /// The most likely tokens, best first, ties to the lowest id; as many as were asked for.
    pub top: Vec<ScoredToken>,
}

/// What a slot must know before its first row: bound when a sequence is admitted (or resumed after preemption).
#[derive(Clone, Debug, PartialEq)]
pub struct SlotInit {
    /// Sampling settings; `seed` is always set.
    pub sampling: SamplingParams,
    /// Which of the request's n choices this is (a word of the noise counter).
    pub choice: u32,
    /// The prompt (repetition penalty counts it).
    pub prompt: Arc<[TokenId]>,
    /// Tokens generated before a preemption (all penalties count them).
    pub output: Vec<TokenId>,
    /// Ids that may not be sampled before `min_tokens` tokens have been generated: EOS and the stop tokens.
    pub banned_until_min: Vec<TokenId>,
    /// See `banned_until_min`.
    pub min_tokens: u32,
    /// Log-probabilities wanted with each sampled token: how many of the most likely (0: the sampled one alone).
    pub n_logprobs: Option<u32>,
}

/// A sampled token on its way home.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token, below `vocab_size`.
    pub token: TokenId,
    /// Present when the slot's `n_logprobs` is.
    pub logprobs: Option<TokenLogprobs>,
}

/// One row gave nothing usable; only its sequence fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// The logits of the row are not numbers.
    #[error("the logits at position {position} are not finite")]
    NotFinite {
        /// Position of the row.
        position: usize,
    },
}
