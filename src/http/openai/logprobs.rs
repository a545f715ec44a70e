//! Log-probabilities in the shapes of both endpoints.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::response::{CompletionLogprobs, TokenScore, TopScore};
use crate::http::choice::ScoredText;
use crate::ids::TokenId;
use crate::sample::params::{ScoredToken, TokenLogprobs};
use crate::tokenizer::Tokenizer;

/// Writes tokens and their scores.
#[derive(Clone, Debug)]
pub struct Scribe {
    tokenizer: Arc<Tokenizer>,
    as_ids: bool,
}

impl Scribe {
    /// With `as_ids`, tokens are written as `token_id:N`.
    #[must_use]
    pub const fn new(tokenizer: Arc<Tokenizer>, as_ids: bool) -> Self {
        Self { tokenizer, as_ids }
    }

    /// A token's name.
    #[must_use]
    pub fn name(&self, token: TokenId) -> String {
        if self.as_ids {
            return format!("token_id:{token}");
        }
        String::from_utf8_lossy(self.bytes(token)).into_owned()
    }

    /// The entries of a chat answer; tokens without scores have none.
    #[must_use]
    pub fn chat(&self, tokens: &[ScoredText]) -> Vec<TokenScore> {
        tokens.iter().filter_map(|scored| Some(self.score(scored.logprobs.as_ref()?))).collect()
    }

    /// Appends an entry to a completion's lists.
    pub fn append(
        &self,
        lists: &mut CompletionLogprobs,
        text_offset: usize,
        token: TokenId,
        scores: Option<&TokenLogprobs>,
    ) {
        lists.text_offset.push(text_offset);
        lists.tokens.push(self.name(token));
        lists.token_logprobs.push(scores.map(|scores| finite(scores.chosen.logprob)));
        lists.top_logprobs.push(scores.map(|scores| self.top(scores)));
    }

    /// vLLM's prompt_logprobs: null for the first token, then token id → score.
    #[must_use]
    pub fn prompt(&self, scores: &[TokenLogprobs]) -> Vec<Option<Map<String, Value>>> {
        let entry = |scores: &TokenLogprobs| {
            let mut map = Map::new();
            let mut put = |scored: &ScoredToken, rank: usize| {
                let value = json!({
                    "logprob": finite(scored.logprob),
                    "rank": rank,
                    "decoded_token": self.name(scored.token),
                });
                map.entry(scored.token.to_string()).or_insert(value);
            };
            put(&scores.chosen, scores.rank as usize);
            scores.top.iter().enumerate().for_each(|(at, scored)| put(scored, at + 1));
            Some(map)
        };
        std::iter::once(None).chain(scores.iter().map(entry)).collect()
    }

    fn score(&self, scores: &TokenLogprobs) -> TokenScore {
        let top = |scored: &ScoredToken| TopScore {
            token: self.name(scored.token),
            logprob: finite(scored.logprob),
            bytes: self.bytes(scored.token).to_vec(),
        };
        let TopScore { token, logprob, bytes } = top(&scores.chosen);
        TokenScore { token, logprob, bytes, top_logprobs: scores.top.iter().map(top).collect() }
    }

    fn top(&self, scores: &TokenLogprobs) -> Map<String, Value> {
        let mut map = Map::new();
        for scored in scores.top.iter().chain([&scores.chosen]) {
            // Different tokens may have one text (halves of characters): the likeliest stays.
            map.entry(self.name(scored.token)).or_insert_with(|| json!(finite(scored.logprob)));
        }
        map
    }

    fn bytes(&self, token: TokenId) -> &[u8] {
        self.tokenizer.token_bytes(token).unwrap_or_default()
    }
}

/// JSON has no infinities; peers write a token without a chance as -9999.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
