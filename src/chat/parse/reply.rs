//! The parts of a completion put together again.

use super::Part;

/// A whole reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// The reasoning.
    pub reasoning: String,
    /// The answer.
    pub content: String,
    /// The calls, in order of their indexes.
    pub tool_calls: Vec<ReplyCall>,
}

/// A call of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyCall {
    /// The function's name.
    pub name: String,
    /// JSON text; only the start of it unless the call is whole.
    pub arguments: String,
    /// Whether the call ended. One that did not must be dropped.
    pub is_whole: bool,
}

impl Reply {
    /// Adds the next part.
    pub fn push(&mut self, part: Part) {
        match part {
            Part::Reasoning(text) => self.reasoning.push_str(&text),
            Part::Content(text) => self.content.push_str(&text),
            Part::ToolCallStart { name, .. } => {
                self.tool_calls.push(ReplyCall { name, arguments: String::new(), is_whole: false });
            }
            Part::ToolCallArguments { index, fragment } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.arguments.push_str(&fragment);
                }
            }
            Part::ToolCallEnd { index } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.is_whole = true;
                }
            }
        }
    }
}

impl FromIterator<Part> for Reply {
    fn from_iter<I: IntoIterator<Item = Part>>(parts: I) -> Self {
        let mut reply = Self::default();
        parts.into_iter().for_each(|part| reply.push(part));
        reply
    }
}
