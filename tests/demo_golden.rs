//! The demo model's greedy answers equal those of the published reference implementation, up to the end token.
#![allow(clippy::unwrap_used)] // A file that can't be read fails the test.

mod lab;

use std::path::Path;

use flashd::ids::TokenId;
use flashd::model::forward::Rounding;
use lab::{Model, argmax};
use serde_json::Value;

fn ids(value: &Value) -> Vec<TokenId> {
    value.as_array().unwrap().iter().map(|id| TokenId(u32::try_from(id.as_u64().unwrap()).unwrap())).collect()
}

fn check(rounding: Rounding, mode: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let golden: Value = serde_json::from_slice(&std::fs::read(root.join("tests/demo/golden.json")).unwrap()).unwrap();
    let end = TokenId(u32::try_from(golden["eos_token_id"].as_u64().unwrap()).unwrap());
    let mut lab = Model::open(&root.join("demo-model")).lab(rounding);
    for prompt in golden["prompts"].as_array().unwrap() {
        let want = ids(&prompt[mode]["greedy_ids"]);
        let mut sequence = lab.start(0, 4096);
        let mut logits = lab.prefill(&mut sequence, &ids(&prompt["prompt_ids"]), 512);
        for (i, want) in want.iter().enumerate() {
            let got = argmax(&logits);
            assert_eq!(got, *want, "{} {mode}: token {i}", prompt["name"]);
            if got == end {
                break;
            }
            logits = lab.decode(&mut sequence, got);
        }
    }
}

#[test]
fn exact_greedy_answers() {
    check(Rounding::Exact, "exact");
}

#[test]
fn official_greedy_answers() {
    check(Rounding::Official, "official");
}
