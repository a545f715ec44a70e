//! From checked requests to a stream of text: submit, follow the engine's events, end choices, count, log.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use futures::stream::{self, Stream, StreamExt};

use super::choice::{ChoiceEnd, ChoiceText, Delta, TextOptions};
use super::error::{ApiError, ErrorKind};
use super::state::{AppState, InFlight};
use crate::engine::event::{Event, RequestStats};
use crate::engine::handle::Submission;
use crate::engine::request::{GenerateRequest, ValidRequest};
use crate::sample::params::TokenLogprobs;
use crate::tokenizer::Tokenizer;

/// What a request's generation says; `choice` counts over all prompts (prompt x n + choice).
#[derive(Debug)]
pub enum Output {
    /// A prompt left the queue.
    Started {
        /// Its tokens from the prefix cache.
        n_cached_tokens: usize,
    },
    /// Scores of the positions 1.. of a prompt.
    PromptLogprobs {
        /// Which prompt.
        prompt: usize,
        /// The scores.
        scores: Vec<TokenLogprobs>,
    },
    /// Text.
    Delta {
        /// Which choice.
        choice: usize,
        /// The text.
        delta: Delta,
    },
    /// A choice ended; nothing of it follows.
    Finished {
        /// Which choice.
        choice: usize,
        /// Why.
        end: ChoiceEnd,
        /// Tokens spent on reasoning.
        n_reasoning_tokens: usize,
    },
    /// It cannot go on; nothing follows.
    Failed(ApiError),
    /// Every choice has ended; nothing follows.
    Done,
}

/// Tokens counted for usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Prompt tokens.
    pub n_prompt: usize,
    /// Prompt tokens from the prefix cache.
    pub n_cached: usize,
    /// Generated tokens.
    pub n_output: usize,
    /// Generated tokens spent on reasoning.
    pub n_reasoning: usize,
}

impl Tally {
    /// Counts what an output adds.
    pub fn count(&mut self, output: &Output) {
        match output {
            Output::Started { n_cached_tokens } => self.n_cached += n_cached_tokens,
            Output::Delta { delta, .. } => self.n_output += delta.tokens.len(),
            Output::Finished { n_reasoning_tokens, .. } => self.n_reasoning += n_reasoning_tokens,
            Output::PromptLogprobs { .. } | Output::Failed(_) | Output::Done => {}
        }
    }
}

/// A request that runs. Dropping it cancels everything.
#[derive(Debug)]
pub struct Generation {
    runs: Vec<Run>,
    record: Record,
}

/// What is known about the request when it starts, for its line in the log.
#[derive(Clone, Debug)]
pub struct RequestInfo {
    /// The id clients see.
    pub id: String,
    /// The path.
    pub endpoint: &'static str,
    /// Whether it streams.
    pub stream: bool,
}

impl Generation {
    /// Checks every prompt against the engine's limits, then submits them all, or none.
    ///
    /// # Errors
    /// What the engine refuses.
    pub fn start(
        state: &AppState,
        info: RequestInfo,
        requests: Vec<GenerateRequest>,
        options: TextOptions,
        in_flight: Arc<InFlight>,
    ) -> Result<Self, ApiError> {
        let n_prompt = requests.iter().map(|request| request.prompt.len()).sum();
        let record = Record {
            info,
            model: state.config().primary_name().to_owned(),
            times: Times::new(Instant::now()),
            tally: Tally { n_prompt, ..Tally::default() },
            stats: RequestStats::default(),
            outcome: "cancelled",
            _in_flight: in_flight,
        };
        if state.config().log_requests {
            record.log_prompts(state.tokenizer(), &requests);
        }
        let limits = state.engine().limits();
        let valid = requests.into_iter().map(|request| ValidRequest::new(request, limits));
        let valid = valid.collect::<Result<Vec<_>, _>>()?;
        let options = Arc::new(options);
        let mut runs = Vec::with_capacity(valid.len());
        for (prompt, request) in valid.into_iter().enumerate() {
            let n = request.get().n as usize;
            let min_tokens = request.get().min_tokens as usize;
            let choice = |_| ChoiceText::new(state.tokenizer(), Arc::clone(&options)).with_min_tokens(min_tokens);
            let choices = (0..n).map(choice).collect();
            // A refusal drops the runs before it, which cancels them.
            let submission = state.engine().submit(request)?;
            runs.push(Run { prompt, submission, choices, ready: VecDeque::new(), is_over: false });
        }
        Ok(Self { runs, record })
    }

    /// Prompt tokens over all prompts.
    #[must_use]
    pub const fn n_prompt_tokens(&self) -> usize {
        self.record.tally.n_prompt
    }

    /// The outputs of all prompts as they come, ending in `Done` or `Failed`.
    pub fn outputs(self) -> impl Stream<Item = Output> + Send {
        let runs = self.runs.into_iter().map(|run| stream::unfold(run, Run::next).boxed());
        let state = Merged { runs: stream::select_all(runs), record: self.record, is_over: false };
        stream::unfold(state, |mut state| async move {
            if state.is_over {
                return None;
            }
            let output = state.next().await;
            Some((output, state))
        })
    }
}

struct Merged<S> {
    runs: stream::SelectAll<S>,
    record: Record,
    is_over: bool,
}

impl<S: Stream<Item = RunOutput> + Unpin> Merged<S> {
    async fn next(&mut self) -> Output {
        loop {
            let output = match self.runs.next().await {
                None => Output::Done,
                Some(RunOutput::Stats(stats)) => {
                    self.record.add(&stats);
                    continue;
                }
                Some(RunOutput::Output(output)) => output,
            };
            self.record.tally.count(&output);
            self.record.times.see(&output, Instant::now());
            if let Output::Done = output {
                self.record.outcome = "finished";
                self.is_over = true;
            } else if let Output::Failed(_) = output {
                self.record.outcome = "failed";
                self.is_over = true;
            }
            return output;
        }
    }
}

/// One prompt in the engine.
#[derive(Debug)]
struct Run {
    prompt: usize,
    submission: Submission,
    choices: Vec<ChoiceText>,
    ready: VecDeque<RunOutput>,
    is_over: bool,
}

#[derive(Debug)]
enum RunOutput {
    Output(Output),
    Stats(RequestStats),
}

impl Run {
    async fn next(mut self) -> Option<(RunOutput, Self)> {
        loop {
            if let Some(output) = self.ready.pop_front() {
                return Some((output, self));
            }
            if self.is_over {
                return None;
            }
            match self.submission.next().await {
                Some(event) => self.take(event),
                None => self.fail(ApiError::new(ErrorKind::NotServing, "the engine has ended")),
            }
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Started { n_cached_tokens } => self.put(Output::Started { n_cached_tokens }),
            Event::PromptLogprobs(scores) => self.put(Output::PromptLogprobs { prompt: self.prompt, scores }),
            Event::Prefill { .. } => {}
            Event::Token { choice, token, logprobs } => {
                self.update(choice, |text| text.push(token, logprobs));
            }
            Event::ChoiceFinished { choice, reason } => self.update(choice, |text| text.finish(reason)),
            Event::Finished(stats) => {
                self.ready.push_back(RunOutput::Stats(stats));
                self.is_over = true;
            }
            Event::Failed(reason) => self.fail(reason.into()),
            Event::Cancelled => self.fail(ApiError::new(ErrorKind::NotServing, "the request was cancelled")),
        }
    }

    /// Applies an event to a choice; what the engine sent before it knew that the choice has ended is ignored.
    fn update(&mut self, choice: u32, apply: impl FnOnce(&mut ChoiceText) -> Delta) {
        let global = self.prompt * self.choices.len() + choice as usize;
        let Some(text) = self.choices.get_mut(choice as usize).filter(|text| text.end().is_none()) else { return };
        let delta = apply(text);
        let (end, n_reasoning_tokens) = (text.end().cloned(), text.n_reasoning_tokens());
        if delta != Delta::default() {
            self.put(Output::Delta { choice: global, delta });
        }
        if let Some(end) = end {
            if matches!(end, ChoiceEnd::StopString(_) | ChoiceEnd::Calls) {
                self.submission.finish_choice(choice);
            }
            self.put(Output::Finished { choice: global, end, n_reasoning_tokens });
        }
    }

    fn put(&mut self, output: Output) {
        self.ready.push_back(RunOutput::Output(output));
    }

    fn fail(&mut self, error: ApiError) {
        self.put(Output::Failed(error));
        self.is_over = true;
    }
}

/// When things happened, as seen from here: the engine gives no numbers for a request that fails or is cancelled.
#[derive(Clone, Copy, Debug)]
struct Times {
    start: Instant,
    /// The first prompt left the queue.
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Times {
    const fn new(start: Instant) -> Self {
        Self { start, started: None, first_token: None, last_token: None }
    }

    fn see(&mut self, output: &Output, now: Instant) {
        match output {
            Output::Started { .. } => {
                self.started.get_or_insert(now);
            }
            Output::Delta { delta, .. } if !delta.tokens.is_empty() => {
                self.first_token.get_or_insert(now);
                self.last_token = Some(now);
            }
            _ => {}
        }
    }

    /// What took how long until `now`; a stage that was not left lasts until then.
    fn stats(&self, now: Instant) -> RequestStats {
        let started = self.started.unwrap_or(now);
        let first_token = self.first_token.unwrap_or(now);
        RequestStats {
            queue_us: micros(self.start, started),
            prefill_us: micros(started, first_token),
            decode_us: micros(first_token, self.last_token.unwrap_or(first_token)),
            ..RequestStats::default()
        }
    }
}

fn micros(from: Instant, to: Instant) -> u64 {
    u64::try_from(to.saturating_duration_since(from).as_micros()).unwrap_or(u64::MAX)
}

/// One line in the log when the request is over, however it ends. Never a word of its text; `log_requests` adds a line
/// with the prompt when the request starts.
#[derive(Debug)]
struct Record {
    info: RequestInfo,
    model: String,
    times: Times,
    tally: Tally,
    /// The engine's own numbers, of prompts that were finished.
    stats: RequestStats,
    outcome: &'static str,
    _in_flight: Arc<InFlight>,
}

impl Record {
    fn log_prompts(&self, tokenizer: &Tokenizer, requests: &[GenerateRequest]) {
        for request in requests {
            let bytes = request.prompt.iter().flat_map(|token| tokenizer.token_bytes(*token).unwrap_or_default());
            let prompt = String::from_utf8_lossy(&bytes.copied().collect::<Vec<u8>>()).into_owned();
            tracing::info!(request_id = %self.info.id, %prompt, "prompt");
        }
    }

    fn add(&mut self, stats: &RequestStats) {
        self.stats.queue_us = self.stats.queue_us.max(stats.queue_us);
        self.stats.prefill_us = self.stats.prefill_us.max(stats.prefill_us);
        self.stats.decode_us = self.stats.decode_us.max(stats.decode_us);
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let now = Instant::now();
        let stats = if self.outcome == "finished" { self.stats.clone() } else { self.times.stats(now) };
        tracing::info!(
            request_id = %self.info.id,
            endpoint = self.info.endpoint,
            model = %self.model,
            stream = self.info.stream,
            outcome = self.outcome,
            n_prompt_tokens = self.tally.n_prompt,
            n_cached_tokens = self.tally.n_cached,
            n_output_tokens = self.tally.n_output,
            n_reasoning_tokens = self.tally.n_reasoning,
            queue_us = stats.queue_us,
            prefill_us = stats.prefill_us,
            decode_us = stats.decode_us,
            total_us = micros(self.times.start, now),
            "request"
        );
    }
}

/// Runs text work off the async threads; when the caller goes away, `cancelled` tells the work to stop.
///
/// # Errors
/// What the work returns; 500 when it panics.
pub async fn off_thread<T: Send + 'static>(
    tokenizer: &Arc<Tokenizer>,
    work: impl FnOnce(&Tokenizer, &(dyn Fn() -> bool + Sync)) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let tokenizer = Arc::clone(tokenizer);
    // The caller holds the strong side: once it is dropped, upgrading fails.
    let alive = Arc::new(());
    let watch = Arc::downgrade(&alive);
    let task = tokio::task::spawn_blocking(move || work(&tokenizer, &|| watch.strong_count() == 0));
    let result = task.await.map_err(ApiError::internal)?;
    drop(alive);
    result
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::http::choice::ScoredText;
    use crate::ids::TokenId;

    #[test]
    fn a_request_that_ends_early_has_its_times() {
        let start = Instant::now();
        let at = |us: u64| start + Duration::from_micros(us);
        let mut times = Times::new(start);
        let stages = |times: &Times, now| {
            let stats = times.stats(now);
            (stats.queue_us, stats.prefill_us, stats.decode_us)
        };
        assert_eq!(stages(&times, at(5)), (5, 0, 0));
        times.see(&Output::Started { n_cached_tokens: 0 }, at(10));
        assert_eq!(stages(&times, at(12)), (10, 2, 0));
        let scored = ScoredText { token: TokenId(1), start_char: 0, logprobs: None };
        for us in [30, 60, 100] {
            let delta = Delta { tokens: vec![scored.clone()], ..Delta::default() };
            times.see(&Output::Delta { choice: 0, delta }, at(us));
        }
        assert_eq!(stages(&times, at(500)), (10, 20, 70));
    }
}
