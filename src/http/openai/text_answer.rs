//! A completion in the making: outputs to chunks, and chunks to the whole answer.

use std::sync::Arc;

use super::answer::stop_reason;
use super::echo::EchoPrompt;
use super::logprobs::Scribe;
use super::response::{CompletionChoice, CompletionLogprobs, CompletionResponse};
use crate::chat::parse::Part;
use crate::engine::request::GenerateRequest;
use crate::http::choice::{ChoiceEnd, Delta};
use crate::http::error::ApiError;
use crate::http::generate::{Output, Tally};
use crate::http::sse::Chunker;
use crate::http::state::{AppState, unix_now_s};
use crate::sample::params::TokenLogprobs;
use crate::tokenizer::Tokenizer;

/// What the client wants to see.
#[derive(Clone, Copy, Debug)]
pub struct TextAnswerOptions {
    /// The prompt before the text.
    pub echo: bool,
    /// vLLM's prompt_logprobs.
    pub prompt_logprobs: bool,
    /// Token ids.
    pub return_token_ids: bool,
    /// Tokens of log-probabilities as ids.
    pub tokens_as_ids: bool,
    /// A usage chunk at the end.
    pub usage_last: bool,
    /// Usage in every chunk.
    pub usage_always: bool,
}

/// The answer to one completion request.
#[derive(Debug)]
pub struct TextAnswer {
    /// Without choices.
    head: CompletionResponse,
    tokenizer: Arc<Tokenizer>,
    scribe: Scribe,
    options: TextAnswerOptions,
    wants_logprobs: bool,
    n: usize,
    tally: Tally,
    prompts: Vec<PromptState>,
    choices: Vec<ChoiceState>,
}

#[derive(Debug)]
struct PromptState {
    prompt: EchoPrompt,
    scores: Vec<TokenLogprobs>,
    n_chars: usize,
}

#[derive(Debug, Default)]
struct ChoiceState {
    has_started: bool,
    /// Used when the answer is given whole.
    whole: CompletionChoice,
}

impl TextAnswer {
    /// An answer before its first output. `request` holds what all prompts share.
    #[must_use]
    pub fn new(
        state: &AppState,
        request: &GenerateRequest,
        options: TextAnswerOptions,
        prompts: Vec<EchoPrompt>,
    ) -> Self {
        let config = state.config();
        let head = CompletionResponse {
            id: request.id.clone(),
            object: "text_completion",
            created: unix_now_s(),
            model: config.primary_name().to_owned(),
            system_fingerprint: config.system_fingerprint.clone(),
            choices: Vec::new(),
            usage: None,
        };
        let n = request.n as usize;
        let choice = |index| ChoiceState {
            whole: CompletionChoice { index, ..CompletionChoice::default() },
            ..ChoiceState::default()
        };
        Self {
            head,
            tokenizer: Arc::clone(state.tokenizer()),
            scribe: Scribe::new(Arc::clone(state.tokenizer()), options.tokens_as_ids),
            wants_logprobs: request.logprobs.is_some(),
            n,
            tally: Tally { n_prompt: prompts.iter().map(|prompt| prompt.ids.len()).sum(), ..Tally::default() },
            choices: (0..prompts.len() * n).map(choice).collect(),
            prompts: prompts.into_iter().map(|prompt| PromptState::new(prompt, options.echo)).collect(),
            options,
        }
    }

    /// Adds an output to the whole answer.
    ///
    /// # Errors
    /// When the generation failed.
    pub fn fold(&mut self, output: Output) -> Result<(), ApiError> {
        if let Output::Failed(error) = output {
            return Err(error);
        }
        for chunk in self.take(output) {
            if let Some(state) = self.choices.get_mut(chunk.index) {
                state.add(chunk);
            }
        }
        Ok(())
    }

    /// The whole answer.
    #[must_use]
    pub fn into_response(self) -> CompletionResponse {
        let choices = self.choices.into_iter().map(|state| state.whole).collect();
        CompletionResponse { choices, usage: Some(self.tally.into()), ..self.head }
    }

    /// What an output adds to the choices.
    fn take(&mut self, output: Output) -> Vec<CompletionChoice> {
        self.tally.count(&output);
        match output {
            Output::PromptLogprobs { prompt, scores } => {
                if let Some(state) = self.prompts.get_mut(prompt) {
                    state.scores = scores;
                }
                Vec::new()
            }
            Output::Delta { choice, delta } => {
                let mut chunks = self.open(choice);
                chunks.extend(self.delta(choice, delta));
                chunks
            }
            Output::Finished { choice, end, .. } => {
                let mut chunks = self.open(choice);
                chunks.push(finish(choice, end));
                chunks
            }
            Output::Started { .. } | Output::Done | Output::Failed(_) => Vec::new(),
        }
    }

    /// What a choice starts with: the prompt, its scores, its ids.
    fn open(&mut self, choice: usize) -> Vec<CompletionChoice> {
        let Some(state) = self.choices.get_mut(choice) else { return Vec::new() };
        let was_started = std::mem::replace(&mut state.has_started, true);
        let Some(prompt) = self.prompts.get(choice / self.n).filter(|_| !was_started) else { return Vec::new() };
        let options = self.options;
        if !(options.echo || options.prompt_logprobs || options.return_token_ids) {
            return Vec::new();
        }
        let ids = || prompt.prompt.ids.iter().map(|token| token.0).collect();
        let scores = || prompt.prompt.logprobs(&self.scribe, &self.tokenizer, &prompt.scores);
        vec![CompletionChoice {
            index: choice,
            text: if options.echo { prompt.prompt.text.clone() } else { String::new() },
            logprobs: (options.echo && self.wants_logprobs).then(scores),
            prompt_logprobs: options.prompt_logprobs.then(|| self.scribe.prompt(&prompt.scores)),
            prompt_token_ids: options.return_token_ids.then(ids),
            ..CompletionChoice::default()
        }]
    }

    fn delta(&self, choice: usize, delta: Delta) -> Option<CompletionChoice> {
        let base = self.prompts.get(choice / self.n).map_or(0, |prompt| prompt.n_chars);
        let logprobs = self.wants_logprobs.then(|| {
            let mut lists = CompletionLogprobs::default();
            for scored in &delta.tokens {
                self.scribe.append(&mut lists, base + scored.start_char, scored.token, scored.logprobs.as_ref());
            }
            lists
        });
        let token_ids = || delta.tokens.iter().map(|scored| scored.token.0).collect();
        let token_ids = self.options.return_token_ids.then(token_ids);
        let text = delta.parts.into_iter().filter_map(content).collect::<String>();
        let is_empty = text.is_empty() && !self.wants_logprobs && token_ids.is_none();
        let chunk = CompletionChoice { index: choice, text, logprobs, token_ids, ..CompletionChoice::default() };
        (!is_empty).then_some(chunk)
    }
}

impl Chunker for TextAnswer {
    type Chunk = CompletionResponse;

    fn chunks(&mut self, output: Output) -> Vec<CompletionResponse> {
        let is_done = matches!(output, Output::Done);
        let choices = self.take(output);
        let usage = self.options.usage_always.then(|| self.tally.into());
        let chunk = |choice| CompletionResponse { choices: vec![choice], usage, ..self.head.clone() };
        let mut chunks: Vec<_> = choices.into_iter().map(chunk).collect();
        if is_done && self.options.usage_last {
            chunks.push(CompletionResponse { usage: Some(self.tally.into()), ..self.head.clone() });
        }
        chunks
    }
}

impl PromptState {
    fn new(prompt: EchoPrompt, echo: bool) -> Self {
        let n_chars = if echo { prompt.text.chars().count() } else { 0 };
        Self { prompt, scores: Vec::new(), n_chars }
    }
}

impl ChoiceState {
    /// Appends a chunk to the whole answer.
    fn add(&mut self, chunk: CompletionChoice) {
        let whole = &mut self.whole;
        whole.text.push_str(&chunk.text);
        if let Some(more) = chunk.logprobs {
            let lists = whole.logprobs.get_or_insert_default();
            lists.text_offset.extend(more.text_offset);
            lists.token_logprobs.extend(more.token_logprobs);
            lists.tokens.extend(more.tokens);
            lists.top_logprobs.extend(more.top_logprobs);
        }
        if let Some(more) = chunk.token_ids {
            whole.token_ids.get_or_insert_default().extend(more);
        }
        whole.prompt_logprobs = whole.prompt_logprobs.take().or(chunk.prompt_logprobs);
        whole.prompt_token_ids = whole.prompt_token_ids.take().or(chunk.prompt_token_ids);
        whole.finish_reason = whole.finish_reason.or(chunk.finish_reason);
        whole.stop_reason = whole.stop_reason.take().or(chunk.stop_reason);
    }
}

fn finish(choice: usize, end: ChoiceEnd) -> CompletionChoice {
    let finish_reason = Some(if end == ChoiceEnd::Length { "length" } else { "stop" });
    CompletionChoice { index: choice, finish_reason, stop_reason: stop_reason(end), ..CompletionChoice::default() }
}

fn content(part: Part) -> Option<String> {
    match part {
        Part::Content(text) => Some(text),
        _ => None,
    }
}
