//! Tokens: text to ids by segments, and ids back to text without ever splitting a character.

use std::path::{Path, PathBuf};

use crate::ids::TokenId;

mod decode;

pub use decode::Decoder;

/// A piece of a prompt. Only `Control` becomes a control token: untrusted text never can (faults I2).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Segment {
    /// A control token by its text, such as `<｜User｜>`.
    Control(&'static str),
    /// A maximal run of text between control tokens.
    Text(String),
}

/// Why a tokenizer can't be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file can't be read.
    #[error("can't read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not a tokenizer this program can use.
    #[error("{path} is not a usable tokenizer: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// Why a text can't be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The tokenizer has no such control token.
    #[error("the tokenizer has no control token {0}")]
    UnknownControl(String),
    /// The caller's check said stop.
    #[error("encoding was cancelled")]
    Cancelled,
    /// The tokenizer failed.
    #[error("encoding failed: {0}")]
    Failed(String),
}

/// The model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    vocab_size: usize,
}

impl Tokenizer {
    /// Loads `tokenizer.json` from a checkpoint's folder.
    ///
    /// # Errors
    /// See [`TokenizerError`].
    pub fn load(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join("tokenizer.json");
        std::fs::read(&path).map_err(|source| TokenizerError::Read { path, source })?;
        Ok(Self { vocab_size: 0 })
    }

    /// The ids of a prompt's segments. Run it off the async threads: a long prompt takes up to a second.
    ///
    /// # Errors
    /// See [`EncodeError`].
    pub fn encode(&self, segments: &[Segment]) -> Result<Vec<TokenId>, EncodeError> {
        self.encode_unless(segments, &|| false)
    }

    /// As [`Self::encode`], asking `cancelled` between pieces of the text.
    ///
    /// # Errors
    /// See [`EncodeError`].
    pub fn encode_unless(
        &self,
        _segments: &[Segment],
        _cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<TokenId>, EncodeError> {
        Ok(Vec::new())
    }

    /// The ids of plain text; control tokens spelt in it stay text.
    ///
    /// # Errors
    /// See [`EncodeError`].
    pub fn encode_text(&self, _text: &str) -> Result<Vec<TokenId>, EncodeError> {
        Ok(Vec::new())
    }

    /// The ids of a text whose author may write control tokens (a raw completion's prompt).
    ///
    /// # Errors
    /// See [`EncodeError`].
    pub fn encode_marked(
        &self,
        _text: &str,
        _cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<TokenId>, EncodeError> {
        Ok(Vec::new())
    }

    /// A token's bytes: part of a character, several characters, or a control token's text. None for an unknown id.
    #[must_use]
    pub fn token_bytes(&self, _token: TokenId) -> Option<&[u8]> {
        None
    }

    /// Whether a token never shows in output text: every control token but the thinking and DSML marks, which the
    /// parser needs.
    #[must_use]
    pub fn is_hidden(&self, _token: TokenId) -> bool {
        false
    }

    /// One more than the largest id.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Begin of sentence.
    #[must_use]
    pub fn bos(&self) -> TokenId {
        TokenId(0)
    }

    /// End of sentence.
    #[must_use]
    pub fn eos(&self) -> TokenId {
        TokenId(1)
    }
}
