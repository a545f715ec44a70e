//! Chat text: messages to a prompt of segments (prepare, template), and a completion's stream back to parts (parse, stop).
//!
//! The types are fixed here: template, parse, tokenizer and http meet in them.

use serde::{Deserialize, Serialize};

mod json;
pub mod message;
pub mod parse;
pub mod prepare;
pub mod stop;
pub mod template;

pub use crate::tokenizer::Segment;

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
