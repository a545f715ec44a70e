//! POST /v1/completions: raw prompts, as text or ids, several at once.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;

use super::echo::EchoPrompt;
use super::fields::{count, n_choices, n_logprobs, priority, stop_strings, stream_usage};
use super::prompt::encode_error;
use super::request::{CompletionRequest, Prompt};
use super::response::CompletionResponse;
use super::text_answer::{TextAnswer, TextAnswerOptions};
use crate::engine::request::GenerateRequest;
use crate::http::choice::TextOptions;
use crate::http::error::{ApiError, ErrorBody};
use crate::http::extract::ApiJson;
use crate::http::generate::{Generation, RequestInfo, off_thread};
use crate::http::models::check_model;
use crate::http::observe::RequestTag;
use crate::http::sse;
use crate::http::state::{AppState, InFlight};
use crate::ids::TokenId;
use crate::tokenizer::Tokenizer;

const ENDPOINT: &str = "/v1/completions";

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Continues raw prompts.
///
/// # Errors
/// See the table in `http::error`.
#[utoipa::path(
    post,
    description = "Continues raw prompts.",
    path = "/v1/completions",
    tag = "openai",
    request_body = CompletionRequest,
    responses(
        (status = 200, description = "The texts, or with `stream` chunks as server-sent events", content(
            (CompletionResponse = "application/json"),
            (CompletionResponse = "text/event-stream"),
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
pub async fn completions(
    State(state): State<AppState>,
    Extension(tag): Extension<RequestTag>,
    Extension(in_flight): Extension<Arc<InFlight>>,
    ApiJson(request): ApiJson<CompletionRequest>,
) -> Result<Response, ApiError> {
    let Plan { generate, prompts, with_bos, text, answer, stream } = Plan::new(&state, request, &tag)?;
    let echo = answer.echo;
    let prompts = off_thread(state.tokenizer(), move |tokenizer, cancelled| {
        encode(prompts, with_bos, echo, tokenizer, cancelled)
    })
    .await?;
    let requests = prompts.iter().map(|prompt| GenerateRequest { prompt: Arc::clone(&prompt.ids), ..generate.clone() });
    let requests = requests.collect();
    let answer = TextAnswer::new(&state, &generate, answer, prompts);
    let info = RequestInfo { id: generate.id, endpoint: ENDPOINT, stream };
    let generation = Generation::start(&state, info, requests, text, in_flight)?;
    if stream {
        return Ok(sse::respond(&state, generation, answer));
    }
    whole(answer, generation).await.map(|response| Json(response).into_response())
}

/// A checked request, before its prompts are encoded.
struct Plan {
    /// All but the prompt.
    generate: GenerateRequest,
    prompts: Vec<RawPrompt>,
    with_bos: bool,
    text: TextOptions,
    answer: TextAnswerOptions,
    stream: bool,
}

enum RawPrompt {
    Text(String),
    Ids(Vec<u32>),
}

impl Plan {
    fn new(state: &AppState, request: CompletionRequest, tag: &RequestTag) -> Result<Self, ApiError> {
        check_model(state, request.model.as_deref())?;
        request.refuse_unsupported()?;
        request.suffix.refuse("suffix")?;
        request.prompt_embeds.refuse("prompt_embeds")?;
        if request.best_of.is_some_and(|best_of| best_of != request.n.unwrap_or(1)) {
            return Err(ApiError::unsupported("best_of", "must be equal to n"));
        }
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
            show_hidden: request.skip_special_tokens == Some(false),
            split_logprobs: false,
            chat: None,
        };
        let answer = TextAnswerOptions {
            echo: request.echo.unwrap_or(false),
            prompt_logprobs: request.prompt_logprobs.is_some(),
            return_token_ids: request.return_token_ids.unwrap_or(false),
            tokens_as_ids: request.return_tokens_as_token_ids.unwrap_or(false),
            usage_last,
            usage_always,
        };
        let with_bos = request.add_special_tokens.unwrap_or(true);
        let prompts = raw_prompts(request.prompt, state.engine().limits().max_queued)?;
        Ok(Self { generate, prompts, with_bos, text, answer, stream })
    }
}

fn generate_request(
    state: &AppState,
    request: &CompletionRequest,
    tag: &RequestTag,
) -> Result<GenerateRequest, ApiError> {
    let logprobs = request.logprobs.map(|n| n_logprobs("logprobs", n)).transpose()?;
    let of_prompt = request.prompt_logprobs.map(|n| n_logprobs("prompt_logprobs", n)).transpose()?;
    let of_echo = logprobs.filter(|_| request.echo.unwrap_or(false));
    Ok(GenerateRequest {
        id: format!("cmpl-{}", tag.0),
        prompt: Arc::from([]),
        max_tokens: Some(request.max_tokens.map_or(Ok(DEFAULT_MAX_TOKENS), |value| count("max_tokens", value))?),
        n: n_choices(request.n, state.engine().limits().max_n)?,
        sampling: request.sampling().resolve(&state.config().default_sampling)?,
        stop_token_ids: request.stop_token_ids.iter().flatten().copied().map(TokenId).collect(),
        ignore_eos: request.ignore_eos.unwrap_or(false),
        min_tokens: count("min_tokens", request.min_tokens.unwrap_or(0))?,
        logprobs,
        prompt_logprobs: of_prompt.max(of_echo),
        cache_salt: request.cache_salt.clone(),
        priority: priority(request.priority)?,
    })
}

fn raw_prompts(prompt: Prompt, max_prompts: usize) -> Result<Vec<RawPrompt>, ApiError> {
    let prompts: Vec<RawPrompt> = match prompt {
        Prompt::Text(text) => vec![RawPrompt::Text(text)],
        Prompt::Texts(texts) => texts.into_iter().map(RawPrompt::Text).collect(),
        Prompt::Ids(ids) => vec![RawPrompt::Ids(ids)],
        Prompt::IdLists(lists) => lists.into_iter().map(RawPrompt::Ids).collect(),
    };
    let n = prompts.len();
    if n > max_prompts {
        return Err(ApiError::invalid("prompt", format!("must hold at most {max_prompts} prompts, got {n}")));
    }
    Ok(prompts)
}

fn encode(
    prompts: Vec<RawPrompt>,
    with_bos: bool,
    echo: bool,
    tokenizer: &Tokenizer,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Vec<EchoPrompt>, ApiError> {
    let one = |prompt| match prompt {
        RawPrompt::Text(text) => {
            let mut ids = if with_bos { vec![tokenizer.bos()] } else { Vec::new() };
            ids.extend(tokenizer.encode_marked(&text, cancelled).map_err(encode_error)?);
            Ok(EchoPrompt::of_text(ids, text, usize::from(with_bos)))
        }
        RawPrompt::Ids(ids) => Ok(EchoPrompt::of_ids(ids.into_iter().map(TokenId).collect(), echo, tokenizer)),
    };
    prompts.into_iter().map(one).collect()
}

/// The whole answer: the stream's own chunks, put together.
async fn whole(mut answer: TextAnswer, generation: Generation) -> Result<CompletionResponse, ApiError> {
    let mut outputs = std::pin::pin!(generation.outputs());
    while let Some(output) = outputs.next().await {
        answer.fold(output)?;
    }
    Ok(answer.into_response())
}
