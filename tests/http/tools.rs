//! Tool calls: streams, choices, forced calls, finish reasons.

use serde_json::{Value, json};

use crate::harness::*;

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters":
            {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}},
        {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}},
    ])
}

fn invoke(name: &str, parameters: &[(&str, bool, &str)]) -> String {
    let parameters = parameters.iter().map(|(key, is_string, value)| {
        format!("<｜DSML｜parameter name=\"{key}\" string=\"{is_string}\">{value}</｜DSML｜parameter>\n")
    });
    format!("<｜DSML｜invoke name=\"{name}\">\n{}</｜DSML｜invoke>\n", parameters.collect::<String>())
}

fn block(invokes: &[String]) -> String {
    format!("\n\n<｜DSML｜tool_calls>\n{}</｜DSML｜tool_calls>", invokes.concat())
}

fn two_calls() -> String {
    let first = invoke("get_weather", &[("city", true, "Seoul \"<b>"), ("days", false, "2")]);
    format!("Let me see.{}", block(&[first, invoke("run", &[])]))
}

#[tokio::test]
async fn two_calls_stream_as_they_are_given_whole() {
    for size in [1, 2, 4, 1000] {
        let server = Server::new(script_in(&two_calls(), size));
        let fields = json!({"tools": tools()});
        let answer = server.chat(fields.clone()).await.ok();
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls");
        assert_eq!(choice["message"]["content"], "Let me see.");
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        let parse =
            |call: &Value| serde_json::from_str::<Value>(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(calls[0]["function"]["name"], "get_weather");
        assert_eq!(parse(&calls[0]), json!({"city": "Seoul \"<b>", "days": 2}));
        assert_eq!((&calls[1]["function"]["name"], parse(&calls[1])), (&json!("run"), json!({})));
        assert_ne!(calls[0]["id"], calls[1]["id"]);
        let events = server.chat_stream(fields).await;
        assert_eq!(fold_chat(&events), [choice_of(&answer, 0)]);
        assert!(!serde_json::to_string(&events).unwrap().contains("DSML"));
    }
}

#[tokio::test]
async fn content_is_null_where_there_are_only_calls() {
    let server = Server::new(script(&block(&[invoke("run", &[])])));
    let answer = server.chat(json!({"tools": tools()})).await.ok();
    assert_eq!(answer["choices"][0]["message"]["content"], Value::Null);
    assert_eq!(answer["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn arguments_stream_while_they_grow() {
    let value = "x".repeat(400);
    let server = Server::new(script(&block(&[invoke("get_weather", &[("city", true, &value)])])));
    let events = server.chat_stream(json!({"tools": tools()})).await;
    let n_deltas = events.iter().filter(|event| event["choices"][0]["delta"].get("tool_calls").is_some()).count();
    assert!(n_deltas > 50, "{n_deltas}");
}

#[tokio::test]
async fn parallel_calls_can_be_refused() {
    for size in [1, 3, 1000] {
        let server = Server::new(script_in(&two_calls(), size));
        let fields = json!({"tools": tools(), "parallel_tool_calls": false});
        let answer = server.chat(fields.clone()).await.ok();
        let choice = &answer["choices"][0];
        assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
        assert_eq!(choice["finish_reason"], "tool_calls");
        assert_eq!(fold_chat(&server.chat_stream(fields).await), [choice_of(&answer, 0)]);
    }
}

#[tokio::test]
async fn no_choice_leaves_the_tools_out() {
    let server = Server::new(script(&two_calls()));
    let with_tools = server.chat(json!({"tools": tools()})).await.ok();
    let without = server.chat(json!({"tools": tools(), "tool_choice": "none"})).await.ok();
    assert!(!server.prompt().contains("get_weather"));
    let n_prompt = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(n_prompt(&without) < n_prompt(&with_tools));
    let choice = &without["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    assert!(choice["message"].get("tool_calls").is_none());
    assert_eq!(choice["message"]["content"], "Let me see.");
}

#[tokio::test]
async fn a_named_tool_is_forced_by_its_opening() {
    let rest = "<｜DSML｜parameter name=\"city\" string=\"true\">Seoul</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    for size in [1, 3, 1000] {
        let server = Server::new(script_in(rest, size));
        let choice = json!({"type": "function", "function": {"name": "get_weather"}});
        let fields = json!({"tools": tools(), "tool_choice": choice});
        let answer = server.chat(fields.clone()).await.ok();
        assert!(
            server
                .prompt()
                .ends_with("<｜Assistant｜></think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n")
        );
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "as OpenAI's");
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        assert_eq!(calls[0]["function"]["arguments"], r#"{"city": "Seoul"}"#);
        assert_eq!(fold_chat(&server.chat_stream(fields).await), [choice_of(&answer, 0)]);
    }
}

#[tokio::test]
async fn a_required_call_is_forced_by_its_opening() {
    let rest = " name=\"run\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    let server = Server::new(script(rest));
    let fields = json!({"tools": tools(), "tool_choice": "required"});
    let answer = server.chat(fields.clone()).await.ok();
    assert!(server.prompt().ends_with("<｜Assistant｜></think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke"));
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "run");
    assert_eq!(fold_chat(&server.chat_stream(fields.clone()).await), [choice_of(&answer, 0)]);
    let thinking = with(fields, "reasoning_effort", "high".into());
    assert_eq!(server.chat(thinking).await.error(400)["param"], "tool_choice");
}

#[tokio::test]
async fn a_cut_call_is_never_a_whole_one() {
    let text = block(&[invoke("get_weather", &[("city", true, "a long value that is cut")])]);
    let n_tokens = script_in(&text, 2).tokens.len();
    let server = Server::new(script_in(&text, 2));
    for max_tokens in 0..n_tokens {
        let fields = json!({"tools": tools(), "max_tokens": max_tokens});
        let answer = server.chat(fields.clone()).await.ok();
        assert_eq!(answer["choices"][0]["finish_reason"], "length", "{max_tokens}");
        assert_eq!(fold_chat(&server.chat_stream(fields).await), [choice_of(&answer, 0)]);
    }
}

#[tokio::test]
async fn logprobs_leave_the_markup_out() {
    for size in [1, 2, 5] {
        let server = Server::new(script_in(&two_calls(), size));
        let fields = json!({"tools": tools(), "logprobs": true});
        let answer = server.chat(fields.clone()).await.ok();
        let entries = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
        let text: String = entries.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
        assert!(text.starts_with("Let me see."), "{text:?}");
        assert!(text.len() < "Let me see.".len() + size, "{text:?}");
        assert_eq!(fold_chat(&server.chat_stream(fields).await), [choice_of(&answer, 0)]);
    }
}

#[tokio::test]
async fn bad_tools_are_named() {
    let server = Server::new(script(""));
    for (fields, param) in [
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].function"),
        (json!({"tools": [{"type": "custom", "function": {"name": "f"}}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "function": {"name": ""}}]}), "tools[0].function.name"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "nope"}}}), "tool_choice"),
        (
            json!({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "c9", "content": "r"}]}),
            "messages[1].tool_call_id",
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls":
            [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}]}),
            "messages[0].tool_calls[0].function.arguments",
        ),
    ] {
        let error = server.chat(fields.clone()).await.error(400);
        assert_eq!(error["param"], param, "{fields}: {error}");
    }
}

#[tokio::test]
async fn odd_arguments_in_history_are_taken() {
    let server = Server::new(script("ok"));
    for arguments in [Value::Null, json!(""), json!("{}"), json!({"a": 1}), json!("{\"a\": 1}")] {
        let call = json!({"id": "c1", "type": "function", "function": {"name": "run", "arguments": arguments}});
        let messages = json!([
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "r"}]},
        ]);
        server.chat(json!({"messages": messages, "tools": tools()})).await.ok();
        assert!(server.prompt().contains("<｜DSML｜invoke name=\"run\">"), "{}", server.prompt());
    }
}
