//! The forward pass on kernels, in the simulator at both wave widths: the bits of the CPU's `device` mode, which depend on nothing but
//! the tokens before them.
#![allow(clippy::unwrap_used)] // A step that fails where it must not fails the test.

mod lab;

use std::sync::Arc;

use flashd::checkpoint::Checkpoint;
use flashd::device::{CodeObjects, Device, DeviceKind, SimWave};
use flashd::ids::{BlockId, CheckpointId, SlotIdx, TokenId};
use flashd::model::batch::{
    Batch, Executor, RowKind, Run, SampleRow, SaveCheckpoint, ScoreRow, StepOutput, StepPlan, TokenSource,
};
use flashd::model::device::WeightSource;
use flashd::model::device::runner::{DeviceRunner, DeviceRunnerSpec};
use flashd::model::forward::Rounding;
use flashd::model::inventory;
use flashd::model::runner::RunnerPlaces;
use flashd::model::weights::Weights;
use flashd::sample::params::{RowError, SamplingParams, SlotInit, TokenLogprobs};
use flashd::sample::sampler::{SlotSampler, score};
use lab::golden::Golden;
use lab::{Feed, Model, Sequence, argmax, assert_same_bits};

const PLACES: RunnerPlaces =
    RunnerPlaces { n_slots: 4, kv_bytes: 16 << 20, n_checkpoints: 2, max_rows: 192, max_tokens: 1024 };

fn runner(model: &Model, wave: SimWave, source: WeightSource) -> DeviceRunner {
    let code = CodeObjects::beside(std::env::current_exe().ok().as_deref()).with_sim_wave(wave);
    let device = Device::open(DeviceKind::Sim, 0, &code).unwrap_or_else(|error| panic!("{error}"));
    let (weights, shape) = (&*model.weights, model.shape.clone());
    DeviceRunner::new(DeviceRunnerSpec {
        device,
        weights,
        source,
        shape,
        places: PLACES,
        use_graphs: true,
        progress: &|_, _| (),
    })
    .unwrap()
}

/// An executor whose sequences are fed in runs of any kind.
struct DeviceLab {
    runner: DeviceRunner,
    vocab_size: usize,
    next_block: u32,
}

impl DeviceLab {
    /// Steps of few rows run from recorded graphs, those of many never do.
    fn new(model: &Model, wave: SimWave) -> Self {
        Self::with_source(model, wave, WeightSource::Checkpoint)
    }

    fn with_source(model: &Model, wave: SimWave, source: WeightSource) -> Self {
        let mut runner = runner(model, wave, source);
        runner.keep_logits();
        Self { runner, vocab_size: model.shape.vocab_size, next_block: 0 }
    }

    /// An empty sequence in a slot, with blocks of its own, in descending order.
    fn start(&mut self, slot: u32) -> Sequence {
        let first = self.next_block;
        self.next_block += 2;
        Sequence { slot: SlotIdx(slot), blocks: (first..self.next_block).rev().map(BlockId).collect(), n_tokens: 0 }
    }

    /// A plan of the next tokens of some sequences.
    fn plan(feeds: &mut [Feed<'_>]) -> StepPlan {
        let mut batch = Batch::default();
        for feed in feeds {
            let (start, first_block) = (batch.token_ids.len(), batch.block_ids.len());
            batch.token_ids.extend_from_slice(feed.tokens);
            batch.block_ids.extend_from_slice(&feed.sequence.blocks);
            batch.runs.push(Run {
                slot: feed.sequence.slot,
                first_pos: feed.sequence.n_tokens,
                n_rows: feed.tokens.len(),
                kind: feed.kind,
                tokens: TokenSource::Host { start },
                blocks: first_block..batch.block_ids.len(),
                logit_rows: feed.logit_rows.clone(),
            });
            feed.sequence.n_tokens += feed.tokens.len();
        }
        StepPlan { batch, ..StepPlan::default() }
    }

    fn run(&mut self, plan: StepPlan) -> StepOutput {
        self.runner.launch(plan).unwrap();
        self.runner.finish().unwrap()
    }

    /// Feeds one run alone and returns the logits of all its rows.
    fn feed(&mut self, sequence: &mut Sequence, tokens: &[TokenId], kind: RowKind) -> Vec<f32> {
        let plan = Self::plan(&mut [Feed { sequence, tokens, kind, logit_rows: 0..tokens.len() }]);
        self.run(plan);
        (0..tokens.len()).flat_map(|row| self.runner.logits(0, row).to_vec()).collect()
    }

    /// Feeds a prompt in chunks and compares every row with that of the whole prompt.
    fn check_chunks(&mut self, tokens: &[TokenId], chunk: usize, whole: &[f32]) {
        let mut sequence = self.start_over();
        for tokens in tokens.chunks(chunk) {
            let first = sequence.n_tokens * self.vocab_size;
            let got = self.feed(&mut sequence, tokens, RowKind::Prefill);
            let what = format!("chunk of {chunk} to {}", sequence.n_tokens);
            assert_same_bits(&got, &whole[first..first + got.len()], &what);
        }
    }

    /// A sequence in slot 0 whose blocks were used before: what they hold must not matter.
    fn start_over(&mut self) -> Sequence {
        self.next_block = 0;
        self.start(0)
    }
}

/// Tokens of the compared prompt: past the window, into the indexer's choice (index_topk groups of 4) and past a group of 128.
const N_LONG: usize = 132;

/// The logits of a prompt of one step: the CPU's, and those that its parts give in chunks of the given sizes.
fn check_fixture(name: &'static str, wave: SimWave, n_tokens: usize, chunks: &[(usize, usize)]) {
    let golden = Golden::load(name);
    let (tokens, vocab_size) = (&golden.tokens[..n_tokens], golden.model.shape.vocab_size);
    let mut cpu = golden.model.lab(Rounding::Device(wave));
    let mut sequence = cpu.start(0, n_tokens);
    let want = cpu.feed(&mut sequence, tokens, RowKind::Prefill, 0..n_tokens);
    let mut lab = DeviceLab::new(&golden.model, wave);
    let mut sequence = lab.start_over();
    let whole = lab.feed(&mut sequence, tokens, RowKind::Prefill);
    for (row, (got, want)) in whole.chunks_exact(vocab_size).zip(want.chunks_exact(vocab_size)).enumerate() {
        assert_same_bits(got, want, &format!("{name} on {}, row {row}", wave.arch()));
    }
    for &(chunk, n_tokens) in chunks {
        lab.check_chunks(&tokens[..n_tokens], chunk, &whole);
    }
}

#[test]
fn small_has_the_bits_of_the_cpu_in_any_chunks() {
    check_fixture("small", SimWave::W64, N_LONG, &[(7, 20), (1, 9)]);
    check_fixture("small", SimWave::W32, 40, &[]);
}

#[test]
fn odd_has_the_bits_of_the_cpu_in_any_chunks() {
    check_fixture("odd", SimWave::W32, N_LONG, &[(64, N_LONG)]);
}

/// A model without a checkpoint's matrices, which the device makes by itself, has the logits of the written one.
#[test]
fn weights_by_formula_give_the_same_logits() {
    let golden = Golden::load("small");
    let config_json = std::fs::read(lab::fixture("small", "config.json")).unwrap();
    let shape = golden.model.shape.clone();
    let (tensors, seed) = (inventory::tensors(&shape, true), golden.seed);
    let checkpoint = Checkpoint::by_formula(&config_json, &tensors, seed, shape.n_routed_experts).unwrap();
    let model = Model { weights: Arc::new(Weights::bind(&checkpoint, &shape).unwrap()), shape };
    let tokens = &golden.tokens[..9];
    let logits = |mut lab: DeviceLab| {
        let mut sequence = lab.start_over();
        lab.feed(&mut sequence, tokens, RowKind::Prefill)
    };
    let want = logits(DeviceLab::new(&golden.model, SimWave::W64));
    let got = logits(DeviceLab::with_source(&model, SimWave::W64, WeightSource::Formula { seed }));
    assert_same_bits(&got, &want, "weights by formula");
}

/// Decode, a batch of three, a rejected draft, a checkpoint: each row has the bits of the whole prompt's.
#[test]
fn bits_do_not_depend_on_batch_drafts_or_cache_hits() {
    check_bits(&Golden::load("odd"), SimWave::W64);
}

fn check_bits(golden: &Golden, wave: SimWave) {
    let mut lab = DeviceLab::new(&golden.model, wave);
    let v = lab.vocab_size;
    let (n, tokens) = (80, &golden.tokens[..80]);
    let mut sequence = lab.start(0);
    let whole = lab.feed(&mut sequence, tokens, RowKind::Prefill);
    let rows = |first: usize, end: usize| &whole[first * v..end * v];

    // A batch: the same prompt's parts in two slots, and a stranger between them.
    let stranger: Vec<TokenId> = tokens.iter().rev().copied().take(5).collect();
    let (mut a, mut b, mut c) = (lab.start(1), lab.start(2), lab.start(3));
    let prefill = |n: usize| (RowKind::Prefill, 0..n);
    lab.feed(&mut a, &tokens[..70], RowKind::Prefill);
    let mut feeds = [
        Feed { sequence: &mut a, tokens: &tokens[70..71], kind: RowKind::Decode, logit_rows: 0..1 },
        Feed { sequence: &mut b, tokens: &stranger, kind: prefill(5).0, logit_rows: 2..2 },
        Feed { sequence: &mut c, tokens: &tokens[..11], kind: prefill(11).0, logit_rows: 3..11 },
    ];
    let plan = DeviceLab::plan(&mut feeds);
    lab.run(plan);
    assert_same_bits(lab.runner.logits(0, 0), rows(70, 71), "decode in a batch");
    for row in 3..11 {
        assert_same_bits(lab.runner.logits(2, row), rows(row, row + 1), "prefill in a batch");
    }

    // Drafts: two of four are right; what the wrong ones left in the rings and blocks is overwritten.
    let wrong = TokenId((tokens[73].0 + 1) % v as u32);
    let drafts = [tokens[71], tokens[72], wrong, wrong];
    let got = lab.feed(&mut a, &drafts, RowKind::Verify);
    assert_same_bits(&got[..2 * v], rows(71, 73), "accepted drafts");
    a.n_tokens = 73;
    let got = lab.feed(&mut a, &tokens[73..n], RowKind::Verify);
    assert_same_bits(&got, rows(73, n), "after rejected drafts");

    check_cache_hit(&mut lab, tokens, &whole);
}

/// A checkpoint taken in the middle, a copied block, another slot that goes on.
fn check_cache_hit(lab: &mut DeviceLab, tokens: &[TokenId], whole: &[f32]) {
    let (v, at) = (lab.vocab_size, 41);
    let mut first = lab.start(1);
    let feed = Feed { sequence: &mut first, tokens: &tokens[..at], kind: RowKind::Prefill, logit_rows: 0..0 };
    let mut plan = DeviceLab::plan(&mut [feed]);
    plan.saves.push(SaveCheckpoint { slot: first.slot, checkpoint: CheckpointId(1), n_tokens: at });
    lab.run(plan);
    // The slot goes on with something else, so that only the checkpoint can be right.
    let others = vec![TokenId(7); 12];
    lab.feed(&mut first, &others, RowKind::Prefill);
    let mut second = lab.start(3);
    second.n_tokens = at;
    let feed =
        Feed { sequence: &mut second, tokens: &tokens[at..], kind: RowKind::Prefill, logit_rows: 0..tokens.len() - at };
    let mut plan = DeviceLab::plan(&mut [feed]);
    plan.copies.push((first.blocks[0], second.blocks[0]));
    plan.restores.push((CheckpointId(1), second.slot));
    lab.run(plan);
    for row in 0..tokens.len() - at {
        let want = &whole[(at + row) * v..(at + row + 1) * v];
        assert_same_bits(lab.runner.logits(0, row), want, &format!("row {row} after a cache hit"));
    }
}

fn greedy(prompt: &[TokenId]) -> Arc<SlotInit> {
    Arc::new(SlotInit {
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        choice: 0,
        prompt: prompt.into(),
        output: Vec::new(),
        banned_until_min: Vec::new(),
        min_tokens: 0,
        n_logprobs: None,
    })
}

/// Sampled tokens are read from their slots; a sequence with an id outside the vocabulary fails alone.
#[test]
fn a_sampled_token_feeds_the_next_step_and_a_bad_id_fails_alone() {
    let golden = Golden::load("odd");
    let mut lab = DeviceLab::new(&golden.model, SimWave::W32);
    let (prompt, bad) = (&golden.tokens[..6], [TokenId(3), TokenId(u32::MAX)]);
    let (mut a, mut b) = (lab.start(2), lab.start(0));
    let mut plan = DeviceLab::plan(&mut [
        Feed { sequence: &mut b, tokens: &bad, kind: RowKind::Prefill, logit_rows: 1..2 },
        Feed { sequence: &mut a, tokens: prompt, kind: RowKind::Prefill, logit_rows: 5..6 },
    ]);
    plan.binds.extend([(b.slot, greedy(&bad)), (a.slot, greedy(prompt))]);
    plan.samples.push(SampleRow { run_idx: 0, row: 1, position: 2 });
    plan.samples.push(SampleRow { run_idx: 1, row: 5, position: 6 });
    let output = lab.run(plan);
    assert_eq!(output.sampled[0], Err(RowError::NotFinite { position: 2 }));
    let sampled = output.sampled[1].as_ref().unwrap().token;
    assert_eq!(sampled, argmax(lab.runner.logits(1, 5)));

    // The next row's token is only on the device.
    let mut plan = DeviceLab::plan(&mut [Feed {
        sequence: &mut a,
        tokens: &[TokenId(0)],
        kind: RowKind::Decode,
        logit_rows: 0..1,
    }]);
    plan.batch.token_ids.clear();
    plan.batch.runs[0].tokens = TokenSource::Slot;
    lab.run(plan);
    let from_slot = lab.runner.logits(0, 0).to_vec();
    let mut again = lab.start(1);
    let fed: Vec<TokenId> = prompt.iter().copied().chain([sampled]).collect();
    let all = lab.feed(&mut again, &fed, RowKind::Prefill);
    assert_same_bits(&from_slot, &all[6 * lab.vocab_size..], "the row after a sampled token");
}

/// Each launch costs a decode step microseconds: what a layer makes, with and without a choice of groups to attend to.
#[test]
fn a_decode_step_makes_few_launches() {
    const LAYER: u64 = 16;
    const CHOICE: u64 = 2;
    // The embedding; the last layer's experts and residual; the head's input, the head and sampling.
    const REST: u64 = 1 + 2 + 3;
    let golden = Golden::load("odd");
    let mut lab = DeviceLab::new(&golden.model, SimWave::W32);
    let (n_layers, top_k) = (golden.model.shape.num_hidden_layers as u64, golden.model.shape.index_topk);
    let n_choosing =
        golden.model.shape.compress_ratios[..n_layers as usize].iter().filter(|ratio| **ratio == 4).count();
    let mut sequence = lab.start(0);
    // The next token's group is the first that is one too many.
    let tokens = &golden.tokens[..4 * (top_k + 1)];
    let (prompt, last) = tokens.split_at(tokens.len() - 1);
    lab.feed(&mut sequence, &prompt[..20], RowKind::Prefill);
    let launches = |sequence: &mut Sequence, lab: &mut DeviceLab, tokens: &[TokenId]| {
        let feed = Feed { sequence, tokens, kind: RowKind::Decode, logit_rows: 0..1 };
        lab.runner.profile(DeviceLab::plan(&mut [feed])).unwrap().len() as u64
    };
    assert_eq!(launches(&mut sequence, &mut lab, &prompt[20..21]), REST + LAYER * n_layers);
    lab.feed(&mut sequence, &prompt[21..], RowKind::Prefill);
    let all = REST + LAYER * n_layers + CHOICE * n_choosing as u64;
    assert_eq!(launches(&mut sequence, &mut lab, last), all);
}

/// Samplers of the host for the slots of a test, which see the logits that came home.
struct HostSamplers(Vec<(SlotIdx, SlotSampler)>);

impl HostSamplers {
    /// Compares what a step gave with what the host makes of the step's logits.
    fn check(&mut self, lab: &DeviceLab, plan: &StepPlan, output: &StepOutput) {
        for (sample, got) in plan.samples.iter().zip(&output.sampled) {
            let slot = plan.batch.runs[sample.run_idx].slot;
            let sampler = &mut self.0.iter_mut().find(|(of, _)| *of == slot).unwrap().1;
            let want = sampler.sample(lab.runner.logits(sample.run_idx, sample.row), sample.position).unwrap();
            let got = got.as_ref().unwrap();
            assert_eq!(got.token, want.token, "{slot:?} at {}", sample.position);
            assert_eq!(got.logprobs.is_some(), want.logprobs.is_some());
            got.logprobs.iter().zip(&want.logprobs).for_each(|(got, want)| assert_near(got, want));
        }
        for (row, got) in plan.scores.iter().zip(&output.scores) {
            assert_near(got, &score(lab.runner.logits(row.run_idx, row.row), row.target, row.n_top));
        }
        assert_eq!((output.sampled.len(), output.scores.len()), (plan.samples.len(), plan.scores.len()));
    }
}

/// The same tokens and ranks; log-probabilities to some units of f32.
fn assert_near(got: &TokenLogprobs, want: &TokenLogprobs) {
    let ids = |logprobs: &TokenLogprobs| logprobs.top.iter().map(|scored| scored.token).collect::<Vec<_>>();
    assert_eq!((got.chosen.token, got.rank, ids(got)), (want.chosen.token, want.rank, ids(want)));
    for (got, want) in got.top.iter().chain([&got.chosen]).zip(want.top.iter().chain([&want.chosen])) {
        assert!((got.logprob - want.logprob).abs() < 1e-5, "{got:?}, want {want:?}");
    }
}

/// Tokens and log-probabilities are those that the host would make of the same logits: drawn on the device, and, for a row with
/// more log-probabilities than the kernel gives and for a penalised run of several tokens, on the host.
#[test]
fn what_is_sampled_is_what_the_host_would_sample() {
    let golden = Golden::load("odd");
    let mut lab = DeviceLab::new(&golden.model, SimWave::W32);
    let prompt = &golden.tokens[..70];
    let filtered = SamplingParams { top_k: 40, top_p: 0.9, min_p: 0.01, seed: Some(7), ..SamplingParams::default() };
    let penalised = SamplingParams { repetition_penalty: 1.3, frequency_penalty: 0.5, ..filtered.clone() };
    let biased = SamplingParams { logit_bias: vec![(TokenId(5), 4.0)], seed: Some(8), ..SamplingParams::default() };
    let inits =
        [(1, filtered, Some(3)), (2, biased, Some(25)), (0, penalised, None)].map(|(slot, sampling, n_logprobs)| {
            let base = SlotInit::clone(&greedy(prompt));
            let init = SlotInit { sampling, n_logprobs, banned_until_min: vec![TokenId(9)], min_tokens: 2, ..base };
            (SlotIdx(slot), Arc::new(init))
        });
    let samplers = inits.iter().map(|(slot, init)| (*slot, SlotSampler::new(init, lab.vocab_size)));
    let mut host = HostSamplers(samplers.collect());
    let mut sequences = inits.clone().map(|(slot, _)| lab.start(slot.0));

    // A prompt whose rows are scored, more than one tile of them; one of which only the last row is wanted; a run of three tokens.
    let [a, b, c] = &mut sequences;
    let mut plan = DeviceLab::plan(&mut [
        Feed { sequence: a, tokens: prompt, kind: RowKind::Prefill, logit_rows: 0..70 },
        Feed { sequence: b, tokens: &prompt[..9], kind: RowKind::Prefill, logit_rows: 8..9 },
        Feed { sequence: c, tokens: &prompt[..5], kind: RowKind::Verify, logit_rows: 2..5 },
    ]);
    plan.binds = inits.to_vec();
    plan.scores = (0..69).map(|row| ScoreRow { run_idx: 0, row, target: prompt[row + 1], n_top: 2 }).collect();
    plan.samples = [(0, 69, 70), (1, 8, 9), (2, 2, 3), (2, 3, 4), (2, 4, 5)]
        .map(|(run_idx, row, position)| SampleRow { run_idx, row, position })
        .into();
    let output = lab.run(plan.clone());
    host.check(&lab, &plan, &output);
    let token_of = |output: &StepOutput, i: usize| output.sampled[i].as_ref().unwrap().token;
    let mut fed = [prompt.to_vec(), prompt[..9].to_vec(), prompt[..5].to_vec()];
    fed.iter_mut().zip([0, 1, 4]).for_each(|(fed, i)| fed.push(token_of(&output, i)));

    // Steps from a recorded graph go on with the tokens that the device keeps.
    for _ in 0..3 {
        let feeds = sequences.iter_mut().map(|sequence| Feed {
            sequence,
            tokens: &prompt[..1],
            kind: RowKind::Decode,
            logit_rows: 0..1,
        });
        let mut plan = DeviceLab::plan(&mut feeds.collect::<Vec<_>>());
        plan.batch.runs.iter_mut().for_each(|run| run.tokens = TokenSource::Slot);
        let of_run = |(run_idx, run): (usize, &Run)| SampleRow { run_idx, row: 0, position: run.first_pos + 1 };
        plan.samples = plan.batch.runs.iter().enumerate().map(of_run).collect();
        let output = lab.run(plan.clone());
        host.check(&lab, &plan, &output);
        fed.iter_mut().enumerate().for_each(|(i, fed)| fed.push(token_of(&output, i)));
    }

    // The steps read the tokens that were told, whoever had drawn them.
    let after = [0, 1, 2].map(|run_idx| lab.runner.logits(run_idx, 0).to_vec());
    for (fed, after) in fed.iter().zip(after) {
        let mut again = lab.start(3);
        let all = lab.feed(&mut again, &fed[..fed.len() - 1], RowKind::Prefill);
        assert_same_bits(&after, &all[all.len() - lab.vocab_size..], "the row after sampled tokens");
    }
}

/// A plan that reaches outside the tables stops the device, and it stays stopped.
#[test]
fn a_plan_outside_the_tables_stops_the_device() {
    let golden = Golden::load("odd");
    let mut lab = DeviceLab::new(&golden.model, SimWave::W64);
    let mut sequence = lab.start(1);
    sequence.blocks[0] = BlockId(u32::MAX);
    let plan = DeviceLab::plan(&mut [Feed {
        sequence: &mut sequence,
        tokens: &golden.tokens[..2],
        kind: RowKind::Prefill,
        logit_rows: 0..1,
    }]);
    let error = lab.runner.launch(plan).unwrap_err();
    assert!(error.to_string().contains("block 4294967295 of"), "{error}");
    assert_eq!(lab.runner.launch(StepPlan::default()), Err(error.clone()));
    assert_eq!(lab.runner.finish().unwrap_err(), error);
}
