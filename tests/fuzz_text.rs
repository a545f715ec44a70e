//! Hostile text against the parsers and the template: no panic, and the same result at every split.
//!
//! `cargo test` runs each target on a bounded number of random inputs; `cargo bolero test` runs them for as long as asked.

use bolero::TypeGenerator;
use flashd::chat::{
    Effort, Mode,
    message::{Message, Role, Task, ToolCall},
    parse::{End, ParserOptions, Reply, StreamParser, ToolSpec},
    prepare::{Conversation, prompt},
    stop::StopMatcher,
    template::{RenderOptions, render, to_text},
};
use serde_json::{Value, json};

const N_INPUTS: usize = 3000;

/// Pieces of markup, chosen by low bytes, so that random bytes become text worth parsing.
const PIECES: [&str; 24] = [
    "<｜DSML｜tool_calls>",
    "</｜DSML｜tool_calls>",
    "<｜DSML｜invoke name=\"",
    "<｜DSML｜invoke name=\"f\">",
    "</｜DSML｜invoke>",
    "<｜DSML｜parameter name=\"",
    "<｜DSML｜parameter name=\"a\" string=\"true\">",
    "<｜DSML｜parameter name=\"b\" string=\"false\">",
    "<｜DSML｜parameter name=\"input\" string=\"false\">",
    "</｜DSML｜parameter>",
    "\" string=\"",
    "\">",
    "<think>",
    "</think>",
    "</tool_call>",
    "<",
    "</｜",
    "\n",
    "\n\n",
    "{\"a\":1}",
    "🎉",
    "泉",
    "\"",
    "\\",
];

fn text(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match PIECES.get(usize::from(*byte)) {
            Some(piece) => text.push_str(piece),
            None => text.push(char::from(*byte)),
        }
    }
    text
}

#[derive(Debug, TypeGenerator)]
struct Completion {
    bytes: Vec<u8>,
    piece_size: u8,
    thinks: bool,
    is_cut: bool,
    tools: u8,
}

fn parse(text: &str, piece_size: usize, options: ParserOptions, end: End) -> Reply {
    let mut parser = StreamParser::new(options);
    let mut parts = Vec::new();
    let letters: Vec<char> = text.chars().collect();
    for piece in letters.chunks(piece_size) {
        parser.push(&piece.iter().collect::<String>(), &mut parts);
    }
    parser.finish(end, &mut parts);
    parts.into_iter().collect()
}

#[test]
fn completions() {
    bolero::check!().with_type::<Completion>().with_iterations(N_INPUTS).for_each(|input| {
        let schema = json!({"properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]});
        let options = ParserOptions {
            mode: if input.thinks { Mode::Thinking } else { Mode::Chat },
            tools: match input.tools % 4 {
                0 => None,
                1 => Some(vec![]),
                _ => Some(vec![ToolSpec { name: "f".to_owned(), parameters: Some(schema) }]),
            },
        };
        let end = if input.is_cut { End::Cut } else { End::Complete };
        let text = text(&input.bytes);
        let whole = parse(&text, usize::MAX, options.clone(), end);
        assert_eq!(parse(&text, usize::from(input.piece_size % 7) + 1, options, end), whole, "{text:?}");
        for call in whole.tool_calls.iter().filter(|call| call.is_whole) {
            assert!(serde_json::from_str::<Value>(&call.arguments).is_ok_and(|value| value.is_object()), "{call:?}");
        }
    });
}

#[derive(Debug, TypeGenerator)]
struct Turn {
    role: u8,
    content: Option<Vec<u8>>,
    reasoning: Option<Vec<u8>>,
    arguments: Option<Vec<u8>>,
    call_id: u8,
    task: u8,
    flags: u8,
}

impl Turn {
    fn message(&self) -> Message {
        let roles = [
            Role::System,
            Role::Developer,
            Role::User,
            Role::Assistant,
            Role::Tool,
            Role::Assistant,
            Role::LatestReminder,
        ];
        let tasks = [Task::Action, Task::Query, Task::Title];
        let id = Some((self.call_id % 3).to_string()).filter(|_| !self.call_id.is_multiple_of(5));
        let mut message = Message::new(roles[usize::from(self.role) % roles.len()], "");
        message.content = self.content.as_ref().map(|bytes| text(bytes));
        message.reasoning = self.reasoning.as_ref().map(|bytes| text(bytes));
        message.tool_call_id.clone_from(&id);
        message.task = tasks.get(usize::from(self.task)).copied();
        message.wo_eos = self.flags % 8 == 1;
        if let Some(arguments) = &self.arguments {
            let arguments = text(arguments);
            let as_value = json!({ arguments.as_str(): arguments }).to_string();
            let arguments = if self.flags.is_multiple_of(2) { as_value } else { arguments };
            message.tool_calls.push(ToolCall { id, name: "f".to_owned(), arguments });
        }
        if self.flags % 16 == 3 {
            message.tools.push(json!({"name": "f", "description": text(self.content.as_deref().unwrap_or_default())}));
        }
        message
    }
}

#[derive(Debug, TypeGenerator)]
struct Asked {
    turns: Vec<Turn>,
    thinks: bool,
    drop_thinking: bool,
    continues: bool,
    generates: Option<bool>,
    has_tools: bool,
}

#[test]
fn conversations() {
    bolero::check!().with_type::<Asked>().with_iterations(N_INPUTS).for_each(|input| {
        let messages: Vec<Message> = input.turns.iter().map(Turn::message).collect();
        let mode = if input.thinks { Mode::Thinking } else { Mode::Chat };
        let official = RenderOptions::official(mode, input.drop_thinking, Some(Effort::Max));
        if let Ok(segments) = render(&messages, &official) {
            assert!(to_text(&segments).starts_with("<｜begin▁of▁sentence｜>"));
        }
        let asked = Conversation {
            messages,
            tools: if input.has_tools { vec![json!({"name": "f"})] } else { vec![] },
            response_format: None,
            mode,
            effort: None,
            drop_thinking: input.drop_thinking,
            add_generation_prompt: input.generates,
            continue_final_message: input.continues,
        };
        if let Err(error) = prompt(asked) {
            assert!(!error.to_string().is_empty());
        }
    });
}

#[test]
fn conversations_as_json() {
    bolero::check!().with_iterations(N_INPUTS).for_each(|bytes: &[u8]| {
        if let Ok(messages) = serde_json::from_slice::<Vec<Message>>(bytes) {
            let _ = render(&messages, &RenderOptions::official(Mode::Thinking, true, None));
        }
    });
}

#[test]
fn stop_strings() {
    bolero::check!().with_type::<(Vec<u8>, Vec<Vec<u8>>, u8)>().with_iterations(N_INPUTS).for_each(
        |(bytes, stops, piece_size)| {
            let (text, stops) = (text(bytes), stops.iter().map(|stop| text(stop)).collect::<Vec<_>>());
            let matched = |piece_size: usize| {
                let mut matcher = StopMatcher::new(stops.clone(), false);
                let mut shown = String::new();
                for piece in text.chars().collect::<Vec<_>>().chunks(piece_size) {
                    let (more, stop) = matcher.push(&piece.iter().collect::<String>());
                    shown.push_str(&more);
                    if stop.is_some() {
                        return (shown, stop);
                    }
                }
                (shown + &matcher.finish(), None)
            };
            assert_eq!(matched(usize::from(*piece_size) + 1), matched(usize::MAX));
        },
    );
}
