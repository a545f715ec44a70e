//! The parts of the bench: decode by streams and by context, prompts, time by kernel.

use super::drive::{Driver, one_each};
use super::table::{KernelTimes, Report, Row};
use super::{N_WARM_UP, Part, Plan};
use crate::model::batch::RowKind;
use crate::model::cache::RowFormat;
use crate::model::cost::{StepBytes, cache_bytes};
use crate::model::shape::ModelShape;

/// Prompts up to this many tokens are run several times.
const SHORT_PROMPT: usize = 2048;
const N_SHORT: usize = 3;

/// All that the parts work with.
pub(super) struct Bench<'a> {
    pub driver: Driver,
    pub report: Report<'a>,
    pub shape: &'a ModelShape,
    pub plan: &'a Plan,
    /// Bytes a second of a plain read.
    pub rate: f64,
}

impl Bench<'_> {
    /// Measures every part that is wanted, each with its table.
    pub fn run(mut self) -> anyhow::Result<()> {
        for part in &self.plan.parts {
            match part {
                Part::Decode => self.decode()?,
                Part::Context => self.contexts()?,
                Part::Prefill => self.prefills()?,
                Part::Ops => self.ops()?,
            }
        }
        Ok(())
    }

    fn decode(&mut self) -> anyhow::Result<()> {
        let context = self.plan.contexts[0];
        self.driver.start(self.plan.max_streams(), self.plan.decode_tokens());
        self.driver.prefill(context)?;
        let rows = self.plan.streams.iter().map(|n| self.decode_row("decode", *n, context));
        let rows = rows.collect::<anyhow::Result<Vec<_>>>()?;
        self.report.rows(&format!("decode by streams, from {context} tokens on, distinct prompts"), &rows)
    }

    fn contexts(&mut self) -> anyhow::Result<()> {
        let mut rows = Vec::new();
        for n_streams in self.plan.context_streams() {
            for &context in &self.plan.contexts {
                self.driver.start(n_streams, self.plan.context_tokens());
                self.driver.pretend(context)?;
                rows.push(self.decode_row("context", n_streams, context)?);
            }
        }
        self.report.rows("decode by context; the KV caches were filled by a kernel with random rows", &rows)
    }

    /// Decodes in the first sequences, which have about `context` tokens.
    fn decode_row(&mut self, part: &'static str, n_streams: usize, context: usize) -> anyhow::Result<Row> {
        let distinct = self.driver.distinct_experts(&one_each(n_streams), RowKind::Decode)?;
        for _ in 0..N_WARM_UP {
            self.driver.decode(n_streams)?;
        }
        let times = (0..self.plan.n_steps).map(|_| self.driver.decode(n_streams));
        let ms = median(times.collect::<Result<Vec<_>, _>>()?);
        let of_caches = n_streams as u64 * cache_bytes(self.shape, RowFormat::Device, context);
        Ok(Row {
            part,
            n_streams,
            n_tokens: context,
            n_rows: n_streams,
            tok_s: n_streams as f64 / (ms * 1e-3),
            ms,
            floor_ms: self.floor_ms(&distinct, of_caches),
            distinct_experts: mean(&distinct),
        })
    }

    fn prefills(&mut self) -> anyhow::Result<()> {
        let rows = self.plan.prefills.iter().map(|n_tokens| self.prefill_row(*n_tokens));
        let rows = rows.collect::<anyhow::Result<Vec<_>>>()?;
        let budget = self.driver.max_rows();
        self.report.rows(&format!("prefill of one prompt, {budget} rows a step at most"), &rows)
    }

    fn prefill_row(&mut self, n_tokens: usize) -> anyhow::Result<Row> {
        let n_rows = n_tokens.min(self.driver.max_rows());
        let max_tokens = self.plan.prefill_tokens();
        self.driver.start(1, max_tokens);
        let distinct = self.driver.distinct_experts(&[(0, n_rows)], RowKind::Prefill)?;
        let n_times = if n_tokens <= SHORT_PROMPT { N_SHORT } else { 1 };
        let (mut sums, mut whole_steps) = (Vec::new(), Vec::new());
        for _ in 0..n_times {
            self.driver.start(1, max_tokens);
            let times = self.driver.prefill(n_tokens)?;
            sums.push(times.iter().sum());
            whole_steps.extend_from_slice(&times[..n_tokens / n_rows]);
        }
        Ok(Row {
            part: "prefill",
            n_streams: 1,
            n_tokens,
            n_rows,
            tok_s: n_tokens as f64 / (median(sums) * 1e-3),
            ms: median(whole_steps),
            floor_ms: self.floor_ms(&distinct, 0),
            distinct_experts: mean(&distinct),
        })
    }

    fn ops(&mut self) -> anyhow::Result<()> {
        let (n_most, n_rows) = (self.plan.max_streams(), self.driver.max_rows());
        let context = self.plan.contexts[0];
        let mut streams = vec![1, n_most];
        streams.dedup();
        for n_streams in streams {
            let what = format!("decode step of {n_streams} streams at {context} tokens");
            self.profile(&what, context, &one_each(n_streams), RowKind::Decode)?;
        }
        self.profile(&format!("prefill step of {n_rows} rows"), 0, &[(0, n_rows)], RowKind::Prefill)
    }

    fn profile(&mut self, what: &str, n_before: usize, rows: &[(usize, usize)], kind: RowKind) -> anyhow::Result<()> {
        self.driver.start(rows.len(), self.plan.decode_tokens().max(self.driver.max_rows()));
        self.driver.pretend(n_before)?;
        // The first looks kernels up.
        self.driver.profile(rows, kind)?;
        let times = KernelTimes::new(&self.driver.profile(rows, kind)?, self.shape.num_hidden_layers);
        self.report.kernels(what, &times)
    }

    /// Milliseconds in which the step's bytes can be read.
    fn floor_ms(&self, distinct_experts: &[usize], of_caches: u64) -> f64 {
        let StepBytes { fixed, expert } = StepBytes::new(self.shape);
        let n_experts: usize = distinct_experts.iter().sum();
        (fixed + expert * n_experts as u64 + of_caches) as f64 / self.rate * 1e3
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn mean(values: &[usize]) -> f64 {
    values.iter().sum::<usize>() as f64 / values.len() as f64
}
