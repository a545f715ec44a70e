//! Raw completions: prompts of every shape, echo, scoring, log-probabilities.

use serde_json::{Value, json};

use crate::harness::*;

fn fold(events: &[Value]) -> Vec<(String, Value)> {
    let mut choices: Vec<(String, Value)> = Vec::new();
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        let index = choice["index"].as_u64().unwrap() as usize;
        if choices.len() <= index {
            choices.resize_with(index + 1, || (String::new(), Value::Null));
        }
        assert!(choices[index].1.is_null(), "a chunk after the last");
        choices[index].0.push_str(choice["text"].as_str().unwrap());
        choices[index].1 = choice["finish_reason"].clone();
    }
    choices
}

#[tokio::test]
async fn text_prompts_start_with_the_begin_token() {
    let server = Server::new(script(" 391"));
    let answer = server.complete(json!({"model": MODEL, "prompt": "Calculate 17 * 23.", "temperature": 0})).await.ok();
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["choices"][0]["text"], " 391");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let seen = server.seen().last();
    assert_eq!(seen.prompt[0], tokenizer().bos());
    assert_eq!(seen.max_tokens, Some(16), "OpenAI's default");
    server.complete(json!({"prompt": "Calculate", "add_special_tokens": false})).await.ok();
    assert_ne!(server.seen().last().prompt[0], tokenizer().bos());
    server.complete(json!({"prompt": [5, 6]})).await.ok();
    assert_eq!(server.seen().last().prompt.iter().map(|id| id.0).collect::<Vec<_>>(), [5, 6]);
}

#[tokio::test]
async fn several_prompts_with_several_choices() {
    let server = Server::new(script("Hi 🎉 there"));
    for prompt in [json!(["a", "b"]), json!([[5], [6, 7]])] {
        let body = json!({"prompt": prompt, "n": 2, "echo": true});
        let answer = server.complete(body.clone()).await.ok();
        let choices = answer["choices"].as_array().unwrap();
        assert_eq!(choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(choices[0]["text"], choices[1]["text"]);
        assert_ne!(choices[1]["text"], choices[2]["text"]);
        let streamed = server.complete(with(body, "stream", true.into())).await.events();
        for (index, (text, reason)) in fold(&streamed).into_iter().enumerate() {
            assert_eq!(choices[index]["text"], text.as_str());
            assert_eq!(choices[index]["finish_reason"], reason);
        }
    }
    let error = server.complete(json!({"prompt": ["a", "b", "c", "d", "e"]})).await.error(400);
    assert_eq!(error["param"], "prompt");
}

#[tokio::test]
async fn scoring_generates_nothing() {
    let server = Server::new(script("never"));
    let body = json!({"prompt": "Hi 🎉 there", "max_tokens": 0, "echo": true, "logprobs": 2});
    let answer = server.complete(body).await.ok();
    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("Hi 🎉 there"), &json!("length")));
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    let lists = &choice["logprobs"];
    let n_prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(lists[list].as_array().unwrap().len(), n_prompt, "{list}");
    }
    assert!(lists["token_logprobs"][0].is_null() && lists["top_logprobs"][0].is_null());
    assert_eq!(lists["token_logprobs"][1], 0.0);
    let offsets: Vec<u64> = lists["text_offset"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap()).collect();
    assert_eq!(offsets[..2], [0, 0], "the begin token has no text");
    assert!(offsets.is_sorted() && *offsets.last().unwrap() < "Hi 🎉 there".chars().count() as u64);
}

#[tokio::test]
async fn logprobs_have_an_entry_for_every_token() {
    let scripted = script_in("ab cd", 1);
    let n_tokens = scripted.tokens.len() + 1;
    let server = Server::new(scripted);
    for echo in [false, true] {
        let body = json!({"prompt": [70, 71], "logprobs": 0, "echo": echo, "return_token_ids": true});
        let answer = server.complete(body.clone()).await.ok();
        let choice = &answer["choices"][0];
        let lists = &choice["logprobs"];
        assert_eq!(answer["usage"]["completion_tokens"], n_tokens);
        assert_eq!(choice["token_ids"].as_array().unwrap().len(), n_tokens);
        assert_eq!(lists["tokens"].as_array().unwrap().len(), n_tokens + if echo { 2 } else { 0 });
        assert_eq!(lists["tokens"].as_array().unwrap().last().unwrap(), "<｜end▁of▁sentence｜>");
        let text = choice["text"].as_str().unwrap();
        for (at, offset) in lists["text_offset"].as_array().unwrap().iter().enumerate().take(n_tokens - 1) {
            let token = lists["tokens"][at].as_str().unwrap();
            assert!(text[offset.as_u64().unwrap() as usize..].starts_with(token), "{at}: {lists}");
        }
        assert_eq!(lists["top_logprobs"].as_array().unwrap().last().unwrap().as_object().unwrap().len(), 1);
    }
    let as_ids = json!({"prompt": [70], "logprobs": 1, "return_tokens_as_token_ids": true});
    let answer = server.complete(as_ids).await.ok();
    assert!(answer["choices"][0]["logprobs"]["tokens"][0].as_str().unwrap().starts_with("token_id:"));
    assert_eq!(server.complete(json!({"prompt": "a", "logprobs": 21})).await.error(400)["param"], "logprobs");
}

#[tokio::test]
async fn halves_of_characters_have_keys_of_their_own() {
    let tokenizer = tokenizer();
    let one_byte = |byte: u8| {
        let ids = (0..tokenizer.vocab_size() as u32).map(flashd::ids::TokenId);
        ids.into_iter().find(|id| tokenizer.token_bytes(*id) == Some(&[byte])).unwrap()
    };
    let server = Server::new(crate::engine::Script::new("é".bytes().map(one_byte).collect()));
    let answer = server.complete(json!({"prompt": "x", "logprobs": 5})).await.ok();
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "é");
    let lists = &choice["logprobs"];
    assert_eq!(lists["tokens"][0], "bytes:\\xc3");
    assert_eq!(lists["tokens"][1], "bytes:\\xa9");
    for at in 0..2 {
        let top = lists["top_logprobs"][at].as_object().unwrap();
        assert_eq!(top.len(), 5, "{top:?}");
        assert_eq!(top[lists["tokens"][at].as_str().unwrap()], lists["token_logprobs"][at]);
    }
}

#[tokio::test]
async fn whole_numbers_may_have_a_point() {
    let server = Server::new(script("abcdef"));
    let ids = |server: &Server| server.seen().last().prompt.iter().map(|id| id.0).collect::<Vec<_>>();
    let body = json!({"prompt": [70.0, 71], "max_tokens": 5.0, "n": 1.0, "stop_token_ids": [44.0], "priority": 2.0});
    server.complete(body).await.ok();
    assert_eq!(ids(&server), [70, 71]);
    let seen = server.seen().last();
    assert_eq!((seen.max_tokens, seen.priority, seen.stop_token_ids[0].0), (Some(5), 2, 44));
    server.complete(json!({"prompt": [[72.0, 73.0]]})).await.ok();
    assert_eq!(ids(&server), [72, 73]);
    let text = server.post_json("/detokenize", json!({"tokens": [70.0]})).await.ok();
    assert_eq!(text, server.post_json("/detokenize", json!({"tokens": [70]})).await.ok());
}

#[tokio::test]
async fn stops_end_text_tokens_and_usage_together() {
    let text = "the quick brown fox jumps";
    for size in 1..=text.len() {
        let server = Server::new(script_in(text, size));
        let body = json!({"prompt": "x", "stop": ["own fox"], "logprobs": 0, "max_tokens": 100});
        let answer = server.complete(body.clone()).await.ok();
        let choice = &answer["choices"][0];
        assert_eq!((&choice["text"], &choice["stop_reason"]), (&json!("the quick br"), &json!("own fox")));
        assert_eq!(answer["usage"]["completion_tokens"], choice["logprobs"]["tokens"].as_array().unwrap().len());
        let streamed = server.complete(with(body, "stream", true.into())).await.events();
        assert_eq!(fold(&streamed), [("the quick br".to_owned(), json!("stop"))]);
    }
}

#[tokio::test]
async fn markup_is_text_in_a_raw_completion() {
    let text = "a</think>b\n\n<｜DSML｜tool_calls>";
    let server = Server::new(script(text));
    assert_eq!(server.complete(json!({"prompt": "x", "max_tokens": 50})).await.ok()["choices"][0]["text"], text);
    let mut scripted = script("ab");
    scripted.tokens.push(tokenizer().control("<｜User｜>").unwrap());
    let server = Server::new(scripted);
    assert_eq!(server.complete(json!({"prompt": "x"})).await.ok()["choices"][0]["text"], "ab");
    let shown = server.complete(json!({"prompt": "x", "skip_special_tokens": false})).await.ok();
    assert_eq!(shown["choices"][0]["text"], "ab<｜User｜>");
}

#[tokio::test]
async fn usage_comes_last_in_a_stream() {
    let server = Server::new(script("Hi there"));
    let body = json!({"prompt": "x", "stream": true, "stream_options": {"include_usage": true}});
    let events = server.complete(body).await.events();
    let last = events.last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert!(last["usage"]["total_tokens"].as_u64() > Some(0));
    assert!(events.iter().rev().skip(1).all(|event| event.get("usage").is_none()));
}

#[tokio::test]
async fn wrong_fields_are_named() {
    let server = Server::new(script(""));
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [1, "a"]}), "prompt[1]"),
        (json!({"prompt": [-1]}), "prompt[0]"),
        (json!({"prompt": [999_999]}), "prompt"),
        (json!({"prompt": [[]]}), "prompt"),
        (json!({"prompt": "", "add_special_tokens": false}), "prompt"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix"),
        (json!({"prompt": "a", "best_of": 2}), "best_of"),
        (json!({"prompt": "a", "length_penalty": 2}), "length_penalty"),
        (json!({"prompt": "a", "logprob_token_ids": [1]}), "logprob_token_ids"),
        (json!({"prompt": "a", "repetition_detection": {"min_count": 2}}), "repetition_detection"),
        (json!({"prompt": [1.5]}), "prompt[0]"),
        (json!({"prompt": "a", "max_tokens": -1}), "max_tokens"),
        (json!({"prompt": "a", "max_tokens": "5"}), "max_tokens"),
        (json!({"prompt": "a", "logprobs": true}), "logprobs"),
        (json!({"prompt": "a", "stream_options": {"include_usage": true}}), "stream_options"),
    ] {
        let error = server.complete(body.clone()).await.error(400);
        assert_eq!(error["param"], param, "{body}: {error}");
    }
    server.complete(json!({"prompt": "a", "suffix": null, "best_of": 1, "max_tokens": null, "echo": null})).await.ok();
    server.complete(json!({"prompt": "a", "max_tokens": 1_000_000_000})).await.ok();
}

#[tokio::test]
async fn over_long_prompts_are_refused_before_the_stream() {
    let server = Server::new(script(""));
    for stream in [false, true] {
        let body = json!({"prompt": vec![5; MAX_MODEL_LEN], "stream": stream});
        assert_eq!(server.complete(body).await.error(400)["code"], "context_length_exceeded");
    }
    let error = server.complete(json!({"prompt": vec![5; MAX_MODEL_LEN], "max_tokens": 1})).await.error(400);
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("at least 4097 tokens (4096 of the prompt and 1 of output)"), "{message}");
    assert!(message.contains("maximum context length is 4096 tokens"), "{message}");
    let full = json!({"prompt": vec![5; MAX_MODEL_LEN], "max_tokens": 0});
    server.complete(full).await.ok();
}
