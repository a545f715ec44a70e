//! Every rule of the parser, each at every split of its text.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// What a text parses to, given in pieces.
fn parse(pieces: &[&str], options: &ParserOptions, end: End) -> Reply {
    let mut parser = StreamParser::new(options.clone());
    let mut parts = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut parts);
    }
    parser.finish(end, &mut parts);
    check_order(&parts);
    parts.into_iter().collect()
}

/// Calls begin in order, once, and nothing of a call comes before its start or after its end.
fn check_order(parts: &[Part]) {
    let mut n_started = 0;
    let mut open = None;
    for part in parts {
        match part {
            Part::ToolCallStart { index, .. } => {
                assert_eq!(*index, n_started);
                n_started += 1;
                open = Some(*index);
            }
            Part::ToolCallArguments { index, .. } => assert_eq!(open, Some(*index)),
            Part::ToolCallEnd { index } => assert_eq!(open.take(), Some(*index)),
            Part::Reasoning(text) | Part::Content(text) => assert!(!text.is_empty()),
        }
    }
}

/// What a text parses to: whole, in characters, in pairs of characters, and split once at each place, all equal.
fn parse_everywhere(text: &str, options: &ParserOptions, end: End) -> Reply {
    let whole = parse(&[text], options, end);
    let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    for step in [1, 2] {
        let bounds: Vec<usize> = starts.iter().copied().step_by(step).chain([text.len()]).collect();
        let pieces: Vec<&str> = bounds.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        assert_eq!(parse(&pieces, options, end), whole, "in steps of {step}: {text}");
    }
    for at in starts {
        assert_eq!(parse(&[&text[..at], &text[at..]], options, end), whole, "split at {at}: {text}");
    }
    whole
}

fn weather() -> Vec<ToolSpec> {
    let tool = |name: &str, properties: Value, required: Value| ToolSpec {
        name: name.to_owned(),
        parameters: Some(json!({"type": "object", "properties": properties, "required": required})),
    };
    vec![
        tool("get_weather", json!({"city": {"type": "string"}, "days": {"type": "integer"}}), json!(["city"])),
        tool("run", json!({}), json!([])),
        tool("wrap", json!({"arguments": {"type": "object"}}), json!([])),
    ]
}

fn chat() -> ParserOptions {
    ParserOptions { mode: Mode::Chat, tools: Some(weather()) }
}

fn thinking() -> ParserOptions {
    ParserOptions { mode: Mode::Thinking, tools: Some(weather()) }
}

fn complete(text: &str) -> Reply {
    parse_everywhere(text, &chat(), End::Complete)
}

/// The whole calls of a reply as (name, arguments).
fn calls(reply: &Reply) -> Vec<(&str, &str)> {
    assert!(reply.tool_calls.iter().all(|call| call.is_whole), "{reply:?}");
    for call in &reply.tool_calls {
        let arguments: Value = serde_json::from_str(&call.arguments).expect("arguments are JSON");
        assert!(arguments.is_object());
    }
    reply.tool_calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect()
}

/// Writes DSML short: `<|` for `<｜DSML｜`.
fn dsml(short: &str) -> String {
    short.replace("<|", "<｜DSML｜").replace("</|", "</｜DSML｜")
}

fn invoke(name: &str, parameters: &str) -> String {
    dsml(&format!("<|invoke name=\"{name}\">\n{parameters}</|invoke>\n"))
}

fn parameter(name: &str, is_string: bool, value: &str) -> String {
    dsml(&format!("<|parameter name=\"{name}\" string=\"{is_string}\">{value}</|parameter>\n"))
}

fn block(calls: &str) -> String {
    dsml(&format!("\n\n<|tool_calls>\n{calls}</|tool_calls>"))
}

fn seoul() -> String {
    invoke("get_weather", &parameter("city", true, "Seoul"))
}

#[test]
fn vectors_of_the_published_parser() {
    #[derive(serde::Deserialize)]
    struct Case {
        name: String,
        mode: Mode,
        completion: String,
        parsed: Value,
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors/encoding.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases: Vec<Case> = serde_json::from_value(json["parse"].take()).unwrap();
    assert_eq!(cases.len(), 7);
    for case in cases {
        let text = case.completion.strip_suffix("<｜end▁of▁sentence｜>").unwrap();
        let options = ParserOptions { mode: case.mode, tools: None };
        let reply = parse_everywhere(text, &options, End::Complete);
        let calls: Vec<Value> = calls(&reply)
            .iter()
            .map(|(name, arguments)| json!({"type": "function", "function": {"name": name, "arguments": arguments}}))
            .collect();
        assert_eq!(Value::from(calls), case.parsed["tool_calls"], "{}", case.name);
        assert_eq!((reply.content, reply.reasoning), {
            let text = |key: &str| case.parsed[key].as_str().unwrap().to_owned();
            (text("content"), text("reasoning_content"))
        });
    }
}

#[test]
fn a_call_without_the_blocks_opener() {
    let text = dsml(
        "<|invoke name=\"get_weather\"><|parameter name=\"city\" string=\"true\">Seoul</|parameter></|invoke></|tool_calls>",
    );
    for text in [text.clone(), format!("{text}\n"), text.replace("</｜DSML｜tool_calls>", "")] {
        let reply = complete(&text);
        assert_eq!(calls(&reply), [("get_weather", r#"{"city": "Seoul"}"#)]);
        assert_eq!(reply.content, "");
    }
    let two = format!("So:\n\n{}{}", seoul(), seoul());
    let reply = complete(&two);
    assert_eq!((calls(&reply).len(), reply.content.as_str()), (2, "So:"));
}

#[test]
fn no_call_out_of_prose_or_fragments() {
    let header = dsml("<|invoke name=\"get_weather\">");
    let parameter_header = dsml("<|parameter name=\"city\" string=\"true\">");
    let unknown = invoke("no_such_tool", &parameter("a", true, "b"));
    for (text, end) in [
        (format!("Use {header} to call it."), End::Complete),
        (format!("Use {header}"), End::Complete),
        (format!("{header}\n{parameter_header}Seo"), End::Cut),
        (format!("{header}\n{parameter_header}Seo"), End::Complete),
        (unknown.clone(), End::Complete),
        (format!("我来查询天气。\n\n{header}"), End::Complete),
        (format!("我来查询天气。\n\n{header}"), End::Cut),
        // A required argument is missing.
        (invoke("get_weather", &parameter("days", false, "3")), End::Complete),
        (dsml("The <|tool_calls> tag opens a block, </|tool_calls> closes it."), End::Complete),
        (dsml("Write\n<|tool_calls>\n<|invoke name=\"$TOOL_NAME\">\n...\n</|invoke>\n</|tool_calls>"), End::Complete),
        (dsml("A stray </|parameter></|invoke></|tool_calls>"), End::Complete),
    ] {
        let reply = parse_everywhere(&text, &chat(), end);
        assert_eq!((reply.content.as_str(), reply.tool_calls.len()), (text.as_str(), 0), "{text}");
    }
    let without_tools = ParserOptions { mode: Mode::Chat, tools: Some(vec![]) };
    for text in [seoul(), block(&seoul()), "\n\n".to_owned()] {
        let reply = parse_everywhere(&text, &without_tools, End::Complete);
        assert_eq!((reply.content.as_str(), reply.tool_calls.len()), (text.as_str(), 0));
    }
}

#[test]
fn a_call_before_the_end_of_thinking() {
    let text = format!("I should check{}", block(&seoul()));
    for end in [End::Complete, End::Cut] {
        let reply = parse_everywhere(&text, &thinking(), end);
        assert_eq!(calls(&reply), [("get_weather", r#"{"city": "Seoul"}"#)]);
        assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("I should check", ""));
    }
    let orphan = format!("I should check\n\n{}", seoul());
    assert_eq!(calls(&parse_everywhere(&orphan, &thinking(), End::Complete)).len(), 1);

    let stays = |text: &str, end, reasoning: &str, content: &str| {
        let reply = parse_everywhere(text, &thinking(), end);
        assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), (reasoning, content));
        assert!(reply.tool_calls.is_empty());
    };
    stays(&format!("{text}</think>Done."), End::Complete, &text, "Done.");
    stays(&format!("{text}\n</think>"), End::Complete, &format!("{text}\n"), "");
    let more = format!("{text}\nThat is how. Now the answer.");
    stays(&more, End::Complete, &more, "");
    let unfinished = &text[..text.find("</｜DSML｜invoke>").unwrap()];
    for end in [End::Complete, End::Cut] {
        stays(unfinished, end, unfinished, "");
        stays(&format!("{unfinished}</think>x"), end, unfinished, "x");
    }
    let unknown = format!("so{}", block(&invoke("no_such_tool", "")));
    stays(&unknown, End::Complete, &unknown, "");
    let real = format!("{unfinished}</think>{}", block(&seoul()));
    let reply = parse_everywhere(&real, &thinking(), End::Complete);
    assert_eq!((calls(&reply).len(), reply.reasoning.as_str(), reply.content.as_str()), (1, unfinished, ""));
}

#[test]
fn the_string_flag_gives_the_type() {
    let parameters = [
        ("zip", true, "007"),
        ("flag", true, "true"),
        ("n", false, "42"),
        ("x", false, "null"),
        ("arr", false, r#"[1,{"a":"b"}]"#),
        ("bad", false, "01"),
        ("oops", false, "{oops"),
        ("big", false, "1.50"),
    ];
    let parameters: String = parameters.iter().map(|(name, flag, value)| parameter(name, *flag, value)).collect();
    let reply = complete(&block(&invoke("run", &parameters)));
    let want = r#"{"zip": "007", "flag": "true", "n": 42, "x": null, "arr": [1,{"a":"b"}], "bad": "01", "oops": "{oops", "big": 1.50}"#;
    assert_eq!(calls(&reply), [("run", want)]);
}

#[test]
fn a_flag_that_is_neither_leaves_the_type_to_the_schema() {
    let text = dsml(
        "<|parameter name=\"city\" string=\"invalid\">7</|parameter>\n<|parameter name=\"days\" string=\"\">7</|parameter>\n<|parameter name=\"x\">y</|parameter>\n",
    );
    let reply = complete(&block(&invoke("get_weather", &text)));
    assert_eq!(calls(&reply), [("get_weather", r#"{"city": "7", "days": 7, "x": "y"}"#)]);
}

#[test]
fn a_wrapper_around_the_arguments_is_taken_off() {
    let wrapped = |tool: &str, name: &str, flag: bool, value: &str| {
        let reply = complete(&block(&invoke(tool, &parameter(name, flag, value))));
        calls(&reply)[0].1.to_owned()
    };
    for flag in [true, false] {
        for name in ["arguments", "input"] {
            assert_eq!(wrapped("get_weather", name, flag, r#"{"city":"Beijing"}"#), r#"{"city":"Beijing"}"#);
        }
    }
    assert_eq!(wrapped("wrap", "arguments", false, r#"{"city":1}"#), r#"{"arguments": {"city":1}}"#);
    assert_eq!(wrapped("get_weather", "arguments", false, r#"{"other":1}"#), r#"{"arguments": {"other":1}}"#);
    assert_eq!(wrapped("get_weather", "arguments", true, "no JSON"), r#"{"arguments": "no JSON"}"#);
    let two = parameter("arguments", false, r#"{"city":"A"}"#) + &parameter("city", true, "B");
    let reply = complete(&block(&invoke("get_weather", &two)));
    assert_eq!(calls(&reply)[0].1, r#"{"arguments": {"city":"A"}, "city": "B"}"#);
}

#[test]
fn arguments_stream_as_they_arrive() {
    let content = "line of text\n".repeat(600);
    let mut parser = StreamParser::new(ParserOptions { mode: Mode::Chat, tools: None });
    let mut n_shown = 0;
    let header =
        dsml("\n\n<|tool_calls>\n<|invoke name=\"write_file\">\n<|parameter name=\"content\" string=\"true\">");
    let mut parts = Vec::new();
    parser.push(&header, &mut parts);
    assert_eq!(parts[0], Part::ToolCallStart { index: 0, name: "write_file".to_owned() });
    for (at, letter) in content.char_indices() {
        parts.clear();
        parser.push(letter.encode_utf8(&mut [0; 4]), &mut parts);
        for part in &parts {
            let Part::ToolCallArguments { index: 0, fragment } = part else { panic!("{part:?}") };
            n_shown += serde_json::from_str::<String>(&format!("\"{fragment}\"")).unwrap().len();
        }
        assert!(at + 1 - n_shown <= 1, "only a line end may be held");
    }
}

#[test]
fn values_keep_every_character() {
    for value in [
        "cat <<EOF >x 2>&1 </parameter>",
        "",
        "\n",
        "\n\n<b>\n",
        "a</｜DSML｜invoke> b",
        "a\n</｜DSML｜tool_calls> b",
        "<｜DSML｜parameter name=\"x\" string=\"true\">",
        "<｜DSML｜invoke name=\"f\">\n",
        "</think>",
        "\"\\\u{1}\t🎉 e\u{301}",
    ] {
        let text = block(&invoke("run", &parameter("command", true, value)));
        let reply = complete(&text);
        assert_eq!(calls(&reply), [("run", format!("{{\"command\": {}}}", Value::from(value)).as_str())], "{value:?}");
    }
}

#[test]
fn missing_closers_are_supplied_where_nothing_else_can_be_meant() {
    let seoul_open = dsml("<|invoke name=\"get_weather\">\n<|parameter name=\"city\" string=\"true\">Seoul");
    let run = invoke("run", "");
    let block_end = dsml("</|tool_calls>");
    let both = [("get_weather", r#"{"city": "Seoul"}"#), ("run", "{}")];
    let end = |text: &str| dsml(text);
    for text in [
        // No closer of the call before the next one.
        block(&format!("{seoul_open}{}\n{run}", end("</|parameter>"))),
        // No closer of the parameter.
        block(&format!("{seoul_open}\n{}\n{run}", end("</|invoke>"))),
    ] {
        assert_eq!(calls(&complete(&text)), both, "{text}");
    }
    let open = dsml("\n\n<|tool_calls>\n");
    for tail in [
        String::new(),
        "\n".to_owned(),
        end("</|parameter>"),
        end("</|parameter>\n</|invoke>"),
        end("</|para"),
        end("\n</|invoke>"),
        end("</|invoke>\n</|tool_calls>"),
        format!("\n{block_end}\n"),
        end("</|parameter></tool_call></function>"),
        end("</|parameter></|parameter></|invoke>\n</|tool_ca"),
        end("</|parameter></|invoke>\n<|invoke name=\"ru"),
    ] {
        let text = format!("{open}{seoul_open}{tail}");
        assert_eq!(calls(&complete(&text)), [both[0]], "{text}");
    }
}

#[test]
fn a_call_that_is_cut_has_no_end() {
    let text = format!("A{}", block(&(seoul() + &invoke("run", &parameter("n", false, "[1, 2]")))));
    for (at, _) in text.char_indices() {
        let reply = parse(&[&text[..at]], &chat(), End::Cut);
        let shown = if text[..at].contains("｜DSML｜") { "A" } else { &text[..at] };
        assert_eq!(reply.content, shown);
        let n_closed = text[..at].matches("</｜DSML｜invoke>").count();
        let n_whole = reply.tool_calls.iter().filter(|call| call.is_whole).count();
        assert_eq!(n_whole, n_closed, "{at}");
        assert!(reply.tool_calls.len() <= n_whole + 1);
        for call in reply.tool_calls.iter().filter(|call| !call.is_whole) {
            assert!(serde_json::from_str::<Value>(&call.arguments).is_err(), "what is cut must not look whole");
        }
    }
}

#[test]
fn text_around_calls_is_content_in_order() {
    let (one, two) = (seoul(), invoke("run", ""));
    let reply = complete(&format!("A{}B", block(&format!("{one}mid{two}"))));
    assert_eq!(calls(&reply), [("get_weather", r#"{"city": "Seoul"}"#), ("run", "{}")]);
    assert_eq!(reply.content, "A\nmidB");
    let reply = complete(&format!("A{}\n\nB \n{}\n \n", block(&one), block(&two)));
    assert_eq!((calls(&reply).len(), reply.content.as_str()), (2, "A\n\nB \n"));
    let inside =
        invoke("run", &format!("{}stray 温泉 <b> text\n{}", parameter("a", true, "1"), parameter("b", true, "2")));
    let reply = complete(&block(&inside));
    assert_eq!(calls(&reply), [("run", r#"{"a": "1", "b": "2"}"#)]);
    assert_eq!(reply.content, "\nstray 温泉 <b> text");
}

#[test]
fn odd_blocks() {
    assert_eq!(complete(&block("")), Reply::default(), "an empty block is nothing");
    let reply = complete(&block(&invoke("no_such_tool", &parameter("a", true, "b"))));
    assert_eq!(calls(&reply), [("no_such_tool", r#"{"a": "b"}"#)], "in a block the client can answer for the name");
    let twice = parameter("city", true, "A") + &parameter("city", true, "B");
    assert_eq!(calls(&complete(&block(&invoke("get_weather", &twice)))), [("get_weather", r#"{"city": "A"}"#)]);
    let compact = dsml("<|tool_calls><|invoke name=\"run\"></|invoke></|tool_calls>");
    assert_eq!(calls(&complete(&compact)), [("run", "{}")]);
    assert_eq!(complete(&format!("x\n{compact}")).content, "x");
    assert_eq!(complete(&format!("x\n\n\n{compact}")).content, "x\n");
}

#[test]
fn reasoning_and_content() {
    let parts = |text: &str, options: &ParserOptions| {
        let reply = parse_everywhere(text, options, End::Complete);
        assert!(reply.tool_calls.is_empty());
        (reply.reasoning, reply.content)
    };
    let pair = |reasoning: &str, content: &str| (reasoning.to_owned(), content.to_owned());
    assert_eq!(parts("R\n\n</think>\n\nC\n", &thinking()), pair("R\n\n", "\n\nC\n"));
    assert_eq!(parts("only reasoning\n</thi", &thinking()), pair("only reasoning\n</thi", ""));
    assert_eq!(parts("<think>R</think>C</think>D", &thinking()), pair("R", "C</think>D"));
    assert_eq!(parts("</think>C", &chat()), pair("", "C"));
    assert_eq!(parts("a </think> <think> b", &chat()), pair("", "a </think> <think> b"));
    assert_eq!(parts("", &thinking()), pair("", ""));
    let emoji = "🎉🔥🚀 👩‍👩‍👧 ∑∫ 饕餮";
    assert_eq!(parts(&format!("{emoji}</think>{emoji}"), &thinking()), pair(emoji, emoji));
}

#[test]
fn only_an_ambiguous_tail_is_held() {
    let mut parser = StreamParser::new(chat());
    let mut shown = String::new();
    let text = "a < b, x <｜y\n z\n\n\n<｜DSM done";
    for letter in text.chars() {
        let mut parts = Vec::new();
        parser.push(letter.encode_utf8(&mut [0; 4]), &mut parts);
        shown.extend(parts.into_iter().map(|part| match part {
            Part::Content(text) => text,
            other => panic!("{other:?}"),
        }));
    }
    assert_eq!(shown, text);
}

#[test]
fn replayed_arguments_render_as_the_model_wrote_them() {
    use crate::chat::{
        message::{Message, Role, ToolCall},
        prepare::{Conversation, prompt},
        template::to_text,
    };
    let values = parameter("command", true, "a <b> \"c\"\n</x>") + &parameter("n", false, "[1, {\"a\": null}]");
    let completion = block(&invoke("run", &values));
    let mut messages = vec![Message::new(Role::User, "q")];
    let mut before = String::new();
    for _turn in 0..3 {
        let reply = complete(&completion);
        let mut message = Message::new(Role::Assistant, reply.content.clone());
        let calls = reply.tool_calls.into_iter();
        message.tool_calls =
            calls.map(|call| ToolCall { id: None, name: call.name, arguments: call.arguments }).collect();
        messages.push(message);
        let asked = Conversation {
            messages: messages.clone(),
            tools: vec![],
            response_format: None,
            mode: Mode::Chat,
            effort: None,
            drop_thinking: true,
            add_generation_prompt: None,
            continue_final_message: false,
        };
        let text = to_text(&prompt(asked).unwrap().segments);
        let history = text.strip_suffix("<｜Assistant｜></think>").unwrap();
        assert!(history.ends_with(&format!("{before}{completion}<｜end▁of▁sentence｜>")), "{text}");
        messages.push(Message::new(Role::User, "next"));
        before = format!("{history}<｜User｜>next<｜Assistant｜></think>");
    }
}

/// Text made of tags, pieces of tags and plain text, as a broken model might write it.
fn any_markup() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        prop::sample::select(vec![
            "<｜DSML｜tool_calls>",
            "</｜DSML｜tool_calls>",
            "<｜DSML｜invoke name=\"get_weather\">",
            "<｜DSML｜invoke name=\"run\">",
            "<｜DSML｜invoke name=\"other\">",
            "</｜DSML｜invoke>",
            "<｜DSML｜parameter name=\"city\" string=\"true\">",
            "<｜DSML｜parameter name=\"n\" string=\"false\">",
            "<｜DSML｜parameter name=\"input\" string=\"false\">",
            "</｜DSML｜parameter>",
            "</think>",
            "<think>",
            "</tool_call>",
            "\n",
            "\n\n",
            "{\"city\": 1}",
            "a",
            "泉 ",
        ])
        .prop_map(str::to_owned),
        "[<>/｜\"\n a]{0,4}",
    ];
    prop::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_text_parses_alike_at_every_split(
        text in any_markup(), thinks: bool, is_cut: bool, knows_tools in 0..3u8,
    ) {
        let options = ParserOptions {
            mode: if thinks { Mode::Thinking } else { Mode::Chat },
            tools: match knows_tools { 0 => None, 1 => Some(vec![]), _ => Some(weather()) },
        };
        let end = if is_cut { End::Cut } else { End::Complete };
        let reply = parse_everywhere(&text, &options, end);
        for call in reply.tool_calls.iter().filter(|call| call.is_whole) {
            prop_assert!(serde_json::from_str::<Value>(&call.arguments).unwrap().is_object());
        }
        if !is_cut {
            prop_assert!(reply.tool_calls.iter().all(|call| call.is_whole));
        }
        if knows_tools == 1 {
            prop_assert!(reply.tool_calls.is_empty());
        }
    }
}

/// Writes the control token as the caller of the parser does.
fn controlled(text: &str) -> String {
    text.replace(DSML, &CONTROL.to_string())
}

#[test]
fn control_tokens_make_the_same_calls() {
    let text = format!("Let me see.{}", block(&(seoul() + &invoke("run", ""))));
    for options in [chat(), thinking()] {
        for end in [End::Complete, End::Cut] {
            let want = parse_everywhere(&text, &options, end);
            assert_eq!(parse_everywhere(&controlled(&text), &options, end), want);
        }
    }
}

#[test]
fn stray_control_tokens_never_show() {
    for (text, content) in [
        ("a｜DSML｜b", "ab"),
        ("｜DSML｜", ""),
        ("<｜DSML｜tool_calls", "<tool_calls"),
        ("see <｜DSML｜invoke name=\"other\"> there", "see <invoke name=\"other\"> there"),
        ("a</｜DSML｜invoke>", "a</invoke>"),
    ] {
        for options in [chat(), thinking(), ParserOptions { tools: Some(Vec::new()), ..chat() }] {
            let reply = parse_everywhere(&controlled(text), &options, End::Complete);
            assert_eq!(reply.content + &reply.reasoning, content, "{text}");
            assert_eq!(reply.tool_calls, []);
        }
    }
    let between = block(&(seoul() + "｜DSML｜\n" + &invoke("run", ""))) + "\n｜DSML｜\n";
    let reply = parse_everywhere(&controlled(&between), &chat(), End::Complete);
    assert_eq!((calls(&reply).len(), reply.content.as_str()), (2, ""));
    assert_eq!(complete("a｜DSML｜b").content, "a｜DSML｜b", "spelt in ordinary tokens it is text");
    let value = block(&invoke("get_weather", &parameter("city", true, "x｜DSML｜y")));
    assert_eq!(calls(&parse_everywhere(&controlled(&value), &chat(), End::Complete))[0].1, r#"{"city": "x｜DSML｜y"}"#);
}
