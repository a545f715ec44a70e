//! The answers of both OpenAI endpoints, whole and in chunks.

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::http::generate::Tally;

/// Answer of POST /v1/chat/completions.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatResponse {
    /// `chatcmpl-…`.
    pub id: String,
    /// `chat.completion`.
    pub object: &'static str,
    /// Unix time in seconds.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// Names build and numerics.
    pub system_fingerprint: String,
    /// The choices, in order.
    pub choices: Vec<ChatChoice>,
    /// What it cost.
    pub usage: Usage,
    /// With `prompt_logprobs`: for each prompt token (null for the first) token id → score.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Object>>)]
    pub prompt_logprobs: Option<Vec<Option<Map<String, Value>>>>,
    /// With `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// One answer.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct ChatChoice {
    /// From 0.
    pub index: usize,
    /// The answer.
    pub message: AnswerMessage,
    /// When asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// stop, length or tool_calls.
    pub finish_reason: Option<&'static str>,
    /// The stop string or id that ended it.
    pub stop_reason: Option<StopReason>,
    /// With `return_token_ids`: every generated token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// The assistant's message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct AnswerMessage {
    /// `assistant`.
    pub role: &'static str,
    /// The text; null when there are only calls.
    pub content: Option<String>,
    /// The reasoning, in thinking mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same under its other name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<AnswerToolCall>,
}

/// A call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct AnswerToolCall {
    /// Unique.
    pub id: String,
    /// `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// What to call.
    pub function: AnswerFunction,
}

/// Function and arguments of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct AnswerFunction {
    /// Its name.
    pub name: String,
    /// JSON text of an object, unless the answer was cut.
    pub arguments: String,
}

/// A chunk of a streamed chat answer.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatChunk {
    /// The same in all chunks.
    pub id: String,
    /// `chat.completion.chunk`.
    pub object: &'static str,
    /// Unix time in seconds.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// Names build and numerics.
    pub system_fingerprint: String,
    /// One choice, or none in the usage chunk.
    pub choices: Vec<ChunkChoice>,
    /// In the last chunk with include_usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// In the first chunk with `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// What a chunk adds to a choice.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct ChunkChoice {
    /// Which choice.
    pub index: usize,
    /// What it adds.
    pub delta: ChunkDelta,
    /// When asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// In the choice's last chunk.
    pub finish_reason: Option<&'static str>,
    /// With finish_reason: the stop string or id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    /// With `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
}

/// New pieces of a message.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct ChunkDelta {
    /// In the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same under its other name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// Pieces of calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallDelta>,
}

/// A piece of a call; id, type and name only in the first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ToolCallDelta {
    /// Which call of the choice.
    pub index: usize,
    /// Unique.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// Pieces of the function.
    pub function: FunctionDelta,
}

/// A piece of a call's function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct FunctionDelta {
    /// In the first piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// JSON text to append.
    pub arguments: String,
}

/// Log-probabilities of a chat answer. Control tokens and the markup of calls have no entries.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct ChatLogprobs {
    /// Of the tokens of the content.
    pub content: Vec<TokenScore>,
    /// Of the tokens of the reasoning, in thinking mode (DeepSeek's name).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reasoning_content: Vec<TokenScore>,
}

/// A token's log-probability.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct TokenScore {
    /// Its text; bytes that are no text by themselves show as U+FFFD.
    pub token: String,
    /// Natural logarithm.
    pub logprob: f32,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// The most likely tokens there.
    pub top_logprobs: Vec<TopScore>,
}

/// A likely token.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct TopScore {
    /// Its text.
    pub token: String,
    /// Natural logarithm.
    pub logprob: f32,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// Answer of POST /v1/completions, and a chunk of it.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct CompletionResponse {
    /// `cmpl-…`.
    pub id: String,
    /// `text_completion`.
    pub object: &'static str,
    /// Unix time in seconds.
    pub created: u64,
    /// The model's name.
    pub model: String,
    /// Names build and numerics.
    pub system_fingerprint: String,
    /// Choices: prompt x n + choice.
    pub choices: Vec<CompletionChoice>,
    /// What it cost; in a stream only in the last chunk with include_usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// One text.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct CompletionChoice {
    /// Prompt x n + choice.
    pub index: usize,
    /// The text, or what a chunk adds.
    pub text: String,
    /// When asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// stop or length.
    pub finish_reason: Option<&'static str>,
    /// The stop string or id that ended it.
    pub stop_reason: Option<StopReason>,
    /// With `prompt_logprobs`: for each prompt token (null for the first) token id → score.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Object>>)]
    pub prompt_logprobs: Option<Vec<Option<Map<String, Value>>>>,
    /// With `return_token_ids`: every generated token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// With `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
}

/// Log-probabilities of a completion, one entry a token.
#[derive(Clone, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    /// Characters before each token.
    pub text_offset: Vec<usize>,
    /// Null for a prompt's first token.
    pub token_logprobs: Vec<Option<f32>>,
    /// Texts.
    pub tokens: Vec<String>,
    /// Text → log-probability of the likely tokens and the chosen one.
    #[schema(value_type = Vec<Option<Object>>)]
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
}

/// What a request cost in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Usage {
    /// Of the prompt, counted once for all choices.
    pub prompt_tokens: usize,
    /// Generated, over all choices.
    pub completion_tokens: usize,
    /// The sum.
    pub total_tokens: usize,
    /// Of the prompt.
    pub prompt_tokens_details: PromptTokensDetails,
    /// Of the output.
    pub completion_tokens_details: CompletionTokensDetails,
}

/// Details of the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptTokensDetails {
    /// Read from the prefix cache.
    pub cached_tokens: usize,
}

/// Details of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct CompletionTokensDetails {
    /// Spent on reasoning, its closing token included.
    pub reasoning_tokens: usize,
}

/// What ended a choice beside the end token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum StopReason {
    /// A stop string.
    Text(String),
    /// A stop id.
    Token(u32),
}

impl From<Tally> for Usage {
    fn from(tally: Tally) -> Self {
        Self {
            prompt_tokens: tally.n_prompt,
            completion_tokens: tally.n_output,
            total_tokens: tally.n_prompt + tally.n_output,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: tally.n_cached },
            completion_tokens_details: CompletionTokensDetails { reasoning_tokens: tally.n_reasoning },
        }
    }
}
