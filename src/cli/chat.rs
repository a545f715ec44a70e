//! `flashd chat`: a conversation at the terminal with a model in this process.
//!
//! Every turn renders the whole conversation; what the prefix cache holds of it is not computed again.

use std::fs::File;
use std::io::{BufRead, ErrorKind, IsTerminal, Read, Write};
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

/// Longest file that /read takes and longest line from a pipe; the longest context is about a million tokens.
const MAX_TEXT_BYTES: u64 = 16 << 20;

/// Runs the conversation until /quit or the end of input.
///
/// # Errors
/// When the model can't be started, or standard input or output fails.
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
    let mut input = Input::open(args.no_history)?;
    if matches!(input, Input::Terminal { .. }) {
        writeln!(std::io::stdout(), "{} is ready; /help lists the commands.", chat.local.name)?;
    }
    while let Some(line) = input.read_text()? {
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

/// Where lines come from.
enum Input {
    /// A line editor, and where its history is kept.
    Terminal { editor: Box<Editor>, history: Option<PathBuf> },
    /// A pipe or a file.
    Pipe,
}

/// What reading a line came to.
enum Got {
    Line(String),
    /// A line that can't be used; why.
    Refused(String),
    /// Ctrl-C.
    Cleared,
    End,
}

impl Input {
    fn open(no_history: bool) -> anyhow::Result<Self> {
        if !std::io::stdin().is_terminal() {
            return Ok(Self::Pipe);
        }
        let mut editor = Box::new(Editor::with_config(Config::builder().auto_add_history(true).build())?);
        let history = if no_history { None } else { history_file() };
        if let Some(path) = &history {
            // A missing file is an empty history.
            let _ = editor.load_history(path);
        }
        Ok(Self::Terminal { editor, history })
    }

    /// A line, with its continuations; `None` at the end of input. Ctrl-C at the prompt clears the line, and a line that
    /// is refused takes what it continues along.
    fn read_text(&mut self) -> anyhow::Result<Option<String>> {
        let mut text = String::new();
        loop {
            match self.read_line(text.is_empty())? {
                Got::Line(line) => match line.strip_suffix('\\') {
                    Some(start) => {
                        text.push_str(start);
                        text.push('\n');
                    }
                    None => return Ok(Some(text + &line)),
                },
                Got::Refused(why) => {
                    writeln!(std::io::stderr(), "{why}")?;
                    text.clear();
                }
                Got::Cleared => text.clear(),
                Got::End => return Ok(None),
            }
        }
    }

    fn read_line(&mut self, is_first: bool) -> anyhow::Result<Got> {
        let Self::Terminal { editor, history } = self else {
            return read_pipe(&mut std::io::stdin().lock()).context("reading a line");
        };
        match editor.readline(if is_first { "> " } else { "… " }) {
            Ok(line) => {
                if let Some(path) = history {
                    // Line by line, so that a killed terminal loses none. A conversation goes on without a history.
                    let _ = editor.append_history(path);
                }
                Ok(Got::Line(line))
            }
            Err(ReadlineError::Interrupted) => Ok(Got::Cleared),
            Err(ReadlineError::Eof) => Ok(Got::End),
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                Ok(Got::Refused(NOT_UTF8.to_owned()))
            }
            Err(error) => Err(error).context("reading a line"),
        }
    }
}

const NOT_UTF8: &str = "the line is not UTF-8; it was not sent";

/// A line of a pipe. What is too long or no text is read to its end and refused, so that the next line stands for itself.
fn read_pipe(input: &mut impl BufRead) -> std::io::Result<Got> {
    let mut bytes = Vec::new();
    input.by_ref().take(MAX_TEXT_BYTES + 1).read_until(b'\n', &mut bytes)?;
    if bytes.is_empty() {
        return Ok(Got::End);
    }
    if bytes.last() == Some(&b'\n') {
        bytes.pop();
    } else if bytes.len() as u64 > MAX_TEXT_BYTES {
        input.skip_until(b'\n')?;
        return Ok(Got::Refused(format!("the line is longer than {MAX_TEXT_BYTES} bytes; it was not sent")));
    }
    if bytes.last() == Some(&b'\r') {
        bytes.pop();
    }
    Ok(String::from_utf8(bytes).map_or_else(|_| Got::Refused(NOT_UTF8.to_owned()), Got::Line))
}

/// The message that /read sends.
///
/// # Errors
/// When the file can't be read, is no regular file (a pipe or a device may never end), is too long or no text.
fn read_file(path: &str, question: &str) -> Result<String, String> {
    let text = read_regular(path).map_err(|error| format!("{path}: {error}"))?;
    Ok(if question.is_empty() { text } else { format!("{}\n\n{question}", text.trim_end()) })
}

fn read_regular(path: &str) -> std::io::Result<String> {
    // Before it is opened: opening a pipe waits for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(std::io::Error::other("not a regular file"));
    }
    let mut text = String::new();
    File::open(path)?.take(MAX_TEXT_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_TEXT_BYTES {
        return Err(std::io::Error::other(format!("longer than {MAX_TEXT_BYTES} bytes")));
    }
    Ok(text)
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
            Line::Read { path, question } => match read_file(&path, &question) {
                Ok(text) => Some(text),
                Err(why) => {
                    writeln!(std::io::stderr(), "{why}")?;
                    None
                }
            },
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
            // Output that can't be written ends the program; a refused turn (too long, say) only the turn.
            Err(error) if error.chain().any(|cause| cause.is::<std::io::Error>()) => return Err(error),
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
        assert_eq!(read_file(path, "why?").unwrap(), "text\n\nwhy?");
        assert_eq!(read_file(path, "").unwrap(), "text\n");
    }

    #[test]
    fn read_refuses_what_it_cannot_send() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        // A hole of a file: read to the limit, never written.
        file.as_file().set_len(MAX_TEXT_BYTES + 1).unwrap();
        assert!(read_file(path, "").unwrap_err().contains("longer than 16777216 bytes"));
        std::fs::write(path, [0xFF, b'a']).unwrap();
        assert!(read_file(path, "").unwrap_err().contains("UTF-8"));
        for (path, why) in [("/no/such/file", "/no/such/file"), ("/dev/zero", "regular"), ("/", "regular")] {
            assert!(read_file(path, "").unwrap_err().contains(why), "{path}");
        }
    }

    #[test]
    fn lines_of_a_pipe_stand_for_themselves() {
        let long = vec![b'x'; MAX_TEXT_BYTES as usize];
        let input = [b"a\r\n\n\xFF\xFE\nb\n".as_slice(), &long, b"\n", &long, b"x\nlast"].concat();
        let mut input = input.as_slice();
        let mut got = Vec::new();
        loop {
            match read_pipe(&mut input).unwrap() {
                Got::Line(line) if line.len() > 10 => got.push(line.len().to_string()),
                Got::Line(line) => got.push(line),
                Got::Refused(why) => got.push(why),
                Got::Cleared => unreachable!("no keys"),
                Got::End => break,
            }
        }
        let too_long = "the line is longer than 16777216 bytes; it was not sent";
        assert_eq!(got, ["a", "", NOT_UTF8, "b", "16777216", too_long, "last"]);
    }
}
