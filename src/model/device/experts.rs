//! The experts of a layer on a device: router, routed experts over the rows that chose them, shared expert, sum.

use crate::device::DeviceError;
use crate::model::device::forward::Pass;
use crate::model::device::weights::{DeviceExperts, DeviceMoe};
use crate::ops::combine::{self, CombineArgs};
use crate::ops::expert_linear::{self, ExpertLinearArgs};
use crate::ops::route::device::{self as route, RouteArgs};
use crate::ops::route::dispatch::{self, DispatchArgs};
use crate::ops::route::few::{self, RouteFewArgs};
use crate::ops::swiglu::device::{self as swiglu, SwigluArgs};

/// Input and outputs of a product of all chosen experts.
struct ExpertProduct {
    x: u64, // [*, K] bf16
    /// The token that each row reads; 0: row r reads x's row r.
    row_token: u64, // [T*K] u32
    y: u64, // [T*K, N] f32
    y2: u64, // [T*K, N] f32, of the second matrix; 0: there is one
}

/// Computes the layer's experts for every row.
///
/// # Errors
/// When the device is lost.
pub(super) fn run(pass: &Pass<'_>, w: &DeviceMoe) -> Result<(), DeviceError> {
    let (at, y) = (&pass.at.moe, pass.at.y);
    let shared = &w.shared;
    pass.products(&[
        w.gate.product(y, at.logits),
        shared.w1.product(y, at.shared_gate),
        shared.w3.product(y, at.shared_up),
    ])?;
    let args = RouteFewArgs {
        route: routing(pass, w),
        dispatch: sorting(pass),
        shared: activation(pass, at.shared_gate, at.shared_up, 0, at.shared_hidden, 1),
    };
    if pass.n_rows() <= few::MAX_ROWS {
        few::launch(pass.device, &args, pass.n_rows())?;
    } else {
        route::launch(pass.device, &args.route, pass.n_rows())?;
        dispatch::launch(pass.device, &args.dispatch)?;
        swiglu::launch(pass.device, &args.shared, pass.n_rows())?;
    }
    routed(pass, w)?;
    pass.products(&[shared.w2.product(at.shared_hidden, at.shared)])?;
    combine(pass)
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

/// w2 (silu(w1 x) * w3 x) of every row and chosen expert.
fn routed(pass: &Pass<'_>, w: &DeviceMoe) -> Result<(), DeviceError> {
    let at = &pass.at.moe;
    let up = ExpertProduct { x: pass.at.y, row_token: at.row_token, y: at.gate, y2: at.up };
    expert_product(pass, &w.w13, &up)?;
    let args = activation(pass, at.gate, at.up, at.row_weight, at.hidden, pass.dims.top_k);
    swiglu::launch(pass.device, &args, pass.n_rows() * pass.dims.top_k)?;
    expert_product(pass, &w.w2, &ExpertProduct { x: at.hidden, row_token: 0, y: at.routed, y2: 0 })
}

fn expert_product(pass: &Pass<'_>, w: &DeviceExperts, product: &ExpertProduct) -> Result<(), DeviceError> {
    let at = &pass.at.moe;
    let args = ExpertLinearArgs {
        step: pass.staged.step,
        codes: w.codes,
        scales: w.scales,
        code_stride_bytes: w.code_stride_bytes,
        scale_stride_bytes: w.scale_stride_bytes,
        x: product.x,
        y: product.y,
        y2: product.y2,
        row_token: product.row_token,
        items: at.items,
        n_items: at.n_items,
        expert_first: at.expert_first,
        n_rows: w.shape.n_rows,
        n_cols: w.shape.n_cols,
        n_matrices: if product.y2 == 0 { 1 } else { 2 },
        rows_per_item: rows_per_item(pass),
    };
    let max_items = dispatch::max_items(pass.n_rows(), pass.dims.n_experts, pass.dims.top_k, args.rows_per_item);
    expert_linear::launch(pass.device, &args, max_items)
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

/// The gated product of `multiplier` rows a token.
fn activation(
    pass: &Pass<'_>,
    gate: u64,   // [R, F] f32
    up: u64,     // [R, F] f32
    weight: u64, // [R] f32, or 0
    out: u64,    // [R, F] bf16
    multiplier: u32,
) -> SwigluArgs {
    SwigluArgs {
        gate,
        up,
        weight,
        out,
        n_rows: pass.staged.step.counts,
        multiplier,
        n_cols: pass.dims.expert_width,
        limit: pass.shape.swiglu_limit,
        pad: 0,
    }
}

/// Each token's outputs: its experts in the order of its choice, then the shared one.
fn combine(pass: &Pass<'_>) -> Result<(), DeviceError> {
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
