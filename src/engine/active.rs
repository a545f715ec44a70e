//! One accepted request on the engine thread: its event stream, its clock, and the numbers it leaves in the metrics.
//!
//! The three terminal events consume the request, so there is exactly one.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc::error::TrySendError;

use super::event::{Event, FailReason, FinishReason, RequestStats};
use super::handle::Submitted;
use super::sequence::{Rank, SequenceSpec};
use crate::ids::{RequestId, TokenId};
use crate::kv::identity::CacheIdentity;
use crate::sample::params::{Sampled, TokenLogprobs};
use crate::telemetry::metrics::{Metrics, Outcome};

/// A request between its arrival and its terminal event.
#[derive(Debug)]
pub struct ActiveRequest {
    submitted: Submitted,
    choices: Vec<Choice>,
    n_cached_tokens: usize,
    n_prefilled: usize,
    has_counted_prompt: bool,
    has_reached_length: bool,
    started_at: Option<Instant>,
    first_token_at: Option<Instant>,
    last_token_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Choice {
    n_tokens: usize,
    last_token_at: Option<Instant>,
    is_finished: bool,
}

impl ActiveRequest {
    /// Takes a request over.
    #[must_use]
    pub fn new(submitted: Submitted) -> Self {
        let n_choices = submitted.request.get().n as usize;
        Self {
            submitted,
            choices: vec![Choice::default(); n_choices],
            n_cached_tokens: 0,
            n_prefilled: 0,
            has_counted_prompt: false,
            has_reached_length: false,
            started_at: None,
            first_token_at: None,
            last_token_at: None,
        }
    }

    /// Its number.
    #[must_use]
    pub const fn id(&self) -> RequestId {
        self.submitted.id
    }

    /// Its priority.
    #[must_use]
    pub const fn priority(&self) -> i32 {
        self.submitted.request.get().priority
    }

    /// Its choices.
    #[must_use]
    pub const fn n_choices(&self) -> u32 {
        self.submitted.request.get().n
    }

    /// What its sequences are to do; `seed` is for requests without one.
    #[must_use]
    pub fn spec(&self, eos: TokenId, identity: &CacheIdentity, seed: u64) -> SequenceSpec {
        let request = self.submitted.request.get();
        let mut sampling = request.sampling.clone();
        sampling.seed = sampling.seed.or(Some(seed));
        SequenceSpec {
            prompt: Arc::clone(&request.prompt),
            sampling,
            max_tokens: self.submitted.request.max_tokens() as usize,
            min_tokens: request.min_tokens as usize,
            eos: (!request.ignore_eos).then_some(eos),
            stop_token_ids: request.stop_token_ids.clone(),
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            cache_root: identity.root(request.cache_salt.as_deref()),
        }
    }

    /// The client has gone.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.submitted.events.is_closed()
    }

    /// Choices that the front end has ended and that have not ended yet.
    pub fn ended_by_client(&self) -> impl Iterator<Item = Rank> + '_ {
        let mask = self.submitted.control.finished_mask();
        let choices = self.choices.iter().zip(0u32..).filter(move |_| mask != 0);
        choices.filter(move |(choice, idx)| mask >> idx & 1 == 1 && !choice.is_finished).map(|(_, choice)| Rank {
            priority: self.priority(),
            request: self.id(),
            choice,
        })
    }

    /// A choice left the queue; the first one sends `Started`.
    pub fn start(&mut self, n_cached_tokens: usize, now: Instant) {
        if self.started_at.is_none() {
            self.started_at = Some(now);
            self.n_cached_tokens = n_cached_tokens;
            self.send(Event::Started { n_cached_tokens });
        }
    }

    /// Prefill progress; only ever forward, though a preempted prompt begins anew.
    pub fn progress(&mut self, n_done: usize, n_total: usize) {
        if n_done > self.n_prefilled {
            self.n_prefilled = n_done;
            self.send(Event::Prefill { n_done, n_total });
        }
    }

    /// The prompt's scores.
    pub fn scores(&self, scores: Vec<TokenLogprobs>) {
        self.send(Event::PromptLogprobs(scores));
    }

    /// A token of one choice.
    pub fn token(&mut self, choice_idx: u32, sampled: Sampled, now: Instant, metrics: &Metrics) {
        if self.first_token_at.is_none() {
            self.first_token_at = Some(now);
            metrics.time_to_first_token_seconds.observe(seconds(self.submitted.arrival, now));
        }
        self.count_prompt(metrics);
        self.last_token_at = Some(now);
        metrics.generation_tokens_total.inc();
        if let Some(choice) = self.choices.get_mut(choice_idx as usize) {
            choice.n_tokens += 1;
            if let Some(before) = choice.last_token_at.replace(now) {
                metrics.inter_token_latency_seconds.observe(seconds(before, now));
            }
        }
        self.send(Event::Token { choice: choice_idx, token: sampled.token, logprobs: sampled.logprobs });
    }

    /// A choice ended; says whether it was the last one.
    pub fn finish_choice(&mut self, choice_idx: u32, reason: FinishReason) -> bool {
        if let Some(choice) = self.choices.get_mut(choice_idx as usize) {
            choice.is_finished = true;
        }
        self.has_reached_length |= reason == FinishReason::Length;
        self.send(Event::ChoiceFinished { choice: choice_idx, reason });
        self.choices.iter().all(|choice| choice.is_finished)
    }

    /// Terminal: every choice ended.
    pub fn finish(mut self, now: Instant, metrics: &Metrics) {
        self.count_prompt(metrics);
        self.observe(now, metrics);
        metrics.count_outcome(if self.has_reached_length { Outcome::Length } else { Outcome::Stop });
        self.send(Event::Finished(self.stats(now)));
    }

    /// Terminal: it cannot go on.
    pub fn fail(self, reason: FailReason, metrics: &Metrics) {
        tracing::warn!(request = %self.submitted.request.get().id, %reason, "request failed");
        metrics.count_outcome(Outcome::Error);
        self.send(Event::Failed(reason));
    }

    /// Terminal: the client went away.
    pub fn cancel(self, metrics: &Metrics) {
        metrics.count_outcome(Outcome::Abort);
        self.send(Event::Cancelled);
    }

    fn send(&self, event: Event) {
        // Closed: the client has gone, and the next tick cancels. Full cannot be: the capacity is the number of events.
        if let Err(TrySendError::Full(event)) = self.submitted.events.try_send(event) {
            tracing::error!(request = %self.submitted.request.get().id, ?event, "an event found no room");
        }
    }

    fn count_prompt(&mut self, metrics: &Metrics) {
        if !std::mem::replace(&mut self.has_counted_prompt, true) {
            let (n_prompt, n_cached) = (self.n_prompt() as u64, self.n_cached_tokens as u64);
            metrics.prompt_tokens_total.inc_by(n_prompt);
            metrics.prompt_tokens_cached_total.inc_by(n_cached);
            metrics.add_prompt_source(n_prompt - n_cached, n_cached);
        }
    }

    fn n_prompt(&self) -> usize {
        self.submitted.request.get().prompt.len()
    }

    fn n_output(&self) -> usize {
        self.choices.iter().map(|choice| choice.n_tokens).sum()
    }

    fn stats(&self, now: Instant) -> RequestStats {
        let started_at = self.started_at.unwrap_or(now);
        let first_at = self.first_token_at.unwrap_or(now);
        RequestStats {
            n_prompt_tokens: self.n_prompt(),
            n_cached_tokens: self.n_cached_tokens,
            n_output_tokens: self.n_output(),
            queue_us: micros(self.submitted.arrival, started_at),
            prefill_us: micros(started_at, first_at),
            decode_us: micros(first_at, self.last_token_at.unwrap_or(now)),
        }
    }

    fn observe(&self, now: Instant, metrics: &Metrics) {
        let arrival = self.submitted.arrival;
        let started_at = self.started_at.unwrap_or(now);
        let (first_at, last_at) = (self.first_token_at.unwrap_or(now), self.last_token_at.unwrap_or(now));
        let longest = self.choices.iter().map(|choice| choice.n_tokens).max().unwrap_or(0);
        metrics.e2e_request_latency_seconds.observe(seconds(arrival, now));
        metrics.request_queue_time_seconds.observe(seconds(arrival, started_at));
        metrics.request_prefill_time_seconds.observe(seconds(started_at, first_at));
        metrics.request_decode_time_seconds.observe(seconds(first_at, last_at));
        metrics.request_inference_time_seconds.observe(seconds(started_at, last_at));
        if longest > 1 {
            metrics.request_time_per_output_token_seconds.observe(seconds(first_at, last_at) / (longest - 1) as f64);
        }
        metrics.request_prompt_tokens.observe(self.n_prompt() as f64);
        metrics.request_generation_tokens.observe(self.n_output() as f64);
        metrics.request_max_num_generation_tokens.observe(longest as f64);
        metrics.request_prefill_kv_computed_tokens.observe((self.n_prompt() - self.n_cached_tokens) as f64);
        metrics.request_params_n.observe(f64::from(self.n_choices()));
        if let Some(max_tokens) = self.submitted.request.get().max_tokens {
            metrics.request_params_max_tokens.observe(f64::from(max_tokens));
        }
    }
}

fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}

fn micros(from: Instant, to: Instant) -> u64 {
    u64::try_from(to.saturating_duration_since(from).as_micros()).unwrap_or(u64::MAX)
}
