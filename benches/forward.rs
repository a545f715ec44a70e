//! Speed of the forward pass on the demo model: a prompt of 1,024 tokens, and decoding at 1 and 16 sequences.
//!
//! `cargo bench --bench forward [-- prefill|decode]` prints tokens a second, the best of several passes.

#[path = "../tests/lab/mod.rs"]
mod lab;

use std::path::Path;
use std::time::Instant;

use flashd::ids::TokenId;
use flashd::model::batch::RowKind;
use flashd::model::forward::Rounding;
use lab::{Feed, Lab, Model, Sequence};

const PROMPT: usize = 1024;
const N_PASSES: usize = 5;

fn tokens(seed: u32, n: usize) -> Vec<TokenId> {
    (0..n as u32).map(|i| TokenId((i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503)) % 3072)).collect()
}

/// Tokens a second of the fastest pass.
fn best(n_tokens: usize, mut pass: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..N_PASSES {
        let start = Instant::now();
        pass();
        best = best.min(start.elapsed().as_secs_f64());
    }
    n_tokens as f64 / best
}

fn prefill(lab: &mut Lab, chunk: usize) -> f64 {
    let prompt = tokens(1, PROMPT);
    best(PROMPT, || {
        let mut sequence = lab.start(0, PROMPT);
        lab.prefill(&mut sequence, &prompt, chunk);
    })
}

fn decode(lab: &mut Lab, n_sequences: u32, n_steps: usize) -> f64 {
    let mut sequences: Vec<Sequence> = (0..n_sequences).map(|slot| lab.start(slot, PROMPT)).collect();
    for (sequence, slot) in sequences.iter_mut().zip(0..) {
        lab.prefill(sequence, &tokens(slot, 300), 300);
    }
    best(n_steps * n_sequences as usize, || {
        for step in 0..n_steps {
            let next = tokens(step as u32, n_sequences as usize);
            let mut feeds: Vec<Feed<'_>> = sequences
                .iter_mut()
                .zip(next.chunks(1))
                .map(|(sequence, tokens)| Feed { sequence, tokens, kind: RowKind::Decode, logit_rows: 0..1 })
                .collect();
            lab.step(&mut feeds);
        }
    })
}

fn main() {
    let only = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let is_asked = |what: &str| only.as_deref().is_none_or(|only| only == what);
    let model = Model::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("demo-model"));
    let mut lab = model.lab(Rounding::Kvq);
    if is_asked("prefill") {
        for chunk in [128, 256, 512, 1024] {
            println!("prefill {PROMPT}, chunks of {chunk}: {:.0} tok/s", prefill(&mut lab, chunk));
        }
    }
    if is_asked("decode") {
        for (n_sequences, n_steps) in [(1, 40), (4, 20), (16, 10)] {
            println!("decode {n_sequences} sequences: {:.0} tok/s", decode(&mut lab, n_sequences, n_steps));
        }
    }
}
