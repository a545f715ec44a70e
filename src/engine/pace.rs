//! How many prompt rows fit a step's target time, learned from the steps that have come home.

use std::time::Duration;

/// Prompt rows that a step may always have, however long it takes, so that no prompt starves.
pub const MIN_ROWS: usize = 32;

/// Prompt rows before the first measurement.
const FIRST_ROWS: usize = 256;

/// No step is wider.
const MAX_ROWS: usize = 1 << 20;

/// A step that has come home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// Rows of prompts.
    pub n_prefill_rows: usize,
    /// All other rows.
    pub n_decode_rows: usize,
    /// What they took.
    pub time: Duration,
}

/// The current cap. A step over its target shrinks it at once to what would have fitted; a step under it lets it grow, at
/// most to twice its size, since a small step says little about a large one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    target: Duration,
    n_rows: usize,
}

impl Pace {
    /// A cap for steps of `target`; zero: no cap.
    #[must_use]
    pub const fn new(target: Duration) -> Self {
        Self { target, n_rows: FIRST_ROWS }
    }

    /// Prompt rows that a step may have.
    #[must_use]
    pub const fn n_rows(&self) -> usize {
        if self.target.is_zero() { MAX_ROWS } else { self.n_rows }
    }

    /// Takes a measurement. Steps without prompt rows say nothing about prompts.
    pub fn learn(&mut self, step: Measured) {
        if step.n_prefill_rows == 0 {
            return;
        }
        // A row costs the same whatever it is for; what the decode rows take is not there for prompts.
        let n_step_rows = step.n_prefill_rows + step.n_decode_rows;
        let n_fitting = n_step_rows as f64 * self.target.as_secs_f64() / step.time.as_secs_f64().max(1e-9);
        let n_fitting = (n_fitting as usize).saturating_sub(step.n_decode_rows);
        self.n_rows = if step.time > self.target {
            self.n_rows.min(n_fitting)
        } else {
            self.n_rows.max(n_fitting.min(2 * self.n_rows))
        };
        self.n_rows = self.n_rows.clamp(MIN_ROWS, MAX_ROWS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: Duration = Duration::from_millis(250);

    fn step(n_prefill_rows: usize, n_decode_rows: usize, ms: u64) -> Measured {
        Measured { n_prefill_rows, n_decode_rows, time: Duration::from_millis(ms) }
    }

    #[test]
    fn a_late_step_shrinks_the_cap_to_what_would_have_fitted() {
        let mut pace = Pace::new(TARGET);
        pace.learn(step(256, 0, 500));
        assert_eq!(pace.n_rows(), 128);
        // Decode rows are paid first: of 100 rows in 500 ms 50 fit, and 10 of them decode.
        pace.learn(step(90, 10, 500));
        assert_eq!(pace.n_rows(), 40);
    }

    #[test]
    fn quick_steps_let_it_grow_twofold_at_most() {
        let mut pace = Pace::new(TARGET);
        pace.learn(step(256, 0, 1));
        assert_eq!(pace.n_rows(), 512);
        pace.learn(step(512, 0, 200));
        assert_eq!(pace.n_rows(), 640);
        // A short prompt took little of a step that could have held more: no reason to shrink.
        pace.learn(step(5, 1, 100));
        assert_eq!(pace.n_rows(), 640);
    }

    #[test]
    fn it_stays_at_the_minimum_or_above_and_recovers() {
        let mut pace = Pace::new(TARGET);
        for (n_prefill_rows, n_decode_rows, ms) in [(1024, 64, 60_000), (1, 64, 60_000), (32, 64, 400)] {
            pace.learn(step(n_prefill_rows, n_decode_rows, ms));
            assert_eq!(pace.n_rows(), MIN_ROWS);
        }
        for _ in 0..10 {
            let n_rows = pace.n_rows();
            pace.learn(step(n_rows, 1, n_rows as u64));
        }
        assert!((240..=250).contains(&pace.n_rows()), "at 1 ms a row: {}", pace.n_rows());
    }

    #[test]
    fn steps_without_prompts_or_time_or_target_do_no_harm() {
        let mut pace = Pace::new(TARGET);
        pace.learn(step(0, 64, 60_000));
        assert_eq!(pace.n_rows(), FIRST_ROWS);
        for _ in 0..100 {
            pace.learn(step(usize::from(u16::MAX), 0, 0));
        }
        assert_eq!(pace.n_rows(), MAX_ROWS);
        let mut off = Pace::new(Duration::ZERO);
        off.learn(step(1024, 0, 60_000));
        assert_eq!(off.n_rows(), MAX_ROWS);
    }
}
