//! The experts of a layer on a device: router, routed experts over the rows that chose them, shared expert, sum.

use crate::device::DeviceError;
use crate::model::device::forward::{Ended, Pass};
use crate::model::device::weights::{DeviceExperts, DeviceMoe};
use crate::ops::combine::{self, CombineArgs};
use crate::ops::expert_linear::{self, ExpertLinearArgs, takes_beside};
use crate::ops::route::device::{self as route, RouteArgs};
use crate::ops::route::dispatch::{self, DispatchArgs};
use crate::ops::route::few::{self, RouteFewArgs};
use crate::ops::swiglu::device::{self as swiglu, SwigluArgs};

/// Rows up to which the next sublayer's start adds up the experts: its blocks do it four times over, and one row after the other.
const MAX_ROWS_ADDED_LATER: u32 = 16;

/// Computes the layer's experts for every row.
///
/// # Errors
/// When the device is lost.
pub(super) fn run(pass: &Pass<'_>, w: &DeviceMoe) -> Result<Ended, DeviceError> {
    let (at, y) = (&pass.at.moe, pass.at.y);
    let shared = &w.shared;
    pass.products(&[
        w.gate.product(y, at.logits),
        shared.w1.product(y, at.shared_gate),
        shared.w3.product(y, at.shared_up),
    ])?;
    let args = RouteFewArgs { route: routing(pass, w), dispatch: sorting(pass), shared: activation(pass) };
    if pass.n_rows() <= few::MAX_ROWS {
        few::launch(pass.device, &args, pass.n_rows())?;
    } else {
        route::launch(pass.device, &args.route, pass.n_rows())?;
        dispatch::launch(pass.device, &args.dispatch)?;
        swiglu::launch(pass.device, &args.shared, pass.n_rows())?;
    }
    routed(pass, w)?;
    if pass.n_rows() <= MAX_ROWS_ADDED_LATER {
        return Ok(Ended::Experts);
    }
    combine(pass)?;
    Ok(Ended::Output)
}

/// The router's choice for every token.
fn routing(pass: &Pass<'_>, w: &DeviceMoe) -> RouteArgs {
    let at = &pass.at.moe;
    RouteArgs {
        step: pass.staged.step,
        logits: at.logits,
        bias: w.bias,
        tid2eid: w.tid2eid,
        ids: pass.at.ids,
        experts: at.experts,
        weights: at.weights,
        n_experts: pass.dims.n_experts,
        top_k: pass.dims.top_k,
        scale: pass.shape.routed_scaling_factor,
        pad: 0,
    }
}

/// Rows by expert, and the work items of the grouped products.
fn sorting(pass: &Pass<'_>) -> DispatchArgs {
    let at = &pass.at.moe;
    DispatchArgs {
        step: pass.staged.step,
        experts: at.experts,
        weights: at.weights,
        row_of: at.row_of,
        row_token: at.row_token,
        row_weight: at.row_weight,
        expert_first: at.expert_first,
        items: at.items,
        n_items: at.n_items,
        n_experts: pass.dims.n_experts,
        top_k: pass.dims.top_k,
        rows_per_item: rows_per_item(pass),
        pad: 0,
    }
}

/// w2 (silu(w1 x) * w3 x) of every row and chosen expert, and the shared expert's w2, in the same launch while rows are few.
fn routed(pass: &Pass<'_>, w: &DeviceMoe) -> Result<(), DeviceError> {
    let at = &pass.at.moe;
    let up = product(pass, &w.w13, pass.at.y, at.hidden);
    let up = ExpertLinearArgs { row_token: at.row_token, n_matrices: 2, ..up };
    let down = product(pass, &w.w2, at.hidden, at.routed);
    let shared = w.shared.w2.product(at.shared_hidden, at.shared);
    let max_items = dispatch::max_items(pass.n_rows(), pass.dims.n_experts, pass.dims.top_k, up.rows_per_item);
    let beside = Some(&shared).filter(|shared| takes_beside(shared, pass.n_rows(), down.rows_per_item));
    expert_linear::launch(pass.device, &up, max_items, None)?;
    expert_linear::launch(pass.device, &down, max_items, beside)?;
    if beside.is_none() {
        pass.products(&[shared])?;
    }
    Ok(())
}

/// A product of all chosen experts, of rows that follow one another.
fn product(
    pass: &Pass<'_>,
    w: &DeviceExperts,
    x: u64, // [*, K] bf16
    y: u64, // [T*K, N] f32, or bf16 of two matrices
) -> ExpertLinearArgs {
    let at = &pass.at.moe;
    ExpertLinearArgs {
        step: pass.staged.step,
        codes: w.codes,
        scales: w.scales,
        code_stride_bytes: w.code_stride_bytes,
        scale_stride_bytes: w.scale_stride_bytes,
        x,
        y,
        row_weight: at.row_weight,
        row_token: 0,
        items: at.items,
        n_items: at.n_items,
        expert_first: at.expert_first,
        n_rows: w.shape.n_rows,
        n_cols: w.shape.n_cols,
        n_matrices: 1,
        rows_per_item: rows_per_item(pass),
        limit: pass.shape.swiglu_limit,
        ..ExpertLinearArgs::default()
    }
}

/// Rows that a work item of the grouped products has at most; no result depends on it. About the rows that an expert gets.
fn rows_per_item(pass: &Pass<'_>) -> u32 {
    match pass.n_rows() * pass.dims.top_k / pass.dims.n_experts.max(1) {
        0..=8 => 8,
        9..=16 => 16,
        17..=32 => 32,
        _ => 64,
    }
}

/// The shared expert's gated product.
fn activation(pass: &Pass<'_>) -> SwigluArgs {
    let at = &pass.at.moe;
    SwigluArgs {
        gate: at.shared_gate,
        up: at.shared_up,
        weight: 0,
        out: at.shared_hidden,
        n_rows: pass.staged.step.counts,
        multiplier: 1,
        n_cols: pass.dims.expert_width,
        limit: pass.shape.swiglu_limit,
        pad: 0,
    }
}

/// Each token's outputs: its experts in the order of its choice, then the shared one.
///
/// # Errors
/// When the device is lost.
pub(super) fn combine(pass: &Pass<'_>) -> Result<(), DeviceError> {
    let at = &pass.at.moe;
    let args = CombineArgs {
        step: pass.staged.step,
        routed: at.routed,
        row_of: at.row_of,
        shared: at.shared,
        out: pass.at.output,
        n_cols: pass.dims.d,
        top_k: pass.dims.top_k,
    };
    combine::launch(pass.device, &args, pass.n_rows())
}
