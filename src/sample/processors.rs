//! What stands between raw logits and the draw: bias, penalties and bans change a row; top-k, top-p and min-p choose ids.
//!
//! Order: bias, penalties (repetition over prompt and output, then presence and frequency over the output), bans,
//! temperature, top-k, top-p over what top-k left, min-p. Each rule is deterministic: equal logits are ordered by id.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use super::params::{SamplingParams, SlotInit};
use crate::ids::TokenId;

/// One change of one logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Edit {
    /// A bias is added.
    Bias(f32),
    /// The repetition penalty divides or multiplies.
    Repeat,
    /// The presence penalty is subtracted, and the frequency penalty times the number of earlier occurrences.
    Penalise(u32),
    /// The token may not be drawn.
    Ban,
}

/// Bias, penalties and bans of one slot, with the counts they need.
#[derive(Clone, Debug)]
pub struct RowEdits {
    logit_bias: Vec<(TokenId, f32)>,
    repetition: f32,
    presence: f32,
    frequency: f32,
    /// Distinct ids of the prompt, sorted; empty unless the repetition penalty needs them.
    prompt_ids: Vec<TokenId>,
    /// How often each id was generated; empty unless a penalty needs it.
    output_counts: BTreeMap<TokenId, u32>,
    banned_until_min: Vec<TokenId>,
    min_tokens: u32,
    n_output: u32,
}

impl RowEdits {
    /// The edits of a slot as it is bound, generated tokens before a preemption included.
    #[must_use]
    pub fn new(init: &SlotInit) -> Self {
        let params = &init.sampling;
        let mut prompt_ids = Vec::new();
        if params.repetition_penalty != 1.0 {
            prompt_ids.extend_from_slice(&init.prompt);
            prompt_ids.sort_unstable();
            prompt_ids.dedup();
        }
        let mut banned_until_min = init.banned_until_min.clone();
        banned_until_min.sort_unstable();
        banned_until_min.dedup();
        let mut edits = Self {
            logit_bias: params.logit_bias.clone(),
            repetition: params.repetition_penalty,
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            prompt_ids,
            output_counts: BTreeMap::new(),
            banned_until_min,
            min_tokens: init.min_tokens,
            n_output: 0,
        };
        for token in &init.output {
            edits.record(*token);
        }
        edits
    }

    /// Whether the next row would be left as it is.
    #[must_use]
    pub fn is_identity(&self) -> bool {
        self.logit_bias.is_empty() && !self.has_penalties() && !self.has_bans()
    }

    /// Applies bias, penalties and bans to a row. Ids outside the row are skipped.
    pub fn apply(&self, row: &mut [f32] /* [V] f32 */) {
        for (token, edit) in self.edits() {
            if let Some(logit) = row.get_mut(token.index()) {
                *logit = self.edited(edit, *logit);
            }
        }
    }

    /// The changes of the next row, in order: kind by kind, and in a kind each token at most once.
    pub fn edits(&self) -> impl Iterator<Item = (TokenId, Edit)> {
        let bias = self.logit_bias.iter().map(|(token, bias)| (*token, Edit::Bias(*bias)));
        let only_output = self.output_counts.keys().filter(|token| self.prompt_ids.binary_search(token).is_err());
        let repeated = self.prompt_ids.iter().chain(only_output).filter(|_| self.repetition != 1.0);
        let penalised = self.output_counts.iter().filter(|_| self.presence != 0.0 || self.frequency != 0.0);
        let banned = self.banned_until_min.iter().filter(|_| self.has_bans());
        bias.chain(repeated.map(|token| (*token, Edit::Repeat)))
            .chain(penalised.map(|(token, count)| (*token, Edit::Penalise(*count))))
            .chain(banned.map(|token| (*token, Edit::Ban)))
    }

    /// The penalties: repetition, presence, frequency.
    #[must_use]
    pub const fn penalties(&self) -> [f32; 3] {
        [self.repetition, self.presence, self.frequency]
    }

    /// Whether the edits of the row after the next depend on the token that the next one gives.
    #[must_use]
    pub fn depend_on_output(&self) -> bool {
        self.has_penalties() || self.has_bans()
    }

    fn edited(&self, edit: Edit, logit: f32) -> f32 {
        match edit {
            Edit::Bias(bias) => logit + bias,
            Edit::Repeat if logit > 0.0 => logit / self.repetition,
            Edit::Repeat => logit * self.repetition,
            Edit::Penalise(count) => logit - self.presence - self.frequency * count as f32,
            Edit::Ban => f32::NEG_INFINITY,
        }
    }

    /// Counts a generated token.
    pub fn record(&mut self, token: TokenId) {
        self.n_output += 1;
        if self.has_penalties() {
            *self.output_counts.entry(token).or_insert(0) += 1;
        }
    }

    fn has_penalties(&self) -> bool {
        self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0
    }

    fn has_bans(&self) -> bool {
        self.n_output < self.min_tokens && !self.banned_until_min.is_empty()
    }
}

/// Temperature and the filters after it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Filter {
    /// Above 0.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// See [`SamplingParams::top_p`].
    pub top_p: f32,
    /// See [`SamplingParams::min_p`].
    pub min_p: f32,
}

/// A weight of 1 as a mass: top-p adds weights as whole numbers of 2^-46, so that the sum has one value in any order, here and
/// on devices. 2^18 of them fit 64 bits.
const MASS_ONE: f64 = (1u64 << 46) as f64;

impl Filter {
    /// The filter of these settings; the temperature is above 0.
    #[must_use]
    pub const fn new(params: &SamplingParams) -> Self {
        let SamplingParams { temperature, top_k, top_p, min_p, .. } = *params;
        Self { temperature, top_k, top_p, min_p }
    }

    /// Fills `kept` with the ids that may be drawn, in order of id: never empty unless every logit is −∞. `top_k` of 0 or
    /// of the vocabulary's size and more is off.
    pub fn keep(&self, row: &[f32], kept: &mut Vec<u32>) {
        kept.clear();
        kept.extend((0u32..).zip(row).filter(|(_, logit)| **logit > f32::NEG_INFINITY).map(|(id, _)| id));
        let top_k = self.top_k as usize;
        if top_k > 0 && top_k < kept.len() {
            kept.select_nth_unstable_by(top_k - 1, |a, b| by_rank(row, *a, *b));
            kept.truncate(top_k);
        }
        if self.top_p >= 1.0 && self.min_p <= 0.0 {
            kept.sort_unstable();
            return;
        }
        let max = kept.iter().map(|id| row[*id as usize]).fold(f32::NEG_INFINITY, f32::max);
        // Not normalised: 1 for the most likely.
        let temperature = f64::from(self.temperature);
        let weight = |id: u32| ((f64::from(row[id as usize]) - f64::from(max)) / temperature).exp();
        if self.top_p < 1.0 {
            truncate_to_mass(row, kept, f64::from(self.top_p), |id| (weight(id) * MASS_ONE) as u64);
        }
        kept.retain(|id| weight(*id) >= f64::from(self.min_p));
        kept.sort_unstable();
    }
}

/// Most likely first; equal logits by id.
#[must_use]
pub fn by_rank(row: &[f32], a: u32, b: u32) -> Ordering {
    // Adding 0 makes the two zeros equal.
    let logit = |id: u32| row[id as usize] + 0.0;
    logit(b).total_cmp(&logit(a)).then(a.cmp(&b))
}

/// Keeps the shortest run of ids in order of rank whose share of the total mass reaches `top_p`. Sorts only as many of
/// the best as it needs: in a peaked distribution that is a handful out of a large vocabulary.
fn truncate_to_mass(row: &[f32], kept: &mut Vec<u32>, top_p: f64, mass_of: impl Fn(u32) -> u64) {
    let total: u64 = kept.iter().map(|id| mass_of(*id)).sum();
    let wanted = ((top_p * total as f64).ceil() as u64).max(1);
    let mut n_sorted = 64;
    loop {
        if n_sorted < kept.len() {
            kept.select_nth_unstable_by(n_sorted - 1, |a, b| by_rank(row, *a, *b));
        }
        let best = n_sorted.min(kept.len());
        kept[..best].sort_unstable_by(|a, b| by_rank(row, *a, *b));
        let mut mass = 0;
        for i in 0..best {
            mass += mass_of(kept[i]);
            if mass >= wanted {
                kept.truncate(i + 1);
                return;
            }
        }
        if best == kept.len() {
            return;
        }
        n_sorted *= 8;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn init(sampling: SamplingParams, prompt: &[u32], output: &[u32]) -> SlotInit {
        SlotInit {
            sampling,
            choice: 0,
            prompt: prompt.iter().map(|id| TokenId(*id)).collect::<Vec<_>>().into(),
            output: output.iter().map(|id| TokenId(*id)).collect(),
            banned_until_min: Vec::new(),
            min_tokens: 0,
            n_logprobs: None,
        }
    }

    fn edited(init: &SlotInit, row: &[f32]) -> Vec<f32> {
        let mut row = row.to_vec();
        RowEdits::new(init).apply(&mut row);
        row
    }

    #[test]
    fn repetition_penalty_counts_prompt_and_output_once_each() {
        let params = SamplingParams { repetition_penalty: 2.0, ..SamplingParams::default() };
        // 0 stands in the prompt (twice), 1 in both, 2 in the output (twice), 3 in neither.
        let row = edited(&init(params, &[0, 1, 0], &[1, 2, 2]), &[4.0, -3.0, 1.0, 5.0]);
        assert_eq!(row, [2.0, -6.0, 0.5, 5.0]);
    }

    #[test]
    fn presence_and_frequency_count_the_output_only() {
        let params = SamplingParams { presence_penalty: 0.5, frequency_penalty: 0.25, ..SamplingParams::default() };
        let row = edited(&init(params, &[0, 0, 0], &[1, 2, 2]), &[1.0, 1.0, 1.0, 1.0]);
        assert_eq!(row, [1.0, 0.25, 0.0, 1.0]);
    }

    #[test]
    fn bias_comes_before_the_repetition_penalty_and_that_before_presence() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            presence_penalty: 1.0,
            logit_bias: vec![(TokenId(1), 3.0)],
            ..SamplingParams::default()
        };
        // (1 + 3) / 2 - 1 = 1; penalty before bias: 1 / 2 + 3 - 1 = 2.5; presence before repetition: (1 + 3 - 1) / 2 = 1.5.
        assert_eq!(edited(&init(params, &[], &[1]), &[0.0, 1.0]), [0.0, 1.0]);
    }

    #[test]
    fn a_bias_of_minus_100_is_only_added() {
        let params = SamplingParams { logit_bias: vec![(TokenId(0), -100.0)], ..SamplingParams::default() };
        assert_eq!(edited(&init(params, &[], &[]), &[150.0, 1.0]), [50.0, 1.0]);
    }

    #[test]
    fn ids_outside_the_vocabulary_are_skipped() {
        let params = SamplingParams {
            repetition_penalty: 2.0,
            presence_penalty: 1.0,
            logit_bias: vec![(TokenId(u32::MAX), 1.0)],
            ..SamplingParams::default()
        };
        let mut slot = init(params, &[2, 129_280], &[i32::MAX as u32]);
        slot.banned_until_min = vec![TokenId(2)];
        slot.min_tokens = 9;
        assert_eq!(edited(&slot, &[1.0, 2.0]), [1.0, 2.0]);
    }

    #[test]
    fn bans_end_with_the_last_of_min_tokens() {
        let mut slot = init(SamplingParams::default(), &[], &[0]);
        slot.banned_until_min = vec![TokenId(1)];
        slot.min_tokens = 3;
        let mut edits = RowEdits::new(&slot);
        for banned in [true, true, false] {
            let mut row = [0.0, 9.0];
            edits.apply(&mut row);
            assert_eq!(row[1] == f32::NEG_INFINITY, banned);
            edits.record(TokenId(0));
        }
        assert!(edits.is_identity());
    }

    fn kept(params: &SamplingParams, row: &[f32]) -> Vec<u32> {
        let mut ids = vec![77];
        Filter::new(params).keep(row, &mut ids);
        ids
    }

    fn log(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn top_k_keeps_exactly_k_and_ties_go_to_the_lowest_ids() {
        let row = [1.0, 3.0, 2.0, 2.0, 2.0];
        let top_k = |k| kept(&SamplingParams { top_k: k, ..SamplingParams::default() }, &row);
        assert_eq!(top_k(1), [1]);
        assert_eq!(top_k(3), [1, 2, 3]);
        for off in [0, 5, 6, u32::MAX] {
            assert_eq!(top_k(off), [0, 1, 2, 3, 4]);
        }
    }

    #[test]
    fn top_p_keeps_the_token_that_crosses_and_always_one() {
        let row = log(&[0.1, 0.5, 0.15, 0.25]);
        let top_p = |p| kept(&SamplingParams { top_p: p, ..SamplingParams::default() }, &row);
        assert_eq!(top_p(f32::MIN_POSITIVE), [1]);
        assert_eq!(top_p(0.49), [1]);
        assert_eq!(top_p(0.51), [1, 3]);
        assert_eq!(top_p(0.8), [1, 2, 3]);
        assert_eq!(top_p(0.95), [0, 1, 2, 3]);
        // Equal tokens: the lowest ids.
        assert_eq!(kept(&SamplingParams { top_p: 0.39, ..SamplingParams::default() }, &[0.0; 5]), [0, 1]);
    }

    #[test]
    fn top_p_is_taken_over_what_top_k_left_and_after_the_temperature() {
        let row = log(&[0.4, 0.3, 0.2, 0.1]);
        // Of the best two, the first has 4/7 > 0.5.
        assert_eq!(kept(&SamplingParams { top_k: 2, top_p: 0.5, ..SamplingParams::default() }, &row), [0]);
        assert_eq!(kept(&SamplingParams { top_p: 0.5, ..SamplingParams::default() }, &row), [0, 1]);
        // At a temperature of 0.5 the first has 16/30 > 0.5.
        assert_eq!(kept(&SamplingParams { top_p: 0.5, temperature: 0.5, ..SamplingParams::default() }, &row), [0]);
    }

    #[test]
    fn the_two_zeros_are_equal() {
        assert!(by_rank(&[-0.0, 0.0], 0, 1).is_lt());
        assert_eq!(kept(&SamplingParams { top_k: 1, ..SamplingParams::default() }, &[-0.0, 0.0]), [0]);
    }

    #[test]
    fn min_p_is_a_share_of_the_most_likely() {
        let row = log(&[0.4, 0.3, 0.2, 0.1]);
        let min_p = |p| kept(&SamplingParams { min_p: p, ..SamplingParams::default() }, &row);
        assert_eq!(min_p(0.6), [0, 1]);
        assert_eq!(min_p(0.2), [0, 1, 2, 3]);
        assert_eq!(min_p(1.0), [0]);
    }

    #[test]
    fn long_rows_agree_with_a_full_sort() {
        // 5,000 tokens with many equal logits; a top-p that needs 64, 512 and 4,096 sorted ids.
        let row: Vec<f32> = (0..5000u32).map(|i| ((i.wrapping_mul(2_654_435_761) >> 20) % 97) as f32 / 40.0).collect();
        for top_p in [0.01, 0.07, 0.6, 0.99] {
            let mut order: Vec<u32> = (0..5000).collect();
            order.sort_by(|a, b| by_rank(&row, *a, *b));
            let weights: Vec<f64> = order.iter().map(|id| f64::from(row[*id as usize]).exp()).collect();
            let total: f64 = weights.iter().sum();
            let mut mass = 0.0;
            let n = 1 + weights
                .iter()
                .take_while(|w| {
                    mass += **w;
                    mass < f64::from(top_p) * total
                })
                .count();
            let mut want = order[..n].to_vec();
            want.sort_unstable();
            assert_eq!(kept(&SamplingParams { top_p, ..SamplingParams::default() }, &row), want, "{top_p}");
        }
    }

    #[test]
    fn masked_ids_are_never_kept() {
        let row = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
        let params = SamplingParams { top_k: 2, top_p: 0.9, min_p: 0.1, ..SamplingParams::default() };
        assert_eq!(kept(&params, &row), [1]);
        assert_eq!(kept(&SamplingParams::default(), &row), [1]);
        assert!(kept(&params, &[f32::NEG_INFINITY; 3]).is_empty());
    }

    #[test]
    fn a_prompt_is_shared_and_not_copied_without_a_penalty() {
        let slot = init(SamplingParams::default(), &[1, 2, 3], &[1]);
        let edits = RowEdits::new(&slot);
        assert!(edits.prompt_ids.is_empty() && edits.output_counts.is_empty() && edits.is_identity());
        assert_eq!(Arc::strong_count(&slot.prompt), 1);
    }
}
