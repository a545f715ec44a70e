//! Checks of a step plan before anything of it reaches a device.

use crate::model::batch::{Batch, Capacity, Run, StepPlan, TokenSource};
use crate::model::cache::BLOCK_TOKENS;
use crate::model::slots::Slots;

/// The first thing about a plan that would reach outside a table.
pub(super) fn check(plan: &StepPlan, capacity: &Capacity, slots: &Slots) -> Result<(), String> {
    let n_rows: usize = plan.batch.runs.iter().map(|run| run.n_rows).sum();
    if n_rows > capacity.max_rows {
        return Err(format!("a step of {n_rows} rows; at most {}", capacity.max_rows));
    }
    let mut is_taken = vec![false; capacity.n_slots];
    for run in &plan.batch.runs {
        check_run(run, &plan.batch, capacity)?;
        if std::mem::replace(&mut is_taken[run.slot.index()], true) {
            return Err(format!("slot {} stands twice in a step", run.slot));
        }
        if run.tokens == TokenSource::Slot && slots.n_drafts(run.slot) + 1 < run.n_rows {
            return Err(format!("slot {} has fewer drafts than its run has rows", run.slot));
        }
    }
    let named_slots = plan.binds.iter().map(|b| b.0).chain(plan.restores.iter().map(|r| r.1));
    for slot in named_slots.chain(plan.saves.iter().map(|s| s.slot)) {
        in_range("slot", slot.index(), capacity.n_slots)?;
    }
    for checkpoint in plan.restores.iter().map(|r| r.0).chain(plan.saves.iter().map(|s| s.checkpoint)) {
        in_range("checkpoint", checkpoint.index(), capacity.n_checkpoints)?;
    }
    for block in plan.copies.iter().flat_map(|c| [c.0, c.1]) {
        in_range("block", block.index(), capacity.n_blocks)?;
    }
    let rows = plan.samples.iter().map(|s| (s.run_idx, s.row)).chain(plan.scores.iter().map(|s| (s.run_idx, s.row)));
    for (run_idx, row) in rows {
        if !plan.batch.runs.get(run_idx).is_some_and(|run| run.logit_rows.contains(&row)) {
            return Err(format!("row {row} of run {run_idx} is read but has no logits"));
        }
    }
    Ok(())
}

fn check_run(run: &Run, batch: &Batch, capacity: &Capacity) -> Result<(), String> {
    in_range("slot", run.slot.index(), capacity.n_slots)?;
    let end = run.first_pos + run.n_rows;
    if run.n_rows == 0 || end > capacity.max_tokens {
        return Err(format!("a run of {} rows up to position {end}; at most {}", run.n_rows, capacity.max_tokens));
    }
    let blocks = batch.block_ids.get(run.blocks.clone()).ok_or("a block table outside block_ids")?;
    if blocks.len() < end.div_ceil(BLOCK_TOKENS) {
        return Err(format!("a block table of {} for {end} tokens", blocks.len()));
    }
    blocks.iter().try_for_each(|block| in_range("block", block.index(), capacity.n_blocks))?;
    if run.logit_rows.start > run.logit_rows.end || run.logit_rows.end > run.n_rows {
        return Err(format!("logits of rows {:?} in a run of {}", run.logit_rows, run.n_rows));
    }
    match run.tokens {
        TokenSource::Host { start } if start + run.n_rows > batch.token_ids.len() => {
            Err(format!("ids {start}..{} of {}", start + run.n_rows, batch.token_ids.len()))
        }
        _ => Ok(()),
    }
}

fn in_range(what: &str, idx: usize, n: usize) -> Result<(), String> {
    if idx < n { Ok(()) } else { Err(format!("{what} {idx} of {n}")) }
}
