//! The router: which experts a token takes and with what weights.
//!
//! score = sqrt(softplus(logit)). The experts come from a table by token id, or are the top k of score + bias, ties to the lowest
//! index. Their weights are the scores without the bias, divided by their sum, times `scale`.

use crate::device::cpu::math::softplus_f32;
use crate::ids::TokenId;

pub mod device;
pub mod dispatch;
pub mod few;

/// How experts are chosen.
#[derive(Clone, Copy, Debug)]
pub enum RouteChoice<'a> {
    /// By the table: the row of each token.
    Table {
        /// Experts by token id.
        tid2eid: &'a [u16], // [V, K] u16
        /// The tokens, each below V.
        token_ids: &'a [TokenId], // [T]
    },
    /// By score.
    Score {
        /// Added for the choice alone.
        bias: &'a [f32], // [E] f32
    },
}

/// What goes in.
#[derive(Clone, Copy, Debug)]
pub struct RouteParams<'a> {
    /// Experts (E).
    pub n_experts: usize,
    /// Experts a token takes (K).
    pub top_k: usize,
    /// Factor on the weights.
    pub scale: f32,
    /// gate · y.
    pub logits: &'a [f32], // [T, E] f32
    /// How to choose.
    pub choice: RouteChoice<'a>,
}

/// The contract in scalar code with f64 sums. Every index is below E, whatever the logits are.
pub fn reference(
    p: &RouteParams<'_>,
    experts: &mut [u16], /* [T, K] u16 */
    weights: &mut [f32], /* [T, K] f32 */
) {
    let rows = p.logits.chunks(p.n_experts).zip(experts.chunks_mut(p.top_k)).zip(weights.chunks_mut(p.top_k));
    for (t, ((logits, experts), weights)) in rows.enumerate() {
        let scores: Vec<f64> = logits
            .iter()
            .map(|&x| {
                let x = f64::from(x);
                (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt()
            })
            .collect();
        match p.choice {
            RouteChoice::Table { tid2eid, token_ids } => {
                experts.copy_from_slice(&tid2eid[token_ids[t].index() * p.top_k..][..p.top_k]);
            }
            RouteChoice::Score { bias } => {
                let biased: Vec<f64> = scores.iter().zip(bias).map(|(s, b)| s + f64::from(*b)).collect();
                let mut order: Vec<u16> = (0..p.n_experts as u16).collect();
                order.sort_by(|&a, &b| biased[usize::from(b)].total_cmp(&biased[usize::from(a)]).then(a.cmp(&b)));
                experts.copy_from_slice(&order[..p.top_k]);
            }
        }
        let sum: f64 = experts.iter().map(|&e| scores[usize::from(e)]).sum();
        for (weight, &expert) in weights.iter_mut().zip(experts.iter()) {
            *weight = (scores[usize::from(expert)] / sum * f64::from(p.scale)) as f32;
        }
    }
}

/// The CPU path.
pub fn run(p: &RouteParams<'_>, experts: &mut [u16] /* [T, K] u16 */, weights: &mut [f32] /* [T, K] f32 */) {
    let mut scores = vec![0f32; p.n_experts];
    let rows = p.logits.chunks_exact(p.n_experts).zip(experts.chunks_exact_mut(p.top_k));
    for (t, ((logits, experts), weights)) in rows.zip(weights.chunks_exact_mut(p.top_k)).enumerate() {
        for (score, &x) in scores.iter_mut().zip(logits) {
            *score = softplus_f32(x).sqrt();
        }
        match p.choice {
            RouteChoice::Table { tid2eid, token_ids } => {
                experts.copy_from_slice(&tid2eid[token_ids[t].index() * p.top_k..][..p.top_k]);
            }
            RouteChoice::Score { bias } => choose(&scores, bias, experts),
        }
        let sum: f32 = experts.iter().map(|&e| scores[usize::from(e)]).sum();
        for (weight, &expert) in weights.iter_mut().zip(experts.iter()) {
            *weight = scores[usize::from(expert)] / sum * p.scale;
        }
    }
}

/// The top experts in descending order of score + bias. A NaN is never greater, so it is taken last.
fn choose(scores: &[f32], bias: &[f32], experts: &mut [u16]) {
    for k in 0..experts.len() {
        let (chosen, rest) = experts.split_at_mut(k);
        let mut best: Option<(usize, f32)> = None;
        for (e, (score, bias)) in scores.iter().zip(bias).enumerate() {
            let value = score + bias;
            let is_better = best.is_none_or(|(_, top)| value > top || (top.is_nan() && !value.is_nan()));
            if is_better && !chosen.contains(&(e as u16)) {
                best = Some((e, value));
            }
        }
        rest[0] = best.map_or(0, |(e, _)| e as u16);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both(p: &RouteParams<'_>, n: usize) -> (Vec<u16>, Vec<f32>) {
        let (mut experts, mut weights) = (vec![u16::MAX; n * p.top_k], vec![f32::NAN; n * p.top_k]);
        let (mut want_experts, mut want_weights) = (experts.clone(), weights.clone());
        run(p, &mut experts, &mut weights);
        reference(p, &mut want_experts, &mut want_weights);
        assert_eq!(experts, want_experts);
        for (got, want) in weights.iter().zip(&want_weights) {
            // A handful of roundings of f32.
            assert!((got - want).abs() <= want * 1e-6, "{got} {want}");
        }
        (experts, weights)
    }

    #[test]
    fn ties_go_to_the_lowest_index_and_weights_carry_no_bias() {
        let logits = [1.0, 2.0, 2.0, -30.0, 2.0, 0.5, 0.5, 40.0];
        let bias = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -100.0];
        let p = RouteParams {
            n_experts: 8,
            top_k: 4,
            scale: 1.5,
            logits: &logits,
            choice: RouteChoice::Score { bias: &bias },
        };
        let (experts, weights) = both(&p, 1);
        assert_eq!(experts, [1, 2, 4, 0]);
        assert!((weights.iter().sum::<f32>() - 1.5).abs() < 1e-6);
        let bias = [0.0, 0.0, 0.0, 100.0, 0.0, 0.0, 0.0, -100.0];
        let (experts, weights) = both(&RouteParams { choice: RouteChoice::Score { bias: &bias }, ..p }, 1);
        assert_eq!(experts[0], 3);
        assert!(weights[0] < 1e-5);
    }

    #[test]
    fn the_table_decides_in_hash_layers() {
        let logits = [1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0];
        let tid2eid = [3, 0, 2, 1, 1, 2];
        let choice = RouteChoice::Table { tid2eid: &tid2eid, token_ids: &[TokenId(2), TokenId(0)] };
        let p = RouteParams { n_experts: 4, top_k: 2, scale: 1.0, logits: &logits, choice };
        assert_eq!(both(&p, 2).0, [1, 2, 3, 0]);
    }

    #[test]
    fn numbers_that_are_not_still_give_experts_that_exist() {
        let logits = [f32::NAN, f32::NAN, 1.0, f32::NAN];
        let p = RouteParams {
            n_experts: 4,
            top_k: 3,
            scale: 1.0,
            logits: &logits,
            choice: RouteChoice::Score { bias: &[0.0; 4] },
        };
        let (mut experts, mut weights) = ([9; 3], [0.0; 3]);
        run(&p, &mut experts, &mut weights);
        assert_eq!(experts, [2, 0, 1]);
    }
}
