//! POST /tokenize and /detokenize, in vLLM's shape.

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::ApiJson;
use super::generate::off_thread;
use super::models::check_model;
use super::openai::message::{ChatMessage, Tool, ToolChoice};
use super::openai::prompt::{PromptFields, build, encode_error};
use super::openai::request::{ReasoningEffort, TemplateKwargs, ThinkingSwitch};
use super::openai::thinking::ThinkingFields;
use super::shape::{objects, token_ids};
use super::state::AppState;
use crate::ids::TokenId;

/// Body of POST /tokenize: a prompt or messages.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub struct TokenizeRequest {
    /// The model's name.
    #[serde(default)]
    pub model: Option<String>,
    /// A text.
    #[serde(default)]
    pub prompt: Option<String>,
    /// Start the text with the begin-of-sequence token (the default; conversations always do).
    #[serde(default)]
    pub add_special_tokens: Option<bool>,
    /// Add the tokens' texts.
    #[serde(default)]
    pub return_token_strs: Option<bool>,
    /// A conversation.
    #[serde(default)]
    pub messages: Option<Vec<ChatMessage>>,
    /// As in a chat request.
    #[serde(default)]
    pub tools: Option<Vec<Tool>>,
    /// As in a chat request.
    #[serde(default)]
    pub tool_choice: Option<ToolChoice>,
    /// As in a chat request.
    #[serde(default)]
    pub reasoning_effort: Option<ReasoningEffort>,
    /// As in a chat request.
    #[serde(default)]
    pub thinking: Option<ThinkingSwitch>,
    /// As in a chat request.
    #[serde(default)]
    pub think: Option<bool>,
    /// As in a chat request.
    #[serde(default)]
    pub chat_template_kwargs: Option<TemplateKwargs>,
    /// As in a chat request.
    #[serde(default)]
    pub add_generation_prompt: Option<bool>,
    /// As in a chat request.
    #[serde(default)]
    pub continue_final_message: Option<bool>,
}

/// Answer of POST /tokenize.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct TokenizeResponse {
    /// Tokens.
    pub count: usize,
    /// Longest prompt plus output in tokens.
    pub max_model_len: usize,
    /// Their ids.
    pub tokens: Vec<u32>,
    /// Their texts, when asked for.
    pub token_strs: Option<Vec<String>>,
}

/// Body of POST /detokenize.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub struct DetokenizeRequest {
    /// The model's name.
    #[serde(default)]
    pub model: Option<String>,
    /// Ids.
    #[serde(deserialize_with = "token_ids")]
    pub tokens: Vec<u32>,
}

/// Answer of POST /detokenize.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct DetokenizeResponse {
    /// The text, control tokens spelt out.
    pub prompt: String,
}

objects!(TokenizeRequest, DetokenizeRequest);

/// The tokens of a text or a conversation.
///
/// # Errors
/// 400 for a conversation that cannot be rendered.
#[utoipa::path(
    post,
    description = "The tokens of a text or a conversation.",
    path = "/tokenize",
    tag = "tokens",
    request_body = TokenizeRequest,
    responses(
        (status = 200, description = "The tokens", body = TokenizeResponse),
        (status = 400, description = "A field is wrong", body = ErrorBody),
        (status = 401, description = "No valid API key", body = ErrorBody),
        (status = 404, description = "No such model", body = ErrorBody),
        (status = 408, description = "The body stopped coming", body = ErrorBody),
        (status = 413, description = "The body is too large", body = ErrorBody),
        (status = 415, description = "The body is not JSON", body = ErrorBody),
        (status = 503, description = "Loading, draining or dead", body = ErrorBody),
    ),
    security((), ("api_key" = [])),
)]
pub async fn tokenize(
    State(state): State<AppState>,
    ApiJson(mut request): ApiJson<TokenizeRequest>,
) -> Result<Json<TokenizeResponse>, ApiError> {
    check_model(&state, request.model.as_deref())?;
    let with_strs = request.return_token_strs.unwrap_or(false);
    let ids = match (request.prompt.take(), request.messages.take()) {
        (Some(text), None) => encode_text(&state, text, request.add_special_tokens.unwrap_or(true)).await?,
        (None, Some(messages)) => build(&state, prompt_fields(request, messages)).await?.ids,
        (Some(_), Some(_)) => return Err(ApiError::invalid("prompt", "excludes messages")),
        (None, None) => return Err(ApiError::invalid("prompt", "is required, or messages")),
    };
    let text = |token: &TokenId| {
        String::from_utf8_lossy(state.tokenizer().token_bytes(*token).unwrap_or_default()).into_owned()
    };
    Ok(Json(TokenizeResponse {
        count: ids.len(),
        max_model_len: state.engine().limits().max_model_len,
        token_strs: with_strs.then(|| ids.iter().map(text).collect()),
        tokens: ids.iter().map(|token| token.0).collect(),
    }))
}

/// The text of tokens.
///
/// # Errors
/// 400 for an id that the model does not have.
#[utoipa::path(
    post,
    description = "The text of tokens.",
    path = "/detokenize",
    tag = "tokens",
    request_body = DetokenizeRequest,
    responses(
        (status = 200, description = "The text", body = DetokenizeResponse),
        (status = 400, description = "A field is wrong", body = ErrorBody),
        (status = 401, description = "No valid API key", body = ErrorBody),
        (status = 404, description = "No such model", body = ErrorBody),
        (status = 408, description = "The body stopped coming", body = ErrorBody),
        (status = 413, description = "The body is too large", body = ErrorBody),
        (status = 415, description = "The body is not JSON", body = ErrorBody),
        (status = 503, description = "Loading, draining or dead", body = ErrorBody),
    ),
    security((), ("api_key" = [])),
)]
pub async fn detokenize(
    State(state): State<AppState>,
    ApiJson(request): ApiJson<DetokenizeRequest>,
) -> Result<Json<DetokenizeResponse>, ApiError> {
    check_model(&state, request.model.as_deref())?;
    let mut bytes = Vec::new();
    for (at, id) in request.tokens.iter().enumerate() {
        let known = state.tokenizer().token_bytes(TokenId(*id));
        let known = known.ok_or_else(|| ApiError::invalid(format!("tokens[{at}]"), format!("there is no token {id}")));
        bytes.extend_from_slice(known?);
    }
    Ok(Json(DetokenizeResponse { prompt: String::from_utf8_lossy(&bytes).into_owned() }))
}

async fn encode_text(state: &AppState, text: String, with_bos: bool) -> Result<Vec<TokenId>, ApiError> {
    off_thread(state.tokenizer(), move |tokenizer, cancelled| {
        let mut ids = if with_bos { vec![tokenizer.bos()] } else { Vec::new() };
        ids.extend(tokenizer.encode_marked(&text, cancelled).map_err(encode_error)?);
        Ok(ids)
    })
    .await
}

fn prompt_fields(request: TokenizeRequest, messages: Vec<ChatMessage>) -> PromptFields {
    PromptFields {
        messages,
        tools: request.tools,
        tool_choice: request.tool_choice,
        parallel_tool_calls: None,
        thinking: ThinkingFields {
            thinking: request.thinking,
            think: request.think,
            kwargs: request.chat_template_kwargs,
            effort: request.reasoning_effort,
        },
        add_generation_prompt: request.add_generation_prompt,
        continue_final_message: request.continue_final_message,
    }
}
