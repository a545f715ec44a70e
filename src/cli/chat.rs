//! `flashd chat`: a conversation at the terminal with a model in this process.
//!
//! Every turn renders the whole conversation; what the prefix cache holds of it is not computed again.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::Context;
use rustyline::config::Config;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;

use super::complete::stats_line;
use super::interrupt::Interrupts;
use super::reply::{self, Ask, Reply, Sink};
use super::sampling::SamplingFlags;
use super::start::Local;
use crate::chat::message::{Message, Role};
use crate::chat::prepare::Conversation;
use crate::config::{self, args::LocalArgs, args::ThinkingChoice};

const HELP: &str = "\
/think [low|high|max]   think before answering
/nothink                answer at once
/read FILE [QUESTION]   send a file's text, then the question
/system [TEXT]          set the system message, or none; starts a new conversation
/new                    start a new conversation
/stats                  token counts and rates after each reply, on or off
/help                   this list
/quit                   leave (also /exit and Ctrl-D)
A line that ends in \\ goes on in the next one. Ctrl-C stops a reply.";

/// Flags of `flashd chat`.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ChatArgs {
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// How hard to think first [default: the model's]
    #[arg(long, value_name = "EFFORT")]
    pub think: Option<ThinkingChoice>,
    /// Do not read or write the history of lines
    #[arg(long)]
    pub no_history: bool,
    /// Sampling flags.
    #[command(flatten)]
    pub sampling: SamplingFlags,
    /// The model and where it runs.
    #[command(flatten)]
    pub local: LocalArgs,
}

/// What a line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Line {
    Nothing,
    Say(String),
    Think(ThinkingChoice),
    Read {
        path: String,
        question: String,
    },
    System(Option<String>),
    New,
    Stats,
    Help,
    Quit,
    /// Not understood; why.
    Wrong(String),
}

type Editor = rustyline::Editor<(), FileHistory>;

/// Runs the conversation until /quit or the end of input.
///
/// # Errors
/// When the model can't be started, or the terminal fails.
pub fn run(args: &ChatArgs) -> anyhow::Result<()> {
    let local = Local::start(&args.local)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let interrupts = Interrupts::watch(&runtime)?;
    let mut chat = Chat {
        thinking: args.think.unwrap_or(local.default_thinking),
        system: args.system.clone(),
        sampling: args.sampling.clone(),
        show_stats: false,
        messages: Vec::new(),
        local,
    };
    let mut editor = Editor::with_config(Config::builder().auto_add_history(true).build())?;
    let history = if args.no_history { None } else { history_file() };
    if let Some(path) = &history {
        // A missing file is an empty history.
        let _ = editor.load_history(path);
    }
    if std::io::stdin().is_terminal() {
        writeln!(std::io::stdout(), "{} is ready; /help lists the commands.", chat.local.name)?;
    }
    while let Some(line) = read_line(&mut editor)? {
        if let Some(path) = &history {
            // Line by line, so that a killed terminal loses none. A conversation goes on without a history.
            let _ = editor.append_history(path);
        }
        if chat.take(&line, &runtime, &interrupts)?.is_break() {
            break;
        }
    }
    Ok(())
}

/// A conversation and its settings.
struct Chat {
    local: Local,
    thinking: ThinkingChoice,
    system: Option<String>,
    sampling: SamplingFlags,
    show_stats: bool,
    messages: Vec<Message>,
}

/// A line, with its continuations; `None` at the end of input. Ctrl-C at the prompt clears the line.
fn read_line(editor: &mut Editor) -> anyhow::Result<Option<String>> {
    let mut text = String::new();
    loop {
        match editor.readline(if text.is_empty() { "> " } else { "… " }) {
            Ok(line) => match line.strip_suffix('\\') {
                Some(start) => {
                    text.push_str(start);
                    text.push('\n');
                }
                None => return Ok(Some(text + &line)),
            },
            Err(ReadlineError::Interrupted) => text.clear(),
            Err(ReadlineError::Eof) => return Ok(None),
            Err(error) => return Err(error).context("reading a line"),
        }
    }
}

/// The message that /read sends; `None`, and a word to the user, when the file can't be read.
fn read_file(path: &str, question: &str) -> std::io::Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) if question.is_empty() => Ok(Some(text)),
        Ok(text) => Ok(Some(format!("{}\n\n{question}", text.trim_end()))),
        Err(error) => {
            writeln!(std::io::stderr(), "{path}: {error}")?;
            Ok(None)
        }
    }
}

/// The file of typed lines, in a folder that is made if need be.
fn history_file() -> Option<PathBuf> {
    let path = config::history_file()?;
    std::fs::create_dir_all(path.parent()?).ok()?;
    Some(path)
}

fn parse(line: &str) -> Line {
    let line = line.trim();
    if line.is_empty() {
        return Line::Nothing;
    }
    if !line.starts_with('/') {
        return Line::Say(line.to_owned());
    }
    let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let rest = rest.trim();
    match (command, rest) {
        ("/think", "" | "high") => Line::Think(ThinkingChoice::High),
        ("/think", "low") => Line::Think(ThinkingChoice::Low),
        ("/think", "max") => Line::Think(ThinkingChoice::Max),
        ("/think", other) => Line::Wrong(format!("/think takes low, high or max, not {other}")),
        ("/nothink", "") => Line::Think(ThinkingChoice::Off),
        ("/read", "") => Line::Wrong("/read needs a file".to_owned()),
        ("/read", rest) => {
            let (path, question) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            Line::Read { path: path.to_owned(), question: question.trim().to_owned() }
        }
        ("/system", text) => Line::System((!text.is_empty()).then(|| text.to_owned())),
        ("/new", "") => Line::New,
        ("/stats", "") => Line::Stats,
        ("/help", _) => Line::Help,
        ("/quit" | "/exit", _) => Line::Quit,
        _ => Line::Wrong(format!("{line}: no such command; /help lists them")),
    }
}

impl Chat {
    /// Does what a line asks for; breaks at /quit.
    fn take(
        &mut self,
        line: &str,
        runtime: &tokio::runtime::Runtime,
        interrupts: &Interrupts,
    ) -> anyhow::Result<ControlFlow<()>> {
        let text = match parse(line) {
            Line::Quit => return Ok(ControlFlow::Break(())),
            Line::Say(text) => Some(text),
            Line::Read { path, question } => read_file(&path, &question)?,
            other => {
                self.set(other)?;
                None
            }
        };
        let Some(text) = text else {
            return Ok(ControlFlow::Continue(()));
        };
        match runtime.block_on(self.turn(text, interrupts)) {
            Ok(()) => {}
            // A broken pipe ends the program; a refused turn (too long, say) only the turn.
            Err(error) if error.chain().any(super::is_broken_pipe) => return Err(error),
            Err(error) => writeln!(std::io::stderr(), "{}", super::describe(&error))?,
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Carries out a command that changes settings, and says so.
    fn set(&mut self, line: Line) -> std::io::Result<()> {
        let said = match line {
            Line::Think(thinking) => {
                self.thinking = thinking;
                format!("thinking: {}", format!("{thinking:?}").to_lowercase())
            }
            Line::System(text) => {
                self.messages.clear();
                self.system = text;
                "a new conversation begins".to_owned()
            }
            Line::New => {
                self.messages.clear();
                "a new conversation begins".to_owned()
            }
            Line::Stats => {
                self.show_stats = !self.show_stats;
                format!("stats: {}", if self.show_stats { "on" } else { "off" })
            }
            Line::Help => HELP.to_owned(),
            Line::Wrong(why) => why,
            Line::Nothing | Line::Say(_) | Line::Read { .. } | Line::Quit => return Ok(()),
        };
        writeln!(std::io::stderr(), "{said}")
    }

    /// One turn: the user's message, the reply, both kept. A turn that fails or says nothing leaves no trace.
    async fn turn(&mut self, text: String, interrupts: &Interrupts) -> anyhow::Result<()> {
        self.messages.push(Message::new(Role::User, text));
        let result = self.reply(interrupts).await;
        match &result {
            Ok(reply) if !(reply.content.is_empty() && reply.end.is_none()) => {
                self.messages.push(Message {
                    reasoning: (!reply.reasoning.is_empty()).then(|| reply.reasoning.clone()),
                    ..Message::new(Role::Assistant, reply.content.clone())
                });
            }
            _ => {
                self.messages.pop();
            }
        }
        let reply = result?;
        if self.show_stats {
            writeln!(std::io::stderr(), "{}", stats_line(&reply))?;
        }
        Ok(())
    }

    async fn reply(&self, interrupts: &Interrupts) -> anyhow::Result<Reply> {
        let (mode, effort) = reply::mode_of(self.thinking);
        let system = self.system.as_ref().map(|text| Message::new(Role::System, text));
        let conversation = Conversation {
            messages: system.into_iter().chain(self.messages.iter().cloned()).collect(),
            tools: Vec::new(),
            response_format: None,
            mode,
            effort,
            drop_thinking: true,
            add_generation_prompt: None,
            continue_final_message: false,
        };
        let (prompt, mode) = reply::chat_prompt(&self.local, conversation)?;
        let ask = Ask {
            prompt,
            mode: Some(mode),
            sampling: self.sampling.over(&self.local.default_sampling),
            max_tokens: self.sampling.max_tokens,
            stop: self.sampling.stop.clone(),
        };
        let mut sink = Screen { is_dim: false, is_terminal: std::io::stdout().is_terminal() };
        let result = reply::run(&self.local, ask, &mut sink, interrupts.next()).await;
        sink.end()?;
        result
    }
}

/// Reasoning dimmed, then the answer.
struct Screen {
    is_dim: bool,
    is_terminal: bool,
}

impl Screen {
    fn write(&mut self, text: &str, dim: bool) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        if dim != self.is_dim {
            let code = match (self.is_terminal, dim) {
                (true, true) => "\x1b[2m",
                (true, false) => "\x1b[0m\n\n",
                (false, true) => "",
                (false, false) => "\n\n",
            };
            out.write_all(code.as_bytes())?;
            self.is_dim = dim;
        }
        let shown = if self.is_terminal { reply::for_terminal(text) } else { text.into() };
        out.write_all(shown.as_bytes())?;
        out.flush()
    }

    fn end(&mut self) -> std::io::Result<()> {
        if self.is_terminal && std::mem::take(&mut self.is_dim) {
            write!(std::io::stdout(), "\x1b[0m")?;
        }
        writeln!(std::io::stdout())
    }
}

impl Sink for Screen {
    fn reasoning(&mut self, text: &str) -> std::io::Result<()> {
        self.write(text, true)
    }

    fn content(&mut self, text: &str) -> std::io::Result<()> {
        self.write(text, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_understood() {
        let read = |path: &str, question: &str| Line::Read { path: path.to_owned(), question: question.to_owned() };
        let cases = [
            ("", Line::Nothing),
            ("  \t", Line::Nothing),
            (" hello /quit ", Line::Say("hello /quit".to_owned())),
            ("/think", Line::Think(ThinkingChoice::High)),
            ("/think low", Line::Think(ThinkingChoice::Low)),
            ("/think  max ", Line::Think(ThinkingChoice::Max)),
            ("/nothink", Line::Think(ThinkingChoice::Off)),
            ("/read a.txt", read("a.txt", "")),
            ("/read a.txt  what is it? ", read("a.txt", "what is it?")),
            ("/system", Line::System(None)),
            ("/system be brief", Line::System(Some("be brief".to_owned()))),
            ("/new", Line::New),
            ("/stats", Line::Stats),
            ("/help", Line::Help),
            ("/quit", Line::Quit),
            ("/exit", Line::Quit),
        ];
        for (line, want) in cases {
            assert_eq!(parse(line), want, "{line:?}");
        }
        for line in ["/think hard", "/read", "/quits", "/", "/new x", "/nothink now"] {
            assert!(matches!(parse(line), Line::Wrong(_)), "{line}");
        }
    }

    #[test]
    fn read_puts_the_question_after_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "text\n").unwrap();
        let path = file.path().to_str().unwrap();
        assert_eq!(read_file(path, "why?").unwrap().unwrap(), "text\n\nwhy?");
        assert_eq!(read_file(path, "").unwrap().unwrap(), "text\n");
        assert_eq!(read_file("/no/such/file", "why?").unwrap(), None);
    }
}
