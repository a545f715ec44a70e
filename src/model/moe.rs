//! The experts of a layer: router, routed experts over the rows that chose them, shared expert, sum in a fixed order.

use crate::model::forward::{Step, fit};
use crate::model::weights::{ExpertWeights, MoeWeights};
use crate::ops::expert_linear::N_LIKE_IT;
use crate::ops::linear::LinearParams;
use crate::ops::route::{self, RouteChoice, RouteParams};
use crate::ops::swiglu::{SwigluParams, swiglu};

/// Rows that a thread adds up at a time.
const ROW_TILE: usize = 8;

/// Rows are in order of expert: first those of expert 0, and so on, then one of each token for the shared expert.
#[derive(Debug, Default)]
pub(super) struct MoeScratch {
    logits: Vec<f32>,      // [T, E] f32
    experts: Vec<u16>,     // [T, K]
    weights: Vec<f32>,     // [T, K] f32
    row_of: Vec<usize>,    // [T, K]: where the row of a token's k-th expert is
    n_rows_of: Vec<usize>, // [E]
    row_weights: Vec<f32>, // [T * K + T] f32
    rounded: Vec<f32>,     // [T, D] f32
    inputs: Vec<f32>,      // [T * K + T, D] f32
    gates: Vec<f32>,       // [T * K + T, F] f32
    ups: Vec<f32>,         // [T * K + T, F] f32
    hidden: Vec<f32>,      // [T * K + T, F] f32
    hidden_input: Vec<f32>,
    outputs: Vec<f32>, // [T * K + T, D] f32
}

/// Computes the layer's experts for every row.
pub(super) fn run(
    step: &Step<'_>,
    w: &MoeWeights,
    y: &[f32], // [T, D] f32
    s: &mut MoeScratch,
    out: &mut [f32], // [T, D] f32
) {
    choose(step, w, y, s);
    group(step, y, s);
    let (n_cols, width) = (step.shape.hidden_size, step.shape.moe_intermediate_size);
    let n_rows = s.row_of.len() + step.n_rows();
    let inputs = &s.inputs[..n_rows * n_cols];
    let (gates, ups) = (fit(&mut s.gates, n_rows * width), fit(&mut s.ups, n_rows * width));
    let mut products = expert_products(w, &s.n_rows_of, step.n_rows(), |e| &e.w1, inputs, gates);
    products.extend(expert_products(w, &s.n_rows_of, step.n_rows(), |e| &e.w3, inputs, ups));
    step.products(products);
    let hidden = fit(&mut s.hidden, n_rows * width);
    let (limit, weights) = (step.shape.swiglu_limit, Some(&s.row_weights[..n_rows]));
    swiglu(step.cpu, SwigluParams { gate: gates, up: ups, limit, weights, n_cols: width, out: hidden });
    let hidden = step.product_input(hidden, width, &mut s.hidden_input);
    let outputs = fit(&mut s.outputs, n_rows * n_cols);
    step.products(expert_products(w, &s.n_rows_of, step.n_rows(), |e| &e.w2, hidden, outputs));
    combine(step, s, out);
}

/// The router's choice for every token.
fn choose(step: &Step<'_>, w: &MoeWeights, y: &[f32], s: &mut MoeScratch) {
    let (n_tokens, n_experts, top_k) = (step.n_rows(), w.experts.len(), step.shape.num_experts_per_tok);
    let logits = fit(&mut s.logits, n_tokens * n_experts);
    step.products(vec![LinearParams::dense(y, &w.gate, n_tokens, logits)]);
    let choice = match (&w.tid2eid, &w.bias) {
        (Some(tid2eid), _) => RouteChoice::Table { tid2eid, token_ids: &step.token_ids },
        (None, bias) => RouteChoice::Score { bias: bias.as_deref().unwrap_or(&[]) },
    };
    let params = RouteParams { n_experts, top_k, scale: step.shape.routed_scaling_factor, logits, choice };
    route::run(&params, fit(&mut s.experts, n_tokens * top_k), fit(&mut s.weights, n_tokens * top_k));
}

/// Gathers the inputs by expert.
fn group(step: &Step<'_>, y: &[f32], s: &mut MoeScratch) {
    let (n_tokens, n_cols) = (step.n_rows(), step.shape.hidden_size);
    let (top_k, n_experts) = (step.shape.num_experts_per_tok, step.shape.n_routed_experts);
    let n_routed = n_tokens * top_k;
    let experts = &s.experts[..n_routed];
    s.n_rows_of.clear();
    s.n_rows_of.resize(n_experts, 0);
    experts.iter().for_each(|&e| s.n_rows_of[usize::from(e)] += 1);
    let mut next: Vec<usize> = Vec::with_capacity(n_experts);
    s.n_rows_of.iter().fold(0, |start, n| {
        next.push(start);
        start + n
    });
    let x = step.product_input(y, n_cols, &mut s.rounded);
    let inputs = fit(&mut s.inputs, (n_routed + n_tokens) * n_cols);
    let row_weights = fit(&mut s.row_weights, n_routed + n_tokens);
    s.row_of.clear();
    for (i, &expert) in experts.iter().enumerate() {
        let row = next[usize::from(expert)];
        next[usize::from(expert)] += 1;
        s.row_of.push(row);
        row_weights[row] = s.weights[i];
        inputs[row * n_cols..(row + 1) * n_cols].copy_from_slice(&x[i / top_k * n_cols..][..n_cols]);
    }
    row_weights[n_routed..].fill(1.0);
    inputs[n_routed * n_cols..].copy_from_slice(x);
}

/// One product for each expert that has rows, and one for the shared expert.
fn expert_products<'a>(
    w: &'a MoeWeights,
    n_rows_of: &[usize],
    n_tokens: usize,
    matrix: impl Fn(&'a ExpertWeights) -> &'a crate::tensor::matrix::Matrix,
    mut x: &'a [f32],     // [rows, K] f32
    mut y: &'a mut [f32], // [rows, N] f32
) -> Vec<LinearParams<'a>> {
    let mut products = Vec::new();
    let routed = w.experts.iter().zip(n_rows_of).map(|(expert, n_rows)| (expert, *n_rows, N_LIKE_IT));
    let experts = routed.chain([(&w.shared, n_tokens, 1)]);
    for (expert, n_rows, n_alike) in experts.filter(|(_, n_rows, _)| *n_rows > 0) {
        let weight = matrix(expert);
        let (own_x, rest_x) = x.split_at(n_rows * weight.n_cols);
        let (own_y, rest_y) = std::mem::take(&mut y).split_at_mut(n_rows * weight.n_rows);
        (x, y) = (rest_x, rest_y);
        products.push(LinearParams { n_alike, ..LinearParams::dense(own_x, weight, n_rows, own_y) });
    }
    products
}

/// Adds up each token's outputs: its experts in the order of its choice, then the shared one.
fn combine(step: &Step<'_>, s: &MoeScratch, out: &mut [f32]) {
    let (n_cols, top_k) = (step.shape.hidden_size, step.shape.num_experts_per_tok);
    let (outputs, n_routed) = (&s.outputs, s.row_of.len());
    step.cpu.par_chunks(out, n_cols, ROW_TILE, |t, out| {
        out.fill(0.0);
        let own = s.row_of[t * top_k..(t + 1) * top_k].iter().copied().chain([n_routed + t]);
        for row in own {
            for (sum, value) in out.iter_mut().zip(&outputs[row * n_cols..(row + 1) * n_cols]) {
                *sum += value;
            }
        }
    });
}
