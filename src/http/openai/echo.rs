//! A completion's prompt, as it is shown again with `echo`.

use std::sync::Arc;

use super::logprobs::Scribe;
use super::response::CompletionLogprobs;
use crate::ids::TokenId;
use crate::sample::params::TokenLogprobs;
use crate::tokenizer::Tokenizer;

/// One prompt.
#[derive(Clone, Debug)]
pub struct EchoPrompt {
    /// Its ids.
    pub ids: Arc<[TokenId]>,
    /// Its text; empty for ids that are not echoed.
    pub text: String,
    /// Leading tokens that the client did not write: their text is not part of `text`.
    n_added: usize,
    /// Control tokens that the client wrote are part of `text`.
    shows_hidden: bool,
}

impl EchoPrompt {
    /// A prompt that came as text.
    #[must_use]
    pub fn of_text(ids: Vec<TokenId>, text: String, n_added: usize) -> Self {
        Self { ids: ids.into(), text, n_added, shows_hidden: true }
    }

    /// A prompt that came as ids; its text is made only when it is echoed.
    #[must_use]
    pub fn of_ids(ids: Vec<TokenId>, echo: bool, tokenizer: &Tokenizer) -> Self {
        let bytes = |token: &TokenId| {
            if tokenizer.is_hidden(*token) { &[] } else { tokenizer.token_bytes(*token).unwrap_or_default() }
        };
        let bytes: Vec<u8> = if echo { ids.iter().flat_map(bytes).copied().collect() } else { Vec::new() };
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Self { ids: ids.into(), text, n_added: 0, shows_hidden: false }
    }

    /// An entry for each token of the prompt; the first has no score.
    #[must_use]
    pub fn logprobs(&self, scribe: &Scribe, tokenizer: &Tokenizer, scores: &[TokenLogprobs]) -> CompletionLogprobs {
        let mut lists = CompletionLogprobs::default();
        let mut n_chars = 0;
        for (at, &token) in self.ids.iter().enumerate() {
            let scores = at.checked_sub(1).and_then(|at| scores.get(at));
            scribe.append(&mut lists, n_chars, token, scores);
            if at >= self.n_added && (self.shows_hidden || !tokenizer.is_hidden(token)) {
                n_chars += n_chars_started(tokenizer.token_bytes(token).unwrap_or_default());
            }
        }
        lists
    }
}

/// Characters that begin in these bytes: a character that spans tokens counts for the first.
fn n_chars_started(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte & 0xc0 != 0x80).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_characters_count_once() {
        let bytes = "aé饕".as_bytes();
        for cut in 0..=bytes.len() {
            assert_eq!(n_chars_started(&bytes[..cut]) + n_chars_started(&bytes[cut..]), 3);
        }
    }
}
