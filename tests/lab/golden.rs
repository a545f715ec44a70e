//! A fixture's golden logits, and the limits an implementation must keep.

use flashd::ids::TokenId;
use flashd::model::forward::Rounding;
use safetensors::SafeTensors;

use super::{Model, fixture};

/// A fixture: its model and the numbers to meet.
pub struct Golden {
    pub name: &'static str,
    pub model: Model,
    pub tokens: Vec<TokenId>,
    pub prefill_lens: Vec<usize>,
    pub decode_range: [usize; 2],
    bytes: Vec<u8>,
}

/// Limits of one mode: the largest difference of a position's logits, in the median and at a share of the positions.
struct Limits {
    median: f32,
    share: f32,
    within: f32,
    /// Prompts up to this length have nothing to flip and agree this closely.
    short_len: usize,
    short: f32,
}

impl Golden {
    pub fn load(name: &'static str) -> Self {
        let seed = match name {
            "small" => 11,
            "odd" => 23,
            _ => panic!("no fixture {name}"),
        };
        let model = Model::synthetic(name, seed);
        let bytes = std::fs::read(fixture(name, "golden.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let ints = |name: &str| -> Vec<usize> {
            let view = file.tensor(name).unwrap();
            view.data().chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()) as usize).collect()
        };
        let tokens = ints("tokens").into_iter().map(|id| TokenId(id as u32)).collect();
        let (prefill_lens, range) = (ints("prefill_lens"), ints("decode_range"));
        Self { name, model, tokens, prefill_lens, decode_range: [range[0], range[1]], bytes }
    }

    /// A tensor's values.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(name).unwrap();
        view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn limits(&self, rounding: Rounding) -> Limits {
        let top_k = self.model.shape.index_topk;
        match rounding {
            Rounding::Exact => Limits { median: 1e-4, share: 0.99, within: 1e-3, short_len: 4 * top_k, short: 2e-5 },
            Rounding::Kvq => Limits { median: 1e-2, share: 0.99, within: 0.1, short_len: 9, short: 2e-5 },
            Rounding::Official => Limits { median: 0.4, share: 0.85, within: 0.8, short_len: 9, short: 5e-6 },
        }
    }
}

pub fn mode(rounding: Rounding) -> &'static str {
    match rounding {
        Rounding::Exact => "exact",
        Rounding::Kvq => "kvq",
        Rounding::Official => "official",
    }
}

/// The last token's logits of a prompt of every recorded length.
pub fn check_prefill(golden: &Golden, rounding: Rounding) {
    let want = golden.floats(&format!("prefill_logits_{}", mode(rounding)));
    let (mut lab, limits) = (golden.model.lab(rounding), golden.limits(rounding));
    let mut errors = Vec::new();
    for (&n, want) in golden.prefill_lens.iter().zip(want.chunks_exact(golden.model.shape.vocab_size)) {
        let mut sequence = lab.start(0, n);
        let error = max_error(&lab.prefill(&mut sequence, &golden.tokens[..n], n), want);
        if n <= limits.short_len {
            assert!(error <= limits.short, "{} {} prompt of {n}: {error}", golden.name, mode(rounding));
        }
        errors.push(error);
    }
    check_errors(golden, rounding, "prefill", errors);
}

/// The logits after every token of the recorded range, fed one at a time after a prompt.
pub fn check_decode(golden: &Golden, rounding: Rounding) {
    let want = golden.floats(&format!("decode_logits_{}", mode(rounding)));
    let [first, end] = golden.decode_range;
    let mut lab = golden.model.lab(rounding);
    let mut sequence = lab.start(0, end);
    let mut logits = lab.prefill(&mut sequence, &golden.tokens[..first], first);
    let mut errors = Vec::new();
    for (i, want) in want.chunks_exact(golden.model.shape.vocab_size).enumerate() {
        if i > 0 {
            logits = lab.decode(&mut sequence, golden.tokens[first + i - 1]);
        }
        errors.push(max_error(&logits, want));
    }
    assert_eq!(errors.len(), end - first + 1);
    check_errors(golden, rounding, "decode", errors);
}

fn check_errors(golden: &Golden, rounding: Rounding, what: &str, mut errors: Vec<f32>) {
    let limits = golden.limits(rounding);
    errors.sort_by(f32::total_cmp);
    let median = errors[errors.len() / 2];
    let n_within = errors.iter().filter(|e| **e <= limits.within).count();
    let worst = errors[errors.len() - 1];
    let share = n_within as f32 / errors.len() as f32;
    println!(
        "{} {} {what}: median {median:.2e}, {:.1} % within {}, worst {worst:.2e}",
        golden.name,
        mode(rounding),
        share * 100.0,
        limits.within
    );
    assert!(median <= limits.median, "median {median}");
    assert!(share >= limits.share, "{n_within} of {} positions within {}", errors.len(), limits.within);
}

/// The largest absolute difference; NaN counts as infinite.
pub fn max_error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, |m, e| if e <= m { m } else { e })
}
