//! The engine thread: drain commands, plan, launch, finish the step before, send events; and again.
//!
//! With nothing to do it sleeps in a blocking receive. It ends when it is drained, when every door to it is gone, or by a
//! fault; in every case each accepted request has had its one terminal event.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TryRecvError;

use super::active::ActiveRequest;
use super::event::{FailReason, FinishReason};
use super::handle::{Command, EngineHandle, EngineHealth, EngineSide, Submitted};
use super::request::EngineLimits;
use super::scheduler::{Scheduler, SchedulerConfig};
use super::stage::StepTicket;
use super::step::{OutputMismatch, Step, Update};
use super::watchdog::Watchdog;
use crate::device::DeviceError;
use crate::ids::{BlockId, RequestId, SlotIdx, TokenId};
use crate::kv::identity::CacheIdentity;
use crate::model::batch::{Batch, Capacity, Executor, RowKind, Run, SampleRow, StepOutput, StepPlan, TokenSource};
use crate::model::cache::BLOCK_TOKENS;
use crate::sample::params::{SamplingParams, SlotInit};
use crate::telemetry::metrics::{CacheConfigInfo, Metrics};

/// Settings of the engine; the names are vLLM's where it has them.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Settings of the scheduler.
    pub scheduler: SchedulerConfig,
    /// What cached state depends on.
    pub identity: CacheIdentity,
    /// Launch a step before the results of the one before have come home (lag 1): for devices that work on their own.
    pub async_scheduling: bool,
    /// The model's end-of-sequence id.
    pub eos_token_id: TokenId,
    /// Requests accepted and not finished; more are refused.
    pub max_queued: usize,
    /// Choices a request may ask for.
    pub max_n: u32,
    /// Log-probabilities a position may return (--max-logprobs).
    pub max_logprobs: u32,
    /// A step that takes longer makes the engine `Stalled`.
    pub step_deadline: Duration,
    /// Rows of the step that must pass before the engine is `Ready`; 0: none.
    pub warm_up_rows: usize,
}

/// The engine cannot start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A setting that does not fit the device.
    #[error("{field}: must be from {min} to {max}, got {value}")]
    Setting {
        /// Which setting.
        field: &'static str,
        /// The least.
        min: usize,
        /// The most.
        max: usize,
        /// The value.
        value: usize,
    },
    /// The system gave no thread.
    #[error("no thread for the engine: {0}")]
    Thread(#[from] std::io::Error),
}

/// The running engine.
#[derive(Debug)]
pub struct EngineThread {
    thread: JoinHandle<Result<(), String>>,
}

/// What the thread owns.
pub struct Engine {
    executor: Box<dyn Executor>,
    scheduler: Scheduler,
    commands: mpsc::Receiver<Command>,
    watchdog: Watchdog,
    active: BTreeMap<RequestId, ActiveRequest>,
    in_flight: VecDeque<Launched>,
    /// When the device was last seen to end a step.
    last_end: Option<Instant>,
    drain_deadline: Option<Instant>,
    lag: usize,
    settings: Settings,
    metrics: Arc<Metrics>,
}

struct Launched {
    ticket: StepTicket,
    at: Instant,
}

struct Settings {
    identity: CacheIdentity,
    eos_token_id: TokenId,
    warm_up_rows: usize,
}

/// Why the loop ended.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("the engine has shut down")]
    Drained,
    #[error("{0}")]
    Device(#[from] DeviceError),
    #[error("{0}")]
    Output(#[from] OutputMismatch),
    #[error("the scheduler has requests and plans nothing")]
    Stuck,
}

impl EngineConfig {
    /// Settings for a model with this end token and cache identity; everything else as vLLM has it.
    #[must_use]
    pub fn new(identity: CacheIdentity, eos_token_id: TokenId) -> Self {
        Self {
            scheduler: SchedulerConfig::default(),
            identity,
            async_scheduling: false,
            eos_token_id,
            max_queued: 1024,
            max_n: super::request::MAX_N,
            max_logprobs: 20,
            step_deadline: Duration::from_secs(60),
            warm_up_rows: 0,
        }
    }

    /// The limits this engine will have on a device.
    #[must_use]
    pub fn limits(&self, capacity: Capacity) -> EngineLimits {
        EngineLimits {
            max_model_len: capacity.max_tokens,
            vocab_size: capacity.vocab_size,
            max_kv_tokens: capacity.n_blocks * BLOCK_TOKENS,
            max_n: self.max_n,
            max_logprobs: self.max_logprobs,
            max_queued: self.max_queued,
            eos_token_id: self.eos_token_id,
        }
    }

    fn check(&self, capacity: Capacity) -> Result<(), EngineError> {
        let check = |field, value: usize, min, max| {
            let is_inside = value >= min && value <= max;
            if is_inside { Ok(()) } else { Err(EngineError::Setting { field, min, max, value }) }
        };
        let scheduler = &self.scheduler;
        let n_seqs = scheduler.max_num_seqs;
        check("max_num_seqs", n_seqs, 1, capacity.n_slots)?;
        check("max_num_batched_tokens", scheduler.max_num_batched_tokens, n_seqs, capacity.max_rows)?;
        check("checkpoint_every_blocks", scheduler.checkpoint_every_blocks, 1, usize::MAX)?;
        check("kv blocks", capacity.n_blocks, 1, u32::MAX as usize)?;
        check("max_queued", self.max_queued, 1, usize::MAX >> 4)?;
        check("warm_up_rows", self.warm_up_rows, 0, capacity.max_rows)
    }
}

impl EngineThread {
    /// Waits for the engine's end: after a drain, or when every handle is gone.
    ///
    /// # Errors
    /// The fault that ended it.
    pub fn join(self) -> Result<(), String> {
        self.thread.join().unwrap_or_else(|_| Err("the engine thread panicked".to_owned()))
    }
}

impl Engine {
    /// Starts the engine thread. The handle's health is `Starting` until the warm-up has passed.
    ///
    /// # Errors
    /// Settings that do not fit the device; no thread to be had.
    pub fn spawn(
        executor: Box<dyn Executor>,
        config: EngineConfig,
        metrics: Arc<Metrics>,
    ) -> Result<(EngineHandle, EngineThread), EngineError> {
        let capacity = executor.capacity();
        let (handle, side) = EngineHandle::new(config.limits(capacity));
        Ok((handle, Self::spawn_behind(side, executor, config, metrics)?))
    }

    /// As [`Engine::spawn`], behind a door that was opened before the device was ready: its limits must be those of
    /// [`EngineConfig::limits`] for the executor's capacity.
    ///
    /// # Errors
    /// As [`Engine::spawn`].
    pub fn spawn_behind(
        side: EngineSide,
        executor: Box<dyn Executor>,
        config: EngineConfig,
        metrics: Arc<Metrics>,
    ) -> Result<EngineThread, EngineError> {
        let capacity = executor.capacity();
        config.check(capacity)?;
        metrics.set_cache_config(&CacheConfigInfo {
            block_size: BLOCK_TOKENS,
            num_gpu_blocks: capacity.n_blocks,
            enable_prefix_caching: config.scheduler.enable_prefix_caching,
        });
        let engine = Self {
            executor,
            scheduler: Scheduler::new(config.scheduler, as_u32(capacity.n_blocks), as_u32(capacity.n_checkpoints)),
            commands: side.commands,
            watchdog: Watchdog::start(side.health, Arc::clone(&metrics), config.step_deadline)?,
            active: BTreeMap::new(),
            in_flight: VecDeque::new(),
            last_end: None,
            drain_deadline: None,
            lag: usize::from(config.async_scheduling),
            settings: Settings {
                identity: config.identity,
                eos_token_id: config.eos_token_id,
                warm_up_rows: config.warm_up_rows,
            },
            metrics,
        };
        let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || engine.run())?;
        Ok(EngineThread { thread })
    }

    fn run(mut self) -> Result<(), String> {
        // After a panic only the requests and the channel are touched again, and both are whole between any two calls.
        let (reason, result) = match catch_unwind(AssertUnwindSafe(|| self.serve())) {
            Ok(End::Drained) => (FailReason::ShuttingDown, Ok(())),
            Ok(End::Device(error)) => (FailReason::Device(error.to_string()), Err(error.to_string())),
            Ok(end) => (FailReason::Internal, Err(end.to_string())),
            Err(panic) => (FailReason::Internal, Err(format!("the engine panicked: {}", panic_text(&*panic)))),
        };
        let state = result.as_ref().err().cloned().unwrap_or_else(|| End::Drained.to_string());
        if result.is_err() {
            tracing::error!(reason = %state, "the engine has ended");
        }
        // In this order: nothing new is let in, what is left is told.
        self.watchdog.set_health(EngineHealth::Dead(state));
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Submit(submitted) = command {
                ActiveRequest::new(*submitted).fail(reason.clone(), &self.metrics);
            }
        }
        self.fail_all(&reason);
        result
    }

    fn serve(&mut self) -> End {
        if let Err(error) = self.warm_up() {
            return End::Device(error);
        }
        self.watchdog.set_health(EngineHealth::Ready);
        loop {
            if let Err(end) = self.tick() {
                return end;
            }
        }
    }

    fn tick(&mut self) -> Result<(), End> {
        self.receive()?;
        self.watchdog.beat();
        let begin = Instant::now();
        self.sweep(begin)?;
        let step = self.scheduler.plan();
        let has_step = step.is_some();
        // Launching is the device's time: a CPU runs the whole step in it.
        let plan_time = begin.elapsed();
        if let Some(step) = step {
            self.launch(step, begin)?;
        }
        if self.in_flight.len() > self.lag || (!has_step && !self.in_flight.is_empty()) {
            let output = self.executor.finish()?;
            let now = Instant::now();
            self.finish(output, now)?;
            self.metrics.step_host_seconds.observe((plan_time + now.elapsed()).as_secs_f64());
        } else if !has_step && !self.scheduler.is_idle() {
            return Err(End::Stuck);
        }
        self.gauge();
        Ok(())
    }

    /// Takes what has come in; waits for it when there is nothing to do.
    fn receive(&mut self) -> Result<(), End> {
        loop {
            let is_idle = self.in_flight.is_empty() && self.scheduler.is_idle();
            let command = if is_idle {
                if !self.active.is_empty() {
                    return Err(End::Stuck);
                }
                if self.drain_deadline.is_some() {
                    return Err(End::Drained);
                }
                self.watchdog.rest();
                self.commands.blocking_recv().ok_or(End::Drained)?
            } else {
                match self.commands.try_recv() {
                    Ok(command) => command,
                    Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(()),
                }
            };
            match command {
                Command::Submit(submitted) => self.submit(*submitted),
                Command::Drain { deadline } => self.drain(deadline),
            }
        }
    }

    fn submit(&mut self, submitted: Submitted) {
        let request = ActiveRequest::new(submitted);
        if self.drain_deadline.is_some() {
            return request.fail(FailReason::ShuttingDown, &self.metrics);
        }
        let (seed, _) = uuid::Uuid::new_v4().as_u64_pair();
        let spec = request.spec(self.settings.eos_token_id, &self.settings.identity, seed);
        self.scheduler.add(request.priority(), request.id(), request.n_choices(), spec);
        self.active.insert(request.id(), request);
    }

    /// A second drain can only bring the end nearer.
    fn drain(&mut self, deadline: Instant) {
        let deadline = self.drain_deadline.map_or(deadline, |before| before.min(deadline));
        self.drain_deadline = Some(deadline);
        self.watchdog.set_health(EngineHealth::Draining);
    }

    /// Drops what nobody waits for, ends what the front end has ended, and gives up after the drain's deadline.
    fn sweep(&mut self, now: Instant) -> Result<(), End> {
        if self.drain_deadline.is_some_and(|deadline| now >= deadline) {
            return Err(End::Drained);
        }
        let abandoned = self.active.extract_if(.., |_, request| request.is_abandoned());
        for (id, request) in abandoned {
            self.scheduler.cancel(id);
            request.cancel(&self.metrics);
        }
        let ended: Vec<_> = self.active.values().flat_map(ActiveRequest::ended_by_client).collect();
        for rank in ended {
            self.scheduler.end(rank);
            self.finish_choice(rank.request, rank.choice, FinishReason::Requested, now);
        }
        Ok(())
    }

    fn launch(&mut self, step: Step, now: Instant) -> Result<(), DeviceError> {
        let metrics = &self.metrics;
        for started in &step.started {
            metrics.prefix_cache_queries_total.inc_by(started.n_prompt_tokens as u64);
            metrics.prefix_cache_hits_total.inc_by(started.n_cached_tokens as u64);
            if let Some(request) = self.active.get_mut(&started.rank.request) {
                request.start(started.n_cached_tokens, now);
            }
        }
        metrics.num_preemptions_total.inc_by(step.n_preempted as u64);
        if step.ticket.n_rows > 0 {
            metrics.iteration_tokens_total.observe(step.ticket.n_rows as f64);
        }
        self.executor.launch(step.plan)?;
        self.in_flight.push_back(Launched { ticket: step.ticket, at: now });
        Ok(())
    }

    fn finish(&mut self, output: StepOutput, now: Instant) -> Result<(), OutputMismatch> {
        let Some(Launched { ticket, at }) = self.in_flight.pop_front() else { return Ok(()) };
        // With a step launched ahead the device begins it when it has ended the one before.
        let begin = self.last_end.replace(now).map_or(at, |last_end| last_end.max(at));
        self.scheduler.learn(&ticket, now - begin);
        for update in self.scheduler.apply(&ticket, output)? {
            self.update(update, now);
        }
        Ok(())
    }

    fn update(&mut self, update: Update, now: Instant) {
        let rank = update.rank();
        let Some(request) = self.active.get_mut(&rank.request) else { return };
        match update {
            Update::Progress { n_done, n_total, .. } => request.progress(n_done, n_total),
            Update::Scores(_, scores) => request.scores(scores),
            Update::Token(_, sampled) => request.token(rank.choice, sampled, now, &self.metrics),
            Update::Finished(_, reason) => self.finish_choice(rank.request, rank.choice, reason, now),
            Update::Failed(_, error) => {
                self.metrics.numerics_errors_total.inc();
                self.scheduler.cancel(rank.request);
                if let Some(request) = self.active.remove(&rank.request) {
                    request.fail(FailReason::Numerics(error.to_string()), &self.metrics);
                }
            }
        }
    }

    fn finish_choice(&mut self, id: RequestId, choice: u32, reason: FinishReason, now: Instant) {
        let is_last = self.active.get_mut(&id).is_some_and(|request| request.finish_choice(choice, reason));
        if is_last && let Some(request) = self.active.remove(&id) {
            request.finish(now, &self.metrics);
        }
    }

    fn fail_all(&mut self, reason: &FailReason) {
        while let Some((_, request)) = self.active.pop_first() {
            request.fail(reason.clone(), &self.metrics);
        }
    }

    fn gauge(&self) {
        let stats = self.scheduler.stats();
        let as_i64 = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.metrics.num_requests_running.set(as_i64(stats.n_running));
        self.metrics.num_requests_waiting.set(as_i64(stats.n_waiting + stats.n_deferred));
        self.metrics.set_waiting_by_reason(as_i64(stats.n_waiting), as_i64(stats.n_deferred));
        self.metrics.kv_cache_usage_perc.set(stats.blocks.n_used as f64 / stats.blocks.n_total() as f64);
    }

    /// Runs one step of the worst shape the settings allow, so that a device short of memory fails now.
    fn warm_up(&mut self) -> Result<(), DeviceError> {
        if self.settings.warm_up_rows == 0 {
            return Ok(());
        }
        let capacity = self.executor.capacity();
        self.executor.launch(warm_up_plan(capacity, self.settings.warm_up_rows))?;
        self.executor.finish().map(drop)
    }
}

/// One prompt of as many rows as fit, and a row for every other slot that finds a block.
fn warm_up_plan(capacity: Capacity, n_rows: usize) -> StepPlan {
    let n_short = (capacity.n_slots - 1).min(capacity.n_blocks - 1).min(n_rows - 1);
    let n_long = (n_rows - n_short).min(capacity.max_tokens).min((capacity.n_blocks - n_short) * BLOCK_TOKENS);
    let mut plan = StepPlan::default();
    let mut n_blocks = 0;
    for slot in 0..=n_short {
        let n_rows = if slot == 0 { n_long } else { 1 };
        let batch: &mut Batch = &mut plan.batch;
        let start = batch.token_ids.len();
        batch.token_ids.resize(start + n_rows, TokenId(0));
        let blocks = n_blocks..n_blocks + n_rows.div_ceil(BLOCK_TOKENS);
        n_blocks = blocks.end;
        batch.block_ids.extend((blocks.start..blocks.end).map(|block| BlockId(as_u32(block))));
        batch.runs.push(Run {
            slot: SlotIdx(as_u32(slot)),
            first_pos: 0,
            n_rows,
            kind: RowKind::Prefill,
            tokens: TokenSource::Host { start },
            blocks,
            logit_rows: n_rows - 1..n_rows,
        });
        plan.binds.push((SlotIdx(as_u32(slot)), Arc::new(warm_up_init(n_rows))));
        plan.samples.push(SampleRow { run_idx: slot, row: n_rows - 1, position: n_rows });
    }
    plan
}

fn warm_up_init(n_rows: usize) -> SlotInit {
    SlotInit {
        sampling: SamplingParams { seed: Some(0), ..SamplingParams::default() },
        choice: 0,
        prompt: vec![TokenId(0); n_rows].into(),
        output: Vec::new(),
        banned_until_min: Vec::new(),
        min_tokens: 0,
        n_logprobs: None,
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

fn as_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
