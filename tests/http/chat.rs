//! Chat completions: streams and whole answers, thinking, usage, log-probabilities, stops, limits.

use flashd::http::{ApiConfig, DefaultThinking};
use serde_json::{Value, json};

use crate::engine::Script;
use crate::harness::*;

const REASONED: &str = "I think, 饕餮.\n\nSo</think>Hello 🎉, the quick brown fox jumps.";

#[tokio::test]
async fn a_stream_equals_the_whole_answer() {
    let texts = ["", "Hi", "Hello 🎉 饕餮, the quick brown fox.\n\nNew <b>line</b>", "a <"];
    for text in texts {
        for size in [1, 2, 3, 100] {
            let server = Server::new(script_in(text, size));
            let whole = server.chat(json!({"n": 3})).await.ok();
            let folded = fold_chat(&server.chat_stream(json!({"n": 3})).await);
            assert_eq!(folded.len(), 3);
            for (index, choice) in folded.iter().enumerate() {
                assert_eq!(*choice, choice_of(&whole, index), "{text:?} in {size}");
                assert_eq!(choice["message"]["content"], text);
                assert_eq!(choice["finish_reason"], "stop");
            }
        }
    }
}

#[tokio::test]
async fn reasoning_has_both_names() {
    for size in [1, 2, 5, 100] {
        let server = Server::new(script_in(REASONED, size));
        let fields = json!({"thinking": {"type": "enabled"}});
        let whole = server.chat(fields.clone()).await.ok();
        let message = &whole["choices"][0]["message"];
        assert_eq!(message["reasoning"], "I think, 饕餮.\n\nSo");
        assert_eq!(message["reasoning_content"], message["reasoning"]);
        assert_eq!(message["content"], "Hello 🎉, the quick brown fox jumps.");
        assert_eq!(fold_chat(&server.chat_stream(fields.clone()).await), [choice_of(&whole, 0)]);
        let hidden = server.chat(with(fields, "include_reasoning", false.into())).await.ok();
        assert!(hidden["choices"][0]["message"].get("reasoning").is_none());
        assert_eq!(hidden["choices"][0]["message"]["content"], message["content"]);
    }
}

#[tokio::test]
async fn the_request_decides_whether_to_think() {
    let think = "<think>";
    let cases = [
        (DefaultThinking::Off, json!({}), false),
        (DefaultThinking::High, json!({}), true),
        (DefaultThinking::High, json!({"thinking": {"type": "disabled"}}), false),
        (DefaultThinking::High, json!({"chat_template_kwargs": {"thinking": false}}), false),
        (DefaultThinking::Off, json!({"chat_template_kwargs": {"enable_thinking": true}}), true),
        (DefaultThinking::Off, json!({"reasoning_effort": "none", "think": true}), true),
        (DefaultThinking::Off, json!({"reasoning_effort": "low"}), true),
        (DefaultThinking::High, json!({"reasoning_effort": "none"}), false),
    ];
    for (default_thinking, fields, thinks) in cases {
        let server = Server::with(ApiConfig { default_thinking, ..config() }, script("a</think>b"));
        let answer = server.chat(fields.clone()).await.ok();
        let prompt = server.prompt();
        let end = if thinks { think } else { "</think>" };
        assert!(prompt.ends_with(end), "{fields}: {prompt}");
        let message = &answer["choices"][0]["message"];
        assert_eq!(message.get("reasoning").is_some(), thinks, "{fields}");
    }
    let server = Server::new(script(""));
    server.chat(json!({"reasoning_effort": "max"})).await.ok();
    assert!(server.prompt().contains("Reasoning Effort: Beyond maximum"));
    let error = server.chat(json!({"reasoning_effort": "foo"})).await.error(400);
    assert_eq!(error["param"], "reasoning_effort");
}

#[tokio::test]
async fn usage_comes_when_it_is_asked_for() {
    let text = "Hi there";
    for (options, wanted) in [
        (Value::Null, false),
        (json!({}), false),
        (json!({"include_usage": false}), false),
        (json!({"include_usage": null}), false),
        (json!({"include_usage": true}), true),
    ] {
        let server = Server::new(script(text));
        let events = server.chat_stream(json!({"stream_options": options})).await;
        let with_usage: Vec<_> = events.iter().filter(|event| event.get("usage").is_some()).collect();
        assert_eq!(with_usage.len(), usize::from(wanted), "{options}");
        if wanted {
            assert_eq!(with_usage[0], events.last().unwrap());
            assert_eq!(with_usage[0]["choices"], json!([]));
            assert_eq!(with_usage[0]["usage"], server.chat(json!({})).await.ok()["usage"]);
        }
    }
    let server = Server::new(script(text));
    assert_eq!(server.chat(json!({"stream_options": {}})).await.error(400)["param"], "stream_options");
    let options = json!({"stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let events = server.chat_stream(options).await;
    assert!(events.iter().all(|event| event["usage"]["prompt_tokens"].as_u64() > Some(0)));
}

#[tokio::test]
async fn usage_is_true() {
    let mut scripted = script(REASONED);
    scripted.n_cached = 5;
    let n_tokens = scripted.tokens.len() + 1;
    let n_reasoning = scripted.tokens.iter().position(|id| Some(*id) == tokenizer().control("</think>")).unwrap() + 1;
    let server = Server::new(scripted);
    let usage = server.chat(json!({"thinking": {"type": "enabled"}, "n": 2})).await.ok()["usage"].clone();
    let n_prompt = server.seen().last().prompt.len();
    assert_eq!(
        usage,
        json!({
            "prompt_tokens": n_prompt,
            "completion_tokens": 2 * n_tokens,
            "total_tokens": n_prompt + 2 * n_tokens,
            "prompt_tokens_details": {"cached_tokens": 5},
            "completion_tokens_details": {"reasoning_tokens": 2 * n_reasoning},
        })
    );
}

#[tokio::test]
async fn thinking_that_is_cut_says_so() {
    let server = Server::new(script(REASONED));
    let answer = server.chat(json!({"thinking": {"type": "enabled"}, "max_tokens": 3})).await.ok();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert!(!choice["message"]["reasoning"].as_str().unwrap().is_empty());
    assert_eq!(choice["message"]["content"], "");
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    assert_eq!(answer["usage"]["completion_tokens_details"]["reasoning_tokens"], 3);
}

#[tokio::test]
async fn max_tokens_of_every_kind() {
    let server = Server::new(script("abcdefghi"));
    for name in ["max_tokens", "max_completion_tokens"] {
        let max = |value: Value| json!({name: value});
        assert_eq!(server.chat(max(Value::Null)).await.ok()["choices"][0]["finish_reason"], "stop");
        assert_eq!(server.chat(max(json!(1_000_000_000))).await.ok()["choices"][0]["finish_reason"], "stop");
        let none = server.chat(max(json!(0))).await.ok();
        assert_eq!(
            (&none["choices"][0]["finish_reason"], &none["usage"]["completion_tokens"]),
            (&json!("length"), &json!(0))
        );
        assert_eq!(server.chat(max(json!(2))).await.ok()["usage"]["completion_tokens"], 2);
        assert_eq!(server.chat(max(json!(2.0))).await.ok()["usage"]["completion_tokens"], 2);
        for wrong in [json!(-1), json!("5"), json!(1.5), json!([])] {
            assert_eq!(server.chat(max(wrong)).await.error(400)["param"], name);
        }
    }
    let both = server.chat(json!({"max_tokens": 5, "max_completion_tokens": 1})).await.ok();
    assert_eq!(both["usage"]["completion_tokens"], 1);
}

#[tokio::test]
async fn stop_strings_at_every_split() {
    let text = "the quick brown fox jumps";
    for size in 1..=text.len() {
        for (stop, include, content, reason) in [
            (json!(["own fox"]), false, "the quick br", json!("own fox")),
            (json!("own fox"), true, "the quick brown fox", json!("own fox")),
            (json!(["brown", "brown fox"]), false, "the quick ", json!("brown")),
            (json!(["fox jumped"]), false, text, Value::Null),
            (json!(["jumps!", "zzz"]), false, text, Value::Null),
        ] {
            let server = Server::new(script_in(text, size));
            let fields = json!({"stop": stop, "include_stop_str_in_output": include, "return_token_ids": true});
            let answer = server.chat(fields.clone()).await.ok();
            let choice = &answer["choices"][0];
            assert_eq!(choice["message"]["content"], content, "{stop} in {size}");
            assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &reason));
            let n_ids = choice["token_ids"].as_array().unwrap().len();
            assert_eq!(answer["usage"]["completion_tokens"], n_ids);
            assert_eq!(fold_chat(&server.chat_stream(fields).await), [choice_of(&answer, 0)]);
        }
    }
}

#[tokio::test]
async fn stop_strings_wait_for_min_tokens() {
    let text = "a fox, a fox, a fox";
    for (min_tokens, content, n_tokens) in [
        (0, "a ", 5),
        (4, "a ", 5),
        // The token that completes the stop must come after the minimum, as the end token must.
        (5, "a fox, a ", 12),
        (11, "a fox, a ", 12),
        (12, "a fox, a fox, a ", 19),
        (19, text, 20),
    ] {
        let server = Server::new(script_in(text, 1));
        let fields = json!({"stop": "fox", "min_tokens": min_tokens, "n": 2});
        let answer = server.chat(fields.clone()).await.ok();
        assert_eq!(answer["choices"][0]["message"]["content"], content, "{min_tokens}");
        assert_eq!(answer["usage"]["completion_tokens"], 2 * n_tokens, "{min_tokens}");
        assert_eq!(fold_chat(&server.chat_stream(fields).await)[1], choice_of(&answer, 1));
    }
}

#[tokio::test]
async fn everything_ends_at_the_stop() {
    let server = Server::new(script_in("the quick brown fox jumps over it", 1));
    let fields = json!({"stop": ["fox"], "logprobs": true, "return_token_ids": true});
    let answer = server.chat(fields.clone()).await.ok();
    let choice = &answer["choices"][0];
    let n_tokens = "the quick brown fox".len();
    assert_eq!(choice["message"]["content"], "the quick brown ");
    assert_eq!(answer["usage"]["completion_tokens"], n_tokens);
    assert_eq!(choice["token_ids"].as_array().unwrap().len(), n_tokens);
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), n_tokens);
    assert_eq!(fold_chat(&server.chat_stream(fields).await), [choice_of(&answer, 0)]);
}

#[tokio::test]
async fn the_engine_is_told_that_a_choice_is_over() {
    let gate = std::sync::Arc::new(tokio::sync::Semaphore::new(4));
    let mut scripted = script_in("abcdefgh", 1);
    scripted.gate = Some(std::sync::Arc::clone(&gate));
    let server = Server::new(scripted);
    let answer = server.chat(json!({"stop": "cd"}));
    let answer = async {
        let release = async {
            // The stop is seen after four steps; the fifth finds the choice ended.
            tokio::task::yield_now().await;
            while server.seen().requests().is_empty() || gate.available_permits() > 0 {
                tokio::task::yield_now().await;
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            gate.add_permits(100);
        };
        tokio::join!(answer, release).0
    };
    let answer = answer.await.ok();
    assert_eq!(answer["choices"][0]["message"]["content"], "ab");
    assert_eq!(answer["usage"]["completion_tokens"], 4);
    assert_eq!(server.seen().n_requested_ends(), 1);
}

#[tokio::test]
async fn logprobs_line_up_with_the_content() {
    for size in [1, 2, 3, 7] {
        let server = Server::new(script_in(REASONED, size));
        for (top, n_top) in [(Value::Null, 0), (json!(0), 0), (json!(5), 5)] {
            let fields = json!({"thinking": {"type": "enabled"}, "logprobs": true, "top_logprobs": top});
            let answer = server.chat(fields.clone()).await.ok();
            let choice = &answer["choices"][0];
            for (list, text) in [("content", "content"), ("reasoning_content", "reasoning")] {
                let entries = choice["logprobs"][list].as_array().unwrap();
                let bytes: Vec<u8> = entries
                    .iter()
                    .flat_map(|entry| entry["bytes"].as_array().unwrap())
                    .map(|byte| byte.as_u64().unwrap() as u8)
                    .collect();
                assert_eq!(String::from_utf8(bytes).unwrap(), choice["message"][text].as_str().unwrap(), "in {size}");
                assert!(entries.iter().all(|entry| entry["top_logprobs"].as_array().unwrap().len() == n_top));
            }
            assert_eq!(fold_chat(&server.chat_stream(fields).await), [choice_of(&answer, 0)]);
        }
    }
    let server = Server::new(script("Hi"));
    assert_eq!(server.chat(json!({"logprobs": true, "top_logprobs": 21})).await.error(400)["param"], "top_logprobs");
    assert_eq!(server.chat(json!({"top_logprobs": 2})).await.error(400)["param"], "top_logprobs");
    assert!(server.chat(json!({"logprobs": null})).await.ok()["choices"][0]["logprobs"].is_null());
}

#[tokio::test]
async fn sampling_fields_reach_the_engine() {
    let mut defaults = config();
    defaults.default_sampling.temperature = 0.6;
    defaults.default_sampling.top_p = 0.95;
    let server = Server::with(defaults, script("Hi"));
    server.chat(json!({})).await.ok();
    let seen = server.seen().last();
    assert_eq!((seen.sampling.temperature, seen.sampling.top_p, seen.n, seen.max_tokens), (0.6, 0.95, 1, None));
    server
        .chat(json!({
            "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
            "repetition_penalty": 1.5, "logit_bias": {"9": -100, "7": 3.5}, "seed": -1, "stop_token_ids": [44],
            "ignore_eos": true, "min_tokens": 2, "priority": -3, "cache_salt": "s", "max_tokens": 3, "user": "x",
            "metadata": {"a": 1}, "service_tier": "auto", "store": false, "unknown": [[[]]],
        }))
        .await
        .ok();
    let seen = server.seen().last();
    let sampling = &seen.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p), (0.0, 0.5, 7, 0.1));
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (1.0, -1.0));
    assert_eq!((sampling.repetition_penalty, sampling.seed), (1.5, Some(u64::MAX)));
    assert_eq!(sampling.logit_bias.iter().map(|(id, bias)| (id.0, *bias)).collect::<Vec<_>>(), [(7, 3.5), (9, -100.0)]);
    assert_eq!((seen.ignore_eos, seen.min_tokens, seen.priority), (true, 2, -3));
    assert_eq!((seen.stop_token_ids[0].0, seen.cache_salt.as_deref()), (44, Some("s")));
}

#[tokio::test]
async fn odd_optional_fields() {
    let server = Server::new(script("Hi"));
    for fields in [
        json!({"temperature": null, "top_p": null, "stop": null, "tools": null, "tool_choice": null, "seed": null}),
        json!({"stream_options": null, "logit_bias": null, "response_format": null, "n": null}),
        json!({"tools": []}),
        json!({"tool_choice": "auto"}),
        json!({"tool_choice": "none"}),
        json!({"stop": ["a", "b", "c", "d", "e"]}),
        json!({"response_format": {"type": "text"}}),
        json!({"seed": -1}),
        json!({"function_call": "none", "length_penalty": 1.0, "logprob_token_ids": [], "repetition_detection": null}),
        json!({"function_call": null, "length_penalty": null, "logprob_token_ids": null, "repetition_detection": {}}),
    ] {
        server.chat(fields).await.ok();
    }
}

/// Each of these is refused by name, in words that know nothing of Rust.
async fn refused(cases: impl IntoIterator<Item = (Value, &str)>) {
    let server = Server::new(script("Hi"));
    for (fields, param) in cases {
        let error = server.chat(fields.clone()).await.error(400);
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["param"], param, "{fields}: {error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(param.split('[').next().unwrap()), "{error}");
        for rust in ["struct ", "enum ", "i64", "u32", "f32", "expected "] {
            assert!(!message.contains(rust), "{message}");
        }
    }
}

#[tokio::test]
async fn wrong_fields_are_named() {
    refused([
        (json!({"n": 0}), "n"),
        (json!({"n": 9}), "n"),
        (json!({"n": -1}), "n"),
        (json!({"seed": 9_223_372_036_854_775_808_u64}), "seed"),
        (json!({"stop": ""}), "stop[0]"),
        (json!({"stop": ["a", ""]}), "stop[1]"),
        (json!({"temperature": 2.5}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias"),
        (json!({"logit_bias": {"999999": 1}}), "logit_bias"),
        (json!({"stop_token_ids": [999_999]}), "stop_token_ids"),
        (json!({"min_tokens": 3, "max_tokens": 2}), "min_tokens"),
        (json!({"cache_salt": ""}), "cache_salt"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"response_format": {"type": "json_object"}}), "response_format.type"),
        (json!({"structured_outputs": {"json": {}, "x": 1}}), "structured_outputs"),
        (json!({"thinking_token_budget": 5}), "thinking_token_budget"),
        (json!({"stream": true, "prompt_logprobs": 1}), "prompt_logprobs"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "alien", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"content": "x"}]}), "messages[0].role"),
        (json!({"messages": "x"}), "messages"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages[0].content[0].type"),
        (json!({"model": 7}), "model"),
        (json!({"priority": 2_147_483_648_u64}), "priority"),
        (json!({"stop_token_ids": [1.5]}), "stop_token_ids[0]"),
    ])
    .await;
}

#[tokio::test]
async fn what_is_not_supported_is_named() {
    refused([
        (json!({"function_call": "auto"}), "function_call"),
        (json!({"function_call": {"name": "f"}}), "function_call"),
        (json!({"function_call": "none", "tools": [{"type": "function", "function": {"name": "f"}}]}), "function_call"),
        (json!({"length_penalty": 0.5}), "length_penalty"),
        (json!({"logprob_token_ids": [5]}), "logprob_token_ids"),
        (json!({"repetition_detection": {"max_pattern_size": 3}}), "repetition_detection"),
    ])
    .await;
}

#[tokio::test]
async fn wrong_shapes_are_named() {
    refused([
        (json!({"messages": [["user", "hi"]]}), "messages[0]"),
        (json!({"messages": [{"role": "user", "content": [["text", "hi"]]}]}), "messages[0].content[0]"),
        (json!({"messages": [{"role": ["user"], "content": "x"}]}), "messages[0].role"),
        (json!({"chat_template_kwargs": []}), "chat_template_kwargs"),
        (json!({"thinking": ["enabled"]}), "thinking"),
        (json!({"thinking": {"type": 1}}), "thinking.type"),
        (json!({"stream": true, "stream_options": [true]}), "stream_options"),
        (json!({"response_format": ["text"]}), "response_format"),
        (json!({"tools": [["function", {"name": "f"}]]}), "tools[0]"),
        (json!({"tool_choice": {"type": "function", "function": ["f"]}}), "tool_choice.function"),
        (json!({"reasoning_effort": 5}), "reasoning_effort"),
    ])
    .await;
    let error = Server::new(script("Hi")).chat(json!({"reasoning_effort": 5})).await.error(400);
    let words = "must be one of none, minimal, low, medium, high, xhigh, max, ultra, got 5";
    assert_eq!(error["message"], format!("reasoning_effort: {words}"));
}

#[tokio::test]
async fn n_choices_have_distinct_indices_and_summed_usage() {
    let server = Server::new(script("Hi there"));
    let one = server.chat(json!({})).await.ok();
    let three = server.chat(json!({"n": 3})).await.ok();
    assert_eq!(three["choices"].as_array().unwrap().len(), 3);
    assert_eq!(three["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"]);
    let n_output = |answer: &Value| answer["usage"]["completion_tokens"].as_u64().unwrap();
    assert_eq!(n_output(&three), 3 * n_output(&one));
    // Refused before anything is made for each choice: one of these took the process down.
    for n in [0, 9, 1 << 31, (1i64 << 32) - 1, 1 << 40, i64::MAX] {
        for answer in [server.chat(json!({"n": n})).await, server.complete(json!({"prompt": "a", "n": n})).await] {
            assert_eq!(answer.status, 400, "{n}");
            assert!(answer.text.contains("must be from 1 to 8"), "{}", answer.text);
        }
    }
}

#[tokio::test]
async fn control_tokens_never_show() {
    let mut scripted = script_in("ab", 1);
    let id = |text: &str| tokenizer().control(text).unwrap();
    scripted.tokens.insert(1, tokenizer().bos());
    scripted.tokens.push(id("<｜User｜>"));
    let server = Server::new(scripted);
    let answer = server.chat(json!({"logprobs": true})).await.ok();
    assert_eq!(answer["choices"][0]["message"]["content"], "ab");
    assert_eq!(answer["choices"][0]["logprobs"]["content"].as_array().unwrap().len(), 2);
    assert_eq!(answer["usage"]["completion_tokens"], 5);
}

#[tokio::test]
async fn stray_marks_of_reasoning_never_show() {
    let tokenizer = tokenizer();
    let mark = |text: &str| vec![tokenizer.control(text).unwrap()];
    let text = |text: &str| tokenizer.encode_text(text).unwrap();
    let (open, close) = (mark("<think>"), mark("</think>"));
    let tokens =
        [&open[..], &text("why"), &close, &text("so "), &close, &open, &text("it </think>is"), &close].concat();
    for (kind, reasoning, content) in [("enabled", "why", "so it </think>is"), ("disabled", "", "whyso it </think>is")]
    {
        let server = Server::new(Script::new(tokens.clone()));
        let fields = json!({"thinking": {"type": kind}});
        let whole = server.chat(fields.clone()).await.ok();
        assert_eq!(whole["choices"][0]["message"]["content"], content);
        assert_eq!(whole["choices"][0]["message"]["reasoning"].as_str().unwrap_or_default(), reasoning);
        assert_eq!(fold_chat(&server.chat_stream(fields).await), [choice_of(&whole, 0)]);
    }
}

#[tokio::test]
async fn stray_control_tokens_of_tags_never_show() {
    // In the script ｜DSML｜ is the control token.
    for (text, shown) in [
        ("a｜DSML｜b", "ab"),
        ("｜DSML｜", ""),
        ("a <｜DSML｜tool_calls", "a <tool_calls"),
        ("see <｜DSML｜invoke name=\"f\"> there", "see <invoke name=\"f\"> there"),
    ] {
        for kind in ["enabled", "disabled"] {
            for size in [1, 3] {
                let server = Server::new(script_in(text, size));
                let fields = json!({"thinking": {"type": kind}, "logprobs": true, "stop": ["｜x", "zzz"]});
                let answer = server.chat(fields.clone()).await.ok();
                let choice = &answer["choices"][0];
                let name = if kind == "enabled" { "reasoning" } else { "content" };
                assert_eq!(choice["message"][name], shown, "{text}");
                assert!(!choice["logprobs"].to_string().contains("DSML"));
                // A stream has no chunk for an empty text.
                let folded = fold_chat(&server.chat_stream(fields).await);
                assert_eq!(folded[0]["message"][name].as_str().unwrap_or_default(), shown);
                if !shown.is_empty() {
                    assert_eq!(folded, [choice_of(&answer, 0)]);
                }
            }
        }
    }
    let spelt = tokenizer().encode_text("a｜DSML｜b").unwrap();
    let answer = Server::new(Script::new(spelt)).chat(json!({})).await.ok();
    assert_eq!(answer["choices"][0]["message"]["content"], "a｜DSML｜b", "text in ordinary tokens is text");
    let server = Server::new(script("a <｜DSML｜b"));
    let answer = server.chat(json!({"stop": "<｜DSML｜"})).await.ok();
    assert_eq!(answer["choices"][0]["message"]["content"], "a ", "stops see what was generated");
}

#[tokio::test]
async fn stop_ids_and_ignored_ends() {
    let mut scripted = script_in("abc", 1);
    let stop = scripted.tokens[1];
    let server = Server::new(scripted.clone());
    let answer = server.chat(json!({"stop_token_ids": [stop.0]})).await.ok();
    let choice = &answer["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["stop_reason"]), (&json!("a"), &json!(stop.0)));
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    scripted.tokens.insert(1, tokenizer().eos());
    let server = Server::new(scripted);
    assert_eq!(server.chat(json!({})).await.ok()["choices"][0]["message"]["content"], "a");
    let answer = server.chat(json!({"ignore_eos": true, "max_tokens": 4})).await.ok();
    assert_eq!(answer["choices"][0]["message"]["content"], "abc");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn final_messages_are_continued() {
    let server = Server::new(script(" 3"));
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "Count to 6"}]},
        {"role": "assistant", "content": "1, 2,"},
    ]);
    let fields = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": false});
    server.chat(fields.clone()).await.ok();
    assert!(server.prompt().ends_with("</think>1, 2,"), "{}", server.prompt());
    let mut by_prefix = fields.clone();
    by_prefix["messages"][1]["prefix"] = true.into();
    by_prefix.as_object_mut().unwrap().remove("continue_final_message");
    server.chat(by_prefix).await.ok();
    assert!(server.prompt().ends_with("</think>1, 2,"));
    server.chat(json!({"messages": messages})).await.ok();
    assert!(server.prompt().ends_with("<｜Assistant｜></think>"), "{}", server.prompt());
    let both = with(fields.clone(), "add_generation_prompt", true.into());
    assert_eq!(server.chat(both).await.error(400)["param"], "continue_final_message");
    assert_eq!(
        server.chat(json!({"continue_final_message": true})).await.error(400)["param"],
        "continue_final_message"
    );
}

#[tokio::test]
async fn prompt_logprobs_and_ids_come_on_request() {
    let server = Server::new(script("Hi"));
    let answer = server.chat(json!({"prompt_logprobs": 2, "return_token_ids": true})).await.ok();
    let ids = answer["prompt_token_ids"].as_array().unwrap().clone();
    let scores = answer["prompt_logprobs"].as_array().unwrap();
    assert_eq!(scores.len(), ids.len());
    assert!(scores[0].is_null());
    assert_eq!(scores[1][ids[1].to_string()]["rank"], 1);
    let events = server.chat_stream(json!({"return_token_ids": true})).await;
    assert_eq!(events[0]["prompt_token_ids"], Value::Array(ids));
    let streamed: Vec<_> = events
        .iter()
        .flat_map(|event| event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default())
        .collect();
    assert_eq!(Value::Array(streamed), answer["choices"][0]["token_ids"]);
}

#[tokio::test]
async fn a_prompt_over_the_context_is_refused_before_the_stream() {
    let server = Server::new(script("Hi"));
    let long = "word ".repeat(MAX_MODEL_LEN);
    for stream in [false, true] {
        let fields = json!({"stream": stream, "messages": [{"role": "user", "content": long}]});
        let error = server.chat(fields).await.error(400);
        assert_eq!(
            (&error["type"], &error["code"]),
            (&json!("invalid_request_error"), &json!("context_length_exceeded"))
        );
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(&MAX_MODEL_LEN.to_string()), "{message}");
        assert!(message.split(' ').filter_map(|word| word.parse::<usize>().ok()).any(|n| n > MAX_MODEL_LEN));
    }
    assert!(server.seen().requests().is_empty());
}
