//! A chat answer in the making: outputs to chunks, and chunks to the whole answer.

use super::logprobs::Scribe;
use super::response::{
    AnswerFunction, AnswerMessage, AnswerToolCall, ChatChoice, ChatChunk, ChatLogprobs, ChatResponse, ChunkChoice,
    ChunkDelta, FunctionDelta, StopReason, ToolCallDelta,
};
use crate::chat::Mode;
use crate::chat::parse::Part;
use crate::engine::request::GenerateRequest;
use crate::http::choice::{ChoiceEnd, Delta};
use crate::http::error::ApiError;
use crate::http::generate::{Output, Tally};
use crate::http::observe::new_id;
use crate::http::sse::Chunker;
use crate::http::state::{AppState, unix_now_s};
use crate::ids::TokenId;
use crate::sample::params::TokenLogprobs;

/// What the client wants to see.
#[derive(Clone, Copy, Debug)]
pub struct AnswerOptions {
    /// Reasoning.
    pub include_reasoning: bool,
    /// Token ids.
    pub return_token_ids: bool,
    /// Tokens of log-probabilities as ids.
    pub tokens_as_ids: bool,
    /// A usage chunk at the end.
    pub usage_last: bool,
    /// Usage in every chunk.
    pub usage_always: bool,
}

/// The answer to one chat request.
#[derive(Debug)]
pub struct Answer {
    head: Head,
    scribe: Scribe,
    options: AnswerOptions,
    wants_logprobs: bool,
    is_named: bool,
    tally: Tally,
    choices: Vec<Choice>,
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
    prompt_ids: Option<Vec<u32>>,
}

/// What all chunks repeat.
#[derive(Clone, Debug)]
struct Head {
    id: String,
    created: u64,
    model: String,
    system_fingerprint: String,
}

#[derive(Debug, Default)]
struct Choice {
    has_started: bool,
    n_calls: usize,
    n_whole_calls: usize,
    /// Used when the answer is given whole.
    whole: ChatChoice,
}

impl Answer {
    /// An answer before its first output.
    #[must_use]
    pub fn new(
        state: &AppState,
        request: &GenerateRequest,
        options: AnswerOptions,
        mode: Mode,
        is_named: bool,
    ) -> Self {
        let config = state.config();
        let head = Head {
            id: request.id.clone(),
            created: unix_now_s(),
            model: config.primary_name().to_owned(),
            system_fingerprint: config.system_fingerprint.clone(),
        };
        let shows_reasoning = mode == Mode::Thinking && options.include_reasoning;
        let choices = (0..request.n as usize).map(|index| Choice::new(index, shows_reasoning)).collect();
        Self {
            head,
            scribe: Scribe::new(std::sync::Arc::clone(state.tokenizer()), options.tokens_as_ids),
            wants_logprobs: request.logprobs.is_some(),
            is_named,
            tally: Tally { n_prompt: request.prompt.len(), ..Tally::default() },
            choices,
            prompt_logprobs: None,
            prompt_ids: options.return_token_ids.then(|| request.prompt.iter().map(|token| token.0).collect()),
            options,
        }
    }

    /// Adds an output to the whole answer.
    ///
    /// # Errors
    /// When the generation failed.
    pub fn fold(&mut self, output: Output) -> Result<(), ApiError> {
        self.tally.count(&output);
        match output {
            Output::Failed(error) => return Err(error),
            Output::PromptLogprobs { scores, .. } => self.prompt_logprobs = Some(scores),
            Output::Delta { choice, delta } => {
                let chunk = self.delta(choice, delta);
                self.with_choice(choice, |state| state.add(chunk));
            }
            Output::Finished { choice, end, .. } => {
                let chunk = self.finish(choice, end);
                self.with_choice(choice, |state| state.add(chunk));
            }
            Output::Started { .. } | Output::Done => {}
        }
        Ok(())
    }

    /// The whole answer.
    #[must_use]
    pub fn into_response(self) -> ChatResponse {
        ChatResponse {
            id: self.head.id,
            object: "chat.completion",
            created: self.head.created,
            model: self.head.model,
            system_fingerprint: self.head.system_fingerprint,
            choices: self.choices.into_iter().map(Choice::into_whole).collect(),
            usage: self.tally.into(),
            prompt_logprobs: self.prompt_logprobs.map(|scores| self.scribe.prompt(&scores)),
            prompt_token_ids: self.prompt_ids,
        }
    }

    fn with_choice(&mut self, choice: usize, apply: impl FnOnce(&mut Choice)) {
        if let Some(state) = self.choices.get_mut(choice) {
            apply(state);
        }
    }

    /// What an output adds to a choice.
    fn delta(&mut self, choice: usize, delta: Delta) -> ChunkChoice {
        let logprobs = self.wants_logprobs.then(|| ChatLogprobs {
            content: self.scribe.chat(&delta.content),
            reasoning_content: if self.options.include_reasoning {
                self.scribe.chat(&delta.reasoning)
            } else {
                Vec::new()
            },
        });
        let token_ids =
            self.options.return_token_ids.then(|| delta.tokens.iter().map(|scored| scored.token.0).collect());
        let mut message = ChunkDelta::default();
        for part in delta.parts {
            self.with_choice(choice, |state| state.count(&part));
            add_part(&mut message, part);
        }
        if !self.options.include_reasoning {
            message.reasoning = None;
        }
        message.reasoning_content.clone_from(&message.reasoning);
        ChunkChoice { index: choice, delta: message, logprobs, token_ids, ..ChunkChoice::default() }
    }

    fn finish(&self, choice: usize, end: ChoiceEnd) -> ChunkChoice {
        let calls = self.choices.get(choice).map_or((0, 0), |state| (state.n_calls, state.n_whole_calls));
        let finish_reason = Some(finish_reason(&end, calls, self.is_named));
        ChunkChoice { index: choice, finish_reason, stop_reason: stop_reason(end), ..ChunkChoice::default() }
    }

    fn chunk(&self, choices: Vec<ChunkChoice>) -> ChatChunk {
        let head = self.head.clone();
        ChatChunk {
            id: head.id,
            object: "chat.completion.chunk",
            created: head.created,
            model: head.model,
            system_fingerprint: head.system_fingerprint,
            choices,
            usage: self.options.usage_always.then(|| self.tally.into()),
            prompt_token_ids: None,
        }
    }

    /// The chunk that opens a choice, before its first other chunk.
    fn open(&mut self, choice: usize, chunks: &mut Vec<ChatChunk>) {
        let mut is_new = false;
        self.with_choice(choice, |state| is_new = !std::mem::replace(&mut state.has_started, true));
        if is_new {
            let delta = ChunkDelta { role: Some("assistant"), content: Some(String::new()), ..ChunkDelta::default() };
            let mut chunk = self.chunk(vec![ChunkChoice { index: choice, delta, ..ChunkChoice::default() }]);
            chunk.prompt_token_ids = self.prompt_ids.take();
            chunks.push(chunk);
        }
    }
}

impl Chunker for Answer {
    type Chunk = ChatChunk;

    fn chunks(&mut self, output: Output) -> Vec<ChatChunk> {
        self.tally.count(&output);
        let mut chunks = Vec::new();
        match output {
            Output::Delta { choice, delta } => {
                self.open(choice, &mut chunks);
                let chunk = self.delta(choice, delta);
                if !chunk.is_empty() {
                    chunks.push(self.chunk(vec![chunk]));
                }
            }
            Output::Finished { choice, end, .. } => {
                self.open(choice, &mut chunks);
                let chunk = self.finish(choice, end);
                chunks.push(self.chunk(vec![chunk]));
            }
            Output::Done if self.options.usage_last => {
                let mut chunk = self.chunk(Vec::new());
                chunk.usage = Some(self.tally.into());
                chunks.push(chunk);
            }
            Output::Done | Output::Started { .. } | Output::PromptLogprobs { .. } | Output::Failed(_) => {}
        }
        chunks
    }
}

impl ChunkChoice {
    fn is_empty(&self) -> bool {
        let no_scores = self.logprobs.as_ref().is_none_or(|lists| *lists == ChatLogprobs::default());
        let no_ids = self.token_ids.as_ref().is_none_or(Vec::is_empty);
        self.delta == ChunkDelta::default() && no_scores && no_ids
    }
}

impl Choice {
    fn new(index: usize, shows_reasoning: bool) -> Self {
        let empty = shows_reasoning.then(String::new);
        let message = AnswerMessage {
            role: "assistant",
            content: Some(String::new()),
            reasoning_content: empty.clone(),
            reasoning: empty,
            tool_calls: Vec::new(),
        };
        Self { whole: ChatChoice { index, message, ..ChatChoice::default() }, ..Self::default() }
    }

    fn count(&mut self, part: &Part) {
        match part {
            Part::ToolCallStart { .. } => self.n_calls += 1,
            Part::ToolCallEnd { .. } => self.n_whole_calls += 1,
            Part::Reasoning(_) | Part::Content(_) | Part::ToolCallArguments { .. } => {}
        }
    }

    /// Appends a chunk to the whole answer.
    fn add(&mut self, chunk: ChunkChoice) {
        let message = &mut self.whole.message;
        extend(&mut message.content, chunk.delta.content);
        extend(&mut message.reasoning, chunk.delta.reasoning);
        extend(&mut message.reasoning_content, chunk.delta.reasoning_content);
        for call in chunk.delta.tool_calls {
            add_call(&mut message.tool_calls, call);
        }
        if let Some(more) = chunk.logprobs {
            let lists = self.whole.logprobs.get_or_insert_default();
            lists.content.extend(more.content);
            lists.reasoning_content.extend(more.reasoning_content);
        }
        if let Some(more) = chunk.token_ids {
            self.whole.token_ids.get_or_insert_default().extend(more);
        }
        self.whole.finish_reason = self.whole.finish_reason.or(chunk.finish_reason);
        self.whole.stop_reason = self.whole.stop_reason.take().or(chunk.stop_reason);
    }

    /// Content is null where there are only calls.
    fn into_whole(mut self) -> ChatChoice {
        let message = &mut self.whole.message;
        if !message.tool_calls.is_empty() && message.content.as_deref() == Some("") {
            message.content = None;
        }
        self.whole
    }
}

/// Why a choice ended, in vLLM's words: the stop string or id.
#[must_use]
pub fn stop_reason(end: ChoiceEnd) -> Option<StopReason> {
    match end {
        ChoiceEnd::StopString(stop) => Some(StopReason::Text(stop)),
        ChoiceEnd::StopToken(TokenId(id)) => Some(StopReason::Token(id)),
        ChoiceEnd::Eos | ChoiceEnd::Length | ChoiceEnd::Calls => None,
    }
}

/// "length" wins over all; "tool_calls" only for whole calls that were not named by the request, as OpenAI's.
fn finish_reason(end: &ChoiceEnd, (n_calls, n_whole_calls): (usize, usize), is_named: bool) -> &'static str {
    match end {
        ChoiceEnd::Length => "length",
        _ if n_calls > 0 && n_calls == n_whole_calls && !is_named => "tool_calls",
        _ => "stop",
    }
}

fn add_part(delta: &mut ChunkDelta, part: Part) {
    match part {
        Part::Content(text) => extend(&mut delta.content, Some(text)),
        Part::Reasoning(text) => extend(&mut delta.reasoning, Some(text)),
        Part::ToolCallStart { index, name } => delta.tool_calls.push(ToolCallDelta {
            index,
            id: Some(format!("call_{}", new_id())),
            kind: Some("function"),
            function: FunctionDelta { name: Some(name), arguments: String::new() },
        }),
        Part::ToolCallArguments { index, fragment } => match delta.tool_calls.last_mut() {
            Some(call) if call.index == index => call.function.arguments.push_str(&fragment),
            _ => delta.tool_calls.push(ToolCallDelta {
                index,
                id: None,
                kind: None,
                function: FunctionDelta { name: None, arguments: fragment },
            }),
        },
        Part::ToolCallEnd { .. } => {}
    }
}

fn add_call(calls: &mut Vec<AnswerToolCall>, delta: ToolCallDelta) {
    match (delta.id, delta.function.name) {
        (Some(id), Some(name)) => calls.push(AnswerToolCall {
            id,
            kind: "function",
            function: AnswerFunction { name, arguments: delta.function.arguments },
        }),
        _ => {
            if let Some(call) = calls.get_mut(delta.index) {
                call.function.arguments.push_str(&delta.function.arguments);
            }
        }
    }
}

fn extend(text: &mut Option<String>, more: Option<String>) {
    if let Some(more) = more {
        text.get_or_insert_default().push_str(&more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finish_reasons() {
        assert_eq!(finish_reason(&ChoiceEnd::Eos, (0, 0), false), "stop");
        assert_eq!(finish_reason(&ChoiceEnd::Eos, (2, 2), false), "tool_calls");
        assert_eq!(finish_reason(&ChoiceEnd::Calls, (1, 1), false), "tool_calls");
        assert_eq!(finish_reason(&ChoiceEnd::Eos, (1, 1), true), "stop");
        assert_eq!(finish_reason(&ChoiceEnd::Length, (1, 0), false), "length");
        assert_eq!(finish_reason(&ChoiceEnd::Length, (1, 1), false), "length");
        assert_eq!(finish_reason(&ChoiceEnd::StopString("x".to_owned()), (1, 0), false), "stop");
    }
}
