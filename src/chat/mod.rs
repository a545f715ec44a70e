//! Chat text: messages to a prompt of segments (template), and a completion's stream back to parts (parse).
//!
//! The types are fixed here: template, parse, tokenizer and http meet in them.

use serde::{Deserialize, Serialize};

pub mod parse;
pub mod template;

/// A piece of a prompt. Only `Control` becomes a control token: untrusted text never can (faults I2).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Segment {
    /// A control token by its text, such as `<｜User｜>`.
    Control(&'static str),
    /// A maximal run of text between control tokens.
    Text(String),
}

/// Whether the assistant thinks before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Answers at once; the turn opens with `</think>`.
    Chat,
    /// Reasons first; the turn opens with `<think>`.
    Thinking,
}

/// The encoder's three levels of reasoning effort (revision 0731).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    /// No prefix.
    Low,
    /// The text that was the preview's "max".
    High,
    /// The new text.
    Max,
}
