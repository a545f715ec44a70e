//! What a bench asks of an executor beside its steps: the rate of plain reads, chosen experts, filled caches, time by launch.

use super::DeviceRunner;
use crate::device::{DeviceError, LaunchTime};
use crate::model::batch::{Executor, StepPlan};
use crate::model::forward::TracePoint;
use crate::model::plan_check::check;
use crate::model::slots::RowTokens;
use crate::ops::read::{self, ReadArgs};

/// Timed reads, the median of which counts.
const N_READS: usize = 5;
/// Times that the weights are read before a profiled step: long enough for the host to queue the step meanwhile.
const N_LEAD_IN: usize = 3;

/// How fast the device reads its memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadRate {
    /// Bytes of one reading.
    pub n_bytes: u64,
    /// Milliseconds of the median reading.
    pub ms: f32,
}

impl ReadRate {
    /// Bytes a second.
    #[must_use]
    pub fn bytes_per_s(self) -> f64 {
        self.n_bytes as f64 / (f64::from(self.ms) * 1e-3)
    }
}

impl DeviceRunner {
    /// Bytes of the weights as kernels read them.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.weights.parts().iter().map(|part| part.n_bytes() as u64).sum()
    }

    /// Reads weights, at least `least_bytes` of them if there are as many, and times it.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn read_rate(&self, least_bytes: u64) -> Result<ReadRate, DeviceError> {
        let mut n_bytes = 0;
        let n_parts = self.weights.parts().iter().take_while(|part| {
            let is_wanted = n_bytes < least_bytes;
            n_bytes += if is_wanted { part.n_bytes() as u64 } else { 0 };
            is_wanted
        });
        let n_parts = n_parts.count();
        self.read_parts(n_parts)?;
        let mut times = Vec::with_capacity(N_READS);
        for _ in 0..N_READS {
            let start = self.device.record()?;
            self.read_parts(n_parts)?;
            times.push(start.elapsed_ms(&self.device.record()?)?);
        }
        times.sort_by(f32::total_cmp);
        Ok(ReadRate { n_bytes, ms: times[N_READS / 2] })
    }

    /// Reads the first parts of the weights, without waiting.
    fn read_parts(&self, n_parts: usize) -> Result<(), DeviceError> {
        // The words are never read: any scratch of that size will do.
        let out = self.workspace.at.residual;
        self.weights.parts()[..n_parts].iter().try_for_each(|part| {
            read::launch(&self.device, &ReadArgs { from: part.address(), out, n_bytes: part.n_bytes() as u64 })
        })
    }

    /// Fills all blocks and all slots with valid rows without pattern, so that any position can be decoded at.
    ///
    /// # Errors
    /// When the device is lost, or there are too many blocks.
    pub fn fill_caches(&mut self) -> Result<(), DeviceError> {
        self.cache.fill(&self.device, &self.capacity)
    }

    /// Runs a plan's batch for the experts that its rows choose: how many different ones in each layer. Nothing is sampled.
    ///
    /// # Errors
    /// When the plan is wrong or the device is lost.
    pub fn distinct_experts(&mut self, plan: &StepPlan) -> Result<Vec<usize>, DeviceError> {
        check(plan, &self.capacity, &self.slots).map_err(|reason| self.failed(reason))?;
        self.slots.gather_token_ids(&plan.batch, &mut self.rows);
        self.upload_slot_tokens()?;
        let RowTokens { token_ids, bad_runs } = &self.rows;
        let staged = self.staging.stage(&self.device, &plan.batch, token_ids, bad_runs)?;
        let mut chosen = vec![0; staged.n_rows * self.shape.num_experts_per_tok];
        let mut counts = Vec::with_capacity(self.shape.num_hidden_layers);
        self.pass(&staged).trunk_seen(&mut |point, _| {
            if !matches!(point, TracePoint::Residual(_)) {
                return Ok(());
            }
            self.workspace.download_experts(&self.device, &mut chosen)?;
            chosen.sort_unstable();
            counts.push(chosen.chunk_by(|a, b| a == b).count());
            Ok(())
        })?;
        Ok(counts)
    }

    /// Runs a step and times each of its launches, none of which is part of a recorded graph. The device is kept busy until
    /// the host has queued the step, so that the times are the device's alone.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn profile(&mut self, plan: StepPlan) -> Result<Vec<LaunchTime>, DeviceError> {
        for _ in 0..N_LEAD_IN {
            self.read_parts(self.weights.parts().len())?;
        }
        self.device.start_profile()?;
        let graphs = self.graphs.take();
        let outcome = self.launch(plan);
        self.graphs = graphs;
        let times = self.device.end_profile();
        outcome?;
        self.finish()?;
        times
    }
}
