//! A completion's text back to reasoning, content and tool calls, piece by piece and the same at every split.

use serde_json::Value;

use super::Mode;

/// A tool that the request declares.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolSpec {
    /// The function's name.
    pub name: String,
    /// Its JSON schema.
    pub parameters: Option<Value>,
}

/// What the parser knows about the request.
#[derive(Clone, Debug, PartialEq)]
pub struct ParserOptions {
    /// Whether the text begins with reasoning (`Prompt::completion_mode`).
    pub mode: Mode,
    /// The request's tools; an empty list leaves every call as text, none accepts a call of any name.
    /// For tool_choice none give the tools anyway and drop the call parts: then no markup reaches the client.
    pub tools: Option<Vec<ToolSpec>>,
}

/// A piece of the reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Reasoning text.
    Reasoning(String),
    /// Answer text.
    Content(String),
    /// A call begins. Indexes count from 0.
    ToolCallStart {
        /// Which call.
        index: usize,
        /// The function's name.
        name: String,
    },
    /// The next piece of a call's arguments; the pieces of one call join to a JSON object.
    ToolCallArguments {
        /// Which call.
        index: usize,
        /// JSON text.
        fragment: String,
    },
    /// The call is whole. A call without it was cut: its arguments are not valid JSON, and it must not be executed.
    ToolCallEnd {
        /// Which call.
        index: usize,
    },
}

/// How the text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model ended it (end token or a stop id): missing closers are supplied.
    Complete,
    /// It was cut (length, stop string, cancellation): nothing is supplied.
    Cut,
}

/// The parser of one completion.
#[derive(Clone, Debug)]
pub struct StreamParser {
    options: ParserOptions,
}

impl StreamParser {
    /// A parser at the start of a completion.
    #[must_use]
    pub fn new(options: ParserOptions) -> Self {
        Self { options }
    }

    /// Takes the next text and appends what is certain to `parts`.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        parts.push(match self.options.mode {
            Mode::Chat => Part::Content(text.to_owned()),
            Mode::Thinking => Part::Reasoning(text.to_owned()),
        });
    }

    /// Ends the text and appends what was held back.
    pub fn finish(&mut self, _end: End, _parts: &mut Vec<Part>) {}
}
