//! One reply of a model in this process: a prompt in, text as it comes, and how it ended.

use std::borrow::Cow;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::start::Local;
use crate::chat::parse::{ParserOptions, Part};
use crate::chat::prepare::{self, Conversation};
use crate::chat::{Effort, Mode};
use crate::config::args::ThinkingChoice;
use crate::engine::event::{Event, FailReason, RequestStats};
use crate::engine::request::{GenerateRequest, ValidRequest};
use crate::http::choice::{ChatText, ChoiceEnd, ChoiceText, Delta, TextOptions};
use crate::ids::TokenId;
use crate::sample::params::SamplingParams;

/// Prompts shorter than this are over before a progress bar could be read.
const PROGRESS_FROM_TOKENS: usize = 512;

/// What to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// The prompt.
    pub prompt: Vec<TokenId>,
    /// What the text begins with in a chat turn; `None`: plain text.
    pub mode: Option<Mode>,
    /// Settings.
    pub sampling: SamplingParams,
    /// Tokens at most.
    pub max_tokens: Option<u32>,
    /// Texts that end it.
    pub stop: Vec<String>,
}

/// Where text goes as it comes.
pub trait Sink {
    /// Reasoning.
    fn reasoning(&mut self, text: &str) -> std::io::Result<()>;
    /// The answer.
    fn content(&mut self, text: &str) -> std::io::Result<()>;
}

/// A reply that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// All of the answer's text.
    pub content: String,
    /// All of the reasoning's text.
    pub reasoning: String,
    /// Why it ended; `None`: it was interrupted.
    pub end: Option<ChoiceEnd>,
    /// Its numbers, when it was not interrupted.
    pub stats: Option<RequestStats>,
}

/// A turn's prompt, and what its reply begins with.
///
/// # Errors
/// When the conversation can't be rendered or encoded.
pub fn chat_prompt(local: &Local, conversation: Conversation) -> anyhow::Result<(Vec<TokenId>, Mode)> {
    let prompt = prepare::prompt(conversation)?;
    Ok((local.tokenizer.encode(&prompt.segments)?, prompt.completion_mode))
}

/// Mode and effort of a choice of thinking.
#[must_use]
pub const fn mode_of(thinking: ThinkingChoice) -> (Mode, Option<Effort>) {
    match thinking {
        ThinkingChoice::Off => (Mode::Chat, None),
        ThinkingChoice::Low => (Mode::Thinking, Some(Effort::Low)),
        ThinkingChoice::High => (Mode::Thinking, Some(Effort::High)),
        ThinkingChoice::Max => (Mode::Thinking, Some(Effort::Max)),
    }
}

/// Text that is safe to show on a terminal: a model may write any character, and some would move the cursor or worse.
#[must_use]
pub fn for_terminal(text: &str) -> Cow<'_, str> {
    let is_unsafe = |c: char| c.is_control() && c != '\n' && c != '\t';
    if text.contains(is_unsafe) { Cow::Owned(text.replace(is_unsafe, "\u{FFFD}")) } else { Cow::Borrowed(text) }
}

/// Runs a request to its end, or until `interrupt` resolves, which cancels it.
///
/// # Errors
/// When the engine refuses or fails the request, or the sink fails.
pub async fn run(
    local: &Local,
    ask: Ask,
    sink: &mut impl Sink,
    interrupt: impl Future<Output = ()>,
) -> anyhow::Result<Reply> {
    let options = text_options(&ask);
    let n_prompt = ask.prompt.len();
    let request = ValidRequest::new(request(ask), local.engine.limits())?;
    let mut submission = local.engine.submit(request)?;
    let mut text = ChoiceText::new(&local.tokenizer, Arc::new(options));
    let mut reply = Reply { content: String::new(), reasoning: String::new(), end: None, stats: None };
    let mut progress = (n_prompt >= PROGRESS_FROM_TOKENS).then(|| progress_bar(n_prompt));
    let mut interrupt = pin!(interrupt);
    loop {
        let event = tokio::select! {
            event = submission.next() => event,
            // Dropping the submission cancels the request.
            () = &mut interrupt => break,
        };
        match event {
            Some(Event::Prefill { n_done, .. }) => {
                if let Some(bar) = &progress {
                    bar.set_position(n_done as u64);
                }
            }
            Some(Event::Token { token, logprobs, .. }) if text.end().is_none() => {
                clear_progress(&mut progress);
                take(&mut reply, text.push(token, logprobs), sink)?;
                if text.end().is_some() {
                    submission.finish_choice(0);
                }
            }
            Some(Event::ChoiceFinished { reason, .. }) => take(&mut reply, text.finish(reason), sink)?,
            Some(Event::Finished(stats)) => {
                reply.stats = Some(stats);
                break;
            }
            Some(Event::Failed(reason)) => return Err(reason.into()),
            Some(Event::Cancelled) | None => return Err(FailReason::Internal.into()),
            Some(Event::Started { .. } | Event::PromptLogprobs(_) | Event::Token { .. }) => {}
        }
    }
    clear_progress(&mut progress);
    reply.end = text.end().cloned();
    Ok(reply)
}

fn text_options(ask: &Ask) -> TextOptions {
    let chat = ask.mode.map(|mode| ChatText {
        // No tools were declared, so what looks like a call is text.
        parser: ParserOptions { mode, tools: Some(Vec::new()) },
        prefix: String::new(),
        max_calls: usize::MAX,
    });
    TextOptions {
        stop: ask.stop.clone(),
        include_stop: false,
        stop_token_ids: Vec::new(),
        ignore_eos: false,
        show_hidden: false,
        split_logprobs: false,
        chat,
    }
}

fn request(ask: Ask) -> GenerateRequest {
    GenerateRequest {
        id: "local".to_owned(),
        prompt: ask.prompt.into(),
        max_tokens: ask.max_tokens,
        n: 1,
        sampling: ask.sampling,
        stop_token_ids: Vec::new(),
        ignore_eos: false,
        min_tokens: 0,
        logprobs: None,
        prompt_logprobs: None,
        cache_salt: None,
        priority: 0,
    }
}

fn take(reply: &mut Reply, delta: Delta, sink: &mut impl Sink) -> std::io::Result<()> {
    for part in delta.parts {
        match part {
            Part::Reasoning(text) => {
                sink.reasoning(&text)?;
                reply.reasoning.push_str(&text);
            }
            Part::Content(text) => {
                sink.content(&text)?;
                reply.content.push_str(&text);
            }
            // No tools were declared, so the parser makes no calls.
            Part::ToolCallStart { .. } | Part::ToolCallArguments { .. } | Part::ToolCallEnd { .. } => {}
        }
    }
    Ok(())
}

/// A bar on standard error while a long prompt is read; indicatif draws nothing where that isn't a terminal.
fn progress_bar(n_prompt: usize) -> ProgressBar {
    let bar = ProgressBar::new(n_prompt as u64);
    if let Ok(style) = ProgressStyle::with_template("reading {wide_bar} {pos}/{len} tokens, {per_sec}") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn clear_progress(progress: &mut Option<ProgressBar>) {
    if let Some(bar) = progress.take() {
        bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_moves_the_cursor_reaches_a_terminal() {
        assert_eq!(for_terminal("a\tb\nc é 🎉"), "a\tb\nc é 🎉");
        assert_eq!(for_terminal("a\u{1b}[2Jb\rc\u{9b}d\u{7}"), "a\u{FFFD}[2Jb\u{FFFD}c\u{FFFD}d\u{FFFD}");
    }

    #[test]
    fn thinking_is_mode_and_effort() {
        assert_eq!(mode_of(ThinkingChoice::Off), (Mode::Chat, None));
        assert_eq!(mode_of(ThinkingChoice::Max), (Mode::Thinking, Some(Effort::Max)));
    }
}
