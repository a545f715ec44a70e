//! Scheduler and fake device in a loop without threads, checked after every step.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use flashd::engine::event::FinishReason;
use flashd::engine::scheduler::{SETTLING_STEPS, Scheduler, SchedulerConfig};
use flashd::engine::sequence::{Rank, SequenceSpec};
use flashd::engine::stage::StepTicket;
use flashd::engine::step::{Started, Update};
use flashd::ids::{RequestId, TokenId};
use flashd::kv::identity::CacheIdentity;
use flashd::model::batch::{Capacity, Executor, RowKind, StepPlan};
use flashd::sample::params::{SamplingParams, TokenLogprobs};

use crate::device::{FakeDevice, Faults};
use crate::oracle::{Expected, expected};

pub const VOCAB: usize = 61;
pub const EOS: TokenId = TokenId(0);

#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub n_slots: usize,
    pub n_blocks: usize,
    pub n_checkpoints: usize,
    pub n_rows: usize,
}

impl Size {
    pub fn capacity(self) -> Capacity {
        Capacity {
            n_slots: self.n_slots,
            n_blocks: self.n_blocks,
            n_checkpoints: self.n_checkpoints,
            max_rows: self.n_rows,
            max_tokens: 1 << 20,
            vocab_size: VOCAB,
        }
    }

    pub fn config(self) -> SchedulerConfig {
        SchedulerConfig {
            max_num_seqs: self.n_slots,
            max_num_batched_tokens: self.n_rows,
            long_prefill_token_threshold: self.n_rows / 2,
            prefill_step_time: Duration::ZERO,
            enable_prefix_caching: true,
            checkpoint_every_blocks: 1,
        }
    }
}

/// What one choice has produced so far.
#[derive(Debug, Default)]
pub struct Produced {
    pub tokens: Vec<TokenId>,
    pub scores: Option<Vec<TokenLogprobs>>,
    pub reason: Option<FinishReason>,
    pub failed: bool,
}

#[derive(Debug, Default)]
pub struct Totals {
    pub n_steps: usize,
    pub n_preempted: usize,
    pub n_restores: usize,
    pub n_copies: usize,
    pub n_cached_tokens: usize,
    pub n_finished: usize,
}

pub struct Bench {
    pub scheduler: Scheduler,
    pub device: FakeDevice,
    pub lag: usize,
    pub in_flight: VecDeque<StepTicket>,
    pub specs: BTreeMap<RequestId, SequenceSpec>,
    pub produced: BTreeMap<Rank, Produced>,
    pub started: BTreeMap<Rank, Started>,
    pub totals: Totals,
    /// What the device's clock says a step took.
    pub step_time: Box<dyn FnMut(&StepTicket) -> Duration>,
    /// The latest step at which each unstarted request must start; only kept for equal priorities.
    bounds: BTreeMap<RequestId, usize>,
    n_rows: usize,
    next_id: u64,
}

pub fn identity() -> CacheIdentity {
    let [model_id, row_format, numerics_id] = ["m", "r", "n"].map(str::to_owned);
    CacheIdentity { model_id, row_format, numerics_id }
}

pub fn spec(prompt: Vec<TokenId>, max_tokens: usize) -> SequenceSpec {
    SequenceSpec {
        prompt: prompt.into(),
        sampling: SamplingParams { seed: Some(1), ..SamplingParams::default() },
        max_tokens,
        min_tokens: 0,
        eos: None,
        stop_token_ids: Vec::new(),
        logprobs: None,
        prompt_logprobs: None,
        cache_root: identity().root(None),
    }
}

/// A prompt of its own for each seed.
pub fn prompt(n_tokens: usize, seed: u64) -> Vec<TokenId> {
    let token = |i| TokenId((crate::oracle::mix(seed, i) % VOCAB as u64) as u32);
    (0..n_tokens as u64).map(token).collect()
}

impl Bench {
    pub fn new(size: Size, lag: usize) -> Self {
        Self::with_config(size, lag, size.config())
    }

    pub fn with_config(size: Size, lag: usize, config: SchedulerConfig) -> Self {
        Self {
            scheduler: Scheduler::new(config, size.n_blocks as u32, size.n_checkpoints as u32),
            device: FakeDevice::new(size.capacity(), lag),
            lag,
            in_flight: VecDeque::new(),
            specs: BTreeMap::new(),
            produced: BTreeMap::new(),
            started: BTreeMap::new(),
            totals: Totals::default(),
            step_time: Box::new(|_| Duration::ZERO),
            bounds: BTreeMap::new(),
            n_rows: size.n_rows,
            next_id: 1,
        }
    }

    pub fn with_faults(mut self, faults: Faults) -> Self {
        self.device = self.device.with_faults(faults);
        self
    }

    pub fn add(&mut self, spec: SequenceSpec) -> RequestId {
        self.add_many(spec, 1, 0)
    }

    pub fn add_many(&mut self, spec: SequenceSpec, n: u32, priority: i32) -> RequestId {
        let request = RequestId(self.next_id);
        self.next_id += 1;
        // The stated bound: the tokens of all sequences before it, and a few steps for each.
        let ahead = self.produced.iter().filter(|(_, produced)| produced.reason.is_none() && !produced.failed);
        let n_ahead: usize = ahead.map(|(rank, _)| self.n_steps_at_most(rank.request)).sum();
        self.bounds.insert(request, self.totals.n_steps + n_ahead + SETTLING_STEPS);
        for choice in 0..n {
            self.produced.insert(Rank { priority, request, choice }, Produced::default());
        }
        self.specs.insert(request, spec.clone());
        self.scheduler.add(priority, request, n, spec);
        request
    }

    pub fn cancel(&mut self, request: RequestId) {
        self.scheduler.cancel(request);
        self.produced.retain(|rank, produced| rank.request != request || produced.reason.is_some());
        self.bounds.remove(&request);
    }

    pub fn end(&mut self, rank: Rank) {
        if self.scheduler.end(rank) {
            self.produced.get_mut(&rank).expect("known").reason = Some(FinishReason::Requested);
        }
        if rank.choice == 0 {
            self.bounds.remove(&rank.request);
        }
    }

    /// One turn of the engine's loop; false when there was nothing to do.
    pub fn step(&mut self) -> bool {
        let planned = self.scheduler.plan();
        let has_step = planned.is_some();
        if let Some(step) = planned {
            self.totals.n_steps += 1;
            self.count(&step.plan);
            self.totals.n_preempted += step.n_preempted;
            for started in step.started {
                self.totals.n_cached_tokens += started.n_cached_tokens;
                if let (0, Some(bound)) = (started.rank.choice, self.bounds.remove(&started.rank.request)) {
                    assert!(self.totals.n_steps <= bound, "{started:?} waited beyond its bound {bound}");
                }
                assert!(self.started.insert(started.rank, started).is_none(), "{started:?} started twice");
            }
            self.device.launch(step.plan).expect("launch");
            self.in_flight.push_back(step.ticket);
        }
        self.scheduler.check().expect("consistent after planning");
        let finishes = self.in_flight.len() > self.lag || (!has_step && !self.in_flight.is_empty());
        if finishes {
            let output = self.device.finish().expect("finish");
            let ticket = self.in_flight.pop_front().expect("in flight");
            self.scheduler.learn(&ticket, (self.step_time)(&ticket));
            for update in self.scheduler.apply(&ticket, output).expect("fitting output") {
                self.update(update);
            }
            self.scheduler.check().expect("consistent after results");
        }
        has_step || finishes
    }

    /// Runs until nothing is left, then looks whether everything is free.
    pub fn drain(&mut self) {
        while self.step() {
            assert!(self.totals.n_steps < 2_000_000, "no end");
        }
        assert!(self.scheduler.is_idle(), "nothing is planned, but requests are left");
        let stats = self.scheduler.stats();
        assert_eq!((stats.n_running, stats.n_waiting, stats.n_deferred, stats.blocks.n_used), (0, 0, 0, 0));
        assert!(self.produced.values().all(|produced| produced.reason.is_some() || produced.failed));
    }

    /// Compares everything produced with the oracle.
    pub fn verify(&self) {
        assert!(self.produced.values().all(|produced| produced.reason.is_some() || produced.failed));
        self.verify_ended();
    }

    /// Compares what has ended with the oracle.
    pub fn verify_ended(&self) {
        for (rank, produced) in &self.produced {
            if produced.reason.is_some() {
                let want = expected(&self.specs[&rank.request], rank.choice, VOCAB);
                verify_choice(*rank, produced, &want);
            }
        }
    }

    /// Runs one request alone; returns its tokens and how many were cached.
    pub fn run_one(&mut self, spec: SequenceSpec) -> (Vec<TokenId>, usize) {
        let request = self.add(spec);
        self.drain();
        let rank = Rank { priority: 0, request, choice: 0 };
        (self.produced[&rank].tokens.clone(), self.started[&rank].n_cached_tokens)
    }

    fn n_steps_at_most(&self, request: RequestId) -> usize {
        let spec = &self.specs[&request];
        spec.prompt.len() + spec.max_tokens + SETTLING_STEPS
    }

    fn count(&mut self, plan: &StepPlan) {
        let n_rows: usize = plan.batch.runs.iter().map(|run| run.n_rows).sum();
        assert!(n_rows <= self.n_rows, "{n_rows} rows are over the budget");
        assert!(plan.batch.runs.iter().all(|run| run.kind != RowKind::Decode || run.n_rows == 1));
        self.totals.n_restores += plan.restores.len();
        self.totals.n_copies += plan.copies.len();
    }

    fn update(&mut self, update: Update) {
        let rank = update.rank();
        let produced = self.produced.get_mut(&rank).expect("an update of a living choice");
        assert!(produced.reason.is_none() && !produced.failed, "{update:?} after the end");
        match update {
            Update::Token(_, sampled) => produced.tokens.push(sampled.token),
            Update::Scores(_, scores) => assert!(produced.scores.replace(scores).is_none(), "scores twice"),
            Update::Finished(_, reason) => {
                produced.reason = Some(reason);
                self.totals.n_finished += 1;
            }
            Update::Failed(..) => produced.failed = true,
            Update::Progress { n_done, n_total, .. } => assert!(n_done < n_total),
        }
    }
}

fn verify_choice(rank: Rank, produced: &Produced, want: &Expected) {
    if produced.reason == Some(FinishReason::Requested) {
        assert!(want.tokens.starts_with(&produced.tokens), "{rank:?}");
        return;
    }
    assert_eq!(produced.tokens, want.tokens, "{rank:?}");
    assert_eq!(produced.reason, Some(want.reason), "{rank:?}");
    if !want.prompt_scores.is_empty() {
        assert_eq!(produced.scores.as_ref(), Some(&want.prompt_scores), "{rank:?}");
    }
}
