//! A router over the fake engine, and a client of it.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Method, Request, StatusCode};
use flashd::engine::request::EngineLimits;
use flashd::http::{ApiConfig, AppState, DefaultThinking};
use flashd::ids::TokenId;
use flashd::telemetry::metrics::Metrics;
use flashd::tokenizer::Tokenizer;
use serde_json::{Map, Value};
use tower::ServiceExt;

use crate::engine::{FakeEngine, Script, Seen, tokens_of};

pub const MODEL: &str = "deepseek-v4-flash";
pub const MAX_MODEL_LEN: usize = 4096;

/// A server without a socket.
pub struct Server {
    pub router: Router,
    pub state: AppState,
    pub engine: FakeEngine,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

pub fn tokenizer() -> Arc<Tokenizer> {
    static DEMO: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo-model");
    Arc::clone(DEMO.get_or_init(|| Arc::new(Tokenizer::load(&dir).unwrap())))
}

pub fn limits() -> EngineLimits {
    EngineLimits {
        max_model_len: MAX_MODEL_LEN,
        vocab_size: tokenizer().vocab_size(),
        max_kv_tokens: MAX_MODEL_LEN,
        max_n: 8,
        max_logprobs: 20,
        max_queued: 4,
        eos_token_id: tokenizer().eos(),
    }
}

pub fn config() -> ApiConfig {
    ApiConfig {
        default_thinking: DefaultThinking::Off,
        sse_keep_alive: Duration::ZERO,
        max_body_bytes: 1 << 20,
        ..ApiConfig::new(MODEL)
    }
}

/// A script of `text`, three characters a piece.
pub fn script(text: &str) -> Script {
    script_in(text, 3)
}

pub fn script_in(text: &str, size: usize) -> Script {
    Script::new(tokens_of(&tokenizer(), text, size))
}

impl Server {
    pub fn new(script: Script) -> Self {
        Self::with(config(), script)
    }

    pub fn with(config: ApiConfig, script: Script) -> Self {
        let engine = FakeEngine::start(limits(), script);
        let metrics = Metrics::new(MODEL);
        let state = AppState::new(config, engine.handle.clone(), tokenizer(), metrics).unwrap();
        Self { router: flashd::http::router(state.clone()), state, engine }
    }

    pub fn seen(&self) -> &Seen {
        &self.engine.seen
    }

    /// The text of the last prompt, control tokens spelt out.
    pub fn prompt(&self) -> String {
        text_of(&self.seen().last().prompt)
    }

    pub async fn send(&self, request: Request<Body>) -> axum::response::Response {
        self.router.clone().oneshot(request).await.unwrap()
    }

    pub async fn call(&self, method: Method, path: &str, headers: &[(&str, &str)], body: impl Into<Body>) -> Answer {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self.send(request.body(body.into()).unwrap()).await;
        let (status, headers) = (response.status(), response.headers().clone());
        let bytes = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        Answer { status, headers, text: String::from_utf8(bytes.to_vec()).unwrap() }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, &[], Body::empty()).await
    }

    pub async fn post(&self, path: &str, body: impl Into<Body>) -> Answer {
        self.call(Method::POST, path, &[("content-type", "application/json")], body).await
    }

    pub async fn post_json(&self, path: &str, body: Value) -> Answer {
        self.post(path, body.to_string()).await
    }

    pub async fn chat(&self, fields: Value) -> Answer {
        self.post_json("/v1/chat/completions", chat_body(fields)).await
    }

    pub async fn chat_stream(&self, fields: Value) -> Vec<Value> {
        self.chat(with(fields, "stream", true.into())).await.events()
    }

    pub async fn complete(&self, fields: Value) -> Answer {
        self.post_json("/v1/completions", fields).await
    }
}

impl Answer {
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        self.json()
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The error object, after checking its shape.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        let body = self.json();
        assert_eq!(body.as_object().unwrap().len(), 1);
        let error = body["error"].clone();
        for field in ["message", "type", "code"] {
            assert!(error[field].is_string(), "{field} in {error}");
        }
        assert!(error.as_object().unwrap().contains_key("param"));
        error
    }

    /// The data of a stream, after checking its frame: every line, and [DONE] last and once.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        assert!(self.headers["content-type"].to_str().unwrap().starts_with("text/event-stream"));
        assert_eq!(self.headers["x-accel-buffering"], "no");
        parse_events(&self.text)
    }
}

pub fn parse_events(text: &str) -> Vec<Value> {
    let mut blocks: Vec<&str> = text.split("\n\n").collect();
    assert_eq!(blocks.pop(), Some(""), "the last event is closed");
    blocks.retain(|block| !block.starts_with(':'));
    assert_eq!(blocks.pop(), Some("data: [DONE]"));
    let data = |block: &str| {
        assert!(!block.contains('\n'), "{block:?}");
        serde_json::from_str(block.strip_prefix("data: ").unwrap()).unwrap()
    };
    blocks.into_iter().map(data).collect()
}

/// A chat request of one user message, with more fields.
pub fn chat_body(fields: Value) -> Value {
    let mut body = serde_json::json!({"model": MODEL, "messages": [{"role": "user", "content": "Say hi"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

pub fn with(mut fields: Value, name: &str, value: Value) -> Value {
    fields.as_object_mut().unwrap().insert(name.to_owned(), value);
    fields
}

pub fn text_of(ids: &[TokenId]) -> String {
    let tokenizer = tokenizer();
    let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap().to_vec()).collect();
    String::from_utf8(bytes).unwrap()
}

/// Puts the chunks of a chat stream together by the rules clients follow, checking them on the way.
pub fn fold_chat(chunks: &[Value]) -> Vec<Value> {
    let mut choices: Vec<Folded> = Vec::new();
    for chunk in chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], chunks[0]["id"]);
        for choice in chunk["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap() as usize;
            if choices.len() <= index {
                choices.resize_with(index + 1, Folded::default);
            }
            choices[index].add(choice);
        }
    }
    choices.into_iter().map(Folded::into_message).collect()
}

#[derive(Default)]
struct Folded {
    message: Map<String, Value>,
    calls: Vec<Value>,
    logprobs: Map<String, Value>,
    finish_reason: Option<Value>,
    has_started: bool,
}

impl Folded {
    fn add(&mut self, choice: &Value) {
        assert!(self.finish_reason.is_none(), "a chunk after the last: {choice}");
        let delta = choice["delta"].as_object().unwrap();
        assert_eq!(delta.get("role").is_some(), !self.has_started, "the role comes first and once: {choice}");
        if !self.has_started {
            assert_eq!(delta["content"], "");
        }
        self.has_started = true;
        for name in ["content", "reasoning", "reasoning_content"] {
            if let Some(more) = delta.get(name) {
                let text = self.message.entry(name).or_insert_with(|| "".into());
                *text = format!("{}{}", text.as_str().unwrap(), more.as_str().unwrap()).into();
            }
        }
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            self.add_call(call);
        }
        if let Some(lists) = choice["logprobs"].as_object() {
            for (name, list) in lists {
                let all = self.logprobs.entry(name).or_insert_with(|| Value::Array(Vec::new()));
                all.as_array_mut().unwrap().extend(list.as_array().unwrap().iter().cloned());
            }
        }
        if !choice["finish_reason"].is_null() {
            self.finish_reason = Some(choice["finish_reason"].clone());
        }
    }

    fn add_call(&mut self, call: &Value) {
        let index = call["index"].as_u64().unwrap() as usize;
        if index == self.calls.len() {
            assert_eq!(call["type"], "function");
            assert!(call["id"].is_string() && call["function"]["name"].is_string(), "{call}");
            let mut first = call.clone();
            first.as_object_mut().unwrap().remove("index");
            self.calls.push(first);
            return;
        }
        assert_eq!(index + 1, self.calls.len(), "{call}");
        assert!(call.get("id").is_none() && call.get("type").is_none() && call["function"].get("name").is_none());
        let arguments = &mut self.calls[index]["function"]["arguments"];
        *arguments = (arguments.as_str().unwrap().to_owned() + call["function"]["arguments"].as_str().unwrap()).into();
    }

    /// In the shape of a whole answer's choice, without what differs by design.
    fn into_message(mut self) -> Value {
        if !self.calls.is_empty() {
            if self.message["content"] == "" {
                self.message.insert("content".to_owned(), Value::Null);
            }
            self.message.insert("tool_calls".to_owned(), Value::Array(self.calls));
        }
        let finish_reason = self.finish_reason.expect("a finish reason");
        without_ids(serde_json::json!({
            "message": self.message,
            "logprobs": self.logprobs,
            "finish_reason": finish_reason,
        }))
    }
}

/// A whole answer's choice in the shape that [`fold_chat`] gives.
pub fn choice_of(answer: &Value, index: usize) -> Value {
    let choice = &answer["choices"][index];
    assert_eq!(choice["index"], index);
    let mut message = choice["message"].clone();
    assert_eq!(message.as_object_mut().unwrap().remove("role"), Some("assistant".into()));
    let logprobs = if choice["logprobs"].is_null() { serde_json::json!({}) } else { choice["logprobs"].clone() };
    without_ids(serde_json::json!({
        "message": message,
        "logprobs": logprobs,
        "finish_reason": choice["finish_reason"],
    }))
}

/// Ids of calls are random.
fn without_ids(mut choice: Value) -> Value {
    for call in choice["message"]["tool_calls"].as_array_mut().into_iter().flatten() {
        assert!(call.as_object_mut().unwrap().remove("id").is_some());
    }
    choice
}
