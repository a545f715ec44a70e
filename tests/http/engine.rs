//! A stand-in for the engine: answers requests with scripted tokens and remembers what it was asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use flashd::engine::event::{Event, FailReason, FinishReason, RequestStats};
use flashd::engine::handle::{Command, EngineHandle, EngineHealth, EngineSide, Submitted};
use flashd::engine::request::{EngineLimits, GenerateRequest};
use flashd::ids::TokenId;
use flashd::sample::params::{ScoredToken, TokenLogprobs};
use flashd::tokenizer::Tokenizer;
use tokio::sync::{Semaphore, watch};

/// What the engine answers.
#[derive(Clone, Debug)]
pub struct Script {
    /// The tokens of every choice, before the end token.
    pub tokens: Vec<TokenId>,
    /// Whether the end token follows them; else the choice ends at its length.
    pub ends: bool,
    /// Cached tokens that it claims.
    pub n_cached: usize,
    /// Fails before the token of this index.
    pub fails_at: Option<usize>,
    /// Goes away without a word before the token of this index.
    pub vanishes_at: Option<usize>,
    /// Needs a permit of this gate for every step.
    pub gate: Option<Arc<Semaphore>>,
}

/// The engine and what it has seen.
pub struct FakeEngine {
    pub handle: EngineHandle,
    pub health: watch::Sender<EngineHealth>,
    pub seen: Arc<Seen>,
}

/// What was asked, and how it ended.
#[derive(Debug, Default)]
pub struct Seen {
    requests: Mutex<Vec<GenerateRequest>>,
    cancelled: watch::Sender<usize>,
    requested_ends: watch::Sender<usize>,
}

impl Script {
    pub fn new(tokens: Vec<TokenId>) -> Self {
        Self { tokens, ends: true, n_cached: 0, fails_at: None, vanishes_at: None, gate: None }
    }
}

impl FakeEngine {
    pub fn start(limits: EngineLimits, script: Script) -> Self {
        let (handle, EngineSide { mut commands, health }) = EngineHandle::new(limits);
        health.send_replace(EngineHealth::Ready);
        let seen = Arc::new(Seen::default());
        let (shared, eos) = (Arc::clone(&seen), handle.limits().eos_token_id);
        let (deadline_tx, deadline) = watch::channel(None);
        tokio::spawn(async move {
            while let Some(command) = commands.recv().await {
                match command {
                    Command::Submit(submitted) => {
                        shared.requests.lock().unwrap().push(submitted.request.get().clone());
                        let run =
                            Run { script: script.clone(), eos, seen: Arc::clone(&shared), deadline: deadline.clone() };
                        tokio::spawn(run.run(*submitted));
                    }
                    Command::Drain { deadline } => {
                        deadline_tx.send_replace(Some(deadline));
                    }
                }
            }
        });
        Self { handle, health, seen }
    }
}

impl Seen {
    pub fn requests(&self) -> Vec<GenerateRequest> {
        self.requests.lock().unwrap().clone()
    }

    pub fn last(&self) -> GenerateRequest {
        self.requests().pop().expect("a request")
    }

    pub async fn wait_for_cancelled(&self, n: usize) {
        self.cancelled.subscribe().wait_for(|seen| *seen >= n).await.unwrap();
    }

    pub fn n_requested_ends(&self) -> usize {
        *self.requested_ends.borrow()
    }
}

struct Run {
    script: Script,
    eos: TokenId,
    seen: Arc<Seen>,
    deadline: watch::Receiver<Option<std::time::Instant>>,
}

impl Run {
    async fn run(self, submitted: Submitted) {
        let end = tokio::select! {
            end = self.generate(&submitted) => end,
            () = submitted.events.closed() => {
                self.seen.cancelled.send_modify(|n| *n += 1);
                return;
            }
            () = self.late() => Some(Event::Failed(FailReason::ShuttingDown)),
        };
        if let Some(event) = end {
            let _ = submitted.events.send(event).await;
        }
    }

    async fn late(&self) {
        let mut deadline = self.deadline.clone();
        let at = deadline.wait_for(Option::is_some).await.map(|at| *at);
        match at {
            Ok(Some(at)) => tokio::time::sleep_until(at.into()).await,
            _ => std::future::pending().await,
        }
    }

    /// Sends everything; returns the terminal event.
    async fn generate(&self, submitted: &Submitted) -> Option<Event> {
        let request = submitted.request.get();
        let send = |event| async move { submitted.events.send(event).await.is_ok() };
        send(Event::Started { n_cached_tokens: self.script.n_cached }).await;
        if let Some(k) = request.prompt_logprobs {
            let scores = request.prompt.iter().skip(1).enumerate().map(|(at, token)| score(at, *token, k)).collect();
            send(Event::PromptLogprobs(scores)).await;
        }
        let mut open: Vec<u32> = (0..request.n).collect();
        for step in 0.. {
            if let Some(gate) = &self.script.gate {
                gate.acquire().await.unwrap().forget();
            }
            if self.script.fails_at == Some(step) {
                return Some(Event::Failed(FailReason::Internal));
            }
            if self.script.vanishes_at == Some(step) {
                return None;
            }
            let mut still_open = Vec::new();
            for choice in open {
                let (events, is_over) = self.step(submitted, choice, step);
                for event in events {
                    send(event).await;
                }
                if !is_over {
                    still_open.push(choice);
                }
            }
            open = still_open;
            if open.is_empty() {
                break;
            }
        }
        let n_prompt_tokens = request.prompt.len();
        Some(Event::Finished(RequestStats { n_prompt_tokens, ..RequestStats::default() }))
    }

    fn step(&self, submitted: &Submitted, choice: u32, step: usize) -> (Vec<Event>, bool) {
        let request = submitted.request.get();
        let end = |reason| Event::ChoiceFinished { choice, reason };
        if submitted.control.is_finished(choice) {
            self.seen.requested_ends.send_modify(|n| *n += 1);
            return (vec![end(FinishReason::Requested)], true);
        }
        if step >= submitted.request.max_tokens() as usize {
            return (vec![end(FinishReason::Length)], true);
        }
        let token = match self.script.tokens.get(step) {
            Some(token) => *token,
            None if self.script.ends => self.eos,
            None => return (vec![end(FinishReason::Length)], true),
        };
        let logprobs = request.logprobs.map(|k| score(step, token, k));
        let mut events = vec![Event::Token { choice, token, logprobs }];
        if request.stop_token_ids.contains(&token) {
            events.push(end(FinishReason::StopToken(token)));
        } else if token == self.eos && !request.ignore_eos {
            events.push(end(FinishReason::Eos));
        } else if step + 1 >= submitted.request.max_tokens() as usize {
            events.push(end(FinishReason::Length));
        }
        let is_over = events.len() > 1;
        (events, is_over)
    }
}

/// A made-up score that names its step.
fn score(step: usize, token: TokenId, k: u32) -> TokenLogprobs {
    let scored = |at: u32| ScoredToken { token: TokenId(token.0 + at), logprob: -(step as f32) - at as f32 / 64.0 };
    TokenLogprobs { chosen: scored(0), rank: 1, top: (0..k).map(scored).collect() }
}

/// The tokens of a text in pieces of `size` characters; the marks of thinking and calls stay one token.
pub fn tokens_of(tokenizer: &Tokenizer, text: &str, size: usize) -> Vec<TokenId> {
    let marks = HashMap::from(["</think>", "｜DSML｜"].map(|mark| (mark, tokenizer.control(mark).unwrap())));
    let mut ids = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        if let Some((mark, id)) = marks.iter().find(|(mark, _)| rest.starts_with(**mark)) {
            ids.push(*id);
            rest = &rest[mark.len()..];
            continue;
        }
        let next_mark = marks.keys().filter_map(|mark| rest.find(mark)).min().unwrap_or(rest.len());
        let piece = rest.char_indices().nth(size).map_or(rest.len(), |(at, _)| at).min(next_mark);
        ids.extend(tokenizer.encode_text(&rest[..piece]).unwrap());
        rest = &rest[piece..];
    }
    ids
}
