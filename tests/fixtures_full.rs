//! The exhaustive form of the fixtures: every prompt by itself in every chunk size and mode, and every place and number of
//! rejected drafts. `cargo xtask ci --full` runs it.

mod lab;

use flashd::ids::{CheckpointId, SlotIdx, TokenId};
use flashd::model::batch::RowKind;
use flashd::model::forward::Rounding;
use lab::golden::{Golden, check_decode, check_prompts_in_chunks};
use lab::{Sequence, assert_same_bits};

fn check_mode(rounding: Rounding) {
    for name in ["small", "odd"] {
        let golden = Golden::load(name);
        check_prompts_in_chunks(&golden, rounding, &[1, 7, 64, 256]);
        check_decode(&golden, rounding);
    }
}

#[test]
fn exact() {
    check_mode(Rounding::Exact);
}

#[test]
fn kvq() {
    check_mode(Rounding::Kvq);
}

#[test]
fn official() {
    check_mode(Rounding::Official);
}

/// From every position of a group of 128: K = 1 to 7 drafts of which any number is right, then plain decoding until the groups
/// that the drafts reached into are complete and seen.
#[test]
fn every_rejection_at_every_position() {
    let golden = Golden::load("odd");
    let mut lab = golden.model.lab(Rounding::Kvq);
    let (first, end, n_after) = (250, 250 + 128, 6);
    let n_whole = end + 16;
    let mut sequence = lab.start(0, n_whole);
    let whole = lab.feed(&mut sequence, &golden.tokens[..n_whole], RowKind::Prefill, 0..n_whole);
    let row = |position: usize| &whole[position * golden.model.shape.vocab_size..][..golden.model.shape.vocab_size];
    let mut sequence = lab.start(0, n_whole);
    lab.prefill(&mut sequence, &golden.tokens[..first], first);
    for start in first..end {
        lab.save(&sequence, 0);
        for n_drafts in 1..=7 {
            for n_right in 0..=n_drafts {
                let n_tokens = lab.cache.restore(CheckpointId(0), SlotIdx(1));
                let mut trial = Sequence { slot: SlotIdx(1), blocks: sequence.blocks.clone(), n_tokens };
                let mut tokens = golden.tokens[start..=start + n_drafts].to_vec();
                for token in &mut tokens[n_right + 1..] {
                    *token = TokenId((token.0 + 7) % golden.model.shape.vocab_size as u32);
                }
                let what = format!("{n_right} of {n_drafts} drafts right at {start}");
                let got = lab.feed(&mut trial, &tokens, RowKind::Verify, 0..n_drafts + 1);
                for (i, got) in got.chunks_exact(golden.model.shape.vocab_size).take(n_right + 1).enumerate() {
                    assert_same_bits(got, row(start + i), &what);
                }
                trial.n_tokens = start + n_right + 1;
                let after = trial.n_tokens;
                let got = lab.feed(&mut trial, &golden.tokens[after..after + n_after], RowKind::Verify, 0..n_after);
                for (i, got) in got.chunks_exact(golden.model.shape.vocab_size).enumerate() {
                    assert_same_bits(got, row(after + i), &format!("{what}, then {i}"));
                }
            }
        }
        lab.decode(&mut sequence, golden.tokens[start]);
    }
}
