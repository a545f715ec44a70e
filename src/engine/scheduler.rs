//! The scheduler: who runs in the next step, a pure function of what came in and what came home.
//!
//! No device, no clock, no async. A step is planned in this order, inside a budget of rows:
//! 1. every running sequence that can decode gets its row (one; with drafts it would be 1 + K). If no block is to be had,
//!    the newest running sequence is preempted: its blocks go, its output stays, and it is recomputed later;
//! 2. prompts in progress get chunks ([`super::chunk`]), oldest first; while anyone else runs or waits, only as many rows
//!    as fit the target time of a step by what the last steps took ([`super::pace`]; the caller has the clock);
//! 3. waiting sequences are admitted in order of [`Rank`] while slots, rows and blocks last. Nobody passes the head of the
//!    line, and nobody is admitted in a step that preempts.
//!
//! Progress: the first in rank of those that run is never preempted and gets a row in every step (the budget is at least
//! one row a slot). So among equal priorities a sequence is admitted at the latest after as many steps as the sequences
//! before it have tokens, plus [`SETTLING_STEPS`] for each; the simulation checks this bound.
//!
//! The caller may launch a step before the results of the one before have come home (lag 1). Decode rows read their token
//! from the slot, so such a row can be planned before its token is known; when the token turns out to end the sequence,
//! the row's result is dropped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::chunk::{self, Company, MAX_SCORED_ROWS};
use super::event::FinishReason;
use super::pace::{Measured, Pace};
use super::sequence::{Next, Rank, Running, Sequence, SequenceSpec};
use super::stage::{RunTicket, Stage, StepTicket};
use super::step::{OutputMismatch, Started, Step, Update};
use crate::ids::{CheckpointId, RequestId, SlotIdx};
use crate::kv::cache::{BlockTable, Hit, KvCache, TurnEnd};
use crate::kv::lease::{Lease, LeasePool};
use crate::kv::pool::{BlockRef, Counts};
use crate::model::batch::StepOutput;
use crate::model::cache::BLOCK_TOKENS;
use crate::sample::params::{RowError, Sampled, TokenLogprobs};

/// Steps beside those for its tokens that a sequence can take: a result that comes home late, a discarded row, a step
/// that only keeps its window state.
pub const SETTLING_STEPS: usize = 4;

/// Settings; the names are vLLM's where it has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Sequences that run at once (--max-num-seqs).
    pub max_num_seqs: usize,
    /// Rows of a step (--max-num-batched-tokens); at least `max_num_seqs`.
    pub max_num_batched_tokens: usize,
    /// Prompts longer than this share a step (--long-prefill-token-threshold); 0: no cap.
    pub long_prefill_token_threshold: usize,
    /// Time of a step that prompts may fill while others run or wait (--prefill-step-time); zero: no cap.
    pub prefill_step_time: Duration,
    /// Share the state of equal prefixes (--enable-prefix-caching).
    pub enable_prefix_caching: bool,
    /// Blocks between checkpoints.
    pub checkpoint_every_blocks: usize,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 64,
            max_num_batched_tokens: 2048,
            long_prefill_token_threshold: 1024,
            prefill_step_time: Duration::from_millis(250),
            enable_prefix_caching: true,
            checkpoint_every_blocks: 8,
        }
    }
}

/// The scheduler and all sequences.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pace: Pace,
    kv: KvCache,
    slots: LeasePool<SlotIdx>,
    /// In order of rank.
    running: Vec<Running>,
    waiting: BTreeMap<Rank, Sequence>,
    /// Choices that wait until their sibling has prefilled, so that they find its prefix in the cache.
    deferred: BTreeMap<RequestId, Vec<Sequence>>,
    /// Ended sequences whose window state the next step keeps.
    endings: Vec<Ending>,
}

#[derive(Debug)]
struct Ending {
    seq: Sequence,
    slot: Lease<SlotIdx>,
    turn_end: TurnEnd,
    /// Taken at once, so that an ending always gives the next step something to do.
    checkpoint: Lease<CheckpointId>,
}

/// Numbers for gauges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Running sequences.
    pub n_running: usize,
    /// Sequences in line.
    pub n_waiting: usize,
    /// Choices waiting for their sibling.
    pub n_deferred: usize,
    /// KV blocks.
    pub blocks: Counts,
}

impl Scheduler {
    /// A scheduler for a device with these many blocks and checkpoints.
    #[must_use]
    pub fn new(config: SchedulerConfig, n_blocks: u32, n_checkpoints: u32) -> Self {
        let kv = KvCache::new(n_blocks, n_checkpoints, config.enable_prefix_caching);
        let n_slots = u32::try_from(config.max_num_seqs).unwrap_or(u32::MAX);
        let slots = LeasePool::new((0..n_slots).map(SlotIdx));
        Self {
            pace: Pace::new(config.prefill_step_time),
            config,
            kv,
            slots,
            running: Vec::new(),
            waiting: BTreeMap::new(),
            deferred: BTreeMap::new(),
            endings: Vec::new(),
        }
    }

    /// Takes a request of `n` choices.
    pub fn add(&mut self, priority: i32, request: RequestId, n: u32, spec: SequenceSpec) {
        let spec = Arc::new(spec);
        let make = |choice| Sequence::new(Rank { priority, request, choice }, Arc::clone(&spec));
        let first = make(0);
        self.waiting.insert(first.rank, first);
        if n > 1 {
            self.deferred.insert(request, (1..n).map(make).collect());
        }
    }

    /// Drops all choices of a request; what they held is free for the next step.
    pub fn cancel(&mut self, request: RequestId) {
        self.running.retain(|running| running.seq.rank.request != request);
        self.waiting.retain(|rank, _| rank.request != request);
        self.deferred.remove(&request);
    }

    /// Ends one choice, keeping what it has in the cache; says whether it was there.
    pub fn end(&mut self, rank: Rank) -> bool {
        if let Ok(idx) = self.find_running(rank) {
            let running = self.running.remove(idx);
            self.retire(running);
        } else if self.waiting.remove(&rank).is_none() && !self.end_deferred(rank) {
            return false;
        }
        if rank.choice == 0 {
            self.release(rank.request);
        }
        true
    }

    /// Plans the next step; `None` when there is nothing to launch (results may still be on their way).
    pub fn plan(&mut self) -> Option<Step> {
        let mut stage = Stage::default();
        let mut started = Vec::new();
        let n_preempted = self.plan_decodes(&mut stage);
        self.plan_prefills(&mut stage);
        let mut pinned = Vec::new();
        if n_preempted == 0 {
            self.admit(&mut stage, &mut started, &mut pinned);
        }
        self.save_endings(&mut stage);
        self.settle();
        // Copied tails must not become anyone's target in the step that copies them.
        drop(pinned);
        let (plan, ticket) = stage.finish()?;
        Some(Step { plan, ticket, started, n_preempted })
    }

    /// Takes a step's output; steps come home in the order in which they were planned.
    ///
    /// # Errors
    /// When the output does not fit the plan.
    pub fn apply(&mut self, ticket: &StepTicket, output: StepOutput) -> Result<Vec<Update>, OutputMismatch> {
        let n_want = ticket.runs.iter().filter(|run| run.has_sample).count();
        OutputMismatch::check("samples", n_want, output.sampled.len())?;
        OutputMismatch::check("scores", ticket.runs.iter().map(|run| run.n_scores).sum(), output.scores.len())?;
        let mut sampled = output.sampled.into_iter();
        let mut scores = output.scores.into_iter();
        let mut updates = Vec::new();
        for run in &ticket.runs {
            let scores: Vec<TokenLogprobs> = scores.by_ref().take(run.n_scores).collect();
            let sampled = if run.has_sample { sampled.next() } else { None };
            self.apply_run(*run, sampled, scores, &mut updates);
        }
        Ok(updates)
    }

    /// Takes what a step took on the device. Only how fast prompts move depends on it, never what is said.
    pub fn learn(&mut self, ticket: &StepTicket, time: Duration) {
        let StepTicket { n_rows, n_prefill_rows, .. } = *ticket;
        self.pace.learn(Measured { n_prefill_rows, n_decode_rows: n_rows - n_prefill_rows, time });
    }

    /// No sequence is left, and no step is needed to keep one's state.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.deferred.is_empty() && self.endings.is_empty()
    }

    /// Numbers for gauges.
    #[must_use]
    pub fn stats(&self) -> SchedulerStats {
        SchedulerStats {
            n_running: self.running.len(),
            n_waiting: self.waiting.len(),
            n_deferred: self.deferred.values().map(Vec::len).sum(),
            blocks: self.kv.counts(),
        }
    }

    /// Recounts everything.
    ///
    /// # Errors
    /// What does not agree; for tests and simulation.
    pub fn check(&self) -> Result<(), String> {
        let n_endings = self.endings.len();
        if self.slots.n_free() + self.running.len() + n_endings != self.slots.n_total() {
            return Err(format!("{} slots are free, {} run", self.slots.n_free(), self.running.len()));
        }
        if !self.running.is_sorted_by_key(|running| running.seq.rank) {
            return Err("the running sequences are out of order".to_owned());
        }
        for running in &self.running {
            let rank = running.seq.rank;
            if running.n_rows > running.table.n_token_places() {
                return Err(format!("{rank:?}: {} rows have no place", running.n_rows));
            }
            if self.waiting.contains_key(&rank) {
                return Err(format!("{rank:?} runs and waits"));
            }
            if running.seq.output.len() + running.seq.n_pending > running.seq.spec.max_tokens {
                return Err(format!("{rank:?} has more samples than max_tokens"));
            }
        }
        let tables = self.running.iter().flat_map(|running| running.table.ids());
        let partial = self.endings.iter().filter_map(|ending| ending.turn_end.block_id());
        let n_saved: usize = self.running.iter().map(|running| running.table.n_saved()).sum();
        self.kv.check(tables.chain(partial).collect(), n_saved + n_endings)
    }

    /// Decode rows for all that can; returns how many sequences had to go to make room.
    fn plan_decodes(&mut self, stage: &mut Stage) -> usize {
        let mut n_preempted = 0;
        let mut idx = 0;
        while idx < self.running.len() {
            if self.running[idx].next() != Next::Decode {
                idx += 1;
                continue;
            }
            if self.running[idx].needs_block() {
                match self.take_blocks(1).and_then(|mut blocks| blocks.pop()) {
                    Some(block) => self.running[idx].table.push(block),
                    None => {
                        // The newest goes, which may be this one; either way the loop ends at the new length.
                        self.preempt_newest();
                        n_preempted += 1;
                        continue;
                    }
                }
            }
            self.decode(idx, stage);
            idx += 1;
        }
        n_preempted
    }

    fn decode(&mut self, idx: usize, stage: &mut Stage) {
        let running = &mut self.running[idx];
        stage.decode(running);
        running.n_rows += 1;
        running.seq.n_pending += 1;
        running.seq.n_in_flight += 1;
        let every_blocks = self.config.checkpoint_every_blocks;
        if chunk::is_kept(running.n_rows, running.seq.n_prompt(), running.n_rows_kept, every_blocks) {
            self.keep(idx, stage);
        }
    }

    fn plan_prefills(&mut self, stage: &mut Stage) {
        for idx in 0..self.running.len() {
            if let Next::Prefill { n_left } = self.running[idx].next() {
                self.prefill(idx, n_left, stage);
            }
        }
    }

    /// Gives a prompt its rows of this step, if any are left.
    fn prefill(&mut self, idx: usize, n_left: usize, stage: &mut Stage) {
        let company = self.company();
        let n_budget = self.n_prompt_rows(company, stage);
        let n_rows = chunk::share(n_left, n_budget, company, self.config.long_prefill_token_threshold);
        if n_rows == 0 {
            return;
        }
        let running = &mut self.running[idx];
        let is_scored = running.seq.n_scores_planned < running.seq.n_scores();
        let n_rows = if is_scored { n_rows.min(MAX_SCORED_ROWS) } else { n_rows };
        let has_siblings = self.deferred.contains_key(&running.seq.rank.request);
        let n_rows = if self.config.enable_prefix_caching {
            let n_rows = chunk::cut(running.to_prefill(), n_rows, self.config.checkpoint_every_blocks);
            if has_siblings { chunk::spare_last(running.to_prefill(), n_rows) } else { n_rows }
        } else {
            n_rows
        };
        let samples = n_rows == n_left && running.seq.may_sample();
        stage.prefill(running, n_rows, samples);
        running.n_rows += n_rows;
        running.has_sampled = samples;
        let seq = &mut running.seq;
        seq.n_pending += usize::from(samples);
        seq.n_in_flight += 1;
        seq.n_scores_planned = seq.n_scores_planned.max(running.n_rows.min(seq.n_scores()));
        let every_blocks = self.config.checkpoint_every_blocks;
        let is_for_siblings = has_siblings && running.n_rows + 1 == running.seq.n_prompt();
        if is_for_siblings || chunk::is_kept(running.n_rows, running.seq.n_prompt(), running.n_rows_kept, every_blocks)
        {
            self.keep(idx, stage);
        }
    }

    fn company(&self) -> Company {
        if self.running.len() + self.waiting.len() <= 1 {
            return Company::Alone;
        }
        let mut prompts = self.running.iter().filter(|running| matches!(running.next(), Next::Prefill { .. }));
        let has_prompts = !self.waiting.is_empty() || prompts.nth(1).is_some();
        if has_prompts { Company::Prompts } else { Company::Streams }
    }

    /// Rows that the step has left for prompts.
    fn n_prompt_rows(&self, company: Company, stage: &Stage) -> usize {
        let n_left = self.config.max_num_batched_tokens.saturating_sub(stage.n_rows());
        match company {
            Company::Alone => n_left,
            Company::Streams | Company::Prompts => {
                n_left.min(self.pace.n_rows().saturating_sub(stage.n_prefill_rows()))
            }
        }
    }

    /// Has the step save a sequence's window state, unless the cache has it already.
    fn keep(&mut self, idx: usize, stage: &mut Stage) {
        let Running { seq, slot, table, n_rows, n_rows_kept, .. } = &mut self.running[idx];
        *n_rows_kept = *n_rows;
        if !self.config.enable_prefix_caching {
            return;
        }
        let (chain, tokens) = seq.chain_and_tokens();
        if *n_rows <= tokens.len() && self.kv.has_checkpoint(chain, tokens, *n_rows) {
            return;
        }
        if let Some(lease) = self.kv.take_checkpoint() {
            stage.save(slot.id(), lease.id(), *n_rows);
            table.note_saved(*n_rows, lease);
        }
    }

    fn admit(&mut self, stage: &mut Stage, started: &mut Vec<Started>, pinned: &mut Vec<BlockRef>) {
        while self.n_prompt_rows(self.company(), stage) > 0
            && let Some(head) = self.waiting.first_entry()
            && head.get().n_in_flight == 0
            && let Some(slot) = self.slots.take()
        {
            let seq = head.remove();
            match self.place(seq, slot) {
                Ok((running, hit)) => {
                    let idx = self.start(running, &hit, stage, started);
                    pinned.extend(hit.tail);
                    if let Next::Prefill { n_left } = self.running[idx].next() {
                        self.prefill(idx, n_left, stage);
                    }
                }
                Err(seq) => {
                    self.waiting.insert(seq.rank, seq);
                    return;
                }
            }
        }
    }

    /// Finds blocks for all known tokens of a sequence, with a tail hit or, when only that fails, without.
    #[allow(clippy::result_large_err)] // The sequence goes back in line by value; a box would cost each admission one.
    fn place(&mut self, mut seq: Sequence, slot: Lease<SlotIdx>) -> Result<(Running, Hit), Sequence> {
        for with_tails in [true, false] {
            let max_hit_tokens = seq.max_hit_tokens();
            let n_blocks = seq.n_known().div_ceil(BLOCK_TOKENS);
            let (chain, tokens) = seq.chain_and_tokens();
            let mut hit = self.kv.lookup(chain, tokens, max_hit_tokens, with_tails);
            let n_fresh = n_blocks - hit.blocks.len();
            let Some(fresh) = self.take_blocks_above(n_fresh, self.n_reserved()) else {
                if hit.tail.is_some() { continue } else { break }
            };
            let (chain, tokens) = seq.chain_and_tokens();
            self.kv.accept(&hit, chain, tokens);
            let table = BlockTable::new(std::mem::take(&mut hit.blocks), fresh);
            let (n_rows, n_rows_kept) = (hit.n_tokens, hit.n_tokens);
            return Ok((Running { seq, slot, table, n_rows, n_rows_kept, has_sampled: false }, hit));
        }
        Err(seq)
    }

    fn start(&mut self, mut running: Running, hit: &Hit, stage: &mut Stage, started: &mut Vec<Started>) -> usize {
        let copy_to = running.table.ids().nth(hit.n_tokens / BLOCK_TOKENS);
        stage.bind(&running, hit, copy_to);
        let rank = running.seq.rank;
        if !running.seq.has_started {
            let (n_prompt_tokens, n_cached_tokens) = (running.seq.n_prompt(), hit.n_tokens);
            started.push(Started { rank, n_prompt_tokens, n_cached_tokens });
            running.seq.has_started = true;
        }
        let idx = self.running.partition_point(|other| other.seq.rank < rank);
        self.running.insert(idx, running);
        idx
    }

    /// Blocks that admission leaves to the running sequences' next tokens.
    fn n_reserved(&self) -> usize {
        self.running.len().min(self.kv.counts().n_total() / 8)
    }

    fn take_blocks_above(&mut self, n: usize, n_reserved: usize) -> Option<Vec<BlockRef>> {
        if self.kv.counts().n_available() < n + n_reserved { None } else { self.take_blocks(n) }
    }

    /// Blocks from the cache; in need, ended turns give theirs up before anyone is preempted.
    fn take_blocks(&mut self, n: usize) -> Option<Vec<BlockRef>> {
        loop {
            if let Some(blocks) = self.kv.take(n) {
                return Some(blocks);
            }
            self.endings.pop()?;
        }
    }

    fn preempt_newest(&mut self) {
        let Some(running) = self.running.pop() else { return };
        let Running { mut seq, table, n_rows, .. } = running;
        let (chain, tokens) = seq.chain_and_tokens();
        // Full blocks stay in the cache, so that recomputing may find them again.
        self.kv.end_turn(table, chain, tokens, n_rows);
        self.waiting.insert(seq.rank, seq);
    }

    fn save_endings(&mut self, stage: &mut Stage) {
        for mut ending in std::mem::take(&mut self.endings) {
            stage.save(ending.slot.id(), ending.checkpoint.id(), ending.turn_end.n_tokens);
            let (chain, tokens) = ending.seq.chain_and_tokens();
            self.kv.keep_turn_end(&ending.turn_end, chain, tokens, ending.checkpoint);
        }
    }

    /// Makes what the step computes visible to the steps that follow it.
    fn settle(&mut self) {
        let mut released = Vec::new();
        for running in &mut self.running {
            let n_rows = running.n_rows;
            let (chain, tokens) = running.seq.chain_and_tokens();
            self.kv.settle(&mut running.table, chain, tokens, n_rows);
            let seq = &mut running.seq;
            // All but the last row, which no sibling can share.
            if seq.rank.choice == 0 && n_rows + 1 >= seq.n_prompt() && self.deferred.contains_key(&seq.rank.request) {
                released.push(seq.rank.request);
            }
        }
        released.into_iter().for_each(|request| self.release(request));
    }

    /// Puts a request's other choices in line.
    fn release(&mut self, request: RequestId) {
        for seq in self.deferred.remove(&request).unwrap_or_default() {
            self.waiting.insert(seq.rank, seq);
        }
    }

    fn end_deferred(&mut self, rank: Rank) -> bool {
        let Some(siblings) = self.deferred.get_mut(&rank.request) else { return false };
        let n_before = siblings.len();
        siblings.retain(|seq| seq.rank != rank);
        siblings.len() < n_before
    }

    fn find_running(&self, rank: Rank) -> Result<usize, usize> {
        self.running.binary_search_by_key(&rank, |running| running.seq.rank)
    }

    fn find(&mut self, rank: Rank) -> Option<&mut Sequence> {
        match self.find_running(rank) {
            Ok(idx) => Some(&mut self.running[idx].seq),
            Err(_) => self.waiting.get_mut(&rank),
        }
    }

    fn apply_run(
        &mut self,
        run: RunTicket,
        sampled: Option<Result<Sampled, RowError>>,
        scores: Vec<TokenLogprobs>,
        updates: &mut Vec<Update>,
    ) {
        let rank = run.rank;
        // Cancelled or ended since: the row is dropped.
        let Some(seq) = self.find(rank) else { return };
        seq.n_in_flight -= 1;
        let n_total = seq.n_prompt();
        if seq.output.is_empty() && rank.choice == 0 && run.n_tokens < n_total {
            updates.push(Update::Progress { rank, n_done: run.n_tokens, n_total });
        }
        if run.n_scores > 0 {
            seq.scores.extend(scores);
            if seq.scores.len() == seq.n_scores() {
                updates.push(Update::Scores(rank, std::mem::take(&mut seq.scores)));
            }
        }
        match sampled {
            Some(Ok(sampled)) => {
                seq.n_pending -= 1;
                let reason = seq.accept(sampled.token);
                updates.push(Update::Token(rank, sampled));
                if let Some(reason) = reason {
                    updates.push(Update::Finished(rank, reason));
                    self.end(rank);
                }
            }
            Some(Err(error)) => {
                updates.push(Update::Failed(rank, error));
                self.fail(rank);
            }
            None if seq.spec.max_tokens == 0 && run.n_tokens == n_total => {
                updates.push(Update::Finished(rank, FinishReason::Length));
                self.end(rank);
            }
            None => {}
        }
    }

    /// Gives back all that an ended sequence holds but what the next step needs to keep its window state.
    fn retire(&mut self, running: Running) {
        let Running { mut seq, slot, table, n_rows, .. } = running;
        let (chain, tokens) = seq.chain_and_tokens();
        if let Some(turn_end) = self.kv.end_turn(table, chain, tokens, n_rows)
            && let Some(checkpoint) = self.kv.take_checkpoint()
        {
            self.endings.push(Ending { seq, slot, turn_end, checkpoint });
        }
    }

    /// Drops a sequence whose numbers are unusable, and what the cache has of it.
    fn fail(&mut self, rank: Rank) {
        let taken = match self.find_running(rank) {
            Ok(idx) => Some(self.running.remove(idx).seq),
            Err(_) => self.waiting.remove(&rank),
        };
        if let Some(mut seq) = taken {
            let root = seq.spec.cache_root;
            let (chain, tokens) = seq.chain_and_tokens();
            self.kv.forget(root, chain, tokens);
        }
        if rank.choice == 0 {
            self.release(rank.request);
        }
    }
}
