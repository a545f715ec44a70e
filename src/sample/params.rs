//! What a request asks of the sampler, already checked: every field is inside its range (the ranges are [`SamplingParams::check`]'s).

use crate::ids::TokenId;

/// Sampling settings of one request. Order of processing: bias, penalties (repetition, then presence and frequency),
/// temperature, top-k, top-p, min-p (docs/architecture.md).
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
