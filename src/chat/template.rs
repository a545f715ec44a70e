//! Messages to the prompt's segments, byte for byte as the published encoder of DeepSeek-V4 (revision 0731).

use super::{Effort, Mode, Segment, message::Message};

/// How a conversation is rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenderOptions {
    /// Chat or thinking.
    pub mode: Mode,
    /// Leave reasoning out before the last user message. Tools in any message turn it off.
    pub drop_thinking: bool,
    /// The effort prefix, in thinking mode only; none is low.
    pub effort: Option<Effort>,
    /// Open a turn at the end even after an assistant or system message. The encoder alone does not.
    pub add_generation_prompt: bool,
    /// Open the turn of an assistant message that a system message parts from its user message. The encoder alone
    /// does not.
    pub bridge_system: bool,
}

/// Why a conversation can't be rendered. Each names the message by its index in the client's list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// Call arguments that are not a JSON object.
    #[error("messages[{index}].tool_calls[{call}].function.arguments must be a JSON object: {reason}")]
    Arguments {
        /// The message.
        index: usize,
        /// The call in the message.
        call: usize,
        /// What is wrong with them.
        reason: String,
    },
    /// A tool result whose id no earlier assistant message has.
    #[error("messages[{index}].tool_call_id {id:?} is not the id of a call in an earlier assistant message")]
    UnknownToolCall {
        /// The message.
        index: usize,
        /// The id.
        id: String,
    },
    /// `continue_final_message` needs a last assistant message.
    #[error("continue_final_message needs an assistant message last, but messages[{index}] is not one")]
    ContinueNotAssistant {
        /// The last message.
        index: usize,
    },
    /// `continue_final_message` and `add_generation_prompt` exclude each other.
    #[error("continue_final_message and add_generation_prompt can't both be true")]
    ContinueAndGenerate,
    /// There is no message.
    #[error("messages must hold at least one message")]
    Empty,
}

/// The prompt of `messages`.
///
/// # Errors
/// See [`TemplateError`].
pub fn render(_messages: &[Message], _options: &RenderOptions) -> Result<Vec<Segment>, TemplateError> {
    Ok(Vec::new())
}
