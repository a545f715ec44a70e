//! A conversation's messages, and their JSON shape as the published encoder takes it.

use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Instructions, without a role token.
    System,
    /// Rendered as a user turn by the encoder itself; `prepare` turns it into `System`.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// A tool's result; joined to a user turn.
    Tool,
    /// Date, place and language of the client; opens no turn.
    LatestReminder,
}

/// The encoder's quick instructions: one token after a message asks for a short classification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Task {
    /// Search or answer.
    Action,
    /// Search queries.
    Query,
    /// Whether authority of sources matters.
    Authority,
    /// The field the question belongs to.
    Domain,
    /// A title for the conversation.
    Title,
    /// Which pages to read.
    ReadUrl,
}

/// A call that an assistant message made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// The id that tool results name.
    pub id: Option<String>,
    /// The function's name.
    pub name: String,
    /// The arguments as JSON text; empty where the client sent null, nothing or an empty string.
    pub arguments: String,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// The text; a list of parts is joined by blank lines.
    #[serde(default, deserialize_with = "content_text")]
    pub content: Option<String>,
    /// An assistant's reasoning (`reasoning_content` or `reasoning`).
    #[serde(default, rename = "reasoning_content", alias = "reasoning")]
    pub reasoning: Option<String>,
    /// An assistant's calls.
    #[serde(default, deserialize_with = "or_default")]
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool message answers.
    #[serde(default)]
    pub tool_call_id: Option<String>,
    /// Function objects (`name`, `description`, `parameters`), on a system or developer message.
    #[serde(default, deserialize_with = "functions")]
    pub tools: Vec<Value>,
    /// A schema for the answer, on a system or developer message.
    #[serde(default)]
    pub response_format: Option<Value>,
    /// A quick instruction after this message.
    #[serde(default)]
    pub task: Option<Task>,
    /// Leave the end token off: the message goes on.
    #[serde(default)]
    pub wo_eos: bool,
    /// The message goes on inside its reasoning: no `</think>`, content or end token follows.
    #[serde(skip)]
    pub open_reasoning: bool,
}

impl Message {
    /// A message of `role` with `content` and nothing else.
    #[must_use]
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: Some(content.into()),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            tools: Vec::new(),
            response_format: None,
            task: None,
            wo_eos: false,
            open_reasoning: false,
        }
    }
}

/// The text of call arguments as clients send them: a string as it is, null as nothing, anything else as its JSON.
#[must_use]
pub fn arguments_text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

impl<'de> Deserialize<'de> for ToolCall {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Function {
            name: String,
            #[serde(default)]
            arguments: Value,
        }
        #[derive(Deserialize)]
        struct Call {
            #[serde(default)]
            id: Option<String>,
            function: Function,
        }
        let Call { id, function } = Call::deserialize(deserializer)?;
        Ok(Self { id, name: function.name, arguments: arguments_text(&function.arguments) })
    }
}

fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

fn functions<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Value>, D::Error> {
    #[derive(Deserialize)]
    struct Tool {
        function: Value,
    }
    let tools = Option::<Vec<Tool>>::deserialize(deserializer)?.unwrap_or_default();
    Ok(tools.into_iter().map(|tool| tool.function).collect())
}

fn content_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    struct Part {
        #[serde(rename = "type")]
        kind: String,
        #[serde(default)]
        text: String,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Content {
        Text(String),
        Parts(Vec<Part>),
    }
    let join = |parts: Vec<Part>| {
        let texts: Vec<String> = parts
            .into_iter()
            .map(|part| if part.kind == "text" { part.text } else { format!("[Unsupported {}]", part.kind) })
            .collect();
        texts.join("\n\n")
    };
    Ok(Option::<Content>::deserialize(deserializer)?.map(|content| match content {
        Content::Text(text) => text,
        Content::Parts(parts) => join(parts),
    }))
}
