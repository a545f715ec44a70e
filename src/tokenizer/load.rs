//! Reads tokenizer.json: byte-level BPE with added tokens, checked for what the encoder relies on.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{PreTokenizerWrapper, models::bpe::BPE};

use super::{TextEncoder, Tokenizer, VISIBLE, bytes::TokenBytes, cache::Cache, chunks};
use crate::ids::TokenId;

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

/// Ids that the cache of encoded pieces keeps: 32 MiB, a few dozen long conversations.
const CACHE_TOKENS: usize = 8 << 20;

#[derive(Deserialize)]
struct File {
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    pre_tokenizer: Value,
    model: BPE,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// Loads the tokenizer in the file `path`.
pub(super) fn load(path: &Path) -> Result<Tokenizer, TokenizerError> {
    let json = std::fs::read(path).map_err(|source| TokenizerError::Read { path: path.to_owned(), source })?;
    let file = serde_json::from_slice(&json).map_err(|error| error.to_string());
    file.and_then(build).map_err(|reason| TokenizerError::Invalid { path: path.to_owned(), reason })
}

fn build(file: File) -> Result<Tokenizer, String> {
    if !is_none(&file.normalizer) {
        return Err(format!("it normalises text ({}), so text would not come back as it was", file.normalizer));
    }
    let can_chunk = patterns(&file.pre_tokenizer).iter().map(String::as_str).eq(chunks::PATTERNS);
    let splitter: PreTokenizerWrapper =
        serde_json::from_value(file.pre_tokenizer).map_err(|error| format!("pre_tokenizer: {error}"))?;
    let added: HashMap<String, u32> = file.added_tokens.into_iter().map(|token| (token.content, token.id)).collect();
    let bytes = TokenBytes::new(&file.model.get_vocab(), &added)?;
    let control = |text: &str| added.get(text).map(|id| TokenId(*id)).ok_or_else(|| format!("no added token {text}"));
    let (bos, eos) = (control("<｜begin▁of▁sentence｜>")?, control("<｜end▁of▁sentence｜>")?);
    for text in ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"] {
        control(text)?;
    }
    let mut hidden: Vec<bool> = (0..bytes.len()).map(|id| bytes.get(id).is_none()).collect();
    for (text, id) in &added {
        hidden[*id as usize] = !VISIBLE.contains(&text.as_str());
    }
    let mut added_lengths: Vec<usize> = added.keys().map(String::len).collect();
    added_lengths.sort_unstable_by(|a, b| b.cmp(a));
    added_lengths.dedup();
    let mut text = TextEncoder::new(file.model);
    text.with_pre_tokenizer(Some(splitter));
    let added = added.into_iter().map(|(text, id)| (text, TokenId(id))).collect();
    Ok(Tokenizer { text, added, added_lengths, hidden, bytes, cache: Cache::new(CACHE_TOKENS), can_chunk, bos, eos })
}

/// Whether a normaliser does nothing: absent, or an empty sequence.
fn is_none(normalizer: &Value) -> bool {
    normalizer.is_null() || normalizer["normalizers"].as_array().is_some_and(Vec::is_empty)
}

/// The regular expressions of the pre-tokeniser's split steps. Files spell line ends as characters or as escapes.
fn patterns(pre_tokenizer: &Value) -> Vec<String> {
    let steps = pre_tokenizer["pretokenizers"].as_array().map_or(&[][..], Vec::as_slice);
    let texts = steps.iter().filter_map(|step| step["pattern"]["Regex"].as_str());
    texts.map(|text| text.replace("\\r", "\r").replace("\\n", "\n")).collect()
}
