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
        lists.tokens.push(self.key(token));
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
        let chosen = &scores.chosen;
        let is_listed = scores.top.iter().any(|scored| scored.token == chosen.token);
        let listed = scores.top.iter().chain((!is_listed).then_some(chosen));
        distinct(chosen.token, listed.map(|scored| (scored.token, self.key(scored.token), finite(scored.logprob))))
    }

    /// A token's name in a completion's lists, where there are no bytes beside it: as OpenAI writes a token that is no
    /// text by itself, `bytes:` and its bytes, those that are not printable ASCII as `\xe4`.
    fn key(&self, token: TokenId) -> String {
        let bytes = self.bytes(token);
        if self.as_ids || std::str::from_utf8(bytes).is_ok() {
            return self.name(token);
        }
        let mut key = String::from("bytes:");
        for &byte in bytes {
            match byte {
                b'\\' => key.push_str("\\x5c"),
                b' '..=b'~' => key.push(char::from(byte)),
                _ => key.push_str(&format!("\\x{byte:02x}")),
            }
        }
        key
    }

    fn bytes(&self, token: TokenId) -> &[u8] {
        self.tokenizer.token_bytes(token).unwrap_or_default()
    }
}

/// Scores by key. Where tokens have one text, the chosen one has it as its key, else the likeliest; the others are
/// `token_id:N`.
fn distinct(chosen: TokenId, scores: impl Iterator<Item = (TokenId, String, f32)>) -> Map<String, Value> {
    let scores: Vec<_> = scores.collect();
    let of_chosen = scores.iter().find(|(token, ..)| *token == chosen).map(|(_, key, _)| key.clone());
    let mut map = Map::new();
    for (token, key, logprob) in scores {
        let is_taken = token != chosen && (of_chosen.as_ref() == Some(&key) || map.contains_key(&key));
        map.insert(if is_taken { format!("token_id:{token}") } else { key }, json!(logprob));
    }
    map
}

/// JSON has no infinities; peers write a token without a chance as -9999.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn scribe() -> Scribe {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo-model");
        Scribe::new(Arc::new(Tokenizer::load(&dir).unwrap()), false)
    }

    #[test]
    fn halves_of_characters_have_keys_of_their_own() {
        let scribe = scribe();
        let ids = (0..scribe.tokenizer.vocab_size() as u32).map(TokenId);
        let halves: Vec<_> = ids.filter(|id| std::str::from_utf8(scribe.bytes(*id)).is_err()).take(20).collect();
        assert_eq!(halves.len(), 20);
        let scored = |token: &TokenId| ScoredToken { token: *token, logprob: -(token.0 as f32) };
        let top: Vec<_> = halves[..19].iter().map(scored).collect();
        let map = scribe.top(&TokenLogprobs { chosen: scored(&halves[19]), rank: 50, top });
        assert_eq!(map.len(), 20);
        for (token, (key, logprob)) in halves.iter().zip(&map) {
            assert_eq!(*key, scribe.key(*token));
            assert!(key.starts_with("bytes:") && key.is_ascii() && key.contains("\\x"), "{key}");
            assert_eq!(logprob.as_f64(), Some(-f64::from(token.0)));
        }
        let byte = halves.iter().find(|id| scribe.bytes(**id).len() == 1).unwrap();
        assert_eq!(scribe.key(*byte), format!("bytes:\\x{:02x}", scribe.bytes(*byte)[0]));
    }

    #[test]
    fn equal_texts_have_distinct_keys() {
        let scores = [(1, "a", -1.0), (2, "a", -2.0), (3, "b", -3.0), (4, "a", -4.0), (5, "b", -5.0)];
        let scores = || scores.iter().map(|(id, key, logprob)| (TokenId(*id), (*key).to_owned(), *logprob));
        let keys = |chosen| distinct(TokenId(chosen), scores()).keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(1), ["a", "token_id:2", "b", "token_id:4", "token_id:5"]);
        assert_eq!(keys(4), ["token_id:1", "token_id:2", "b", "a", "token_id:5"]);
    }
}
