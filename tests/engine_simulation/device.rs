//! A device that computes nothing but knows which token every cached row, window and checkpoint holds.
//!
//! A token's state is a hash of the whole prefix. As in the model, a block holds one row for each complete group of
//! tokens, a slot's window holds the last states and those of the unfinished group, and a checkpoint is a copy of the
//! window. Every run first proves that its blocks and its window belong to one prefix; each broken rule panics.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex};

use flashd::device::DeviceError;
use flashd::ids::{BlockId, TokenId};
use flashd::model::batch::{Capacity, Executor, RowKind, Run, StepOutput, StepPlan, TokenSource};
use flashd::model::cache::BLOCK_TOKENS;
use flashd::sample::params::{RowError, Sampled, SlotInit};

use crate::oracle::{EMPTY, advance, sample, score};

/// Tokens that share a compressed row.
const GROUP: usize = 4;
const GROUPS: usize = BLOCK_TOKENS / GROUP;
/// States a window keeps.
const WINDOW: usize = 128;

/// A compressed row: the states before and after its group.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Row {
    before: u64,
    after: u64,
}

#[derive(Clone, Debug)]
struct Window {
    n_tokens: usize,
    /// The newest `WINDOW` states, newest last.
    states: VecDeque<u64>,
    /// State at the start of the unfinished group.
    group_start: u64,
}

#[derive(Debug)]
struct Slot {
    window: Window,
    init: Option<Arc<SlotInit>>,
    output: Vec<TokenId>,
    last: Option<TokenId>,
}

/// Faults to inject.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// A row of this token has no usable logits.
    pub nan_token: Option<TokenId>,
    /// Launches that work before the device is lost.
    pub n_launches_until_lost: Option<usize>,
    /// Launches that work before one panics.
    pub n_launches_until_panic: Option<usize>,
}

/// Holds `finish` back until it is opened.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub fn close(&self) {
        *self.0.0.lock().expect("lock") = true;
    }

    pub fn open(&self) {
        *self.0.0.lock().expect("lock") = false;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let closed = self.0.0.lock().expect("lock");
        drop(self.0.1.wait_while(closed, |closed| *closed).expect("lock"));
    }
}

#[derive(Debug)]
pub struct FakeDevice {
    capacity: Capacity,
    max_in_flight: usize,
    blocks: Vec<Vec<Option<Row>>>,
    slots: Vec<Slot>,
    checkpoints: Vec<Option<Window>>,
    results: VecDeque<StepOutput>,
    faults: Faults,
    n_launches: usize,
    gate: Gate,
}

impl Window {
    fn new() -> Self {
        Self { n_tokens: 0, states: VecDeque::from([EMPTY]), group_start: EMPTY }
    }

    fn state(&self) -> u64 {
        *self.states.back().expect("never empty")
    }

    fn push(&mut self, token: TokenId) {
        if self.n_tokens.is_multiple_of(GROUP) {
            self.group_start = self.state();
        }
        self.states.push_back(advance(self.state(), token));
        if self.states.len() > WINDOW {
            self.states.pop_front();
        }
        self.n_tokens += 1;
    }

    /// The state after `n_tokens` tokens, if it is recent enough.
    fn state_after(&self, n_tokens: usize) -> Option<u64> {
        let back = self.n_tokens - n_tokens;
        self.states.len().checked_sub(back + 1).map(|idx| self.states[idx])
    }
}

impl FakeDevice {
    pub fn new(capacity: Capacity, lag: usize) -> Self {
        let slot = || Slot { window: Window::new(), init: None, output: Vec::new(), last: None };
        Self {
            capacity,
            max_in_flight: lag + 1,
            blocks: vec![vec![None; GROUPS]; capacity.n_blocks],
            slots: (0..capacity.n_slots).map(|_| slot()).collect(),
            checkpoints: vec![None; capacity.n_checkpoints],
            results: VecDeque::new(),
            faults: Faults::default(),
            n_launches: 0,
            gate: Gate::default(),
        }
    }

    pub fn with_faults(self, faults: Faults) -> Self {
        Self { faults, ..self }
    }

    pub fn gate(&self) -> Gate {
        self.gate.clone()
    }

    fn run_step(&mut self, plan: &StepPlan) -> StepOutput {
        self.check_shape(plan);
        for (slot, init) in &plan.binds {
            let slot = &mut self.slots[slot.index()];
            *slot =
                Slot { window: Window::new(), init: Some(Arc::clone(init)), output: init.output.clone(), last: None };
        }
        for (from, to) in &plan.copies {
            self.blocks[to.index()] = self.blocks[from.index()].clone();
        }
        for (checkpoint, slot) in &plan.restores {
            let window = self.checkpoints[checkpoint.index()].clone();
            self.slots[slot.index()].window = window.expect("a checkpoint that was saved");
        }
        let states: Vec<Vec<u64>> = plan.batch.runs.iter().map(|run| self.forward(plan, run)).collect();
        let output = self.sample_and_score(plan, &states);
        for save in &plan.saves {
            let window = &self.slots[save.slot.index()].window;
            assert_eq!(window.n_tokens, save.n_tokens, "{save:?}");
            self.checkpoints[save.checkpoint.index()] = Some(window.clone());
        }
        output
    }

    fn check_shape(&self, plan: &StepPlan) {
        let batch = &plan.batch;
        let n_rows: usize = batch.runs.iter().map(|run| run.n_rows).sum();
        assert!(n_rows <= self.capacity.max_rows, "{n_rows} rows");
        let mut slots = HashSet::new();
        let mut writers: HashMap<BlockId, usize> = HashMap::new();
        for (idx, run) in batch.runs.iter().enumerate() {
            assert!(slots.insert(run.slot), "slot {} twice", run.slot);
            assert!(run.n_rows >= 1 && run.first_pos + run.n_rows <= self.capacity.max_tokens, "{run:?}");
            assert!(run.logit_rows.end <= run.n_rows, "{run:?}");
            let table = &batch.block_ids[run.blocks.clone()];
            assert!(table.len() * BLOCK_TOKENS >= run.first_pos + run.n_rows, "{run:?}");
            for block in &table[run.first_pos / BLOCK_TOKENS..=(run.first_pos + run.n_rows - 1) / BLOCK_TOKENS] {
                assert_eq!(writers.insert(*block, idx), None, "two runs write block {block}");
            }
        }
        for (idx, run) in batch.runs.iter().enumerate() {
            for block in &batch.block_ids[run.blocks.clone()] {
                assert!(writers.get(block).is_none_or(|&writer| writer == idx), "block {block} is written and read");
            }
        }
        let targets: HashSet<BlockId> = plan.copies.iter().map(|&(_, to)| to).collect();
        assert_eq!(targets.len(), plan.copies.len(), "a block is copied to twice");
        assert!(plan.copies.iter().all(|(from, _)| !targets.contains(from)), "a copy's source is a target");
        assert!(plan.copies.iter().all(|(from, _)| !writers.contains_key(from) || self.is_partial_writer(plan, *from)));
        assert!(batch.token_ids.iter().all(|token| token.index() < self.capacity.vocab_size));
    }

    /// The source of a copy may go on being filled by the sequence that made it, and by nobody else.
    fn is_partial_writer(&self, plan: &StepPlan, block: BlockId) -> bool {
        plan.batch.runs.iter().any(|run| {
            let idx = run.first_pos / BLOCK_TOKENS;
            plan.batch.block_ids[run.blocks.clone()][idx] == block && run.first_pos % BLOCK_TOKENS != 0
        })
    }

    /// Runs the rows; returns the state after each.
    fn forward(&mut self, plan: &StepPlan, run: &Run) -> Vec<u64> {
        let table = &plan.batch.block_ids[run.blocks.clone()];
        let slot = &mut self.slots[run.slot.index()];
        assert_eq!(slot.window.n_tokens, run.first_pos, "slot {} is elsewhere", run.slot);
        prove_prefix(&self.blocks, table, &slot.window);
        (0..run.n_rows)
            .map(|row| {
                let token = match run.tokens {
                    TokenSource::Host { start } => plan.batch.token_ids[start + row],
                    TokenSource::Slot => slot.last.expect("a sampled token"),
                };
                assert_eq!(run.tokens == TokenSource::Slot, run.kind == RowKind::Decode);
                slot.window.push(token);
                let n_tokens = slot.window.n_tokens;
                if n_tokens.is_multiple_of(GROUP) {
                    let group = n_tokens / GROUP - 1;
                    let row = Row { before: slot.window.group_start, after: slot.window.state() };
                    self.blocks[table[group / GROUPS].index()][group % GROUPS] = Some(row);
                }
                if Some(token) == self.faults.nan_token { u64::MAX } else { slot.window.state() }
            })
            .collect()
    }

    fn sample_and_score(&mut self, plan: &StepPlan, states: &[Vec<u64>]) -> StepOutput {
        let mut output = StepOutput::default();
        for wanted in &plan.samples {
            let run = &plan.batch.runs[wanted.run_idx];
            assert!(run.logit_rows.contains(&wanted.row), "{wanted:?} {run:?}");
            assert_eq!(wanted.position, run.first_pos + wanted.row + 1);
            let slot = &mut self.slots[run.slot.index()];
            let init = slot.init.clone().expect("a bound slot");
            let state = states[wanted.run_idx][wanted.row];
            if state == u64::MAX {
                // A row that was planned before this is known still finds a valid id.
                slot.output.push(TokenId(0));
                slot.last = Some(TokenId(0));
                output.sampled.push(Err(RowError::NotFinite { position: wanted.position - 1 }));
                continue;
            }
            assert_eq!(init.prompt.len() + slot.output.len(), wanted.position, "the slot has missed a token");
            let token = sample(state, &init, &slot.output, wanted.position, self.capacity.vocab_size);
            slot.output.push(token);
            slot.last = Some(token);
            let logprobs = init.n_logprobs.map(|n_top| score(state, token, n_top));
            output.sampled.push(Ok(Sampled { token, logprobs }));
        }
        for wanted in &plan.scores {
            let run = &plan.batch.runs[wanted.run_idx];
            assert!(run.logit_rows.contains(&wanted.row), "{wanted:?} {run:?}");
            output.scores.push(score(states[wanted.run_idx][wanted.row], wanted.target, wanted.n_top));
        }
        output
    }
}

/// All complete groups before the window's end chain up to its state, and the window's states are theirs.
fn prove_prefix(blocks: &[Vec<Option<Row>>], table: &[BlockId], window: &Window) {
    let mut state = EMPTY;
    for group in 0..window.n_tokens / GROUP {
        let row = blocks[table[group / GROUPS].index()][group % GROUPS].expect("a row that was written");
        assert_eq!(row.before, state, "group {group} belongs to another prefix");
        state = row.after;
        if let Some(recent) = window.state_after((group + 1) * GROUP) {
            assert_eq!(recent, state, "the window belongs to another prefix than group {group}");
        }
    }
    if window.n_tokens.is_multiple_of(GROUP) {
        assert_eq!(window.state(), state, "the window belongs to another prefix");
    } else {
        assert_eq!(window.group_start, state, "the unfinished group belongs to another prefix");
    }
}

impl Executor for FakeDevice {
    fn capacity(&self) -> Capacity {
        self.capacity
    }

    fn launch(&mut self, plan: StepPlan) -> Result<(), DeviceError> {
        assert!(self.faults.n_launches_until_panic != Some(self.n_launches), "an injected panic");
        if self.faults.n_launches_until_lost == Some(self.n_launches) {
            return Err(DeviceError::Step { device: "fake".to_owned(), reason: "an injected fault".to_owned() });
        }
        self.n_launches += 1;
        let output = self.run_step(&plan);
        self.results.push_back(output);
        assert!(self.results.len() <= self.max_in_flight, "too many steps in flight");
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, DeviceError> {
        self.gate.pass();
        Ok(self.results.pop_front().expect("a step in flight"))
    }
}
