//! Cases of `sample`: the tokens, ranks and order of src/sample, log-probabilities within a limit, rows and masks that are hard.

use std::sync::Arc;

use super::{MAX_TOP, SampleArgs, SampleResult, SampleRow, launch};
use crate::device::Device;
use crate::ids::{SlotIdx, TokenId};
use crate::ops::case::batch::Worst;
use crate::ops::case::data::{Noise, download, nan_buffer, same_bits, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::sample::{RowAnswer, reference};
use crate::ops::step::{Step, StepCounts};
use crate::sample::params::{SamplingParams, SlotInit, TokenLogprobs};
use crate::sample::sampler::SlotSampler;

/// Rows of the bucket that are not there.
const N_PADDING: usize = 2;
/// Draws of the case that looks at their distribution.
const N_DRAWS: usize = 1024;

/// What a row's logits look like.
#[derive(Clone, Copy)]
enum Logits {
    /// Spread as a model's are: a bell of some nats, the best few apart.
    Model,
    /// Steps of a quarter: many are equal.
    Steps,
    /// One value.
    Same,
    /// So far apart that all but one weigh nothing.
    Far,
    /// Zeros of both signs, −∞ and a few numbers.
    Zeros,
    /// −∞ but for one.
    OneLeft,
    /// As `Model`, and one value among them.
    With(f32),
    /// Nothing that can be drawn.
    Masked,
}

const KINDS: [Logits; 11] = [
    Logits::Model,
    Logits::Steps,
    Logits::Same,
    Logits::Far,
    Logits::Zeros,
    Logits::OneLeft,
    Logits::With(f32::NAN),
    Logits::With(-f32::NAN),
    Logits::With(f32::INFINITY),
    Logits::With(-1e38),
    Logits::Masked,
];

/// A row and what it is asked for.
struct Row {
    logits: Vec<f32>, // [V]
    init: SlotInit,
    position: usize,
    draws: bool,
    score: Option<(TokenId, u32)>,
}

pub(super) fn cases() -> Vec<OpCase> {
    let mixed = |name: &str, n_vocab: usize, n_rows: usize, seed: u64| {
        OpCase::new("sample", name, move |device| {
            let mut noise = Noise::new(seed);
            compare(
                device,
                n_vocab,
                (0..n_rows).map(|i| mixed_row(&mut noise, KINDS[i % KINDS.len()], n_vocab)).collect(),
            )
        })
    };
    vec![
        mixed("the demo's vocabulary", 3072, 66, 71),
        mixed("the model's vocabulary", 129_280, 6, 72),
        mixed("an odd vocabulary just past a round", 4097, 33, 73),
        mixed("a vocabulary of 1", 1, 22, 74),
        mixed("a vocabulary of 7", 7, 88, 75),
        mixed("no row", 100, 0, 76),
        OpCase::new("sample", "noise alone, the model's vocabulary", noise_alone),
        OpCase::new("sample", "every token edited", every_token_edited),
        OpCase::new("sample", "the distribution of draws", distribution),
    ]
}

fn logits(noise: &mut Noise, kind: Logits, n_vocab: usize) -> Vec<f32> {
    // The sum of some uniform numbers is near enough to a bell.
    let mut bell = |_| (0..6).map(|_| noise.unit()).sum::<f32>() * 1.7;
    let model: Vec<f32> = (0..n_vocab).map(&mut bell).collect();
    let one = noise.below(n_vocab as u32) as usize;
    let among = |value: f32| {
        let mut row = model.clone();
        row[one] = value;
        row
    };
    match kind {
        Logits::Model => among(12.0),
        Logits::Steps => model.iter().map(|x| (x * 4.0).round() / 4.0).collect(),
        Logits::Same => vec![model[0]; n_vocab],
        Logits::Far => model.iter().map(|x| x * 1e30).collect(),
        Logits::Zeros => (0..n_vocab).map(|_| [0.0, -0.0, f32::NEG_INFINITY, 0.5][noise.below(4) as usize]).collect(),
        Logits::OneLeft => (0..n_vocab).map(|i| if i == one { 1.5 } else { f32::NEG_INFINITY }).collect(),
        Logits::With(value) => among(value),
        Logits::Masked => vec![f32::NEG_INFINITY; n_vocab],
    }
}

fn mixed_row(noise: &mut Noise, kind: Logits, n_vocab: usize) -> Row {
    let logits = logits(noise, kind, n_vocab);
    let v = n_vocab as u32;
    let mut of = |values: &[f32]| values[noise.below(values.len() as u32) as usize];
    let mut sampling = SamplingParams {
        temperature: of(&[0.0, 0.3, 1.0, 1.0, 2.0, 1e6, 1e-3, 1e-38, f32::from_bits(1)]),
        top_p: of(&[1.0, 1.0, 0.999, 0.9, 0.5, 1e-6, f32::MIN_POSITIVE]),
        min_p: of(&[0.0, 0.0, 0.03, 0.4, 1.0]),
        presence_penalty: of(&[0.0, 0.0, 0.7, -2.0]),
        frequency_penalty: of(&[0.0, 0.0, 0.3, -0.5]),
        repetition_penalty: of(&[1.0, 1.0, 1.3, 0.8]),
        ..SamplingParams::default()
    };
    sampling.seed = Some(noise.next_u64());
    sampling.top_k = [0, 0, 1, 2, 50, v - 1, v, v + 5][noise.below(8) as usize];
    // Some ids are outside the vocabulary.
    let mut ids = |n: u32| -> Vec<TokenId> { (0..n).map(|_| TokenId(noise.below(v + 2))).collect() };
    let mut biased = ids(v.min(5));
    biased.sort_unstable();
    biased.dedup();
    let (prompt, output, banned) = (ids(60), ids(40), ids(2));
    if noise.below(2) == 0 {
        sampling.logit_bias = biased.into_iter().map(|id| (id, noise.unit() * 20.0)).collect();
    }
    let init = SlotInit {
        sampling,
        choice: noise.below(3),
        prompt: prompt.into(),
        output,
        banned_until_min: banned,
        min_tokens: [0, 100][noise.below(2) as usize],
        n_logprobs: [None, Some(0), Some(5), Some(MAX_TOP)][noise.below(4) as usize],
    };
    let score = [None, Some((TokenId(noise.below(v + 1)), noise.below(MAX_TOP + 1)))][noise.below(2) as usize];
    Row { logits, init, position: noise.below(1 << 20) as usize, draws: score.is_none() || noise.below(4) > 0, score }
}

/// Rows with nothing but noise: one row of logits, many seeds, positions and choices.
fn noise_alone(device: &Device) -> Result<Deviation, CaseError> {
    let mut noise = Noise::new(77);
    let logits = logits(&mut noise, Logits::Model, 129_280);
    let row = |i: u32| {
        let sampling = SamplingParams { seed: Some(u64::from(i) << 30), ..SamplingParams::default() };
        Row { position: 1 << i, init: SlotInit { choice: i, ..plain(sampling) }, ..drawn(logits.clone()) }
    };
    compare(device, 129_280, (0..12).map(row).collect())
}

/// Every entry has a bias, a repetition penalty, a count and, but for the last few, a ban.
fn every_token_edited(device: &Device) -> Result<Deviation, CaseError> {
    let (mut noise, n_vocab) = (Noise::new(78), 3000);
    let all: Vec<TokenId> = (0..n_vocab as u32).map(TokenId).collect();
    let row = |i: u32| {
        let sampling = SamplingParams {
            temperature: [0.0, 0.8][i as usize % 2],
            repetition_penalty: 1.25,
            presence_penalty: 0.25,
            frequency_penalty: 0.5,
            logit_bias: all.iter().map(|id| (*id, noise.unit() * 9.0)).collect(),
            seed: Some(u64::from(i)),
            ..SamplingParams::default()
        };
        let init = SlotInit {
            prompt: Arc::from(&all[..2000]),
            output: [&all[1000..], &all[2500..]].concat(),
            banned_until_min: all[..2900].to_vec(),
            min_tokens: [10_000, 0][i as usize / 4],
            n_logprobs: Some(3),
            ..plain(sampling)
        };
        Row { init, ..drawn(logits(&mut noise, Logits::Model, n_vocab)) }
    };
    compare(device, n_vocab, (0..8).map(row).collect())
}

/// χ² of many draws from a small vocabulary, over the value that a fair draw passes in one case of 10,000.
fn distribution(device: &Device) -> Result<Deviation, CaseError> {
    let logits: Vec<f32> = (0..40u32).map(|i| ((i * 7919) % 31) as f32 / 10.0 - 1.5).collect();
    let filter = SamplingParams { temperature: 1.3, min_p: 0.2, ..SamplingParams::default() };
    let row = |i: usize| {
        let sampling = SamplingParams { seed: Some(i as u64 / 2), ..filter.clone() };
        Row { position: 5 + i % 2, init: plain(sampling), ..drawn(logits.clone()) }
    };
    let rows: Vec<Row> = (0..N_DRAWS).map(row).collect();
    let mut counts = vec![0u32; logits.len()];
    for result in &on_device(device, logits.len(), &rows)?.0 {
        counts[result.token as usize] += 1;
    }
    let (mut chi, mut n_cells) = (0.0, 0.0f64);
    for (count, p) in counts.iter().zip(exact(&logits, &filter)) {
        if p == 0.0 && *count > 0 {
            return Err(CaseError::Rule("a token outside the filter was drawn".to_owned()));
        }
        if p > 0.0 {
            let want = p * N_DRAWS as f64;
            chi += (f64::from(*count) - want).powi(2) / want;
            n_cells += 1.0;
        }
    }
    // Wilson and Hilferty's approximation.
    let df = n_cells - 1.0;
    let limit = df * (1.0 - 2.0 / (9.0 * df) + 3.719 * (2.0 / (9.0 * df)).sqrt()).powi(3);
    Ok(Deviation { worst: chi, limit })
}

/// The exact distribution under a temperature and min-p.
fn exact(logits: &[f32], filter: &SamplingParams) -> Vec<f64> {
    let weights = logits.iter().map(|logit| (f64::from(*logit) / f64::from(filter.temperature)).exp());
    let floor = weights.clone().fold(0.0, f64::max) * f64::from(filter.min_p);
    let kept: Vec<f64> = weights.map(|weight| if weight < floor { 0.0 } else { weight }).collect();
    let total: f64 = kept.iter().sum();
    kept.iter().map(|weight| weight / total).collect()
}

fn plain(sampling: SamplingParams) -> SlotInit {
    SlotInit {
        sampling,
        choice: 0,
        prompt: Arc::new([]),
        output: Vec::new(),
        banned_until_min: Vec::new(),
        min_tokens: 0,
        n_logprobs: None,
    }
}

fn drawn(logits: Vec<f32>) -> Row {
    Row { logits, init: plain(SamplingParams::default()), position: 3, draws: true, score: None }
}

/// Runs the rows: what each gives, and the slots' last tokens. Row i is slot i's. Checks that the logits are left as they were
/// and that nothing is written for padding.
fn on_device(device: &Device, n_vocab: usize, rows: &[Row]) -> Result<(Vec<SampleResult>, Vec<u32>), CaseError> {
    let n = rows.len() + N_PADDING;
    let (mut asked, mut edits) = (Vec::new(), Vec::new());
    for (i, row) in rows.iter().enumerate() {
        let (sampler, mut ask) = (SlotSampler::new(&row.init, n_vocab), SampleRow::default());
        if row.draws {
            ask.draw(&sampler, SlotIdx(i as u32), row.position, i % 3 > 0);
            ask.edit(sampler.edits(), n_vocab, &mut edits);
        }
        if let Some((target, n_top)) = row.score {
            ask.score(target, n_top);
        }
        asked.push(ask);
    }
    asked.resize(n, asked.last().copied().unwrap_or_default());
    let logits: Vec<f32> = rows.iter().flat_map(|row| &row.logits).copied().collect();
    let counts = StepCounts { n_logit_rows: rows.len() as u32, ..StepCounts::default() };
    let (on_device, counts) = (upload(device, &logits)?, upload(device, &[counts])?);
    let (asked, edits) = (upload(device, &asked)?, upload(device, &edits)?);
    let results = nan_buffer(device, n * size_of::<SampleResult>())?;
    let slot_tokens = nan_buffer(device, 4 * n)?;
    let args = SampleArgs {
        step: Step { counts: counts.address(), ..Step::default() },
        logits: on_device.address(),
        rows: asked.address(),
        edits: edits.address(),
        results: results.address(),
        slot_tokens: slot_tokens.address(),
        n_vocab: n_vocab as u32,
        pad: 0,
    };
    launch(device, &args, n as u32)?;
    same_bits("logits after the launch", &download(device, &on_device, logits.len())?, &logits)?;
    let mut got: Vec<SampleResult> = download(device, &results, n)?;
    let padding = got.split_off(rows.len());
    if bytemuck::cast_slice::<_, u8>(&padding).iter().any(|byte| *byte != 0xFF) {
        return Err(CaseError::Rule("a row of padding was written".to_owned()));
    }
    Ok((got, download(device, &slot_tokens, rows.len())?))
}

/// Every row against src/sample, a second run, and rows alone.
fn compare(device: &Device, n_vocab: usize, rows: Vec<Row>) -> Result<Deviation, CaseError> {
    let (got, slot_tokens) = on_device(device, n_vocab, &rows)?;
    let bytes = |results: &[SampleResult]| bytemuck::cast_slice::<_, u8>(results).to_vec();
    if bytes(&on_device(device, n_vocab, &rows)?.0) != bytes(&got) {
        return Err(CaseError::Rule("a second run gives other results".to_owned()));
    }
    let mut worst = Worst::default();
    for (i, row) in rows.iter().enumerate() {
        let wrong = |what: &str| CaseError::Rule(format!("row {i} ({:?}): {what}", row.init.sampling));
        let mut sampler = SlotSampler::new(&row.init, n_vocab);
        let want = reference(&row.logits, row.draws.then_some((&mut sampler, row.position)), row.score);
        let have: RowAnswer = (
            row.draws.then(|| got[i].sampled(row.position, row.init.n_logprobs)),
            row.score.map(|(target, n_top)| got[i].scored(target, n_top)),
        );
        let token = |answer: &RowAnswer| answer.0.as_ref().map(|sampled| sampled.as_ref().ok().map(|s| s.token));
        if token(&have) != token(&want) {
            return Err(wrong(&format!("token {:?}, want {:?}", token(&have), token(&want))));
        }
        let kept = token(&want).flatten().filter(|_| i % 3 > 0).map_or(u32::MAX, |token| token.0);
        if slot_tokens[i] != kept {
            return Err(wrong(&format!("the slot's last token is {}, want {kept}", slot_tokens[i])));
        }
        let logprobs = |answer: RowAnswer| [answer.0.and_then(|s| s.ok()?.logprobs), answer.1];
        for (have, want) in logprobs(have).into_iter().zip(logprobs(want)) {
            judge(have, want, &mut worst).map_err(|what| wrong(&what))?;
        }
    }
    for (i, row) in rows.into_iter().enumerate().step_by(7) {
        let alone = Row { draws: row.draws, ..row };
        if i % 3 == 0 && bytes(&on_device(device, n_vocab, &[alone])?.0) != bytes(&got[i..=i]) {
            return Err(CaseError::Rule(format!("row {i} alone gives other results")));
        }
    }
    Ok(worst.deviation())
}

/// Ranks and order must be equal; log-probabilities within a unit of f32 and what masses lose at 2^-46.
fn judge(have: Option<TokenLogprobs>, want: Option<TokenLogprobs>, worst: &mut Worst) -> Result<(), String> {
    let (Some(have), Some(want)) = (&have, &want) else {
        return if have == want { Ok(()) } else { Err(format!("{have:?}, want {want:?}")) };
    };
    let ids = |scored: &TokenLogprobs| scored.top.iter().map(|s| s.token).collect::<Vec<_>>();
    if (have.chosen.token, have.rank, ids(have)) != (want.chosen.token, want.rank, ids(want)) {
        return Err(format!("{have:?}, want {want:?}"));
    }
    let all = |scored: &TokenLogprobs| {
        std::iter::once(&scored.chosen).chain(&scored.top).map(|s| s.logprob).collect::<Vec<_>>()
    };
    for (have, want) in all(have).into_iter().zip(all(want)) {
        let want = f64::from(want);
        worst.add(have, want, want.abs() * f64::from(f32::EPSILON) + 4e-9);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn tokens_and_logprobs_are_those_of_the_host() {
        crate::device::testing::run_cases(&super::cases());
    }
}
