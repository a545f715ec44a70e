//! Requests that do not end well: disconnects, failures, full queues, drains; and silence on the line.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request};
use flashd::http::ApiConfig;
use flashd::http::choice::TextOptions;
use flashd::http::generate::{Generation, Output, RequestInfo};
use flashd::http::sse::{self, Chunker};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};

use crate::engine::Script;
use crate::harness::*;

/// A script that stops for a permit before every token.
fn gated(text: &str, n_free: usize) -> (Script, Arc<Semaphore>) {
    let gate = Arc::new(Semaphore::new(n_free));
    let mut scripted = script_in(text, 1);
    scripted.gate = Some(Arc::clone(&gate));
    (scripted, gate)
}

struct Live {
    server: Server,
    address: std::net::SocketAddr,
    stop: oneshot::Sender<()>,
    ended: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Live {
    async fn start(config: ApiConfig, scripted: Script) -> Self {
        let server = Server::with(config, scripted);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let shutdown = async {
            let _ = stopped.await;
        };
        let ended = tokio::spawn(flashd::http::serve(listener, server.state.clone(), shutdown));
        Self { server, address, stop, ended }
    }

    /// Sends a request and leaves the connection open.
    async fn open(&self, path: &str, body: &Value) -> TcpStream {
        let body = body.to_string();
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).await.unwrap();
        stream
    }

    async fn status(&self, path: &str) -> u16 {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream
            .write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes())
            .await
            .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text.split(' ').nth(1).unwrap().parse().unwrap()
    }
}

async fn read_until(stream: &mut TcpStream, mark: &str) -> String {
    let mut text = Vec::new();
    let mut buffer = [0; 1024];
    while !String::from_utf8_lossy(&text).contains(mark) {
        let n = stream.read(&mut buffer).await.unwrap();
        assert!(n > 0, "closed before {mark:?}: {}", String::from_utf8_lossy(&text));
        text.extend_from_slice(&buffer[..n]);
    }
    String::from_utf8_lossy(&text).into_owned()
}

#[tokio::test]
async fn a_disconnect_cancels() {
    let (scripted, _gate) = gated("abcdef", 2);
    let live = Live::start(config(), scripted).await;
    for stream in [true, false] {
        let body = json!({"prompt": "x", "stream": stream});
        let mut connection = live.open("/v1/completions", &body).await;
        if stream {
            read_until(&mut connection, "data: ").await;
        } else {
            while live.server.seen().requests().len() < 2 {
                tokio::task::yield_now().await;
            }
        }
        drop(connection);
        live.server.seen().wait_for_cancelled(if stream { 1 } else { 2 }).await;
    }
}

#[tokio::test]
async fn dropping_one_of_several_prompts_cancels_all() {
    let (scripted, _gate) = gated("abc", 0);
    let server = Server::new(scripted);
    let body = json!({"prompt": ["a", "b", "c"], "stream": true}).to_string();
    let request =
        Request::builder().method(Method::POST).uri("/v1/completions").header("content-type", "application/json");
    let response = server.send(request.body(Body::from(body)).unwrap()).await;
    drop(response);
    server.seen().wait_for_cancelled(3).await;
}

#[tokio::test]
async fn comments_bridge_the_silence() {
    let (scripted, gate) = gated("ab", 0);
    let quiet = ApiConfig { sse_keep_alive: Duration::from_millis(5), ..config() };
    let server = Server::with(quiet, scripted);
    let body = json!({"prompt": "x", "stream": true}).to_string();
    let request =
        Request::builder().method(Method::POST).uri("/v1/completions").header("content-type", "application/json");
    let response = server.send(request.body(Body::from(body)).unwrap()).await;
    assert_eq!(response.headers()["cache-control"], "no-cache");
    let mut frames = response.into_body().into_data_stream();
    let mut text = String::new();
    while text.matches(": keep-alive\n\n").count() < 3 {
        text.push_str(std::str::from_utf8(&frames.next().await.unwrap().unwrap()).unwrap());
    }
    assert!(!text.contains("data:"));
    gate.add_permits(100);
    while let Some(frame) = frames.next().await {
        text.push_str(std::str::from_utf8(&frame.unwrap()).unwrap());
    }
    let events = parse_events(&text);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn failures_have_a_status_or_an_event() {
    for (fails_at, vanishes_at, status) in [(Some(0), None, 500), (Some(2), None, 500), (None, Some(2), 503)] {
        let mut scripted = script_in("abcdef", 1);
        (scripted.fails_at, scripted.vanishes_at) = (fails_at, vanishes_at);
        let server = Server::new(scripted);
        server.chat(json!({})).await.error(status);
        let options = json!({"stream_options": {"include_usage": true}});
        let events = server.chat_stream(options).await;
        let last = events.last().unwrap();
        assert!(last["error"]["message"].is_string(), "{last}");
        assert!(events.iter().rev().skip(1).all(|event| event.get("error").is_none()));
    }
}

#[tokio::test]
async fn a_full_queue_says_when_to_come_back() {
    let (scripted, gate) = gated("a", 0);
    let server = Server::new(scripted);
    let body = |n: usize| json!({"prompt": vec!["x"; n], "stream": true}).to_string();
    let request = |n: usize| {
        let request = Request::builder().method(Method::POST).uri("/v1/completions");
        request.header("content-type", "application/json").body(Body::from(body(n))).unwrap()
    };
    let three = server.send(request(3)).await;
    let refused = server.complete(json!({"prompt": ["x", "x"]})).await;
    assert_eq!(refused.error(429)["code"], "queue_full");
    assert!(refused.headers.contains_key("retry-after"));
    server.seen().wait_for_cancelled(1).await;
    drop(three);
    server.seen().wait_for_cancelled(4).await;
    gate.add_permits(100);
    server.complete(json!({"prompt": "x"})).await.ok();
}

#[tokio::test]
async fn a_drain_lets_requests_end_and_refuses_new_ones() {
    let (scripted, gate) = gated("abc", 1);
    let patient = ApiConfig { drain_timeout: Duration::from_secs(60), ..config() };
    let live = Live::start(patient, scripted).await;
    let mut running = live.open("/v1/completions", &json!({"prompt": "x", "stream": true})).await;
    read_until(&mut running, "data: ").await;
    assert_eq!(live.status("/readyz").await, 200);
    live.stop.send(()).unwrap();
    while TcpStream::connect(live.address).await.is_ok() && {
        let mut stream = TcpStream::connect(live.address).await.unwrap();
        stream.write_all(b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text.starts_with("HTTP/1.1 200")
    } {
        tokio::task::yield_now().await;
    }
    let mut refused = live_refused(live.address).await;
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    refused.make_ascii_lowercase();
    assert!(refused.contains("retry-after"));
    gate.add_permits(100);
    let rest = read_until(&mut running, "[DONE]").await;
    assert!(!rest.contains("error"), "{rest}");
    live.ended.await.unwrap().unwrap();
}

async fn live_refused(address: std::net::SocketAddr) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n";
    stream.write_all(format!("{head}content-length: 14\r\n\r\n{{\"prompt\":\"x\"}}").as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

#[tokio::test]
async fn a_drain_has_a_bound() {
    let (scripted, _gate) = gated("abc", 2);
    let hasty = ApiConfig { drain_timeout: Duration::from_millis(50), ..config() };
    let live = Live::start(hasty, scripted).await;
    let mut running = live.open("/v1/completions", &json!({"prompt": "x", "stream": true})).await;
    read_until(&mut running, "data: ").await;
    let _idle = TcpStream::connect(live.address).await.unwrap();
    live.stop.send(()).unwrap();
    let rest = read_until(&mut running, "[DONE]").await;
    assert!(rest.contains("\"error\"") && rest.contains("shutting down"), "{rest}");
    live.ended.await.unwrap().unwrap();
}

#[tokio::test]
async fn malformed_heads_leave_the_server_alive() {
    let live = Live::start(config(), script("Hi")).await;
    for head in [
        "content-length: 12abc",
        "content-length: -1",
        "content-length: 5\r\ncontent-length: 6",
        "content-length: 5\r\ntransfer-encoding: chunked\r\ntransfer-encoding: x",
    ] {
        let mut stream = TcpStream::connect(live.address).await.unwrap();
        let text =
            format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{head}\r\n\r\n{{}}");
        stream.write_all(text.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        // A reset is an answer too.
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{head}: {answer}");
    }
    let mut cut = TcpStream::connect(live.address).await.unwrap();
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{";
    cut.write_all(head.as_bytes()).await.unwrap();
    drop(cut);
    assert_eq!(live.status("/health").await, 200);
}

#[tokio::test]
async fn a_head_that_does_not_end_is_let_go() {
    let hasty = ApiConfig { header_timeout: Duration::from_millis(20), ..config() };
    let live = Live::start(hasty, script("Hi")).await;
    for start in ["", "POST /v1/completions HT", "POST /v1/completions HTTP/1.1\r\nhost: x\r\n"] {
        let mut stream = TcpStream::connect(live.address).await.unwrap();
        stream.write_all(start.as_bytes()).await.unwrap();
        // Without a bound this never ends.
        let _ = stream.read_to_end(&mut Vec::new()).await;
    }
    assert_eq!(live.status("/health").await, 200);
    live.stop.send(()).unwrap();
    live.ended.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_body_that_stalls_gets_408() {
    let hasty = ApiConfig { body_idle_timeout: Duration::from_millis(20), ..config() };
    let live = Live::start(hasty, script("Hi")).await;
    for (framing, start) in
        [("content-length: 99", ""), ("content-length: 99", "{"), ("transfer-encoding: chunked", "1\r\n{\r\n")]
    {
        let mut stream = TcpStream::connect(live.address).await.unwrap();
        let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";
        stream.write_all(format!("{head}{framing}\r\n\r\n{start}").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("request_timeout"), "{answer}");
    }
    assert_eq!(live.status("/health").await, 200);
}

struct Panics;

impl Chunker for Panics {
    type Chunk = Value;

    fn chunks(&mut self, output: Output) -> Vec<Value> {
        match output {
            Output::Delta { .. } => panic!("a parser's fault"),
            _ => Vec::new(),
        }
    }
}

#[tokio::test]
async fn a_panic_ends_only_its_stream() {
    let server = Server::new(script("Hi"));
    server.complete(json!({"prompt": "x"})).await.ok();
    let request = server.seen().last();
    let options = TextOptions {
        stop: Vec::new(),
        include_stop: false,
        stop_token_ids: Vec::new(),
        ignore_eos: false,
        show_hidden: false,
        split_logprobs: false,
        chat: None,
    };
    let info = RequestInfo { id: "x".to_owned(), endpoint: "/x", stream: true };
    let in_flight = Arc::new(server.state.enter().unwrap());
    let generation = Generation::start(&server.state, info, vec![request], options, in_flight).unwrap();
    let response = sse::respond(&server.state, generation, Panics);
    let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
    let events = parse_events(std::str::from_utf8(&bytes).unwrap());
    assert_eq!(events.len(), 1);
    assert_eq!(events[0]["error"]["code"], "internal_error");
    server.complete(json!({"prompt": "x"})).await.ok();
}
