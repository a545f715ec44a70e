//! `flashd debug render`: a conversation's prompt as the published encoder renders it.

use std::{io::Write, path::PathBuf};

use anyhow::Context;
use serde::Deserialize;

use crate::chat::{
    Effort, Mode,
    message::Message,
    template::{RenderOptions, render, to_text},
};

/// Print the prompt of a conversation: its text on stdout, nothing else.
#[derive(Clone, Debug, clap::Args)]
pub struct RenderArgs {
    /// JSON: {"messages":[…], "mode":"chat|thinking", "drop_thinking":bool, "effort":"low|high|max"|null}.
    #[arg(long, value_name = "FILE")]
    pub input: PathBuf,
}

#[derive(Deserialize)]
struct Input {
    messages: Vec<Message>,
    mode: Mode,
    #[serde(default = "default_drop_thinking")]
    drop_thinking: bool,
    #[serde(default)]
    effort: Option<Effort>,
}

/// The published encoder's default.
const fn default_drop_thinking() -> bool {
    true
}

/// Runs the command.
///
/// # Errors
/// The file can't be read, is not such JSON, or holds a conversation that can't be rendered.
pub fn run(args: &RenderArgs) -> anyhow::Result<()> {
    let name = || args.input.display().to_string();
    let json = std::fs::read(&args.input).with_context(name)?;
    let text = prompt(&json).with_context(name)?;
    std::io::stdout().write_all(text.as_bytes()).context("stdout")
}

fn prompt(json: &[u8]) -> anyhow::Result<String> {
    let input: Input = serde_json::from_slice(json)?;
    let options = RenderOptions::official(input.mode, input.drop_thinking, input.effort);
    Ok(to_text(&render(&input.messages, &options)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_and_its_options() {
        let json =
            br#"{"messages":[{"role":"user","content":"Hi"}],"mode":"thinking","drop_thinking":true,"effort":null}"#;
        assert_eq!(prompt(json).unwrap(), "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜><think>");
        let high = br#"{"messages":[{"role":"user","content":[{"type":"text","text":"Hi"}]}],"mode":"thinking","effort":"high"}"#;
        assert!(prompt(high).unwrap().starts_with("<｜begin▁of▁sentence｜>Reasoning Effort: Absolute maximum"));
        for bad in [&b"{}"[..], br#"{"messages":[],"mode":"loud"}"#, br#"{"messages":[{"role":"x"}],"mode":"chat"}"#] {
            assert!(prompt(bad).is_err());
        }
    }
}
