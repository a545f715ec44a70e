//! flashd's own decisions about a client's conversation, made before the encoder's rendering.

use serde_json::Value;

use super::{Effort, Mode, Segment, message::Message, template::TemplateError};

/// A conversation as a client sends it.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// The client's messages, in its order.
    pub messages: Vec<Message>,
    /// Function objects (`name`, `description`, `parameters`) that the model may call; empty for tool_choice none.
    pub tools: Vec<Value>,
    /// A schema for the answer, written into the prompt.
    pub response_format: Option<Value>,
    /// Chat or thinking.
    pub mode: Mode,
    /// Effort, in thinking mode.
    pub effort: Option<Effort>,
    /// Leave reasoning out before the last user message (the encoder's default: true).
    pub drop_thinking: bool,
    /// Open a turn for the assistant whatever the last message is; none is true unless `continue_final_message`.
    pub add_generation_prompt: Option<bool>,
    /// Go on with the last message, which must be an assistant's.
    pub continue_final_message: bool,
}

/// A rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The text, with its control tokens.
    pub segments: Vec<Segment>,
    /// What the completion's text begins with: reasoning (`Thinking`) or content (`Chat`), for the parser.
    pub completion_mode: Mode,
}

/// The prompt of a client's conversation.
///
/// # Errors
/// See [`TemplateError`].
pub fn prompt(conversation: Conversation) -> Result<Prompt, TemplateError> {
    Ok(Prompt { segments: Vec::new(), completion_mode: conversation.mode })
}
