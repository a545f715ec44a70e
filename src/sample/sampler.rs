//! One slot's sampler: a row of logits to a token, and log-probabilities of the raw row.

use super::params::{RowError, Sampled, ScoredToken, SlotInit, TokenLogprobs};
use super::philox::{MAX_GUMBEL, Noise, Purpose, gumbel};
use super::processors::{Filter, RowEdits, by_rank};
use crate::ids::TokenId;

/// Given for a token that can't be sampled, in place of −∞, which JSON lacks (as OpenAI's API does).
pub const LOGPROB_FLOOR: f32 = -9999.0;

/// The sampling state of one sequence. A draw depends on the settings, the row, the tokens so far and the position; not
/// on the batch, nor on when or how often the sequence was preempted.
#[derive(Clone, Debug)]
pub struct SlotSampler {
    edits: RowEdits,
    /// `None` is greedy.
    filter: Option<Filter>,
    noise: Noise,
    n_logprobs: Option<u32>,
    vocab_size: usize,
    /// Scratch: the row after the edits.
    row: Vec<f32>, // [V] f32
    /// Scratch: the ids that may be drawn.
    kept: Vec<u32>,
}

impl SlotSampler {
    /// The sampler of a slot as it is bound. A missing seed counts as 0; the engine always sets one.
    #[must_use]
    pub fn new(init: &SlotInit, vocab_size: usize) -> Self {
        let params = &init.sampling;
        let filter = (params.temperature > 0.0).then(|| Filter::new(params));
        Self {
            edits: RowEdits::new(init),
            filter,
            noise: Noise::new(params.seed.unwrap_or(0), init.choice),
            n_logprobs: init.n_logprobs,
            vocab_size,
            row: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// Draws the token that will stand at `position` from a row of raw logits, and counts it. Entries of the row beyond
    /// the vocabulary are not looked at.
    ///
    /// # Errors
    /// `NotFinite` when the row holds a NaN or +∞, or when nothing is left to draw because every entry is −∞; nothing is
    /// counted then.
    pub fn sample(&mut self, logits: &[f32] /* [V] f32 */, position: usize) -> Result<Sampled, RowError> {
        let logits = logits.get(..self.vocab_size).unwrap_or(logits);
        if logits.iter().any(|logit| logit.is_nan() || *logit == f32::INFINITY) {
            return Err(RowError::NotFinite { position });
        }
        let token = self.draw(logits, position).ok_or(RowError::NotFinite { position })?;
        self.record(token);
        let logprobs = self.n_logprobs.map(|n_top| score(logits, token, n_top));
        Ok(Sampled { token, logprobs })
    }

    /// Counts a token that was drawn elsewhere by these settings.
    pub fn record(&mut self, token: TokenId) {
        self.edits.record(token);
    }

    /// What is changed in the next row.
    #[must_use]
    pub const fn edits(&self) -> &RowEdits {
        &self.edits
    }

    /// Temperature and filters; `None` is greedy.
    #[must_use]
    pub const fn filter(&self) -> Option<Filter> {
        self.filter
    }

    /// The noise.
    #[must_use]
    pub const fn noise(&self) -> Noise {
        self.noise
    }

    /// Log-probabilities wanted with each token: how many of the most likely.
    #[must_use]
    pub const fn n_logprobs(&self) -> Option<u32> {
        self.n_logprobs
    }

    fn draw(&mut self, logits: &[f32], position: usize) -> Option<TokenId> {
        if self.edits.is_identity() && self.filter.is_none() {
            return argmax(logits);
        }
        self.row.clear();
        self.row.extend_from_slice(logits);
        self.edits.apply(&mut self.row);
        let Some(filter) = self.filter else {
            return argmax(&self.row);
        };
        filter.keep(&self.row, &mut self.kept);
        let temperature = f64::from(filter.temperature);
        draw_gumbel(&self.row, &self.kept, temperature, |group| self.noise.words(Purpose::Sample, position, group))
    }
}

/// Log-probabilities of `target` and of the `n_top` most likely tokens under the softmax of a raw row, by a sum in f64.
/// Equal tokens are ranked by id. A token that is masked (−∞), outside the row, or in a row that holds no numbers gets
/// [`LOGPROB_FLOOR`].
#[must_use]
pub fn score(logits: &[f32] /* [V] f32 */, target: TokenId, n_top: u32) -> TokenLogprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - f64::from(max)).exp()).sum();
    let log_sum = f64::from(max) + sum.ln();
    let scored = |token: TokenId| {
        let logit = logits.get(token.index()).copied().unwrap_or(f32::NEG_INFINITY);
        let logprob = (f64::from(logit) - log_sum) as f32;
        ScoredToken { token, logprob: if logprob.is_finite() { logprob } else { LOGPROB_FLOOR } }
    };
    let better = |id: u32| target.index() >= logits.len() || by_rank(logits, id, target.0).is_lt();
    let n_vocab = u32::try_from(logits.len()).unwrap_or(u32::MAX);
    let n_better = (0..n_vocab).filter(|id| better(*id)).count();
    TokenLogprobs {
        chosen: scored(target),
        rank: u32::try_from(n_better).unwrap_or(u32::MAX).saturating_add(1),
        top: best(logits, n_top as usize).into_iter().map(|id| scored(TokenId(id))).collect(),
    }
}

/// The most likely id, the lowest of equals; `None` when every entry is −∞.
fn argmax(row: &[f32]) -> Option<TokenId> {
    let mut best = (f32::NEG_INFINITY, None);
    for (id, logit) in (0..).zip(row) {
        if *logit > best.0 {
            best = (*logit, Some(TokenId(id)));
        }
    }
    best.1
}

/// The id with the largest logit/T − ln(−ln u), the lowest of equals: a draw from the softmax over the kept ids (the
/// Gumbel-max method). `kept` is in order of id. Ids that even the largest noise can't lift to the best are passed over
/// without drawing theirs, which changes no result.
fn draw_gumbel(row: &[f32], kept: &[u32], temperature: f64, words: impl Fn(u32) -> [u32; 4]) -> Option<TokenId> {
    let scaled = |id: u32| f64::from(row[id as usize]) / temperature;
    let likeliest = *kept.iter().min_by(|a, b| by_rank(row, **a, **b))?;
    let mut group = likeliest >> 2;
    let mut drawn = words(group);
    let mut best = (likeliest, scaled(likeliest) + gumbel(drawn[(likeliest & 3) as usize]));
    for id in kept.iter().copied() {
        let base = scaled(id);
        if base + MAX_GUMBEL < best.1 {
            continue;
        }
        if id >> 2 != group {
            group = id >> 2;
            drawn = words(group);
        }
        let total = base + gumbel(drawn[(id & 3) as usize]);
        if total > best.1 || (total == best.1 && id < best.0) {
            best = (id, total);
        }
    }
    Some(TokenId(best.0))
}

/// The `n` best ids, best first.
fn best(row: &[f32], n: usize) -> Vec<u32> {
    let n = n.min(row.len());
    if n == 0 {
        return Vec::new();
    }
    let mut ids: Vec<u32> = (0u32..).take(row.len()).collect();
    if n < ids.len() {
        ids.select_nth_unstable_by(n - 1, |a, b| by_rank(row, *a, *b));
        ids.truncate(n);
    }
    ids.sort_unstable_by(|a, b| by_rank(row, *a, *b));
    ids
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::sample::params::SamplingParams;

    fn slot(sampling: SamplingParams) -> SlotInit {
        SlotInit {
            sampling,
            choice: 0,
            prompt: Arc::from([]),
            output: Vec::new(),
            banned_until_min: Vec::new(),
            min_tokens: 0,
            n_logprobs: None,
        }
    }

    fn greedy() -> SamplingParams {
        SamplingParams { temperature: 0.0, ..SamplingParams::default() }
    }

    fn draw(init: &SlotInit, row: &[f32], position: usize) -> u32 {
        SlotSampler::new(init, row.len()).sample(row, position).unwrap().token.0
    }

    /// Logits of 40 tokens with some equal ones, spread over about e^6.
    fn row() -> Vec<f32> {
        (0..40u32).map(|i| ((i * 7919) % 31) as f32 / 5.0 - 3.0).collect()
    }

    /// The exact distribution, the plain way: sort, cut, normalise.
    fn exact(row: &[f32], params: &SamplingParams) -> Vec<f64> {
        let mut p: Vec<(usize, f64)> =
            row.iter().map(|l| (f64::from(*l) / f64::from(params.temperature)).exp()).enumerate().collect();
        p.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if params.top_k > 0 {
            p.truncate(params.top_k as usize);
        }
        let total: f64 = p.iter().map(|x| x.1).sum();
        let mut mass = 0.0;
        let mut n = 0;
        while n < p.len() && mass < f64::from(params.top_p) {
            mass += p[n].1 / total;
            n += 1;
        }
        p.truncate(n);
        let floor = p[0].1 * f64::from(params.min_p);
        p.retain(|x| x.1 >= floor);
        let total: f64 = p.iter().map(|x| x.1).sum();
        let mut out = vec![0.0; row.len()];
        for (id, weight) in p {
            out[id] = weight / total;
        }
        out
    }

    /// χ² of observed counts, and the value that a fair draw passes in one case of 10,000 (Wilson and Hilferty).
    fn chi_square(counts: &[u32], p: &[f64]) -> (f64, f64) {
        let n: u32 = counts.iter().sum();
        let (mut chi, mut cells) = (0.0, 0.0);
        for (count, p) in counts.iter().zip(p) {
            if *p == 0.0 {
                assert_eq!(*count, 0, "a token outside the filter was drawn");
                continue;
            }
            let want = p * f64::from(n);
            chi += (f64::from(*count) - want).powi(2) / want;
            cells += 1.0;
        }
        let df: f64 = cells - 1.0;
        let limit = df * (1.0 - 2.0 / (9.0 * df) + 3.719 * (2.0 / (9.0 * df)).sqrt()).powi(3);
        (chi, limit)
    }

    #[test]
    fn draws_follow_the_exact_distribution() {
        let base = SamplingParams::default();
        let cases = [
            base.clone(),
            SamplingParams { temperature: 0.6, ..base.clone() },
            SamplingParams { temperature: 2.0, ..base.clone() },
            SamplingParams { top_k: 7, ..base.clone() },
            SamplingParams { top_p: 0.8, ..base.clone() },
            SamplingParams { min_p: 0.1, ..base.clone() },
            SamplingParams { temperature: 1.3, top_k: 20, top_p: 0.9, min_p: 0.2, ..base },
        ];
        let row = row();
        for params in cases {
            let p = exact(&row, &params);
            // Over seeds at one position, then over positions with one seed.
            for by_seed in [true, false] {
                let mut counts = vec![0; row.len()];
                let mut sampler = SlotSampler::new(&slot(params.clone()), row.len());
                for i in 0..60_000usize {
                    let (seed, position) = if by_seed { (i as u64, 5) } else { (5, i) };
                    sampler.noise = Noise::new(seed, 0);
                    counts[sampler.sample(&row, position).unwrap().token.index()] += 1;
                }
                let (chi, limit) = chi_square(&counts, &p);
                assert!(chi < limit, "{params:?} by_seed {by_seed}: {chi} > {limit}");
            }
        }
    }

    #[test]
    fn the_chi_square_test_sees_a_slightly_wrong_temperature() {
        let row = row();
        let mut counts = vec![0; row.len()];
        for seed in 0..60_000 {
            let params = SamplingParams { temperature: 1.05, seed: Some(seed), ..SamplingParams::default() };
            counts[draw(&slot(params), &row, 5) as usize] += 1;
        }
        let (chi, limit) = chi_square(&counts, &exact(&row, &SamplingParams::default()));
        assert!(chi > limit);
    }

    #[test]
    fn passing_over_hopeless_ids_changes_nothing() {
        let row: Vec<f32> = (0..500u32).map(|i| ((i * 7919) % 311) as f32 / 6.0).collect();
        let kept: Vec<u32> = (0..500).collect();
        for position in 0..500 {
            let noise = Noise::new(11, 0);
            let words = |group| noise.words(Purpose::Sample, position, group);
            let plain = kept
                .iter()
                .map(|id| (f64::from(row[*id as usize]) / 3.0 + gumbel(words(id >> 2)[(id & 3) as usize]), *id));
            let want = plain.fold((f64::NEG_INFINITY, 0), |a, b| if b.0 > a.0 { b } else { a }).1;
            assert_eq!(draw_gumbel(&row, &kept, 3.0, words), Some(TokenId(want)));
        }
    }

    #[test]
    fn equal_scores_go_to_the_lowest_id() {
        // The same noise word for all: the scores are equal.
        assert_eq!(draw_gumbel(&[1.0; 12], &[3, 5, 9], 1.0, |_| [77; 4]), Some(TokenId(3)));
    }

    #[test]
    fn the_same_seed_gives_the_same_tokens_and_another_choice_or_seed_others() {
        let row = vec![0.0; 3072];
        let tokens = |seed, choice| {
            let init = SlotInit { choice, ..slot(SamplingParams { seed: Some(seed), ..SamplingParams::default() }) };
            let mut sampler = SlotSampler::new(&init, row.len());
            (0..50).map(|position| sampler.sample(&row, position).unwrap().token).collect::<Vec<_>>()
        };
        let base = tokens(7, 0);
        assert_eq!(tokens(7, 0), base);
        for other in [tokens(8, 0), tokens(7, 1), tokens(7 + (1 << 32), 0)] {
            let n_equal = other.iter().zip(&base).filter(|(a, b)| a == b).count();
            assert!(n_equal <= 2, "{n_equal} of 50 tokens are equal by chance of 1 in 3072");
        }
    }

    #[test]
    fn a_preempted_sequence_goes_on_as_if_nothing_had_happened() {
        let params = SamplingParams {
            seed: Some(3),
            frequency_penalty: 0.7,
            repetition_penalty: 1.2,
            presence_penalty: 0.1,
            ..SamplingParams::default()
        };
        let init = SlotInit {
            prompt: Arc::from([TokenId(4)]),
            banned_until_min: vec![TokenId(30)],
            min_tokens: 12,
            ..slot(params)
        };
        let row = row();
        let mut whole = SlotSampler::new(&init, row.len());
        let want: Vec<TokenId> = (1..31).map(|p| whole.sample(&row, p).unwrap().token).collect();
        for cut in [1, 11, 12, 29] {
            let mut resumed = SlotSampler::new(&SlotInit { output: want[..cut].to_vec(), ..init.clone() }, row.len());
            let rest: Vec<TokenId> = (cut + 1..31).map(|p| resumed.sample(&row, p).unwrap().token).collect();
            assert_eq!(rest, want[cut..]);
        }
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals_and_leaves_the_callers_row() {
        assert_eq!(draw(&slot(greedy()), &[1.0, 3.0, 3.0, 2.0], 0), 1);
        let params = SamplingParams { logit_bias: vec![(TokenId(1), -100.0)], ..greedy() };
        let row = [1.0, 3.0, 3.0, 2.0];
        assert_eq!(draw(&slot(params), &row, 0), 2);
        assert_eq!(row, [1.0, 3.0, 3.0, 2.0]);
    }

    #[test]
    fn tiny_temperatures_are_greedy_and_do_not_overflow() {
        for temperature in [1e-3, 1e-38, f32::from_bits(1)] {
            let params = SamplingParams { temperature, top_p: 0.9, ..SamplingParams::default() };
            assert_eq!(draw(&slot(params), &[80.0, 90.0, -90.0], 1), 1);
        }
    }

    #[test]
    fn greedy_obeys_penalties_and_counts_its_own_tokens() {
        let params = SamplingParams { frequency_penalty: 0.6, ..greedy() };
        let mut sampler = SlotSampler::new(&slot(params), 3);
        let tokens: Vec<u32> = (0..5).map(|p| sampler.sample(&[2.0, 1.5, 1.0], p).unwrap().token.0).collect();
        // 2.0 1.5 1.0 → 0; 1.4 1.5 → 1; 1.4 0.9 1.0 → 0; 0.8 0.9 1.0 → 2; 0.8 0.9 0.4 → 1.
        assert_eq!(tokens, [0, 1, 0, 2, 1]);
    }

    #[test]
    fn min_tokens_bans_end_tokens_in_every_mode() {
        for temperature in [0.0, 1.0] {
            let init = SlotInit {
                banned_until_min: vec![TokenId(1)],
                min_tokens: 2,
                ..slot(SamplingParams { temperature, ..SamplingParams::default() })
            };
            let mut sampler = SlotSampler::new(&init, 3);
            let tokens: Vec<u32> = (0..3).map(|p| sampler.sample(&[0.0, 90.0, 0.0], p).unwrap().token.0).collect();
            assert!(tokens[0] != 1 && tokens[1] != 1 && tokens[2] == 1, "{tokens:?}");
        }
    }

    #[test]
    fn a_row_without_numbers_is_an_error_and_is_not_counted() {
        for temperature in [0.0, 1.0] {
            for n_logprobs in [None, Some(2)] {
                let params = SamplingParams { temperature, presence_penalty: 2.0, ..SamplingParams::default() };
                let mut sampler = SlotSampler::new(&SlotInit { n_logprobs, ..slot(params) }, 3);
                let bad = [[0.0, f32::NAN, 1.0], [f32::INFINITY, 0.0, 0.0], [f32::NEG_INFINITY; 3]];
                for row in bad {
                    assert_eq!(sampler.sample(&row, 8), Err(RowError::NotFinite { position: 8 }));
                }
                assert_eq!(sampler.sample(&[0.0, f32::NEG_INFINITY, 60.0], 9).unwrap().token, TokenId(2));
            }
        }
    }

    #[test]
    fn masking_every_token_fails_the_row_and_never_yields_an_id_outside() {
        let init = SlotInit {
            banned_until_min: (0..3).map(TokenId).collect(),
            min_tokens: 1,
            ..slot(SamplingParams { top_k: 2, ..SamplingParams::default() })
        };
        let mut sampler = SlotSampler::new(&init, 3);
        assert_eq!(sampler.sample(&[1.0, 2.0, 3.0], 4), Err(RowError::NotFinite { position: 4 }));
    }

    #[test]
    fn entries_beyond_the_vocabulary_are_not_drawn() {
        let mut sampler = SlotSampler::new(&slot(greedy()), 2);
        assert_eq!(sampler.sample(&[0.0, 1.0, 9.0, f32::NAN], 0).unwrap().token, TokenId(1));
    }

    #[test]
    fn logprobs_are_of_the_raw_row() {
        let params = SamplingParams { logit_bias: vec![(TokenId(0), 100.0)], ..greedy() };
        let mut sampler = SlotSampler::new(&SlotInit { n_logprobs: Some(2), ..slot(params) }, 4);
        let p = [0.1f32, 0.2, 0.3, 0.4];
        let logits = p.map(|p| p.ln() + 5.0);
        let got = sampler.sample(&logits, 0).unwrap().logprobs.unwrap();
        assert_eq!((got.chosen.token, got.rank), (TokenId(0), 4));
        let want = [(got.chosen, 0, 0.1f32), (got.top[0], 3, 0.4), (got.top[1], 2, 0.3)];
        for (scored, id, p) in want {
            assert_eq!(scored.token, TokenId(id));
            assert!((scored.logprob - p.ln()).abs() < 1e-6);
        }
        assert_eq!(got.top.len(), 2);
    }

    #[test]
    fn equal_tokens_are_ranked_by_id() {
        let got = score(&[0.0, 1.0, 1.0, 1.0], TokenId(2), 9);
        assert_eq!(got.rank, 2);
        assert_eq!(got.top.iter().map(|s| s.token.0).collect::<Vec<_>>(), [1, 2, 3, 0]);
        assert!(score(&[0.0, 1.0], TokenId(1), 0).top.is_empty());
    }

    #[test]
    fn large_logits_do_not_overflow_and_what_has_no_number_gets_the_floor() {
        let got = score(&[1e30, -1e30, f32::NEG_INFINITY], TokenId(2), 1);
        assert_eq!((got.chosen.logprob, got.rank, got.top[0].logprob), (LOGPROB_FLOOR, 3, 0.0));
        assert_eq!(score(&[0.0, f32::NAN], TokenId(0), 1).chosen.logprob, LOGPROB_FLOOR);
        let outside = score(&[0.0, 1.0], TokenId(2), 1);
        assert_eq!((outside.chosen.logprob, outside.rank), (LOGPROB_FLOOR, 3));
    }
}
