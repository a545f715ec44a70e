//! A completion's text back to reasoning, content and tool calls, piece by piece and the same at every split.
//!
//! The rules, where the published parser only fails:
//! - Only what may still become markup is held back: at most two line ends, and the start of a tag.
//! - A block of calls begins at its opening tag once a call in it is certain (its tag, and then a parameter or its end);
//!   up to two line ends before the block belong to it. Arguments stream from then on.
//! - A call without the block's opening tag counts once it is closed, its tool is declared and no required argument is
//!   missing; until then it is held, and else it is text.
//! - A call inside reasoning counts if it is closed, its tool is declared and the text ends after it; else it is reasoning.
//! - In a block a tool that is not declared is called too, if its name can be one: the client can answer that.
//! - The string flag gives a parameter's type; a value that is not JSON is a string. Strings stream, other values are
//!   written when they end. The first value of a repeated name counts. A lone undeclared parameter `arguments` or
//!   `input` that holds an object of declared names is the arguments themselves.
//! - A missing closer is supplied where the next tag or the model's end leaves no doubt, closers of other formats are
//!   skipped in a block, and a call that is cut has no end part.
//! - A control token of tags that the caller marks as such ([`CONTROL`]) and that is in no call is left out.
//! - Text between calls and behind a block is content; white space alone is not.

use super::Mode;

mod call;
mod reply;
mod tags;
mod tools;

pub use reply::{Reply, ReplyCall};
pub use tags::{CONTROL, DSML};
pub use tools::ToolSpec;

use call::{Call, ValueStep};
use tags::Look;
use tools::Tools;

/// What the parser knows about the request.
#[derive(Clone, Debug, PartialEq)]
pub struct ParserOptions {
    /// Whether the text begins with reasoning (`Prompt::completion_mode`).
    pub mode: Mode,
    /// The request's tools; an empty list leaves every call as text, none accepts a call of any name.
    /// For tool_choice none give the tools anyway and drop the call parts: then no markup reaches the client.
    pub tools: Option<Vec<ToolSpec>>,
}

/// A piece of the reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Reasoning text.
    Reasoning(String),
    /// Answer text.
    Content(String),
    /// A call begins. Indexes count from 0.
    ToolCallStart {
        /// Which call.
        index: usize,
        /// The function's name.
        name: String,
    },
    /// The next piece of a call's arguments; the pieces of one call join to a JSON object.
    ToolCallArguments {
        /// Which call.
        index: usize,
        /// JSON text.
        fragment: String,
    },
    /// The call is whole. A call without it was cut: its arguments are not valid JSON, and it must not be executed.
    ToolCallEnd {
        /// Which call.
        index: usize,
    },
}

/// How the text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model ended it (end token or a stop id): missing closers are supplied.
    Complete,
    /// It was cut (length, stop string, cancellation): nothing is supplied.
    Cut,
}

/// The parser of one completion.
#[derive(Clone, Debug)]
pub struct StreamParser {
    /// None where calls of any name count.
    tools: Option<Tools>,
    channel: Channel,
    /// Text that waits for more.
    pending: String,
    /// The mark that the prompt ends in: a model that repeats it at once means nothing by it.
    echo: Option<&'static str>,
    wrapper: Wrapper,
    call: Option<OpenCall>,
    /// White space since the last call or block; shown only if text follows.
    layout: Option<String>,
    hold: Option<Hold>,
    n_calls: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Channel {
    Reasoning,
    Content,
}

/// What the current call stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrapper {
    /// No block.
    None,
    /// A block with its opening tag.
    Block,
    /// Calls without one.
    Orphan,
}

#[derive(Clone, Debug)]
struct OpenCall {
    index: usize,
    call: Call,
}

/// Markup that is not certain yet: its text, and what it means if it turns out to be.
#[derive(Clone, Debug)]
struct Hold {
    raw: String,
    parts: Vec<Part>,
    n_calls_before: usize,
}

/// A tag in text.
enum Mark {
    Block,
    Invoke(String),
    BlockEnd,
    /// A closer that closes nothing.
    Stray,
    /// A tag cut by the end of the text.
    Cut,
}

/// A tag between the parameters of a call.
enum CallMark {
    Parameter(String, Option<String>),
    End,
    /// A tag that can only come after the call.
    After,
    /// A closer without its opening tag.
    Stray,
}

enum Step {
    /// So many bytes were read, or the state moved on.
    Read(usize),
    /// More text is needed.
    Wait,
}

const END_THINK: &str = "</think>";

impl StreamParser {
    /// A parser at the start of a completion.
    #[must_use]
    pub fn new(options: ParserOptions) -> Self {
        let (channel, echo) = match options.mode {
            Mode::Chat => (Channel::Content, END_THINK),
            Mode::Thinking => (Channel::Reasoning, "<think>"),
        };
        Self {
            tools: options.tools.map(tools::index),
            channel,
            pending: String::new(),
            echo: Some(echo),
            wrapper: Wrapper::None,
            call: None,
            layout: None,
            hold: None,
            n_calls: 0,
        }
    }

    /// Takes the next text and appends what is certain to `parts`.
    pub fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        self.pending.push_str(text);
        self.run(None, parts);
    }

    /// Ends the text and appends what was held back.
    pub fn finish(&mut self, end: End, parts: &mut Vec<Part>) {
        self.run(Some(end), parts);
        let Some(hold) = &self.hold else { return };
        let has_calls = !hold.parts.is_empty() && self.call.is_none();
        match self.channel {
            Channel::Reasoning if has_calls && (self.wrapper != Wrapper::Block || end == End::Complete) => {
                self.commit(parts);
            }
            // A block that was cut before its first call: its start is no answer.
            Channel::Content if end == End::Cut && self.wrapper == Wrapper::Block => self.hold = None,
            _ => self.abandon(parts),
        }
    }

    /// Reads what is pending as far as it is certain; all of it at the end.
    fn run(&mut self, end: Option<End>, out: &mut Vec<Part>) {
        let pending = std::mem::take(&mut self.pending);
        let mut at = 0;
        let close = if self.channel == Channel::Reasoning { pending.find(END_THINK) } else { None };
        loop {
            let close = close.filter(|_| self.channel == Channel::Reasoning);
            let limit = match close {
                Some(close) => close,
                None if self.channel == Channel::Reasoning && end.is_none() => pending.len() - partial_close(&pending),
                None => pending.len(),
            };
            let is_last = close.is_some() || end.is_some();
            match self.step(&pending[at..limit.max(at)], is_last, end, out) {
                Step::Read(n_bytes) => at += n_bytes,
                Step::Wait => {
                    let Some(close) = close else { break };
                    self.abandon(out);
                    (self.channel, self.layout) = (Channel::Content, None);
                    at = close + END_THINK.len();
                }
            }
        }
        pending[at..].clone_into(&mut self.pending);
    }

    fn step(&mut self, view: &str, is_last: bool, end: Option<End>, out: &mut Vec<Part>) -> Step {
        if let Some(echo) = self.echo {
            match tags::literal(view, echo) {
                Look::Maybe if !is_last => return Step::Wait,
                Look::Yes((), length) => {
                    self.echo = None;
                    return Step::Read(length);
                }
                _ => self.echo = None,
            }
        }
        match self.call.take() {
            Some(open) => self.call_step(open, view, is_last, end, out),
            None => self.text_step(view, is_last, end, out),
        }
    }

    /// Text outside calls.
    fn text_step(&mut self, view: &str, is_last: bool, end: Option<End>, out: &mut Vec<Part>) -> Step {
        if self.hold.is_none() && view.starts_with(CONTROL) {
            return Step::Read(CONTROL.len_utf8());
        }
        let n_space = view.len() - view.trim_start().len();
        if let Some(layout) = &mut self.layout
            && n_space > 0
        {
            layout.push_str(&view[..n_space]);
            return self.read(view, n_space);
        }
        let (start, mark) = self.find_mark(view, is_last, end);
        let is_held = !matches!(mark, Look::No) || !is_last;
        let breaks = if is_held && self.sees_calls() { tags::trailing_breaks(&view[..start]) } else { 0 };
        if start > breaks {
            return self.text(&view[..start - breaks], out);
        }
        match mark {
            Look::Yes(mark, length) => self.mark(mark, view, start + length, out),
            Look::Maybe | Look::No => Step::Wait,
        }
    }

    /// Shows text, or gives up the markup that it contradicts.
    fn text(&mut self, text: &str, out: &mut Vec<Part>) -> Step {
        if self.hold.is_some() {
            self.abandon(out);
            return Step::Read(0);
        }
        if self.wrapper == Wrapper::Orphan {
            self.wrapper = Wrapper::None;
        }
        let layout = self.layout.take().unwrap_or_default();
        self.emit_text(layout + text, out);
        Step::Read(text.len())
    }

    /// The first tag in `view`, or the place from which text is held back.
    fn find_mark(&self, view: &str, is_last: bool, end: Option<End>) -> (usize, Look<Mark>) {
        if !self.sees_calls() {
            return (view.len(), Look::No);
        }
        for (at, _) in view.match_indices('<') {
            let rest = &view[at..];
            match self.mark_at(rest) {
                Look::No => {}
                Look::Maybe if is_last => {
                    let is_opener = tags::literal(rest, tags::BLOCK) == Look::Maybe
                        && (rest.contains(DSML) || rest.contains(CONTROL));
                    let in_block = self.wrapper == Wrapper::Block;
                    let is_cut = in_block && self.hold.is_none() || (in_block || is_opener) && end == Some(End::Cut);
                    if is_cut && end.is_some() && self.channel == Channel::Content {
                        return (at, Look::Yes(Mark::Cut, rest.len()));
                    }
                }
                mark => return (at, mark),
            }
        }
        (view.len(), Look::No)
    }

    fn mark_at(&self, text: &str) -> Look<Mark> {
        let invoke = || match tags::invoke(text) {
            Look::Yes(name, _) if !self.accepts(name) => Look::No,
            other => other.map(|name| Mark::Invoke(name.to_owned())),
        };
        let closer = || {
            if self.wrapper == Wrapper::None {
                return Look::No;
            }
            let stray = |tag| tags::literal(text, tag).map(|()| Mark::Stray);
            let block_end = tags::literal(text, tags::BLOCK_END).map(|()| Mark::BlockEnd);
            block_end.or(|| stray(tags::INVOKE_END)).or(|| stray(tags::PARAMETER_END))
        };
        tags::literal(text, tags::BLOCK).map(|()| Mark::Block).or(invoke).or(closer)
    }

    /// Acts on a tag that ends at byte `end` of `view`.
    fn mark(&mut self, mark: Mark, view: &str, end: usize, out: &mut Vec<Part>) -> Step {
        match mark {
            Mark::Block => {
                if self.wrapper != Wrapper::Block {
                    self.begin_hold();
                    self.wrapper = Wrapper::Block;
                }
                self.layout = Some(String::new());
                self.read(view, end)
            }
            Mark::Invoke(name) => {
                if self.wrapper != Wrapper::Block {
                    self.begin_hold();
                    self.wrapper = Wrapper::Orphan;
                }
                let step = self.read(view, end);
                self.begin_call(name, out);
                step
            }
            Mark::BlockEnd => {
                let is_empty = self.hold.as_ref().is_some_and(|hold| hold.parts.is_empty());
                if is_empty && self.channel == Channel::Reasoning {
                    self.abandon(out);
                    return Step::Read(0);
                }
                let step = self.read(view, end);
                if is_empty {
                    self.hold = None;
                }
                (self.wrapper, self.layout) = (Wrapper::None, Some(String::new()));
                step
            }
            Mark::Stray => self.read(view, end),
            Mark::Cut => Step::Read(end),
        }
    }

    fn begin_call(&mut self, name: String, out: &mut Vec<Part>) {
        let tool = self.tools.as_ref().and_then(|tools| tools.get(&name)).cloned();
        let index = self.n_calls;
        self.call = Some(OpenCall { index, call: Call::new(tool) });
        self.n_calls += 1;
        self.layout = Some(String::new());
        self.emit(Part::ToolCallStart { index, name: tags::spelt(&name).into_owned() }, out);
        if self.channel == Channel::Content && self.wrapper == Wrapper::Block {
            self.commit(out);
        }
    }

    /// Text inside a call. The call is taken out of the parser and put back unless it ends.
    fn call_step(&mut self, open: OpenCall, view: &str, is_last: bool, end: Option<End>, out: &mut Vec<Part>) -> Step {
        if open.call.is_in_value() {
            return self.value_step(open, view, is_last, end, out);
        }
        let n_space = view.len() - view.trim_start().len();
        if n_space > 0 {
            self.layout.get_or_insert_default().push_str(&view[..n_space]);
            let step = self.read(view, n_space);
            return self.keep(open, step);
        }
        match call_mark(view) {
            Look::Yes(mark, length) => {
                self.layout = Some(String::new());
                self.call_mark(mark, open, view, length, out)
            }
            Look::Maybe if !is_last => self.keep(open, Step::Wait),
            Look::Maybe => self.cut_call(open, view, end, out),
            Look::No if self.hold.is_some() => {
                self.abandon(out);
                Step::Read(0)
            }
            Look::No => {
                let next = view.char_indices().skip(1).find(|(_, letter)| *letter == '<');
                let text = view[..next.map_or(view.len(), |(at, _)| at)].trim_end();
                let layout = self.layout.replace(String::new()).unwrap_or_default();
                self.emit_text(layout + text, out);
                self.keep(open, Step::Read(text.len()))
            }
        }
    }

    /// The value of a parameter.
    fn value_step(
        &mut self,
        mut open: OpenCall,
        view: &str,
        is_last: bool,
        end: Option<End>,
        out: &mut Vec<Part>,
    ) -> Step {
        let mut fragment = String::new();
        let step = open.call.read_value(view, is_last, &mut fragment);
        self.emit_arguments(open.index, fragment, out);
        match step {
            ValueStep::Read(0) if is_last => self.cut_call(open, view, end, out),
            ValueStep::Read(0) => self.keep(open, Step::Wait),
            ValueStep::Read(n_bytes) | ValueStep::Ended(n_bytes) => {
                let step = self.read(view, n_bytes);
                self.keep(open, step)
            }
        }
    }

    /// Acts on a tag between the parameters of a call, `length` bytes at the start of `view`.
    fn call_mark(
        &mut self,
        mark: CallMark,
        mut open: OpenCall,
        view: &str,
        length: usize,
        out: &mut Vec<Part>,
    ) -> Step {
        match mark {
            CallMark::Parameter(name, flag) => {
                let step = self.read(view, length);
                let fragment = open.call.begin_value(&tags::spelt(&name), flag.as_deref());
                self.emit_arguments(open.index, fragment, out);
                self.keep(open, step)
            }
            CallMark::End => {
                let step = self.read(view, length);
                self.end_call(open, out);
                step
            }
            CallMark::After if self.wrapper != Wrapper::Orphan => {
                self.end_call(open, out);
                Step::Read(0)
            }
            CallMark::Stray if self.hold.is_none() => {
                let step = self.read(view, length);
                self.keep(open, step)
            }
            CallMark::After | CallMark::Stray => {
                self.abandon(out);
                Step::Read(0)
            }
        }
    }

    fn keep(&mut self, open: OpenCall, step: Step) -> Step {
        self.call = Some(open);
        step
    }

    /// A call that the end of the text, or of the reasoning, cuts short.
    fn cut_call(&mut self, open: OpenCall, view: &str, end: Option<End>, out: &mut Vec<Part>) -> Step {
        if self.hold.is_some() {
            self.abandon(out);
            return Step::Read(0);
        }
        if end == Some(End::Complete) {
            self.end_call(open, out);
        }
        Step::Read(view.len())
    }

    fn end_call(&mut self, mut open: OpenCall, out: &mut Vec<Part>) {
        let index = open.index;
        let fragment = open.call.end();
        self.emit_arguments(index, fragment, out);
        self.emit(Part::ToolCallEnd { index }, out);
        self.layout = Some(String::new());
        if self.wrapper == Wrapper::Orphan {
            if !open.call.has_required() {
                self.abandon(out);
            } else if self.channel == Channel::Content {
                self.commit(out);
            }
        }
    }

    /// Whether the request lets calls be seen at all.
    fn sees_calls(&self) -> bool {
        self.tools.as_ref().is_none_or(|tools| !tools.is_empty())
    }

    /// Whether a call of `name` counts here.
    fn accepts(&self, name: &str) -> bool {
        let Some(tools) = &self.tools else { return true };
        let in_block = self.wrapper == Wrapper::Block && self.channel == Channel::Content;
        tools.contains_key(name) || in_block && (self.hold.is_none() || tools::is_plausible_name(name))
    }

    /// Moves on by `n_bytes` of `view`.
    fn read(&mut self, view: &str, n_bytes: usize) -> Step {
        if let Some(hold) = &mut self.hold {
            hold.raw.push_str(&view[..n_bytes]);
        }
        Step::Read(n_bytes)
    }

    fn begin_hold(&mut self) {
        let raw = self.layout.take().unwrap_or_default();
        let n_calls_before = self.n_calls;
        self.hold.get_or_insert_with(|| Hold { raw, parts: Vec::new(), n_calls_before });
    }

    /// The held markup is what it seemed.
    fn commit(&mut self, out: &mut Vec<Part>) {
        for part in self.hold.take().into_iter().flat_map(|hold| hold.parts) {
            push_part(part, out);
        }
    }

    /// The held markup is text.
    fn abandon(&mut self, out: &mut Vec<Part>) {
        (self.call, self.wrapper) = (None, Wrapper::None);
        if let Some(hold) = self.hold.take() {
            self.layout = None;
            self.n_calls = hold.n_calls_before;
            self.emit_text(hold.raw, out);
        }
    }

    fn emit_text(&mut self, mut text: String, out: &mut Vec<Part>) {
        if text.contains(CONTROL) {
            text.retain(|letter| letter != CONTROL);
        }
        if !text.is_empty() {
            let part = match self.channel {
                Channel::Reasoning => Part::Reasoning(text),
                Channel::Content => Part::Content(text),
            };
            self.emit(part, out);
        }
    }

    fn emit_arguments(&mut self, index: usize, fragment: String, out: &mut Vec<Part>) {
        if !fragment.is_empty() {
            self.emit(Part::ToolCallArguments { index, fragment }, out);
        }
    }

    fn emit(&mut self, part: Part, out: &mut Vec<Part>) {
        push_part(part, self.hold.as_mut().map_or(out, |hold| &mut hold.parts));
    }
}

/// The tag at the start of `text`, between the parameters of a call; `Maybe` for no text.
fn call_mark(text: &str) -> Look<CallMark> {
    let literal = |tag, mark| tags::literal(text, tag).map(|()| mark);
    tags::parameter(text)
        .map(|(name, flag)| CallMark::Parameter(name.to_owned(), flag.map(str::to_owned)))
        .or(|| literal(tags::INVOKE_END, CallMark::End))
        .or(|| literal(tags::BLOCK_END, CallMark::After))
        .or(|| literal(tags::BLOCK, CallMark::After))
        .or(|| tags::invoke(text).map(|_| CallMark::After))
        .or(|| literal(tags::PARAMETER_END, CallMark::Stray))
        .or(|| tags::foreign_closer(text).map(|()| CallMark::Stray))
}

/// Appends a part, joined to the last one where both are text of one kind.
fn push_part(part: Part, out: &mut Vec<Part>) {
    match (out.last_mut(), &part) {
        (Some(Part::Reasoning(last)), Part::Reasoning(text)) | (Some(Part::Content(last)), Part::Content(text)) => {
            last.push_str(text);
        }
        (
            Some(Part::ToolCallArguments { index: last_index, fragment: last }),
            Part::ToolCallArguments { index, fragment },
        ) if last_index == index => last.push_str(fragment),
        _ => out.push(part),
    }
}

/// The bytes at the end of `text` that may be the start of the closing mark.
fn partial_close(text: &str) -> usize {
    (1..END_THINK.len()).rev().find(|length| text.ends_with(&END_THINK[..*length])).unwrap_or_default()
}

#[cfg(test)]
mod tests;
