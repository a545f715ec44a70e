//! Sampling after a device's step: what rows are asked for goes up, ids and the log-probabilities asked for come home.
//!
//! A few rows are left to the host, and their logits come home: those whose step has no room for their edits, whose edits depend
//! on a token of the same step, that are asked twice, or for more log-probabilities than the kernel gives.

use crate::device::{Buffer, Device, DeviceError};
use crate::model::batch::{Capacity, SampleRow, ScoreRow, StepOutput, StepPlan};
use crate::model::device::step::LogitTile;
use crate::model::device::workspace::LOGIT_TILE;
use crate::model::slots::{RowTokens, Slots};
use crate::ops::sample::device::{self as sample, MAX_TOP, RowEdit, SampleArgs, SampleResult};
use crate::sample::params::RowError;
use crate::sample::sampler::score;

/// Edits that a step has room for; a row has as many as its prompt and output have different tokens if it is penalised.
const MAX_EDITS: usize = 1 << 18;

/// The buffers, and the step in hand.
#[derive(Debug)]
pub(super) struct Sampling {
    rows: Buffer,    // [T] SampleRow
    edits: Buffer,   // [MAX_EDITS] RowEdit
    results: Buffer, // [T] SampleResult
    /// The logit row of each run's row 0, so that rows before the wanted ones wrap below zero.
    first_row: Vec<usize>,
    asked: Vec<sample::SampleRow>,
    edit_list: Vec<RowEdit>,
    /// Where each of the plan's samples, then each of its scores, is made.
    places: Vec<Place>,
    answers: Vec<SampleResult>,
}

/// Who makes a sample or a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Device,
    Host,
    /// Nobody: the run has an id outside the vocabulary.
    Nowhere,
}

impl Sampling {
    /// Bytes of the buffers.
    pub fn n_bytes(capacity: &Capacity) -> usize {
        capacity.max_rows * (size_of::<sample::SampleRow>() + size_of::<SampleResult>())
            + MAX_EDITS * size_of::<RowEdit>()
    }

    /// Allocates the buffers of an executor.
    ///
    /// # Errors
    /// When the device has not enough memory.
    pub fn new(device: &Device, capacity: &Capacity) -> Result<Self, DeviceError> {
        Ok(Self {
            rows: device.alloc(capacity.max_rows * size_of::<sample::SampleRow>())?,
            edits: device.alloc(MAX_EDITS * size_of::<RowEdit>())?,
            results: device.alloc(capacity.max_rows * size_of::<SampleResult>())?,
            first_row: Vec::new(),
            asked: Vec::new(),
            edit_list: Vec::new(),
            places: Vec::new(),
            answers: Vec::new(),
        })
    }

    /// Decides who samples and scores what, and uploads what the device is asked for.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn stage(
        &mut self,
        device: &Device,
        plan: &StepPlan,
        rows: &RowTokens,
        slots: &mut Slots,
    ) -> Result<(), DeviceError> {
        self.first_row.clear();
        let mut n_rows = 0usize;
        for run in &plan.batch.runs {
            self.first_row.push(n_rows.wrapping_sub(run.logit_rows.start));
            n_rows += run.logit_rows.len();
        }
        self.asked.clear();
        self.asked.resize(n_rows, sample::SampleRow::default());
        self.edit_list.clear();
        self.places.clear();
        for row in &plan.samples {
            let place = if rows.bad_runs[row.run_idx] { Place::Nowhere } else { self.ask_sample(plan, row, slots) };
            self.places.push(place);
        }
        for row in &plan.scores {
            let place = if rows.bad_runs[row.run_idx] { Place::Nowhere } else { self.ask_score(row) };
            self.places.push(place);
        }
        device.upload(&self.edits, 0, bytemuck::cast_slice(&self.edit_list))?;
        device.upload(&self.rows, 0, bytemuck::cast_slice(&self.asked))
    }

    fn ask_sample(&mut self, plan: &StepPlan, row: &SampleRow, slots: &mut Slots) -> Place {
        let slot = plan.batch.runs[row.run_idx].slot;
        let is_only = plan.samples.iter().filter(|other| other.run_idx == row.run_idx).count() == 1;
        let n_vocab = slots.vocab_size();
        let sampler = slots.sampler(slot);
        let asked = &mut self.asked[self.first_row[row.run_idx].wrapping_add(row.row)];
        let depends_on_step = !is_only && sampler.edits().depend_on_output();
        if asked.draws() || depends_on_step || sampler.n_logprobs().is_some_and(|n| n > MAX_TOP) {
            return Place::Host;
        }
        let (n_edits, mut edited) = (self.edit_list.len(), *asked);
        edited.edit(sampler.edits(), n_vocab, &mut self.edit_list);
        if self.edit_list.len() > MAX_EDITS {
            self.edit_list.truncate(n_edits);
            return Place::Host;
        }
        // Of several tokens the last one is the slot's; the host knows which of them was drawn.
        edited.draw(sampler, slot, row.position, is_only);
        *asked = edited;
        Place::Device
    }

    fn ask_score(&mut self, row: &ScoreRow) -> Place {
        let asked = &mut self.asked[self.first_row[row.run_idx].wrapping_add(row.row)];
        if asked.scores() || row.n_top > MAX_TOP {
            return Place::Host;
        }
        asked.score(row.target, row.n_top);
        Place::Device
    }

    /// The logit row of a row of a run.
    pub fn logit_row(&self, run_idx: usize, row: usize) -> usize {
        self.first_row[run_idx].wrapping_add(row)
    }

    /// Rows whose logits are wanted.
    pub fn n_logit_rows(&self) -> usize {
        self.asked.len()
    }

    /// Logit rows that the host samples or scores, ascending.
    pub fn host_rows(&self, plan: &StepPlan) -> Vec<usize> {
        let samples = plan.samples.iter().map(|row| (row.run_idx, row.row));
        let all = samples.chain(plan.scores.iter().map(|row| (row.run_idx, row.row)));
        let of_host = all.zip(&self.places).filter(|(_, place)| **place == Place::Host);
        let mut rows: Vec<usize> = of_host.map(|((run_idx, row), _)| self.logit_row(run_idx, row)).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }

    /// The launch for a tile of logits.
    pub fn args(&self, tile_idx: usize, tile: &LogitTile, logits: u64, slot_tokens: u64, n_vocab: u32) -> SampleArgs {
        let first = (tile_idx * LOGIT_TILE) as u64;
        SampleArgs {
            step: tile.step,
            logits,
            rows: self.rows.address() + first * size_of::<sample::SampleRow>() as u64,
            edits: self.edits.address(),
            results: self.results.address() + first * size_of::<SampleResult>() as u64,
            slot_tokens,
            n_vocab,
            pad: 0,
        }
    }

    /// Brings home what the device gave, has the host do the rest from `logits` of a logit row, and tells the slots their tokens.
    ///
    /// # Errors
    /// When the device is lost.
    pub fn finish<'a>(
        &mut self,
        device: &Device,
        plan: &StepPlan,
        slots: &mut Slots,
        logits: impl Fn(usize) -> &'a [f32],
    ) -> Result<StepOutput, DeviceError> {
        self.answers.resize(self.asked.len(), SampleResult::default());
        if self.places.contains(&Place::Device) {
            device.download(&self.results, 0, bytemuck::cast_slice_mut(&mut self.answers))?;
        }
        let mut output = StepOutput::default();
        let (of_samples, of_scores) = self.places.split_at(plan.samples.len());
        for (row, place) in plan.samples.iter().zip(of_samples) {
            let (slot, logit_row) = (plan.batch.runs[row.run_idx].slot, self.logit_row(row.run_idx, row.row));
            let sampled = match place {
                Place::Nowhere => Err(RowError::NotFinite { position: row.position }),
                Place::Host => slots.sample(slot, logits(logit_row), row.position),
                Place::Device => {
                    let sampled = self.answers[logit_row].sampled(row.position, slots.sampler(slot).n_logprobs());
                    if let Ok(sampled) = &sampled {
                        slots.record(slot, sampled.token, self.asked[logit_row].keeps());
                    }
                    sampled
                }
            };
            output.sampled.push(sampled);
        }
        for (row, place) in plan.scores.iter().zip(of_scores) {
            let logit_row = self.logit_row(row.run_idx, row.row);
            output.scores.push(match place {
                Place::Nowhere => score(&[f32::NAN], row.target, row.n_top),
                Place::Host => score(logits(logit_row), row.target, row.n_top),
                Place::Device => self.answers[logit_row].scored(row.target, row.n_top),
            });
        }
        Ok(output)
    }
}
