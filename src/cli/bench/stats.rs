//! From timed requests to the numbers of one row.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::load::Point;

/// One answered request.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub started: Instant,
    /// The first token was there.
    pub first: Instant,
    /// The last one was.
    pub last: Instant,
    /// Time before each token but those of the first chunk.
    pub gaps_s: Vec<f64>,
    pub n_prompt: usize,
    /// Prompt tokens that the server took from its prefix cache.
    pub n_cached: usize,
    pub n_output: usize,
    /// Tokens that came after the first chunk.
    pub n_after_first: usize,
}

/// A sample, or what went wrong.
pub(super) type Outcome = Result<Sample, String>;

/// Nearest-rank percentiles.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Percentiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
}

/// One row.
#[derive(Clone, Debug)]
pub(super) struct Summary {
    pub point: Point,
    pub n_ok: usize,
    /// Messages and how often each came.
    pub errors: BTreeMap<String, usize>,
    pub wall_s: f64,
    /// Tokens of all answers over the wall time.
    pub output_tok_s: f64,
    /// Prompt tokens that were computed, over the time in which at least one request waited for its first token.
    pub prefill_tok_s: f64,
    /// Tokens after the first chunk over the time they took, by request.
    pub stream_tok_s: Percentiles,
    pub ttft_ms: Percentiles,
    pub gap_ms: Percentiles,
    pub n_cached: usize,
    /// Ctrl-C came before the last answer; requests in flight count for nothing.
    pub is_interrupted: bool,
}

impl Summary {
    pub fn new(point: Point, outcomes: Vec<Outcome>, wall: Duration) -> Self {
        let (mut samples, mut errors) = (Vec::new(), BTreeMap::new());
        for outcome in outcomes {
            match outcome {
                Ok(sample) => samples.push(sample),
                Err(message) => *errors.entry(message).or_default() += 1,
            }
        }
        let sum = |count: fn(&Sample) -> usize| samples.iter().map(count).sum::<usize>() as f64;
        let ttft_ms = |sample: &Sample| (sample.first - sample.started).as_secs_f64() * 1e3;
        Self {
            point,
            n_ok: samples.len(),
            errors,
            wall_s: wall.as_secs_f64(),
            output_tok_s: rate(sum(|sample| sample.n_output), wall),
            prefill_tok_s: rate(
                sum(|sample| sample.n_prompt - sample.n_cached.min(sample.n_prompt)),
                waiting(&samples),
            ),
            stream_tok_s: Percentiles::of(samples.iter().filter_map(stream_rate)),
            ttft_ms: Percentiles::of(samples.iter().map(ttft_ms)),
            gap_ms: Percentiles::of(samples.iter().flat_map(|sample| sample.gaps_s.iter().map(|gap| gap * 1e3))),
            n_cached: sum(|sample| sample.n_cached) as usize,
            is_interrupted: false,
        }
    }

    pub fn n_failed(&self) -> usize {
        self.errors.values().sum()
    }
}

impl Percentiles {
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_unstable_by(f64::total_cmp);
        let rank = |percent: usize| {
            let place = (values.len() * percent).div_ceil(100).max(1) - 1;
            values.get(place).copied().unwrap_or(f64::NAN)
        };
        Self { p50: rank(50), p90: rank(90), p99: rank(99) }
    }
}

fn rate(n_tokens: f64, time: Duration) -> f64 {
    if time.is_zero() { f64::NAN } else { n_tokens / time.as_secs_f64() }
}

fn stream_rate(sample: &Sample) -> Option<f64> {
    let time = sample.last - sample.first;
    (!time.is_zero()).then(|| rate(sample.n_after_first as f64, time))
}

/// How long at least one request waited for its first token.
fn waiting(samples: &[Sample]) -> Duration {
    let mut spans: Vec<(Instant, Instant)> = samples.iter().map(|sample| (sample.started, sample.first)).collect();
    spans.sort_unstable();
    let (mut total, mut covered) = (Duration::ZERO, None);
    for (start, end) in spans {
        let start = covered.map_or(start, |covered: Instant| covered.max(start));
        total += end.saturating_duration_since(start);
        covered = Some(covered.map_or(end, |covered: Instant| covered.max(end)));
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(epoch: Instant, started_ms: u64, first_ms: u64, last_ms: u64) -> Sample {
        let at = |ms| epoch + Duration::from_millis(ms);
        Sample {
            started: at(started_ms),
            first: at(first_ms),
            last: at(last_ms),
            gaps_s: vec![(last_ms - first_ms) as f64 / 2e3; 2],
            n_prompt: 100,
            n_cached: 10,
            n_output: 3,
            n_after_first: 2,
        }
    }

    #[test]
    fn nearest_rank() {
        assert_eq!(Percentiles::of((1..=100).map(f64::from)), Percentiles { p50: 50.0, p90: 90.0, p99: 99.0 });
        assert_eq!(Percentiles::of([3.0, 1.0].into_iter()), Percentiles { p50: 1.0, p90: 3.0, p99: 3.0 });
        assert!(Percentiles::of(std::iter::empty()).p50.is_nan());
    }

    #[test]
    fn a_row_by_hand() {
        let epoch = Instant::now();
        // Waiting: 0..100 and 50..150 overlap, 200..250 stands apart: 200 ms in all.
        let outcomes = vec![
            Ok(sample(epoch, 50, 150, 350)),
            Ok(sample(epoch, 0, 100, 300)),
            Err("refused".to_owned()),
            Ok(sample(epoch, 200, 250, 350)),
            Err("refused".to_owned()),
        ];
        let point = Point { concurrency: 2, n_requests: 5, n_prompt: 100, n_output: 3 };
        let row = Summary::new(point, outcomes, Duration::from_millis(500));
        assert_eq!((row.n_ok, row.n_failed(), row.errors["refused"], row.n_cached), (3, 2, 2, 30));
        assert!((row.output_tok_s - 9.0 / 0.5).abs() < 1e-9);
        assert!((row.prefill_tok_s - 270.0 / 0.2).abs() < 1e-6, "{}", row.prefill_tok_s);
        assert!((row.ttft_ms.p50 - 100.0).abs() < 1e-9);
        assert!((row.stream_tok_s.p50 - 10.0).abs() < 1e-9);
        assert!((row.gap_ms.p99 - 100.0).abs() < 1e-9 && (row.gap_ms.p50 - 100.0).abs() < 1e-9);
    }

    #[test]
    fn a_row_without_answers_has_no_numbers_and_all_errors() {
        let point = Point { concurrency: 1, n_requests: 1, n_prompt: 1, n_output: 1 };
        let row = Summary::new(point, vec![Err("x".to_owned())], Duration::from_secs(1));
        assert!(row.ttft_ms.p50.is_nan() && row.prefill_tok_s.is_nan());
        assert_eq!(row.n_failed(), 1);
    }
}
