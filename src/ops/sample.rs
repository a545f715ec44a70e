//! A token and log-probabilities from a row of logits: what src/sample computes, for devices that keep the logits to themselves.

use crate::ids::TokenId;
use crate::sample::params::{RowError, Sampled, TokenLogprobs};
use crate::sample::sampler::{SlotSampler, score};

pub mod device;

/// What a row gives: a token where one was to be drawn, log-probabilities where a token was to be scored.
pub type RowAnswer = (Option<Result<Sampled, RowError>>, Option<TokenLogprobs>);

/// The sampler of src/sample. `draw` is a sampler and the position of its token, `scored` a token and how many of the most
/// likely ones are wanted with it; both see the raw row.
pub fn reference(
    logits: &[f32], // [V]
    draw: Option<(&mut SlotSampler, usize)>,
    scored: Option<(TokenId, u32)>,
) -> RowAnswer {
    let sampled = draw.map(|(sampler, position)| sampler.sample(logits, position));
    (sampled, scored.map(|(target, n_top)| score(logits, target, n_top)))
}
