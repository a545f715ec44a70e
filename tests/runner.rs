//! The CPU executor: step plans in, sampled tokens out; one bad sequence fails alone, a bad plan stops the device.
#![allow(clippy::unwrap_used)] // A step that fails where it must not fails the test.

use std::path::Path;
use std::sync::Arc;

use flashd::checkpoint::Checkpoint;
use flashd::device::cpu::Cpu;
use flashd::ids::{BlockId, CheckpointId, SlotIdx, TokenId};
use flashd::model::batch::{Executor, RowKind, Run, SampleRow, SaveCheckpoint, ScoreRow, StepPlan, TokenSource};
use flashd::model::forward::Rounding;
use flashd::model::runner::{CpuRunner, CpuRunnerSpec, RunnerError, RunnerPlaces};
use flashd::model::shape::ModelShape;
use flashd::model::weights::Weights;
use flashd::sample::params::{RowError, SamplingParams, SlotInit};

const PLACES: RunnerPlaces =
    RunnerPlaces { n_slots: 4, kv_bytes: 64 << 20, n_checkpoints: 4, max_rows: 64, max_tokens: 1024 };

fn runner(places: RunnerPlaces) -> Result<CpuRunner, RunnerError> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let checkpoint = Checkpoint::open(&root.join("demo-model")).unwrap();
    let shape = ModelShape::from_json(checkpoint.config_json()).unwrap();
    let weights = Arc::new(Weights::bind(&checkpoint, &shape).unwrap());
    CpuRunner::new(CpuRunnerSpec { weights, shape, rounding: Rounding::Kvq, cpu: Cpu::detect().unwrap(), places })
}

fn greedy(prompt: &[TokenId]) -> Arc<SlotInit> {
    Arc::new(SlotInit {
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        choice: 0,
        prompt: prompt.into(),
        output: Vec::new(),
        banned_until_min: Vec::new(),
        min_tokens: 0,
        n_logprobs: Some(2),
    })
}

/// "Calculate 17 * 23. Answer with the number only." and its answer, 391.
fn golden() -> (Vec<TokenId>, Vec<TokenId>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/demo/golden.json");
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let ids = |value: &serde_json::Value| -> Vec<TokenId> { serde_json::from_value(value.clone()).unwrap() };
    (ids(&golden["prompts"][0]["prompt_ids"]), ids(&golden["prompts"][0]["exact"]["greedy_ids"])[..5].to_vec())
}

/// A plan of one run per (slot, tokens, first position); every run samples its last row.
fn plan(runs: &[(u32, &[TokenId], usize)]) -> StepPlan {
    let mut plan = StepPlan::default();
    for &(slot, tokens, first_pos) in runs {
        let start = plan.batch.token_ids.len();
        plan.batch.token_ids.extend_from_slice(tokens);
        let n_rows = tokens.len().max(1);
        let block = plan.batch.block_ids.len();
        plan.batch.block_ids.push(BlockId(slot));
        let run_idx = plan.batch.runs.len();
        plan.batch.runs.push(Run {
            slot: SlotIdx(slot),
            first_pos,
            n_rows,
            kind: if tokens.is_empty() { RowKind::Decode } else { RowKind::Prefill },
            tokens: if tokens.is_empty() { TokenSource::Slot } else { TokenSource::Host { start } },
            blocks: block..block + 1,
            logit_rows: n_rows - 1..n_rows,
        });
        plan.samples.push(SampleRow { run_idx, row: n_rows - 1, position: first_pos + n_rows });
    }
    plan
}

#[test]
fn answers_from_plans_and_from_a_checkpoint() {
    let mut runner = runner(PLACES).unwrap();
    let (prompt, want) = golden();
    let mut first = plan(&[(2, &prompt, 0)]);
    first.binds.push((SlotIdx(2), greedy(&prompt)));
    first.saves.push(SaveCheckpoint { slot: SlotIdx(2), checkpoint: CheckpointId(1), n_tokens: prompt.len() });
    runner.launch(first).unwrap();
    let mut got = vec![runner.finish().unwrap().sampled.remove(0).unwrap()];
    for i in 0..want.len() - 1 {
        runner.launch(plan(&[(2, &[], prompt.len() + i)])).unwrap();
        got.push(runner.finish().unwrap().sampled.remove(0).unwrap());
    }
    assert_eq!(got.iter().map(|s| s.token).collect::<Vec<_>>(), want);
    let logprobs = got[0].logprobs.clone().unwrap();
    assert_eq!((logprobs.chosen.token, logprobs.rank, logprobs.top.len()), (want[0], 1, 2));

    // Another slot resumes at the end of the prompt: its first token is given, the rest follows.
    let mut resumed = plan(&[(0, &want[..1], prompt.len())]);
    resumed.binds.push((SlotIdx(0), greedy(&prompt)));
    resumed.copies.push((BlockId(2), BlockId(0)));
    resumed.restores.push((CheckpointId(1), SlotIdx(0)));
    runner.launch(resumed).unwrap();
    let next = runner.finish().unwrap().sampled.remove(0).unwrap();
    assert_eq!(next, got[1]);
}

#[test]
fn an_id_outside_the_vocabulary_fails_its_sequence_alone() {
    let mut runner = runner(PLACES).unwrap();
    let (prompt, want) = golden();
    let bad = [TokenId(0), TokenId(3072), TokenId(u32::MAX)];
    let mut step = plan(&[(1, &bad, 0), (3, &prompt, 0)]);
    step.binds.extend([(SlotIdx(1), greedy(&bad)), (SlotIdx(3), greedy(&prompt))]);
    step.scores.push(ScoreRow { run_idx: 0, row: 2, target: TokenId(5), n_top: 1 });
    runner.launch(step).unwrap();
    let output = runner.finish().unwrap();
    assert_eq!(output.sampled[0], Err(RowError::NotFinite { position: 3 }));
    assert_eq!(output.sampled[1].as_ref().unwrap().token, want[0]);
    assert!(output.scores[0].chosen.logprob < -9000.0);
}

#[test]
fn a_plan_that_reaches_outside_the_tables_stops_the_device() {
    let prompt = [TokenId(0), TokenId(9)];
    let mut bad_block = plan(&[(1, &prompt, 0)]);
    bad_block.batch.block_ids[0] = BlockId(u32::MAX);
    let mut twice = plan(&[(1, &prompt, 0), (2, &prompt, 0)]);
    twice.batch.runs[1].slot = SlotIdx(1);
    let mut no_logits = plan(&[(1, &prompt, 0)]);
    no_logits.samples[0].row = 0;
    let too_long: Vec<TokenId> = vec![TokenId(3); 65];
    let plans = [
        (bad_block, "block 4294967295 of"),
        (twice, "slot 1 stands twice"),
        (no_logits, "row 0 of run 0 is read but has no logits"),
        (plan(&[(9, &prompt, 0)]), "slot 9 of 4"),
        (plan(&[(1, &too_long, 0)]), "a step of 65 rows; at most 64"),
        (plan(&[(1, &prompt, 1023)]), "up to position 1025; at most 1024"),
        (plan(&[(1, &prompt, 255)]), "a block table of 1 for 257 tokens"),
    ];
    for (bad, want) in plans {
        let mut runner = runner(PLACES).unwrap();
        let error = runner.launch(bad).unwrap_err();
        assert!(error.to_string().contains(want), "{error}");
        // A device that has failed stays failed.
        assert_eq!(runner.launch(plan(&[(1, &prompt, 0)])), Err(error.clone()));
        assert_eq!(runner.finish().unwrap_err(), error);
    }
}

#[test]
fn places_that_do_not_hold_one_sequence_are_refused() {
    let error = runner(RunnerPlaces { kv_bytes: 1 << 20, ..PLACES }).unwrap_err();
    assert!(matches!(error, RunnerError::KvTooSmall { got_bytes: 1_048_576, want_bytes, .. } if want_bytes > 1 << 20));
    let error = runner(RunnerPlaces { max_tokens: 65_537, ..PLACES }).unwrap_err();
    assert_eq!(error.to_string(), "max_tokens is 65537; want 1 to 65536");
    let runner = runner(PLACES).unwrap();
    assert!(runner.capacity().n_blocks > 300, "{:?}", runner.capacity());
}
