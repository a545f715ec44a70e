//! The whole command against a server of a few lines whose answers are known.

use std::sync::Arc;
use std::sync::Mutex;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use clap::Parser;
use serde_json::{Value, json};

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: BenchArgs,
}

/// Bodies that the server has seen.
type Seen = Arc<Mutex<Vec<Value>>>;

fn args(base_url: &str, more: &[&str]) -> BenchArgs {
    let line = ["bench", "--base-url", base_url, "--output-tokens", "5", "--prompt-tokens", "20", "--warmup", "0"];
    Line::parse_from(line.iter().chain(more)).args
}

/// Five tokens in four chunks, the fourth of two; every third request is refused, every third of the rest ends early.
fn answer(seen: &Seen, body: Value) -> Response {
    let n_before = {
        let mut seen = seen.lock().unwrap();
        seen.push(body);
        seen.len() - 1
    };
    if n_before % 3 == 2 {
        let error = json!({"error": {"message": "queue is full", "type": "overloaded_error"}});
        return (StatusCode::SERVICE_UNAVAILABLE, Json(error)).into_response();
    }
    let n_tokens = if n_before == 3 { [1, 2, 3, 4] } else { [1, 2, 3, 5] };
    let usage =
        |n: usize| json!({"prompt_tokens": 20, "completion_tokens": n, "prompt_tokens_details": {"cached_tokens": 4}});
    let mut text = ": ping\n\n".to_owned();
    for n in n_tokens {
        text += &format!("data: {}\n\n", json!({"choices": [{"text": "x", "finish_reason": null}], "usage": usage(n)}));
    }
    text += &format!("data: {}\n\ndata: [DONE]\n\n", json!({"choices": [], "usage": usage(n_tokens[3])}));
    ([("content-type", "text/event-stream")], text).into_response()
}

/// Runs `measure` against the server.
fn bench(more: &[&str]) -> (Vec<Summary>, Vec<Value>, String) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let seen = Seen::default();
    let handler_seen = Arc::clone(&seen);
    let (summaries, text) = runtime.block_on(async move {
        let app = axum::Router::new()
            .route("/v1/models", get(|| async { Json(json!({"data": [{"id": "deepseek-v4-flash"}]})) }))
            .route("/v1/completions", post(move |Json(body): Json<Value>| async move { answer(&handler_seen, body) }));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base_url = format!("http://{}/v1/", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await });
        let mut text = Vec::new();
        let summaries = measure(&args(&base_url, more), &mut text).await.unwrap();
        (summaries, String::from_utf8(text).unwrap())
    });
    let seen = seen.lock().unwrap().clone();
    (summaries, seen, text)
}

#[test]
fn a_sweep_counts_tokens_and_errors() {
    let csv = tempfile::NamedTempFile::new().unwrap();
    let (rows, seen, text) = bench(&["--concurrency", "1,2", "--requests", "6", "--csv", csv.path().to_str().unwrap()]);
    assert_eq!(rows.len(), 2);
    // Requests 2 and 5 are refused, request 3 comes back short.
    assert_eq!((rows[0].n_ok, rows[0].n_failed(), rows[0].n_cached), (3, 3, 12));
    assert_eq!(rows[0].errors["503 Service Unavailable: queue is full"], 2);
    assert_eq!(rows[0].errors["4 tokens instead of 5 (finish_reason none)"], 1);
    assert_eq!((rows[1].n_ok, rows[1].n_failed()), (4, 2));
    assert_eq!(seen.len(), 12);
    assert!(text.contains("error (1 at once, 20 tokens): 2 x 503 Service Unavailable: queue is full"), "{text}");
    assert!(text.contains("note (2 at once, 20 tokens): 16 prompt tokens came from the prefix cache"), "{text}");
    let records: Vec<csv::StringRecord> =
        csv::Reader::from_path(csv.path()).unwrap().records().map(Result::unwrap).collect();
    assert_eq!(records.len(), 2);
    assert_eq!((&records[0][0], &records[1][2], &records[1][7]), ("deepseek-v4-flash", "2", "2"));
}

#[test]
fn prompts_are_distinct_and_inside_the_vocabulary() {
    let (_, seen, _) = bench(&["--concurrency", "1,2", "--requests", "4", "--seed", "9", "--max-token-id", "400"]);
    let firsts: std::collections::HashSet<String> = seen.iter().map(|body| body["prompt"].to_string()).collect();
    assert_eq!(firsts.len(), 8);
    for body in &seen {
        let prompt = body["prompt"].as_array().unwrap();
        assert_eq!(prompt.len(), 20);
        assert!(prompt.iter().all(|id| (100..=400).contains(&id.as_u64().unwrap())));
        assert_eq!(
            (&body["ignore_eos"], &body["max_tokens"], &body["stream"]),
            (&json!(true), &json!(5), &json!(true))
        );
    }
    // The same seed asks the same again.
    let (_, again, _) = bench(&["--concurrency", "1,2", "--requests", "4", "--seed", "9", "--max-token-id", "400"]);
    let again: std::collections::HashSet<String> = again.iter().map(|body| body["prompt"].to_string()).collect();
    assert_eq!(again, firsts);
}

#[test]
fn no_server_is_said_plainly() {
    let error = format!("{:#}", run(&args("http://127.0.0.1:9", &[])).unwrap_err());
    assert!(error.contains("no answer from http://127.0.0.1:9 (start a server with `flashd serve`)"), "{error}");
}
