//! `flashd debug parse`: a completion's text as the message that the server would answer with.

use std::{
    io::{Read, Write},
    path::PathBuf,
};

use anyhow::Context;
use clap::ValueEnum;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::chat::{
    Mode,
    parse::{End, ParserOptions, Reply, StreamParser, ToolSpec},
};

/// Print the message that a completion holds: its text on stdin, JSON on stdout.
///
/// Text that does not reach the end token counts as cut: a call that is not whole is left out.
#[derive(Clone, Debug, clap::Args)]
pub struct ParseArgs {
    /// Whether the completion begins with reasoning.
    #[arg(long)]
    pub mode: ParseMode,
    /// JSON: the request's tools. Without it a call of any name counts.
    #[arg(long, value_name = "FILE")]
    pub tools: Option<PathBuf>,
}

/// What a completion begins with.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ParseMode {
    /// The answer.
    Chat,
    /// Reasoning.
    Thinking,
}

/// A tool in OpenAI's shape, or its function alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum Tool {
    Wrapped { function: Function },
    Bare(Function),
}

#[derive(Deserialize)]
struct Function {
    name: String,
    parameters: Option<Value>,
}

const EOS: &str = "<｜end▁of▁sentence｜>";

/// Runs the command.
///
/// # Errors
/// Stdin or the file of tools can't be read, or the file is not such JSON.
pub fn run(args: &ParseArgs) -> anyhow::Result<()> {
    let mode = match args.mode {
        ParseMode::Chat => Mode::Chat,
        ParseMode::Thinking => Mode::Thinking,
    };
    let tools = match &args.tools {
        None => None,
        Some(path) => {
            let json = std::fs::read(path).with_context(|| path.display().to_string())?;
            Some(specs(&json).with_context(|| path.display().to_string())?)
        }
    };
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("stdin")?;
    let message = message(&text, ParserOptions { mode, tools });
    writeln!(std::io::stdout(), "{message:#}").context("stdout")
}

fn specs(json: &[u8]) -> anyhow::Result<Vec<ToolSpec>> {
    let tools: Vec<Tool> = serde_json::from_slice(json)?;
    let specs = tools.into_iter().map(|tool| match tool {
        Tool::Wrapped { function } | Tool::Bare(function) => {
            ToolSpec { name: function.name, parameters: function.parameters }
        }
    });
    Ok(specs.collect())
}

fn message(text: &str, options: ParserOptions) -> Value {
    let (text, end) = match text.split_once(EOS) {
        Some((text, _)) => (text, End::Complete),
        None => (text, End::Cut),
    };
    let mut parser = StreamParser::new(options);
    let mut parts = Vec::new();
    parser.push(text, &mut parts);
    parser.finish(end, &mut parts);
    let reply: Reply = parts.into_iter().collect();
    let calls = reply.tool_calls.iter().filter(|call| call.is_whole);
    let calls =
        calls.map(|call| json!({"type": "function", "function": {"name": call.name, "arguments": call.arguments}}));
    json!({
        "role": "assistant",
        "content": reply.content,
        "reasoning_content": reply.reasoning,
        "tool_calls": calls.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: &str =
        "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

    #[test]
    fn a_message_with_reasoning_and_a_call() {
        let options = ParserOptions { mode: Mode::Thinking, tools: None };
        let want = json!({"role": "assistant", "content": "C", "reasoning_content": "R",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]});
        assert_eq!(message(&format!("R</think>C{CALL}{EOS}"), options.clone()), want);
        assert_eq!(message(&format!("R</think>C{CALL}"), options.clone()), want);
        let cut = message(&format!("R</think>C{}", &CALL[..60]), options);
        assert_eq!((&cut["content"], &cut["tool_calls"]), (&json!("C"), &json!([])));
    }

    #[test]
    fn tools_in_either_shape() {
        let json = br#"[{"type":"function","function":{"name":"f","parameters":{}}},{"name":"g"}]"#;
        let specs = specs(json).unwrap();
        assert_eq!(specs.iter().map(|spec| spec.name.as_str()).collect::<Vec<_>>(), ["f", "g"]);
        assert!(super::specs(b"{}").is_err());
    }
}
