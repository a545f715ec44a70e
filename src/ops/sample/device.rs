//! Sampling on a device: what a row is asked for, its edits, what it gives, and launch and cases of the kernel `sample`.
//!
//! Tokens are those of src/sample unless two logits with their noise are within 1e-13 of each other relative to the larger one, or
//! top-p's or min-p's limit falls between two tokens' values that are as near: exp and ln differ by 2 units in the last
//! place of f64. The bits are the same on every device and do not depend on the batch.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ids::{SlotIdx, TokenId};
use crate::ops::case::OpCase;
use crate::ops::step::Step;
use crate::sample::params::{RowError, Sampled, ScoredToken, TokenLogprobs};
use crate::sample::processors::{Edit, RowEdits};
use crate::sample::sampler::SlotSampler;

mod cases;

/// Threads of a block, which takes one row.
const N_THREADS: u32 = 512;
/// Entries that a row may have: the sum of as many masses fits 64 bits.
const MAX_VOCAB: u32 = 1 << 18;
/// Log-probabilities that a row can give.
pub const MAX_TOP: u32 = 20;

/// `SampleRow::flags`: a token is drawn.
const DRAW: u32 = 1;
/// Its log-probability is wanted.
const LOGPROBS: u32 = 2;
/// A given token is scored.
const SCORE: u32 = 4;
/// The drawn token becomes its slot's last one.
const KEEP: u32 = 8;
/// `SampleResult::token` where nothing could be drawn.
const NO_TOKEN: u32 = u32::MAX;

/// What a row is asked for; all zero: nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct SampleRow {
    /// Key of the noise.
    seed: u64,
    flags: u32,
    /// Whose last token the drawn one becomes.
    slot: u32,
    /// Position of the drawn token.
    position: u32,
    choice: u32,
    /// 0 is greedy.
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    repetition: f32,
    presence: f32,
    frequency: f32,
    /// The token to score.
    target: u32,
    /// How many of the most likely tokens are wanted.
    n_top: u32,
    /// Where its edits begin.
    first_edit: u32,
    /// Edits of each kind, one kind after the other.
    n_edits: [u32; 4],
}

/// A change of a token's logit; `value` is the bias or the number of occurrences. The kernel uses it as scratch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct RowEdit {
    token: u32,
    value: f32,
}

/// What a row gives; undefined where it was not asked for.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct SampleResult {
    /// The token, or [`NO_TOKEN`].
    token: u32,
    logprob: f32,
    rank: u32,
    target_logprob: f32,
    target_rank: u32,
    n_top: u32,
    pad: [u32; 2],
    top: [u32; MAX_TOP as usize],
    top_logprobs: [f32; MAX_TOP as usize],
}

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct SampleArgs {
    /// The step's counts.
    pub step: Step,
    /// Raw logits; after the launch they are what they were.
    pub logits: u64, // [R, V] f32
    /// What each row is asked for.
    pub rows: u64, // [R] SampleRow
    /// All rows' edits.
    pub edits: u64, // [n] RowEdit
    /// What each row gives.
    pub results: u64, // [R] SampleResult
    /// Every slot's last token.
    pub slot_tokens: u64, // [n_slots] u32
    /// V.
    pub n_vocab: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<SampleRow>() == 80 && size_of::<RowEdit>() == 8);
const _: () = assert!(size_of::<SampleResult>() == 192 && size_of::<SampleArgs>() == 80);

/// Samples at most `max_rows` logit rows; the number there are is read on the device.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, args: &SampleArgs, max_rows: u32) -> Result<(), DeviceError> {
    assert!(args.n_vocab <= MAX_VOCAB, "sample: V: want at most {MAX_VOCAB}, got {}", args.n_vocab);
    if max_rows == 0 {
        return Ok(());
    }
    device.launch(device.kernel("sample")?, [max_rows, 1, 1], N_THREADS, args)
}

impl SampleRow {
    /// Whether a token is to be drawn.
    #[must_use]
    pub const fn draws(&self) -> bool {
        self.flags & DRAW != 0
    }

    /// Whether the drawn token becomes its slot's last one on the device.
    #[must_use]
    pub const fn keeps(&self) -> bool {
        self.flags & KEEP != 0
    }

    /// Whether a token is to be scored.
    #[must_use]
    pub const fn scores(&self) -> bool {
        self.flags & SCORE != 0
    }

    /// Asks for a token of a slot, without edits; `keeps`: it becomes the slot's last one on the device.
    pub fn draw(&mut self, sampler: &SlotSampler, slot: SlotIdx, position: usize, keeps: bool) {
        self.flags |= DRAW | if keeps { KEEP } else { 0 };
        (self.slot, self.position) = (slot.0, position as u32);
        (self.seed, self.choice) = (sampler.noise().seed(), sampler.noise().choice());
        if let Some(filter) = sampler.filter() {
            self.temperature = filter.temperature;
            (self.top_k, self.top_p, self.min_p) = (filter.top_k, filter.top_p, filter.min_p);
        }
        if let Some(n_top) = sampler.n_logprobs() {
            self.flags |= LOGPROBS;
            self.n_top = self.n_top.max(n_top);
        }
    }

    /// Adds the edits of the row's token to the list. Tokens outside the vocabulary are left out.
    pub fn edit(&mut self, edits: &RowEdits, n_vocab: usize, list: &mut Vec<RowEdit>) {
        [self.repetition, self.presence, self.frequency] = edits.penalties();
        self.first_edit = list.len() as u32;
        for (token, edit) in edits.edits().filter(|(token, _)| token.index() < n_vocab) {
            let (kind, value) = match edit {
                Edit::Bias(bias) => (0, bias),
                Edit::Repeat => (1, 0.0),
                Edit::Penalise(count) => (2, count as f32),
                Edit::Ban => (3, 0.0),
            };
            self.n_edits[kind] += 1;
            list.push(RowEdit { token: token.0, value });
        }
    }

    /// Asks for log-probabilities of a token and of the `n_top` most likely ones.
    pub fn score(&mut self, target: TokenId, n_top: u32) {
        self.flags |= SCORE;
        self.target = target.0;
        self.n_top = self.n_top.max(n_top);
    }
}

impl SampleResult {
    /// The token of a row that was to draw one, with as many log-probabilities as its slot wants.
    ///
    /// # Errors
    /// When the row holds a NaN or +infinity, or nothing is left to draw.
    pub fn sampled(&self, position: usize, n_logprobs: Option<u32>) -> Result<Sampled, RowError> {
        if self.token == NO_TOKEN {
            return Err(RowError::NotFinite { position });
        }
        let token = TokenId(self.token);
        let chosen = ScoredToken { token, logprob: self.logprob };
        let logprobs = n_logprobs.map(|n| TokenLogprobs { chosen, rank: self.rank, top: self.top(n) });
        Ok(Sampled { token, logprobs })
    }

    /// The log-probabilities of a row that was to score `target`.
    #[must_use]
    pub fn scored(&self, target: TokenId, n_top: u32) -> TokenLogprobs {
        let chosen = ScoredToken { token: target, logprob: self.target_logprob };
        TokenLogprobs { chosen, rank: self.target_rank, top: self.top(n_top) }
    }

    fn top(&self, n: u32) -> Vec<ScoredToken> {
        let scored = self.top.iter().zip(&self.top_logprobs);
        let scored = scored.map(|(token, logprob)| ScoredToken { token: TokenId(*token), logprob: *logprob });
        scored.take(n.min(self.n_top) as usize).collect()
    }
}

/// The cases of the kernel.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    cases::cases()
}
