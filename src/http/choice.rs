//! The text of one choice: tokens in, reasoning, content and calls out, with the log-probabilities that belong to them.
//!
//! Token → Decoder → StopMatcher → StreamParser. Streaming and whole answers use this one path, so they cannot differ.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

use crate::chat::Mode;
use crate::chat::parse::{CONTROL, DSML, End, ParserOptions, Part, StreamParser};
use crate::chat::stop::StopMatcher;
use crate::engine::event::FinishReason;
use crate::ids::TokenId;
use crate::sample::params::TokenLogprobs;
use crate::tokenizer::{Decoder, Tokenizer};

const END_OF_THINKING: &[u8] = b"</think>";

/// How the choices of a request turn tokens into text; the same for all of them.
#[derive(Clone, Debug)]
pub struct TextOptions {
    /// Strings that end a choice.
    pub stop: Vec<String>,
    /// Show the stop string.
    pub include_stop: bool,
    /// Ids that end a choice.
    pub stop_token_ids: Vec<TokenId>,
    /// Whether the end-of-sequence id does not.
    pub ignore_eos: bool,
    /// Show control tokens that are hidden otherwise.
    pub show_hidden: bool,
    /// Sort log-probabilities into those of the content and those of the reasoning.
    pub split_logprobs: bool,
    /// Chat: how to parse. None: the text is the content.
    pub chat: Option<ChatText>,
}

/// What only chat has.
#[derive(Clone, Debug)]
pub struct ChatText {
    /// How to parse.
    pub parser: ParserOptions,
    /// Text that the prompt ends in and that belongs to the answer: a forced call's opening.
    pub prefix: String,
    /// Calls a choice may make; the next one ends it. 0 drops every call.
    pub max_calls: usize,
}

/// What some tokens added to a choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Text and calls, in order.
    pub parts: Vec<Part>,
    /// Every token counted in usage, in order, whether it shows or not.
    pub tokens: Vec<ScoredText>,
    /// The tokens of the content, with `split_logprobs`.
    pub content: Vec<ScoredText>,
    /// The tokens of the reasoning, with `split_logprobs`.
    pub reasoning: Vec<ScoredText>,
}

/// A token, the text it completed, and its log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredText {
    /// The token.
    pub token: TokenId,
    /// Where its text starts: characters from the start of the choice.
    pub start_char: usize,
    /// When they were asked for.
    pub logprobs: Option<TokenLogprobs>,
}

/// Why a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChoiceEnd {
    /// The model ended it.
    Eos,
    /// A stop id.
    StopToken(TokenId),
    /// A stop string.
    StopString(String),
    /// max_tokens or the context's end.
    Length,
    /// It made all the calls it may make.
    Calls,
}

/// The state of one choice.
#[derive(Debug)]
pub struct ChoiceText {
    options: Arc<TextOptions>,
    tokenizer: Arc<Tokenizer>,
    decoder: Decoder,
    matcher: StopMatcher,
    parser: Option<StreamParser>,
    marks: Marks,
    /// Stop strings that end in so many tokens are text.
    min_tokens: usize,
    aligner: Option<Aligner>,
    n_chars: usize,
    /// Parts that the forced prefix gave, for the first delta.
    pending: Vec<Part>,
    reasoning_open: bool,
    n_reasoning_tokens: usize,
    n_tokens: usize,
    end: Option<ChoiceEnd>,
}

impl ChoiceText {
    /// A choice before its first token.
    #[must_use]
    pub fn new(tokenizer: &Arc<Tokenizer>, options: Arc<TextOptions>) -> Self {
        let mut parser = options.chat.as_ref().map(|chat| StreamParser::new(chat.parser.clone()));
        let mut pending = Vec::new();
        if let (Some(parser), Some(chat)) = (&mut parser, &options.chat)
            && !chat.prefix.is_empty()
        {
            parser.push(&chat.prefix, &mut pending);
        }
        Self {
            decoder: Decoder::new(Arc::clone(tokenizer)),
            tokenizer: Arc::clone(tokenizer),
            matcher: StopMatcher::new(options.stop.clone(), options.include_stop),
            parser,
            marks: Marks::default(),
            min_tokens: 0,
            aligner: options.split_logprobs.then(Aligner::default),
            n_chars: 0,
            pending,
            reasoning_open: options.chat.as_ref().is_some_and(|chat| chat.parser.mode == Mode::Thinking),
            n_reasoning_tokens: 0,
            n_tokens: 0,
            end: None,
            options,
        }
    }

    /// The same choice, which no stop string ends before it has more tokens than these.
    #[must_use]
    pub const fn with_min_tokens(mut self, min_tokens: usize) -> Self {
        self.min_tokens = min_tokens;
        self
    }

    /// Tokens so far: all that count in usage.
    #[must_use]
    pub const fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Tokens up to and with the one that ended the reasoning.
    #[must_use]
    pub const fn n_reasoning_tokens(&self) -> usize {
        self.n_reasoning_tokens
    }

    /// Why the choice ended, once it has.
    #[must_use]
    pub const fn end(&self) -> Option<&ChoiceEnd> {
        self.end.as_ref()
    }

    /// Takes a token. Afterwards [`Self::end`] may say that the choice is over; later tokens must not be pushed.
    pub fn push(&mut self, token: TokenId, logprobs: Option<TokenLogprobs>) -> Delta {
        self.n_tokens += 1;
        self.n_reasoning_tokens += usize::from(self.reasoning_open);
        let mut delta = Delta { parts: std::mem::take(&mut self.pending), ..Delta::default() };
        let scored = ScoredText { token, start_char: self.n_chars, logprobs };
        let is_silent = self.is_end(token) || self.is_stray_mark(token);
        let text = if is_silent { String::new() } else { self.decode(token) };
        let is_tag_mark = !is_silent && self.is_tag_mark(token);
        self.marks.grow(text.len(), is_tag_mark);
        self.n_chars += text.chars().count();
        if let Some(aligner) = &mut self.aligner {
            aligner.grow(text.len());
            if !is_silent && !is_tag_mark && (self.options.show_hidden || !self.tokenizer.is_hidden(token)) {
                aligner.add(scored.clone(), text.len());
            }
        }
        delta.tokens.push(scored);
        let (shown, stop) =
            if self.n_tokens <= self.min_tokens { (self.matcher.pass(&text), None) } else { self.matcher.push(&text) };
        self.parse(&shown, &mut delta);
        if self.tokenizer.token_bytes(token) == Some(END_OF_THINKING) || delta.parts.iter().any(leaves_reasoning) {
            self.reasoning_open = false;
        }
        if let Some(stop) = stop {
            self.close(ChoiceEnd::StopString(stop), &mut delta);
        } else {
            self.limit_calls(&mut delta);
        }
        delta
    }

    /// Ends the choice for the engine's reason and gives what was held back. Without effect on one that has ended.
    pub fn finish(&mut self, reason: FinishReason) -> Delta {
        let mut delta = Delta { parts: std::mem::take(&mut self.pending), ..Delta::default() };
        if self.end.is_some() {
            return delta;
        }
        let tail = self.decoder.finish();
        if let Some(aligner) = &mut self.aligner {
            aligner.grow(tail.len());
        }
        let (mut shown, stop) = self.matcher.push(&tail);
        let end = match (stop, reason) {
            (Some(stop), _) => ChoiceEnd::StopString(stop),
            (None, FinishReason::Eos) => ChoiceEnd::Eos,
            (None, FinishReason::StopToken(token)) => ChoiceEnd::StopToken(token),
            // Requested only follows an end of ours, which returned above.
            (None, FinishReason::Length | FinishReason::Requested) => ChoiceEnd::Length,
        };
        if !matches!(end, ChoiceEnd::StopString(_)) {
            shown.push_str(&self.matcher.finish());
        }
        self.parse(&shown, &mut delta);
        self.close(end, &mut delta);
        delta
    }

    fn is_end(&self, token: TokenId) -> bool {
        self.options.stop_token_ids.contains(&token) || (token == self.tokenizer.eos() && !self.options.ignore_eos)
    }

    /// A mark of reasoning, as its control token, where a chat answer has none to open or close: it must not show as text.
    /// The same characters spelt in ordinary tokens are text.
    fn is_stray_mark(&self, token: TokenId) -> bool {
        if self.parser.is_none() || self.options.show_hidden {
            return false;
        }
        match self.tokenizer.token_bytes(token) {
            Some(b"<think>") => true,
            Some(END_OF_THINKING) => !self.reasoning_open,
            _ => false,
        }
    }

    /// The control token of tags in a chat answer: the parser must know it from its characters in ordinary tokens.
    fn is_tag_mark(&self, token: TokenId) -> bool {
        let is_hidden = self.parser.is_some() && !self.options.show_hidden;
        is_hidden && self.tokenizer.token_bytes(token) == Some(DSML.as_bytes())
    }

    fn decode(&mut self, token: TokenId) -> String {
        if !self.options.show_hidden || !self.tokenizer.is_hidden(token) {
            let text = self.decoder.push(token);
            // What stands for a control token can't be text too; both are three bytes.
            return if self.parser.is_some() { text.replace(CONTROL, "\u{FFFD}") } else { text };
        }
        let mut text = self.decoder.finish();
        text.push_str(&String::from_utf8_lossy(self.tokenizer.token_bytes(token).unwrap_or_default()));
        text
    }

    /// Parses text; with log-probabilities one character at a time, so that each part's place in the text is known.
    fn parse(&mut self, text: &str, delta: &mut Delta) {
        let Some(parser) = &mut self.parser else {
            if !text.is_empty() {
                append(&mut delta.parts, Part::Content(text.to_owned()));
            }
            return;
        };
        let mut parts = Vec::new();
        let text = &*self.marks.mark(text);
        let Some(aligner) = &mut self.aligner else {
            parser.push(text, &mut parts);
            parts.into_iter().for_each(|part| append(&mut delta.parts, part));
            return;
        };
        for (at, letter) in text.char_indices() {
            let letter = &text[at..at + letter.len_utf8()];
            parser.push(letter, &mut parts);
            aligner.feed(if letter.starts_with(CONTROL) { DSML } else { letter });
            for part in parts.drain(..) {
                aligner.emit(&part, delta);
                append(&mut delta.parts, part);
            }
        }
    }

    fn close(&mut self, end: ChoiceEnd, delta: &mut Delta) {
        if let Some(parser) = &mut self.parser {
            let how = if matches!(end, ChoiceEnd::Eos | ChoiceEnd::StopToken(_)) { End::Complete } else { End::Cut };
            let mut parts = Vec::new();
            parser.finish(how, &mut parts);
            for part in parts {
                if let Some(aligner) = &mut self.aligner {
                    aligner.emit(&part, delta);
                }
                append(&mut delta.parts, part);
            }
        }
        if let (ChoiceEnd::StopString(_), Some(aligner)) = (&end, &mut self.aligner) {
            // The tokens of the stop string count, so they are scored, though their text does not show.
            let list = if self.reasoning_open { &mut delta.reasoning } else { &mut delta.content };
            list.extend(aligner.rest());
        }
        self.end = Some(end);
        self.limit_calls(delta);
    }

    /// Drops the calls beyond the limit, and ends the choice at the first of them.
    fn limit_calls(&mut self, delta: &mut Delta) {
        let Some(chat) = &self.options.chat else { return };
        let allowed = |part: &Part| call_index(part).is_none_or(|index| index < chat.max_calls);
        if chat.max_calls == 0 {
            delta.parts.retain(allowed);
        } else if let Some(at) = delta.parts.iter().position(|part| !allowed(part)) {
            delta.parts.truncate(at);
            self.end = Some(ChoiceEnd::Calls);
        }
    }
}

/// Where control tokens of tags stand in the text, from the decoder through the stop matcher to the parser.
#[derive(Debug, Default)]
struct Marks {
    /// Their first bytes, counted from the start of the choice; those that the parser has not been given.
    starts: VecDeque<usize>,
    /// Bytes decoded.
    n_bytes: usize,
    /// Bytes given to the parser.
    n_given_bytes: usize,
    /// The start of a mark whose rest the stop matcher holds back.
    cut: String,
}

impl Marks {
    /// Text that a token completed; a mark is the end of its text.
    fn grow(&mut self, n_bytes: usize, is_mark: bool) {
        self.n_bytes += n_bytes;
        if is_mark {
            self.starts.push_back(self.n_bytes - DSML.len());
        }
    }

    /// The next text as the parser takes it: control tokens as [`CONTROL`].
    fn mark<'a>(&mut self, text: &'a str) -> Cow<'a, str> {
        if self.starts.is_empty() {
            self.n_given_bytes += text.len();
            return Cow::Borrowed(text);
        }
        let text = std::mem::take(&mut self.cut) + text;
        let (mut marked, mut at) = (String::new(), 0);
        while let Some(start) =
            self.starts.front().map(|start| start - self.n_given_bytes).filter(|at| *at < text.len())
        {
            marked.push_str(&text[at..start]);
            at = start + DSML.len();
            if at > text.len() {
                text[start..].clone_into(&mut self.cut);
                self.n_given_bytes += start;
                return Cow::Owned(marked);
            }
            marked.push(CONTROL);
            self.starts.pop_front();
        }
        marked.push_str(&text[at..]);
        self.n_given_bytes += text.len();
        Cow::Owned(marked)
    }
}

/// Finds out which tokens made which part of the text.
#[derive(Debug, Default)]
struct Aligner {
    /// Tokens whose text has not been given out.
    tokens: VecDeque<Placed>,
    /// Bytes of text that tokens have given.
    n_bytes: usize,
    /// Bytes of text that the parser has taken.
    n_fed_bytes: usize,
    /// What the parser took since the end of the last text that it gave.
    window: String,
    /// Whether the last text was reasoning.
    in_reasoning: bool,
    /// Whether markup was taken out since the last text.
    broken: bool,
}

#[derive(Debug)]
struct Placed {
    scored: ScoredText,
    /// Bytes of the choice's text.
    span: std::ops::Range<usize>,
}

impl Aligner {
    /// Text that the newest token completed. Tokens that had completed none belong to it.
    fn grow(&mut self, n_bytes: usize) {
        self.n_bytes += n_bytes;
        for placed in self.tokens.iter_mut().rev().take_while(|placed| placed.span.is_empty()) {
            placed.span.end = self.n_bytes;
        }
    }

    /// The token that completed the last `n_bytes`.
    fn add(&mut self, scored: ScoredText, n_bytes: usize) {
        self.tokens.push_back(Placed { scored, span: self.n_bytes - n_bytes..self.n_bytes });
    }

    fn feed(&mut self, text: &str) {
        self.n_fed_bytes += text.len();
        self.window.push_str(text);
    }

    /// Gives the tokens of a part's text to the list it belongs to. Markup has no tokens there.
    fn emit(&mut self, part: &Part, delta: &mut Delta) {
        let (text, is_reasoning) = match part {
            Part::Reasoning(text) => (text, true),
            Part::Content(text) => (text, false),
            _ => {
                self.broken = true;
                return;
            }
        };
        let follows = !self.broken && is_reasoning == self.in_reasoning && self.window.starts_with(text.as_str());
        let at = if follows { Some(0) } else { self.window.rfind(text.as_str()) };
        let window_span = at.map_or(0..self.window.len(), |at| at..at + text.len());
        let window_start = self.n_fed_bytes - self.window.len();
        let span = window_start + window_span.start..window_start + window_span.end;
        let list = if is_reasoning { &mut delta.reasoning } else { &mut delta.content };
        while let Some(placed) = self.tokens.pop_front_if(|placed| placed.span.start < span.end) {
            if placed.span.end > span.start {
                list.push(placed.scored);
            }
        }
        self.window.drain(..window_span.end);
        self.in_reasoning = is_reasoning;
        self.broken = false;
    }

    fn rest(&mut self) -> impl Iterator<Item = ScoredText> {
        std::mem::take(&mut self.tokens).into_iter().map(|placed| placed.scored)
    }
}

/// Joins text to text of its kind, so that one delta has few parts whatever the splits.
fn append(parts: &mut Vec<Part>, part: Part) {
    match (parts.last_mut(), part) {
        (Some(Part::Reasoning(text)), Part::Reasoning(more)) | (Some(Part::Content(text)), Part::Content(more)) => {
            text.push_str(&more);
        }
        (
            Some(Part::ToolCallArguments { index, fragment }),
            Part::ToolCallArguments { index: same, fragment: more },
        ) if *index == same => fragment.push_str(&more),
        (_, part) => parts.push(part),
    }
}

const fn call_index(part: &Part) -> Option<usize> {
    match part {
        Part::ToolCallStart { index, .. } | Part::ToolCallArguments { index, .. } | Part::ToolCallEnd { index } => {
            Some(*index)
        }
        Part::Reasoning(_) | Part::Content(_) => None,
    }
}

const fn leaves_reasoning(part: &Part) -> bool {
    !matches!(part, Part::Reasoning(_))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_found_at_every_split() {
        let pieces = ["a", DSML, "b", DSML, "spelt ｜DSML｜", DSML, DSML];
        let text = pieces.concat();
        let want = format!("a{CONTROL}b{CONTROL}spelt ｜DSML｜{CONTROL}{CONTROL}");
        let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        for (nth, &first) in starts.iter().enumerate() {
            for &second in &starts[nth..] {
                let mut marks = Marks::default();
                pieces.iter().for_each(|piece| marks.grow(piece.len(), *piece == DSML));
                let given: String = [&text[..first], &text[first..second], &text[second..]]
                    .iter()
                    .map(|piece| marks.mark(piece).into_owned())
                    .collect();
                assert_eq!(given, want, "split at {first} and {second}");
            }
        }
    }
}
