//! Ids to text as they come, holding back only the start of an unfinished character.

use std::sync::Arc;

use super::Tokenizer;
use crate::ids::TokenId;

/// The text of one choice.
///
/// Bytes that can never become a character turn into one U+FFFD a maximal invalid part, as in a whole-text decoding; a
/// character that the last token leaves unfinished is dropped, so a reply cut by its length ends before it.
#[derive(Debug)]
pub struct Decoder {
    tokenizer: Arc<Tokenizer>,
    bytes: Utf8Stream,
}

impl Decoder {
    /// A decoder at the start of a text.
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, bytes: Utf8Stream::default() }
    }

    /// The text that `token` completes; empty while a character is unfinished or the token is hidden.
    pub fn push(&mut self, token: TokenId) -> String {
        match self.tokenizer.token_bytes(token) {
            Some(bytes) if !self.tokenizer.is_hidden(token) => self.bytes.push(bytes),
            _ => String::new(),
        }
    }

    /// Ends the text: an unfinished character is dropped. Nothing is ever left to show, so this is for callers that
    /// treat every stage alike.
    pub fn finish(&mut self) -> String {
        self.bytes.held.clear();
        String::new()
    }
}

/// Bytes to text.
#[derive(Debug, Default)]
struct Utf8Stream {
    /// The start of a character: at most three bytes between calls.
    held: Vec<u8>,
}

impl Utf8Stream {
    fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.held.len());
        let mut rest = &self.held[..];
        let n_unfinished = loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    break 0;
                }
                Err(error) => {
                    let (valid, bad) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                    let Some(n_bad) = error.error_len() else { break bad.len() };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &bad[n_bad..];
                }
            }
        };
        self.held.drain(..self.held.len() - n_unfinished);
        text
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces(bytes: &[u8], size: usize) -> String {
        let mut stream = Utf8Stream::default();
        let mut text = String::new();
        for piece in bytes.chunks(size) {
            let shown = stream.push(piece);
            assert!(stream.held.len() <= 3);
            text.push_str(&shown);
        }
        text
    }

    #[test]
    fn characters_are_never_split() {
        let text = "Repeat exactly: 🎉🔥🚀 👩‍👩‍👧 ∑∫ 饕餮 e\u{301}\u{0}\u{feff}\r\n\u{2028}";
        for size in 1..=text.len() {
            assert_eq!(pieces(text.as_bytes(), size), text);
        }
        assert_eq!(pieces(&"饕餮".as_bytes()[..5], 1), "饕", "an unfinished tail is dropped");
    }

    proptest! {
        #[test]
        fn any_bytes_decode_as_a_whole_does(bytes in prop::collection::vec(any::<u8>(), 0..40), size in 1..6usize) {
            let whole = String::from_utf8_lossy(&bytes).into_owned();
            let mut closed = bytes.clone();
            closed.push(b'.');
            // A full stop ends any unfinished character, so that nothing is dropped.
            prop_assert_eq!(pieces(&closed, size), String::from_utf8_lossy(&closed).into_owned());
            prop_assert!(whole.starts_with(&pieces(&bytes, size)));
        }
    }
}
