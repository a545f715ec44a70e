//! POST /v1/chat/completions: a request becomes a plan, the plan a generation, the generation chunks or one answer.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde_json::Value;

use super::answer::{Answer, AnswerOptions};
use super::fields::{Unsupported, count, n_choices, n_logprobs, priority, stop_strings, stream_usage};
use super::prompt::{ChatPrompt, PromptFields, build};
use super::request::ChatRequest;
use super::response::{ChatChunk, ChatResponse};
use super::thinking::ThinkingFields;
use crate::engine::request::GenerateRequest;
use crate::http::choice::TextOptions;
use crate::http::error::{ApiError, ErrorBody};
use crate::http::extract::ApiJson;
use crate::http::generate::{Generation, RequestInfo};
use crate::http::models::check_model;
use crate::http::observe::RequestTag;
use crate::http::sse;
use crate::http::state::{AppState, InFlight};
use crate::ids::TokenId;

const ENDPOINT: &str = "/v1/chat/completions";

/// Answers a conversation.
///
/// # Errors
/// See the table in `http::error`.
#[utoipa::path(
    post,
    description = "Answers a conversation.",
    path = "/v1/chat/completions",
    tag = "openai",
    request_body = ChatRequest,
    responses(
        (status = 200, description = "The answer, or with `stream` chunks as server-sent events", content(
            (ChatResponse = "application/json"),
            (ChatChunk = "text/event-stream"),
        )),
        (status = 400, description = "A field is wrong or not supported", body = ErrorBody),
        (status = 401, description = "No valid API key", body = ErrorBody),
        (status = 404, description = "No such model", body = ErrorBody),
        (status = 408, description = "The body stopped coming", body = ErrorBody),
        (status = 413, description = "The body is too large", body = ErrorBody),
        (status = 415, description = "The body is not JSON", body = ErrorBody),
        (status = 429, description = "The queue is full", body = ErrorBody),
        (status = 500, description = "The server's fault", body = ErrorBody),
        (status = 503, description = "Loading, draining or dead", body = ErrorBody),
    ),
    security((), ("api_key" = [])),
)]
pub async fn chat_completions(
    State(state): State<AppState>,
    Extension(tag): Extension<RequestTag>,
    Extension(in_flight): Extension<Arc<InFlight>>,
    ApiJson(request): ApiJson<ChatRequest>,
) -> Result<Response, ApiError> {
    let mut plan = Plan::new(&state, request, &tag)?;
    let ChatPrompt { ids, text, is_named } = build(&state, plan.prompt).await?;
    plan.generate.prompt = ids.into();
    let answer = Answer::new(&state, &plan.generate, plan.answer, text.parser.mode, is_named);
    plan.text.chat = Some(text);
    let info = RequestInfo { id: plan.generate.id.clone(), endpoint: ENDPOINT, stream: plan.stream };
    let generation = Generation::start(&state, info, vec![plan.generate], plan.text, in_flight)?;
    if plan.stream {
        return Ok(sse::respond(&state, generation, answer));
    }
    whole(answer, generation).await.map(|response| Json(response).into_response())
}

/// A checked request, before its prompt is made.
struct Plan {
    generate: GenerateRequest,
    prompt: PromptFields,
    text: TextOptions,
    answer: AnswerOptions,
    stream: bool,
}

impl Plan {
    fn new(state: &AppState, request: ChatRequest, tag: &RequestTag) -> Result<Self, ApiError> {
        check_model(state, request.model.as_deref())?;
        request.refuse_unsupported()?;
        refuse_chat_only(&request)?;
        let stream = request.stream.unwrap_or(false);
        if stream && request.prompt_logprobs.is_some() {
            return Err(ApiError::invalid("prompt_logprobs", "is not available when stream is true"));
        }
        let (usage_last, usage_always) = stream_usage(stream, request.stream_options)?;
        let generate = generate_request(state, &request, tag)?;
        let text = TextOptions {
            stop: stop_strings(request.stop.as_ref())?,
            include_stop: request.include_stop_str_in_output.unwrap_or(false),
            stop_token_ids: generate.stop_token_ids.clone(),
            ignore_eos: generate.ignore_eos,
            show_hidden: false,
            split_logprobs: generate.logprobs.is_some(),
            chat: None,
        };
        let answer = AnswerOptions {
            include_reasoning: request.include_reasoning.unwrap_or(true),
            return_token_ids: request.return_token_ids.unwrap_or(false),
            tokens_as_ids: request.return_tokens_as_token_ids.unwrap_or(false),
            usage_last,
            usage_always,
        };
        Ok(Self { generate, prompt: prompt_fields(request), text, answer, stream })
    }
}

fn refuse_chat_only(request: &ChatRequest) -> Result<(), ApiError> {
    request.echo.refuse("echo")?;
    request.thinking_token_budget.refuse("thinking_token_budget")?;
    request.functions.refuse("functions")?;
    let has_tools = request.tools.as_ref().is_some_and(|tools| !tools.is_empty());
    let asks = |call: &Value| !call.is_null() && (has_tools || call != "none");
    Unsupported::asks(request.function_call.as_ref().is_some_and(asks)).refuse("function_call")?;
    request.chat_template.refuse("chat_template")?;
    request.documents.refuse("documents")?;
    request.web_search_options.refuse("web_search_options")?;
    request.audio.refuse("audio")
}

fn generate_request(state: &AppState, request: &ChatRequest, tag: &RequestTag) -> Result<GenerateRequest, ApiError> {
    let max_tokens = match (request.max_completion_tokens, request.max_tokens) {
        (Some(value), _) => Some(count("max_completion_tokens", value)?),
        (None, value) => value.map(|value| count("max_tokens", value)).transpose()?,
    };
    Ok(GenerateRequest {
        id: format!("chatcmpl-{}", tag.0),
        prompt: Arc::from([]),
        max_tokens,
        n: n_choices(request.n, state.engine().limits().max_n)?,
        sampling: request.sampling().resolve(&state.config().default_sampling)?,
        stop_token_ids: request.stop_token_ids.iter().flatten().copied().map(TokenId).collect(),
        ignore_eos: request.ignore_eos.unwrap_or(false),
        min_tokens: count("min_tokens", request.min_tokens.unwrap_or(0))?,
        logprobs: wanted_logprobs(request)?,
        prompt_logprobs: request.prompt_logprobs.map(|n| n_logprobs("prompt_logprobs", n)).transpose()?,
        cache_salt: request.cache_salt.clone(),
        priority: priority(request.priority)?,
    })
}

fn wanted_logprobs(request: &ChatRequest) -> Result<Option<u32>, ApiError> {
    match (request.logprobs.unwrap_or(false), request.top_logprobs) {
        (true, top) => n_logprobs("top_logprobs", top.unwrap_or(0)).map(Some),
        (false, Some(top)) if top != 0 => Err(ApiError::invalid("top_logprobs", "needs logprobs: true")),
        (false, _) => Ok(None),
    }
}

fn prompt_fields(request: ChatRequest) -> PromptFields {
    PromptFields {
        messages: request.messages,
        tools: request.tools,
        tool_choice: request.tool_choice,
        parallel_tool_calls: request.parallel_tool_calls,
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

/// The whole answer: the stream's own chunks, put together.
async fn whole(mut answer: Answer, generation: Generation) -> Result<ChatResponse, ApiError> {
    let mut outputs = std::pin::pin!(generation.outputs());
    while let Some(output) = outputs.next().await {
        answer.fold(output)?;
    }
    Ok(answer.into_response())
}
