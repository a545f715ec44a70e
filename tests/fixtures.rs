//! Synthetic checkpoints against the golden logits of an independent reference, in every rounding mode.

mod lab;

use flashd::model::forward::Rounding;
use lab::golden::{Golden, check_decode, check_prefill};

#[test]
fn odd_exact() {
    let golden = Golden::load("odd");
    check_prefill(&golden, Rounding::Exact);
    check_decode(&golden, Rounding::Exact);
}
