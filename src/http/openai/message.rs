//! Messages, tools and tool choice as OpenAI's clients send them, and their way into a conversation.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::fields::deserialize_one_or_many;
use crate::chat::message::{Message, Role, ToolCall, arguments_text};
use crate::chat::parse::ToolSpec;
use crate::http::error::ApiError;
use crate::http::shape::{objects, words};

/// One message of the conversation.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub struct ChatMessage {
    /// Who speaks.
    pub role: ChatRole,
    /// The text: a string, or parts of type text, which are joined by blank lines.
    #[serde(default)]
    pub content: Option<MessageContent>,
    /// An assistant's earlier reasoning.
    #[serde(default)]
    pub reasoning_content: Option<String>,
    /// The same under its other name.
    #[serde(default)]
    pub reasoning: Option<String>,
    /// Calls the assistant made.
    #[serde(default)]
    pub tool_calls: Option<Vec<MessageToolCall>>,
    /// The call a tool message answers.
    #[serde(default)]
    pub tool_call_id: Option<String>,
    /// Go on with this message, the last one (DeepSeek's name for continue_final_message).
    #[serde(default)]
    pub prefix: Option<bool>,
}

/// Roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(remote = "Self", rename_all = "snake_case")]
pub enum ChatRole {
    /// Instructions.
    System,
    /// Instructions; the same as system.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// A tool's result.
    Tool,
    /// Date, place and language of the client.
    LatestReminder,
}

/// A string or a list of parts.
#[derive(Clone, Debug, PartialEq, Deserialize, ToSchema)]
#[serde(remote = "Self", untagged)] // For the schema; what reads it is below.
pub enum MessageContent {
    /// Text.
    Text(String),
    /// Parts.
    Parts(Vec<ContentPart>),
}

/// A part of a message.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub struct ContentPart {
    /// `text`; this model takes no other.
    #[serde(rename = "type")]
    pub kind: String,
    /// The text.
    #[serde(default)]
    pub text: Option<String>,
}

/// A call in an assistant's message.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub struct MessageToolCall {
    /// The id a tool message names.
    #[serde(default)]
    pub id: Option<String>,
    /// What was called.
    pub function: MessageFunction,
}

/// The function of a call.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub struct MessageFunction {
    /// Its name.
    pub name: String,
    /// JSON text of an object; an object itself, null and absence are taken too.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub arguments: Value,
}

/// A function the model may call.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub struct Tool {
    /// `function`.
    #[serde(rename = "type", default = "function_kind")]
    pub kind: String,
    /// Name, description and parameters; written into the prompt as they come.
    #[schema(value_type = FunctionDefinition)]
    pub function: Map<String, Value>,
}

/// The shape of a tool's function.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub struct FunctionDefinition {
    /// Its name.
    #[schema(min_length = 1)]
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments.
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<Value>,
}

/// Which tools the model may or must call.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(remote = "Self", untagged)] // For the schema; what reads it is below.
pub enum ToolChoice {
    /// By name of the mode.
    Mode(ToolChoiceMode),
    /// This function.
    Named(NamedToolChoice),
}

/// Values of tool_choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ToolChoiceMode {
    /// No calls; the tools are left out of the prompt.
    None,
    /// As the model likes.
    Auto,
    /// At least one call.
    Required,
}

/// `{"type": "function", "function": {"name": …}}`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, ToSchema)]
pub struct NamedToolChoice {
    /// `function`.
    #[serde(rename = "type", default = "function_kind")]
    pub kind: String,
    /// Which.
    pub function: FunctionName,
}

/// A function by name.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub struct FunctionName {
    /// Its name.
    pub name: String,
}

/// Tools and choice of a request, checked against each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ToolUse {
    /// The function objects as sent.
    pub functions: Vec<Value>,
    /// What the model must do.
    pub force: ToolForce,
}

/// What the model must do about tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolForce {
    /// No tools, or none may be called.
    None,
    /// As it likes.
    #[default]
    Auto,
    /// Call one.
    Required,
    /// Call this one.
    Named(String),
}

objects!(ChatMessage, ContentPart, MessageToolCall, MessageFunction, Tool, FunctionName);
words!(ChatRole: "system, developer, user, assistant, tool, latest_reminder");

impl ChatMessage {
    /// The message as the template takes it.
    ///
    /// # Errors
    /// 400 for a part that is not text.
    pub fn into_message(self, index: usize) -> Result<Message, ApiError> {
        let role = match self.role {
            ChatRole::System => Role::System,
            ChatRole::Developer => Role::Developer,
            ChatRole::User => Role::User,
            ChatRole::Assistant => Role::Assistant,
            ChatRole::Tool => Role::Tool,
            ChatRole::LatestReminder => Role::LatestReminder,
        };
        let mut message = Message::new(role, String::new());
        message.content = self.content.map(|content| content.into_text(index)).transpose()?;
        message.reasoning = self.reasoning_content.or(self.reasoning);
        message.tool_calls = self.tool_calls.unwrap_or_default().into_iter().map(MessageToolCall::into_call).collect();
        message.tool_call_id = self.tool_call_id;
        Ok(message)
    }
}

impl MessageContent {
    fn into_text(self, index: usize) -> Result<String, ApiError> {
        let parts = match self {
            Self::Text(text) => return Ok(text),
            Self::Parts(parts) => parts,
        };
        let text = |(at, part): (usize, ContentPart)| match part.kind.as_str() {
            "text" | "input_text" | "output_text" => Ok(part.text.unwrap_or_default()),
            other => Err(ApiError::unsupported(
                format!("messages[{index}].content[{at}].type"),
                format!("parts of type {other:?} are not supported, only text"),
            )),
        };
        Ok(parts.into_iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?.join("\n\n"))
    }
}

impl<'de> Deserialize<'de> for MessageContent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_one_or_many(deserializer, "a string or a list of parts", Self::Text, Self::Parts)
    }
}

impl MessageToolCall {
    fn into_call(self) -> ToolCall {
        ToolCall { id: self.id, name: self.function.name, arguments: arguments_text(&self.function.arguments) }
    }
}

impl<'de> Deserialize<'de> for ToolChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ToolChoiceVisitor)
    }
}

struct ToolChoiceVisitor;

impl<'de> Visitor<'de> for ToolChoiceVisitor {
    type Value = ToolChoice;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("none, auto, required, or an object that names a function")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ToolChoice, E> {
        ToolChoiceMode::deserialize(de::value::StrDeserializer::new(text)).map(ToolChoice::Mode)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ToolChoice, A::Error> {
        NamedToolChoice::deserialize(de::value::MapAccessDeserializer::new(map)).map(ToolChoice::Named)
    }
}

impl ToolUse {
    /// Checks tools and choice. No tools (absent, null or empty) and no choice is plain conversation.
    ///
    /// # Errors
    /// 400 for a tool that is no function, or a choice without its tool.
    pub fn new(tools: Option<Vec<Tool>>, choice: Option<ToolChoice>) -> Result<Self, ApiError> {
        let mut functions = Vec::new();
        for (at, tool) in tools.unwrap_or_default().into_iter().enumerate() {
            functions.push(tool.into_function(at)?);
        }
        let force = match choice {
            None | Some(ToolChoice::Mode(ToolChoiceMode::Auto)) => ToolForce::Auto,
            Some(ToolChoice::Mode(ToolChoiceMode::None)) => ToolForce::None,
            Some(ToolChoice::Mode(ToolChoiceMode::Required)) => ToolForce::Required,
            Some(ToolChoice::Named(named)) => ToolForce::Named(named.checked_name()?),
        };
        let tools = Self { functions, force };
        tools.check_choice()?;
        Ok(tools)
    }

    /// The tools as the parser takes them.
    #[must_use]
    pub fn specs(&self) -> Vec<ToolSpec> {
        let spec = |function: &Value| ToolSpec {
            name: name_of(function).to_owned(),
            parameters: function.get("parameters").cloned(),
        };
        self.functions.iter().map(spec).collect()
    }

    fn check_choice(&self) -> Result<(), ApiError> {
        match &self.force {
            ToolForce::Required if self.functions.is_empty() => {
                Err(ApiError::invalid("tool_choice", "\"required\" needs tools"))
            }
            ToolForce::Named(name) if !self.functions.iter().any(|function| name_of(function) == name) => {
                Err(ApiError::invalid("tool_choice", format!("there is no tool named {name:?}")))
            }
            _ => Ok(()),
        }
    }
}

impl Tool {
    fn into_function(self, at: usize) -> Result<Value, ApiError> {
        if self.kind != "function" {
            let message = format!("must be \"function\", got {:?}", self.kind);
            return Err(ApiError::unsupported(format!("tools[{at}].type"), message));
        }
        match self.function.get("name") {
            Some(Value::String(name)) if !name.is_empty() => Ok(Value::Object(self.function)),
            _ => Err(ApiError::invalid(format!("tools[{at}].function.name"), "must be a string that is not empty")),
        }
    }
}

impl NamedToolChoice {
    fn checked_name(self) -> Result<String, ApiError> {
        if self.kind == "function" {
            return Ok(self.function.name);
        }
        Err(ApiError::unsupported("tool_choice.type", format!("must be \"function\", got {:?}", self.kind)))
    }
}

fn function_kind() -> String {
    "function".to_owned()
}

fn name_of(function: &Value) -> &str {
    function.get("name").and_then(Value::as_str).unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::extract::parse;

    fn message(json: &str) -> Result<Message, ApiError> {
        parse::<ChatMessage>(json.as_bytes())?.into_message(3)
    }

    #[test]
    fn content_is_text_or_parts() {
        let content = |json: &str| message(&format!(r#"{{"role":"user","content":{json}}}"#)).unwrap().content;
        assert_eq!(content(r#""a""#).as_deref(), Some("a"));
        assert_eq!(content("null"), None);
        assert_eq!(content("[]").as_deref(), Some(""));
        assert_eq!(content(r#"[{"type":"text","text":"a"},{"type":"text","text":"b"}]"#).as_deref(), Some("a\n\nb"));
        let error = message(r#"{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}"#).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages[3].content[0].type"));
        assert!(error.message.contains("image_url"));
    }

    #[test]
    fn both_reasoning_names_are_read() {
        for name in ["reasoning", "reasoning_content"] {
            let json = format!(r#"{{"role":"assistant","content":"c","{name}":"r"}}"#);
            assert_eq!(message(&json).unwrap().reasoning.as_deref(), Some("r"));
        }
    }

    #[test]
    fn arguments_come_in_odd_shapes() {
        let arguments = |json: &str| {
            let json = format!(r#"{{"role":"assistant","tool_calls":[{{"id":"1","function":{{"name":"f"{json}}}}}]}}"#);
            message(&json).unwrap().tool_calls[0].arguments.clone()
        };
        assert_eq!(arguments(""), "");
        assert_eq!(arguments(r#","arguments":null"#), "");
        assert_eq!(arguments(r#","arguments":"{\"a\":1}""#), r#"{"a":1}"#);
        assert_eq!(arguments(r#","arguments":{"a":1}"#), r#"{"a":1}"#);
    }

    fn tool_use(tools: &str, choice: &str) -> Result<ToolUse, ApiError> {
        #[derive(Deserialize)]
        struct Sample {
            tools: Option<Vec<Tool>>,
            tool_choice: Option<ToolChoice>,
        }
        let json = format!(r#"{{"tools":{tools},"tool_choice":{choice}}}"#);
        let sample: Sample = parse(json.as_bytes())?;
        ToolUse::new(sample.tools, sample.tool_choice)
    }

    #[test]
    fn choices_need_their_tools() {
        let tools = r#"[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]"#;
        let named = |name: &str| format!(r#"{{"type":"function","function":{{"name":"{name}"}}}}"#);
        assert_eq!(tool_use("null", "null").unwrap(), ToolUse::default());
        assert_eq!(tool_use("[]", r#""auto""#).unwrap().force, ToolForce::Auto);
        assert_eq!(tool_use(tools, r#""none""#).unwrap().force, ToolForce::None);
        assert_eq!(tool_use(tools, &named("f")).unwrap().force, ToolForce::Named("f".to_owned()));
        for (tools, choice) in [("[]", r#""required""#), (tools, &named("g")), (tools, r#""always""#), (tools, "7")] {
            let error = tool_use(tools, choice).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("tool_choice"), "{choice}");
        }
        assert!(tool_use(r#"[{"type":"web_search"}]"#, "null").is_err());
        assert!(tool_use(r#"[{"type":"function","function":{}}]"#, "null").is_err());
        assert_eq!(tool_use(tools, "null").unwrap().specs()[0].name, "f");
    }
}
