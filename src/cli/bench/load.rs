//! A closed loop of requests at one concurrency, with a progress bar; Ctrl-C ends it and keeps what is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::request::Target;
use super::stats::{Outcome, Summary};

/// Smaller ids are left out of prompts: that is where vocabularies keep their control tokens.
const MIN_TOKEN_ID: u32 = 100;

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Point {
    pub concurrency: u32,
    pub n_requests: u32,
    /// Tokens of each prompt.
    pub n_prompt: u32,
    /// Tokens of each answer.
    pub n_output: u32,
}

/// What all points share.
pub(super) struct Load<'a> {
    pub target: &'a Target,
    pub seed: u64,
    pub max_token_id: u32,
}

/// What one worker needs; workers take the next request until none is left.
struct Worker {
    target: Target,
    point: Point,
    prompts: PromptSource,
    next_request: Arc<AtomicU32>,
    outcomes: mpsc::Sender<Outcome>,
}

/// Prompts that share no prefix with one another.
#[derive(Clone, Copy)]
pub(super) struct PromptSource {
    /// Of this point.
    pub seed: u64,
    pub max_token_id: u32,
}

impl Load<'_> {
    /// Runs all requests of a point. `point_idx` tells its prompts from those of other points.
    pub async fn drive(&self, point: Point, point_idx: u64) -> Summary {
        let bar = request_bar(point);
        let (sender, mut outcomes) = mpsc::channel(point.concurrency as usize);
        let prompts = PromptSource { seed: mix(self.seed ^ mix(point_idx)), max_token_id: self.max_token_id };
        let next_request = Arc::new(AtomicU32::new(0));
        let started = Instant::now();
        let mut workers = JoinSet::new();
        for _ in 0..point.concurrency.min(point.n_requests) {
            let worker = Worker {
                target: self.target.clone(),
                point,
                prompts,
                next_request: Arc::clone(&next_request),
                outcomes: sender.clone(),
            };
            workers.spawn(worker.run());
        }
        drop(sender);
        let mut done = Vec::new();
        let is_interrupted = loop {
            tokio::select! {
                outcome = outcomes.recv() => match outcome {
                    Some(outcome) => done.push(outcome),
                    None => break false,
                },
                _ = tokio::signal::ctrl_c() => break true,
            }
            bar.inc(1);
        };
        let ended = Instant::now();
        workers.abort_all();
        bar.finish_and_clear();
        let mut summary = Summary::new(point, done, ended - started);
        summary.is_interrupted = is_interrupted;
        summary
    }
}

impl Worker {
    async fn run(self) {
        loop {
            let request_idx = self.next_request.fetch_add(1, Ordering::Relaxed);
            if request_idx >= self.point.n_requests {
                return;
            }
            let prompt = self.prompts.prompt(request_idx, self.point.n_prompt);
            let result = self.target.complete(&prompt, self.point.n_output as usize).await;
            let outcome = result.map_err(|error| format!("{error:#}"));
            if self.outcomes.send(outcome).await.is_err() {
                return;
            }
        }
    }
}

impl PromptSource {
    pub fn prompt(self, request_idx: u32, n_tokens: u32) -> Vec<u32> {
        let n_ids = u64::from(self.max_token_id - MIN_TOKEN_ID) + 1;
        let stream = mix(self.seed.wrapping_add(u64::from(request_idx)));
        let id = |i: u32| MIN_TOKEN_ID + (mix(stream ^ u64::from(i)) % n_ids) as u32;
        (0..n_tokens).map(id).collect()
    }
}

fn request_bar(point: Point) -> ProgressBar {
    let bar = ProgressBar::new(point.n_requests.into());
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:40} {pos}/{len} requests {elapsed}") {
        bar.set_style(style);
    }
    bar.set_message(format!("{} at once, {} + {} tokens", point.concurrency, point.n_prompt, point.n_output));
    bar.enable_steady_tick(std::time::Duration::from_millis(250));
    bar
}

/// The output function of SplitMix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}
