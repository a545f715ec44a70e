//! Synthetic checkpoints: golden logits of an independent reference in every rounding mode, and logits whose bits depend on
//! nothing but the tokens before them. The exhaustive form of both is in fixtures_full.

mod lab;

use flashd::device::SimWave;
use flashd::device::cpu::SimdLevel;
use flashd::ids::{BlockId, CheckpointId, SlotIdx, TokenId};
use flashd::model::batch::RowKind;
use flashd::model::forward::Rounding;
use lab::golden::{Golden, check_both, check_decode, check_prefill, check_trace};
use lab::{Feed, Lab, Sequence, assert_same_bits};

/// Both fixtures in one mode.
fn check_golden(rounding: Rounding) {
    for name in ["small", "odd"] {
        let golden = Golden::load(name);
        check_prefill(&golden, rounding);
        check_decode(&golden, rounding);
    }
}

#[test]
fn golden_exact() {
    check_golden(Rounding::Exact);
}

#[test]
fn golden_kvq() {
    check_golden(Rounding::Kvq);
}

#[test]
fn golden_official() {
    check_golden(Rounding::Official);
}

#[test]
fn device_mode_is_near_golden_kvq() {
    for name in ["small", "odd"] {
        check_both(&Golden::load(name), Rounding::Device(SimWave::W32));
    }
}

/// Residual, attention and experts of every layer: names the layer when a formula is wrong.
#[test]
fn every_layer_agrees_in_exact_mode() {
    for name in ["small", "odd"] {
        check_trace(&Golden::load(name));
    }
}

/// A model in the mode the server runs, its tokens, and the logits of every position of one whole prompt.
struct Whole {
    golden: Golden,
    lab: Lab,
    logits: Vec<f32>, // [N_WHOLE, V]
}

const N_WHOLE: usize = 560;

impl Whole {
    fn new(name: &'static str) -> Self {
        let golden = Golden::load(name);
        let mut lab = golden.model.lab(Rounding::Kvq);
        let mut sequence = lab.start(0, N_WHOLE);
        let logits = lab.feed(&mut sequence, &golden.tokens[..N_WHOLE], RowKind::Prefill, 0..N_WHOLE);
        Self { golden, lab, logits }
    }

    fn row(&self, position: usize) -> &[f32] {
        let vocab_size = self.lab.vocab_size;
        &self.logits[position * vocab_size..(position + 1) * vocab_size]
    }

    /// Feeds the next `n` tokens as one run and compares every row.
    fn feed(&mut self, sequence: &mut Sequence, n: usize, kind: RowKind) {
        let first = sequence.n_tokens;
        let got = self.lab.feed(sequence, &self.golden.tokens[first..first + n], kind, 0..n);
        for (i, got) in got.chunks_exact(self.lab.vocab_size).enumerate() {
            assert_same_bits(got, self.row(first + i), &format!("{kind:?} of {n} at {first}, row {i}"));
        }
    }

    /// A token that is not the one at a position.
    fn wrong(&self, position: usize) -> TokenId {
        TokenId((self.golden.tokens[position].0 + 1 + position as u32 % 5) % self.lab.vocab_size as u32)
    }
}

#[test]
fn bits_do_not_depend_on_chunks() {
    for name in ["small", "odd"] {
        let mut whole = Whole::new(name);
        for (chunk, end) in [(1, 270), (7, 400), (64, 560), (256, 560)] {
            let mut sequence = whole.lab.start(0, N_WHOLE);
            while sequence.n_tokens < end {
                let n = chunk.min(end - sequence.n_tokens);
                whole.feed(&mut sequence, n, if chunk == 1 { RowKind::Decode } else { RowKind::Prefill });
            }
        }
    }
}

/// Runs of K + 1 rows of which j + 1 are right: the right rows' logits, and everything after them, are those of a sequence that
/// never drafted. K and j change with every step, so that rejections fall on every place of a group of 4 and, over the passes,
/// of 128.
#[test]
fn bits_do_not_depend_on_rejected_drafts() {
    let mut whole = Whole::new("small");
    for pass in 0..3usize {
        let mut sequence = whole.lab.start(0, N_WHOLE);
        whole.feed(&mut sequence, 1 + pass * 37, RowKind::Prefill);
        for step in 0.. {
            let first = sequence.n_tokens;
            let n_drafts = [7, 5, 1, 15, 7, 3, 2, 6, 4][(step + pass) % 9];
            if first + n_drafts + 1 > N_WHOLE {
                break;
            }
            let n_right = (step * 5 + pass * 3 + step / 7) % (n_drafts + 1);
            let mut tokens = whole.golden.tokens[first..first + n_drafts + 1].to_vec();
            for (i, token) in tokens.iter_mut().enumerate().skip(n_right + 1) {
                *token = whole.wrong(first + i);
            }
            let got = whole.lab.feed(&mut sequence, &tokens, RowKind::Verify, 0..n_drafts + 1);
            for (i, got) in got.chunks_exact(whole.lab.vocab_size).take(n_right + 1).enumerate() {
                let what = format!("pass {pass}: row {i} of {n_drafts} drafts at {first}, {n_right} right");
                assert_same_bits(got, whole.row(first + i), &what);
            }
            sequence.n_tokens = first + n_right + 1;
        }
    }
}

/// A sequence's logits are the same alone and among others that prefill, decode and verify in the same step.
#[test]
fn bits_do_not_depend_on_the_rest_of_the_batch() {
    let mut whole = Whole::new("odd");
    let tokens = whole.golden.tokens.clone();
    let mut sequences: Vec<Sequence> = (0..4).map(|slot| whole.lab.start(slot, N_WHOLE)).collect();
    let n_rows = [[3, 1, 16, 1], [1, 130, 1, 8], [200, 7, 1, 1], [64, 1, 9, 2]];
    for step in 0..12 {
        let shape = n_rows[step % 4];
        let mut feeds: Vec<Feed<'_>> = Vec::new();
        // Sequence 0 reads the fixture's tokens; the others read them backwards from their own places.
        let backwards: Vec<TokenId> = tokens.iter().rev().copied().collect();
        for (i, sequence) in sequences.iter_mut().enumerate() {
            let (first, n) = (sequence.n_tokens, shape[i].min(N_WHOLE - sequence.n_tokens));
            if n == 0 || (step + i) % 5 == 4 {
                continue;
            }
            let own = if i == 0 { &tokens[first..first + n] } else { &backwards[i * 17 + first..i * 17 + first + n] };
            let kind = [RowKind::Prefill, RowKind::Verify][step % 2];
            feeds.push(Feed { sequence, tokens: own, kind, logit_rows: 0..n });
        }
        // The order of runs changes too.
        feeds.rotate_left(step % 3);
        let run_of_first = feeds.iter().position(|feed| feed.sequence.slot == SlotIdx(0));
        whole.lab.step(&mut feeds);
        let Some(run_idx) = run_of_first else { continue };
        let n = feeds[run_idx].tokens.len();
        let first = sequences[0].n_tokens - n;
        for row in 0..n {
            let what = format!("step {step}, row {row} at {first}");
            assert_same_bits(whole.lab.forward.logits(run_idx, row), whole.row(first + row), &what);
        }
    }
}

/// A checkpoint at any length goes on in another slot, on shared blocks with a copy of the partly filled one, while the first
/// sequence goes another way; both give the bits of a sequence that was never interrupted.
#[test]
fn bits_do_not_depend_on_checkpoints() {
    for name in ["small", "odd"] {
        let mut whole = Whole::new(name);
        // What a slot held before must not matter.
        let mut other = whole.lab.start(3, N_WHOLE);
        whole.lab.prefill(&mut other, &whole.golden.tokens[50..400], 350);
        let mut first = whole.lab.start(1, N_WHOLE);
        for n in [1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513] {
            let n_more = n - first.n_tokens;
            whole.feed(&mut first, n_more, RowKind::Prefill);
            whole.lab.save(&first, 2);
            let mut resumed = whole.lab.resume(&first, 2, 3);
            assert_eq!(resumed.n_tokens, n);
            let last = n / 256;
            let spare = BlockId(100 + last as u32);
            whole.lab.cache.copy_block(resumed.blocks[last], spare);
            resumed.blocks[last] = spare;
            resumed.blocks.truncate(last + 1);
            resumed.blocks.extend([BlockId(110), BlockId(111)]);
            // The first sequence writes other tokens over its own part of the block and is put back.
            let astray: Vec<TokenId> = (n..n + 9).map(|p| whole.wrong(p)).collect();
            whole.lab.prefill(&mut first, &astray, 9);
            let n_more = (N_WHOLE - n).min(40);
            for kind_and_n in [(RowKind::Decode, 1), (RowKind::Decode, 1), (RowKind::Prefill, n_more - 2)] {
                whole.feed(&mut resumed, kind_and_n.1, kind_and_n.0);
            }
            first.n_tokens = whole.lab.cache.restore(CheckpointId(2), first.slot);
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let mut whole = Whole::new("odd");
    for n_threads in [1, 3] {
        let level = *SimdLevel::available().last().unwrap();
        whole.lab = whole.golden.model.lab_with(Rounding::Kvq, level, n_threads);
        let mut sequence = whole.lab.start(0, 200);
        whole.feed(&mut sequence, 150, RowKind::Prefill);
        whole.feed(&mut sequence, 1, RowKind::Decode);
    }
}

/// Long enough for the indexer to choose (more than four times its 16 rows); the portable form is slow.
#[test]
fn bits_do_not_depend_on_the_instruction_set() {
    let mut whole = Whole::new("odd");
    for level in SimdLevel::available() {
        whole.lab = whole.golden.model.lab_with(Rounding::Kvq, level, 2);
        let mut sequence = whole.lab.start(0, 80);
        whole.feed(&mut sequence, 70, RowKind::Prefill);
        whole.feed(&mut sequence, 1, RowKind::Decode);
    }
}
