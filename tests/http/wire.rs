//! The protocol around the endpoints: errors, keys, models, probes, metrics, the API's description.

use axum::http::{Method, StatusCode};
use flashd::engine::handle::EngineHealth;
use flashd::http::ApiConfig;
use serde_json::{Value, json};

use crate::harness::*;

const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test]
async fn unknown_things_have_their_status() {
    let server = Server::new(script("Hi"));
    let error = server.chat(json!({"model": "gpt-9"})).await.error(404);
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    assert_eq!(error["message"], "The model `gpt-9` does not exist.");
    server.complete(json!({"model": "gpt-9", "prompt": "a"})).await.error(404);
    server.get("/v1/nothing").await.error(404);
    let answer = server.get("/v1/chat/completions").await;
    answer.error(405);
    assert_eq!(answer.headers["allow"], "POST");
    server.call(Method::DELETE, "/v1/models", &[], "").await.error(405);
    server.call(Method::POST, "/v1/completions", &[("content-type", "text/plain")], "{}").await.error(415);
    let form = ("content-type", "application/x-www-form-urlencoded");
    server.call(Method::POST, "/v1/completions", &[form], "{}").await.error(415);
    let charset = ("content-type", "application/json; charset=utf-8");
    server.call(Method::POST, "/v1/completions", &[charset], r#"{"prompt":"a"}"#).await.ok();
}

#[tokio::test]
async fn hostile_bodies() {
    let server = Server::new(script("Hi"));
    let deep = "[".repeat(100_000);
    for (body, status) in [
        ("", 400),
        ("{", 400),
        ("null", 400),
        ("[]", 400),
        ("{\"prompt\":\"\\ud800\"}", 400),
        ("{\"prompt\":\"a\",\"prompt\":\"b\"}", 400),
        ("{\"prompt\":\"a\",\"temperature\":1e999}", 400),
        ("{\"prompt\":\"a\"} trailing", 400),
        (&format!("{{\"prompt\":\"a\",\"ignored\":{deep}}}"), 400),
        (&format!("{{\"prompt\":{deep}}}"), 400),
    ] {
        let answer = server.post("/v1/completions", body.to_owned()).await;
        answer.error(status);
    }
    let balanced = format!("{{\"prompt\":\"a\",\"ignored\":{deep}{}}}", "]".repeat(100_000));
    server.post("/v1/completions", balanced).await.ok();
    let schema = format!("{}{}", "{\"a\":".repeat(100_000), "}".repeat(100_000));
    let tools = format!(
        r#"{{"messages":[{{"role":"user","content":"x"}}],"tools":[{{"type":"function","function":{schema}}}]}}"#
    );
    server.post("/v1/chat/completions", tools).await.error(400);
    server.post("/v1/completions", b"{\"prompt\":\"\xff\"}".to_vec()).await.error(400);
    server.post("/v1/completions", "x".repeat((1 << 20) + 1)).await.error(413);
    let announced = [JSON, ("content-length", "99999999999")];
    server.call(Method::POST, "/v1/completions", &announced, "{}").await.error(413);
    server.complete(json!({"prompt": "a"})).await.ok();
}

#[tokio::test]
async fn an_array_is_no_object() {
    let server = Server::new(script("Hi"));
    for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"] {
        for (body, got) in [("[]", "an array"), ("[[1]]", "an array"), ("7", "7"), ("null", "null")] {
            let error = server.post(path, body).await.error(400);
            assert_eq!(error["message"], format!("the body must be an object, got {got}"), "{path}");
        }
    }
    let error = server.post("/v1/completions", "{\"prompt\":\"a\",\"prompt\":\"b\"}").await.error(400);
    assert_eq!(error["param"], "prompt");
}

#[tokio::test]
async fn keys_guard_the_api_and_nothing_else() {
    let keys = vec!["sesame".to_owned(), "second".to_owned()];
    let server = Server::with(ApiConfig { api_keys: keys, ..config() }, script("Hi"));
    let body = r#"{"prompt":"a"}"#;
    for (path, method) in [
        ("/v1/completions", Method::POST),
        ("/v1/chat/completions", Method::POST),
        ("/v1/models", Method::GET),
        ("/tokenize", Method::POST),
        ("/detokenize", Method::POST),
    ] {
        let answer = server.call(method, path, &[JSON], body).await;
        assert_eq!(answer.error(401)["code"], "invalid_api_key");
        assert_eq!(answer.headers["www-authenticate"], "Bearer");
    }
    for header in [
        ("authorization", "Bearer wrong"),
        ("authorization", "sesame"),
        ("authorization", "Bearer "),
        ("x-api-key", ""),
        ("x-api-key", "sesam"),
    ] {
        server.call(Method::POST, "/v1/completions", &[JSON, header], body).await.error(401);
    }
    for header in [("authorization", "Bearer sesame"), ("authorization", "bearer second"), ("x-api-key", "sesame")] {
        server.call(Method::POST, "/v1/completions", &[JSON, header], body).await.ok();
    }
    for path in ["/livez", "/health", "/readyz", "/ping", "/metrics", "/version", "/openapi.json"] {
        assert_eq!(server.get(path).await.status, StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn models_have_several_names() {
    let names = vec!["org/flash".to_owned(), "alias".to_owned()];
    let server = Server::with(ApiConfig { served_model_names: names, ..config() }, script("Hi"));
    let list = server.get("/v1/models").await.ok();
    assert_eq!(list["object"], "list");
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|card| card["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["org/flash", "alias"]);
    assert_eq!(list["data"][1]["max_model_len"], MAX_MODEL_LEN);
    assert_eq!(list["data"][1]["root"], "org/flash");
    for path in ["/v1/models/org/flash", "/v1/models/org%2Fflash", "/v1/models/alias"] {
        assert_eq!(server.get(path).await.ok()["object"], "model");
    }
    server.get("/v1/models/other").await.error(404);
    server.get("/v1/models/%ff").await.error(400);
    for name in [json!("alias"), json!("org/flash"), Value::Null] {
        let answer = server.complete(json!({"model": name, "prompt": "a"})).await.ok();
        assert_eq!(answer["model"], "org/flash");
    }
}

#[tokio::test]
async fn probes_tell_the_truth() {
    let server = Server::new(script("Hi"));
    let states = [
        (EngineHealth::Starting, 503, 503),
        (EngineHealth::Ready, 200, 200),
        (EngineHealth::Stalled, 503, 200),
        (EngineHealth::Draining, 503, 503),
        (EngineHealth::Dead("x".to_owned()), 503, 503),
    ];
    for (state, ready, api) in states {
        server.engine.health.send_replace(state.clone());
        assert_eq!(server.get("/livez").await.status, 200);
        for path in ["/health", "/readyz", "/ping"] {
            assert_eq!(server.get(path).await.status.as_u16(), ready, "{path} {state:?}");
        }
        assert_eq!(server.call(Method::POST, "/ping", &[], "").await.status.as_u16(), ready);
        for answer in [server.get("/v1/models").await, server.complete(json!({"prompt": "a"})).await] {
            assert_eq!(answer.status.as_u16(), api, "{state:?}");
            assert_eq!(answer.headers.contains_key("retry-after"), api == 503);
        }
    }
}

#[tokio::test]
async fn request_ids_are_echoed_or_made() {
    let server = Server::new(script("Hi"));
    let body = r#"{"prompt":"a"}"#;
    let answer = server.call(Method::POST, "/v1/completions", &[JSON, ("x-request-id", "my-id")], body).await;
    assert_eq!(answer.headers["x-request-id"], "my-id");
    assert_eq!(answer.json()["id"], "cmpl-my-id");
    let made: Vec<_> = [server.get("/v1/models").await, server.get("/nothing").await]
        .iter()
        .map(|answer| answer.headers["x-request-id"].to_str().unwrap().to_owned())
        .collect();
    assert_ne!(made[0], made[1]);
    assert_eq!(made[0].len(), 32);
}

#[tokio::test]
async fn requests_are_counted() {
    let server = Server::new(script("Hi"));
    server.complete(json!({"prompt": "a"})).await.ok();
    server.complete(json!({"prompt": "a", "stream": true})).await.events();
    server.complete(json!({})).await.error(400);
    server.get("/nowhere/else").await.error(404);
    server.get("/health").await;
    let answer = server.get("/metrics").await;
    assert!(answer.headers["content-type"].to_str().unwrap().starts_with("text/plain; version=0.0.4"));
    let line = |start: &str| answer.text.lines().find(|line| line.starts_with(start)).unwrap_or_default().to_owned();
    let count = |status: &str| {
        line(&format!("http_requests_total{{handler=\"/v1/completions\",method=\"POST\",status=\"{status}\"}}"))
    };
    assert!(count("2xx").ends_with(" 2"), "{}", answer.text);
    assert!(count("4xx").ends_with(" 1"));
    assert!(line("http_requests_total{handler=\"none\"").ends_with(" 1"));
    assert!(line("http_request_duration_seconds_count{handler=\"/v1/completions\"").ends_with(" 3"));
    assert!(!answer.text.contains("/health"));
    assert!(answer.text.contains("vllm:"));
}

#[tokio::test]
async fn tokens_there_and_back() {
    let server = Server::new(script(""));
    let answer = server.post_json("/tokenize", json!({"prompt": "Hi 🎉", "return_token_strs": true})).await.ok();
    assert_eq!(answer["max_model_len"], MAX_MODEL_LEN);
    let tokens = answer["tokens"].as_array().unwrap();
    assert_eq!(answer["count"], tokens.len());
    assert_eq!(tokens[0], tokenizer().bos().0);
    assert_eq!(answer["token_strs"].as_array().unwrap().len(), tokens.len());
    let back = server.post_json("/detokenize", json!({"tokens": tokens})).await.ok();
    assert_eq!(back["prompt"], "<｜begin▁of▁sentence｜>Hi 🎉");
    let plain = json!({"prompt": "Hi", "add_special_tokens": false});
    assert_ne!(server.post_json("/tokenize", plain).await.ok()["tokens"][0], tokenizer().bos().0);
    let chat = server.post_json("/tokenize", chat_body(json!({}))).await.ok();
    assert_eq!(chat["token_strs"], Value::Null);
    server.chat(json!({})).await.ok();
    assert_eq!(chat["count"], server.seen().last().prompt.len());
    for body in [json!({}), json!({"prompt": "a", "messages": []})] {
        assert_eq!(server.post_json("/tokenize", body).await.error(400)["param"], "prompt");
    }
    assert_eq!(server.post_json("/detokenize", json!({"tokens": [5, 999_999]})).await.error(400)["param"], "tokens[1]");
    server.post_json("/detokenize", json!({"tokens": [1], "model": "x"})).await.error(404);
}

#[tokio::test]
async fn browsers_may_call_from_allowed_origins() {
    let preflight = [
        ("origin", "https://app.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type,x-stainless-os"),
    ];
    let keys = vec!["k".to_owned()];
    let server = Server::with(ApiConfig { api_keys: keys, ..config() }, script(""));
    let answer = server.call(Method::OPTIONS, "/v1/chat/completions", &preflight, "").await;
    assert_eq!(
        (answer.status, &answer.headers["access-control-allow-origin"]),
        (StatusCode::OK, &"*".parse().unwrap())
    );
    // To browsers, `*` does not cover Authorization.
    assert_eq!(answer.headers["access-control-allow-headers"], "authorization,content-type,x-stainless-os");
    let origins = vec!["https://other.example".to_owned()];
    let server = Server::with(ApiConfig { allowed_origins: origins, ..config() }, script(""));
    let answer = server.call(Method::OPTIONS, "/v1/chat/completions", &preflight, "").await;
    assert!(!answer.headers.contains_key("access-control-allow-origin"));
}

#[tokio::test]
async fn the_description_is_whole() {
    let server = Server::new(script(""));
    let doc = server.get("/openapi.json").await.ok();
    assert!(doc["openapi"].as_str().unwrap().starts_with("3."));
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/livez",
        "/health",
        "/readyz",
        "/ping",
        "/metrics",
        "/version",
    ] {
        assert!(doc["paths"][path].is_object(), "{path}");
    }
    assert!(doc["paths"]["/ping"]["get"].is_object() && doc["paths"]["/ping"]["post"].is_object());
    let mut references = Vec::new();
    collect_references(&doc, &mut references);
    assert!(references.len() > 20);
    for reference in references {
        let pointer = reference.strip_prefix('#').expect("a local reference");
        assert!(doc.pointer(pointer).is_some(), "{reference}");
    }
    let chat = &doc["components"]["schemas"]["ChatRequest"];
    assert_eq!(chat["required"], json!(["messages"]));
    assert_eq!(chat["properties"]["temperature"]["maximum"], json!(2));
    for hidden in ["guided_json", "function_call", "length_penalty"] {
        assert!(chat["properties"].get(hidden).is_none(), "{hidden}");
    }
    let schemas = &doc["components"]["schemas"];
    assert!(schemas["MessageContent"]["oneOf"].is_array() && schemas["ToolChoice"]["oneOf"].is_array());
    assert_eq!(schemas["ReasoningEffort"]["enum"].as_array().unwrap().len(), 8);
    for status in ["400", "401", "404", "408", "413", "415", "429", "500", "503"] {
        assert!(doc["paths"]["/v1/chat/completions"]["post"]["responses"][status].is_object(), "{status}");
    }
}

fn collect_references(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get("$ref").and_then(Value::as_str).map(str::to_owned));
            map.values().for_each(|value| collect_references(value, found));
        }
        Value::Array(list) => list.iter().for_each(|value| collect_references(value, found)),
        _ => {}
    }
}
