//! `flashd complete`: one prompt in, its answer on standard output.

use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;

use anyhow::Context;

use super::reply::{self, Ask, Reply, Sink};
use super::sampling::SamplingFlags;
use super::start::Local;
use crate::chat::message::{Message, Role};
use crate::chat::prepare::Conversation;
use crate::config::args::{LocalArgs, ThinkingChoice};

/// Flags of `flashd complete`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct CompleteArgs {
    /// The prompt [default: standard input]
    pub prompt: Option<String>,
    /// File that holds the prompt
    #[arg(short = 'f', long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompt_file: Option<PathBuf>,
    /// Go on with the text itself instead of answering it as a chat message
    #[arg(long, conflicts_with_all = ["system", "think"])]
    pub raw: bool,
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// How hard to think first; the reasoning goes to standard error [default: the model's]
    #[arg(long, value_name = "EFFORT")]
    pub think: Option<ThinkingChoice>,
    /// Print token counts and rates to standard error
    #[arg(long)]
    pub stats: bool,
    /// Sampling flags.
    #[command(flatten)]
    pub sampling: SamplingFlags,
    /// The model and where it runs.
    #[command(flatten)]
    pub local: LocalArgs,
}

/// Runs the command.
///
/// # Errors
/// When the prompt can't be read, the model can't be started, or the request fails.
pub fn run(args: &CompleteArgs) -> anyhow::Result<()> {
    let text = read_prompt(args)?;
    let local = Local::start(&args.local)?;
    let ask = ask(args, &local, &text)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut sink = Streams { has_reasoned: false };
    let reply = runtime.block_on(reply::run(&local, ask, &mut sink, std::future::pending()))?;
    writeln!(std::io::stdout())?;
    if args.stats {
        writeln!(std::io::stderr(), "{}", stats_line(&reply))?;
    }
    Ok(())
}

/// Counts and rates of a reply, for people.
#[must_use]
pub fn stats_line(reply: &Reply) -> String {
    let Some(stats) = &reply.stats else {
        return "interrupted".to_owned();
    };
    let per_second = |n: usize, us: u64| if us == 0 { 0.0 } else { n as f64 * 1e6 / us as f64 };
    let n_read = stats.n_prompt_tokens - stats.n_cached_tokens.min(stats.n_prompt_tokens);
    format!(
        "prompt {} tokens, {} cached, {:.0} tok/s; output {} tokens, {:.0} tok/s",
        stats.n_prompt_tokens,
        stats.n_cached_tokens,
        per_second(n_read, stats.prefill_us),
        stats.n_output_tokens,
        // The first token belongs to the prompt's time.
        per_second(stats.n_output_tokens.saturating_sub(1), stats.decode_us),
    )
}

/// Answer to standard output, reasoning dimmed to standard error when that is a terminal.
struct Streams {
    has_reasoned: bool,
}

impl Sink for Streams {
    fn reasoning(&mut self, text: &str) -> std::io::Result<()> {
        let mut out = std::io::stderr().lock();
        if out.is_terminal() {
            self.has_reasoned = true;
            write!(out, "\x1b[2m{}\x1b[0m", reply::for_terminal(text))?;
        }
        Ok(())
    }

    fn content(&mut self, text: &str) -> std::io::Result<()> {
        if std::mem::take(&mut self.has_reasoned) {
            writeln!(std::io::stderr())?;
        }
        let mut out = std::io::stdout().lock();
        // A file or a pipe gets the text as it is.
        let shown = if out.is_terminal() { reply::for_terminal(text) } else { text.into() };
        out.write_all(shown.as_bytes())?;
        out.flush()
    }
}

/// The prompt; the last line break of a file or of standard input is not part of it.
fn read_prompt(args: &CompleteArgs) -> anyhow::Result<String> {
    if let Some(prompt) = &args.prompt {
        return Ok(prompt.clone());
    }
    let mut text = String::new();
    match &args.prompt_file {
        Some(path) => text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?,
        None => {
            std::io::stdin().read_to_string(&mut text).context("standard input")?;
        }
    }
    let text = text.strip_suffix('\n').map_or(text.as_str(), |text| text.strip_suffix('\r').unwrap_or(text));
    Ok(text.to_owned())
}

fn ask(args: &CompleteArgs, local: &Local, text: &str) -> anyhow::Result<Ask> {
    let (prompt, mode) = if args.raw {
        let mut prompt = vec![local.tokenizer.bos()];
        prompt.extend(local.tokenizer.encode_marked(text, &|| false)?);
        (prompt, None)
    } else {
        let (mode, effort) = reply::mode_of(args.think.unwrap_or(local.default_thinking));
        let system = args.system.as_ref().map(|text| Message::new(Role::System, text));
        let conversation = Conversation {
            messages: system.into_iter().chain([Message::new(Role::User, text)]).collect(),
            tools: Vec::new(),
            response_format: None,
            mode,
            effort,
            drop_thinking: true,
            add_generation_prompt: None,
            continue_final_message: false,
        };
        let (prompt, mode) = reply::chat_prompt(local, conversation)?;
        (prompt, Some(mode))
    };
    Ok(Ask {
        prompt,
        mode,
        sampling: args.sampling.over(&local.default_sampling),
        max_tokens: args.sampling.max_tokens,
        stop: args.sampling.stop.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::event::RequestStats;

    #[test]
    fn a_files_last_line_break_is_not_part_of_the_prompt() {
        let read = |content: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), content).unwrap();
            read_prompt(&CompleteArgs { prompt_file: Some(file.path().to_owned()), ..CompleteArgs::default() }).unwrap()
        };
        assert_eq!(read("a\n\n"), "a\n");
        assert_eq!(read("a\r\n"), "a");
        assert_eq!(read("a"), "a");
        assert_eq!(
            read_prompt(&CompleteArgs { prompt: Some("b\n".to_owned()), ..CompleteArgs::default() }).unwrap(),
            "b\n"
        );
    }

    #[test]
    fn rates_leave_out_cached_tokens_and_the_first_output_token() {
        let stats = RequestStats {
            n_prompt_tokens: 1000,
            n_cached_tokens: 500,
            n_output_tokens: 11,
            queue_us: 0,
            prefill_us: 1_000_000,
            decode_us: 2_000_000,
        };
        let reply = Reply { content: String::new(), reasoning: String::new(), end: None, stats: Some(stats) };
        assert_eq!(stats_line(&reply), "prompt 1000 tokens, 500 cached, 500 tok/s; output 11 tokens, 5 tok/s");
    }
}
