//! Synthetic weights: every element is a formula of seed, tensor name and index, the same in any language.
//!
//! A 64-bit mix of (name hash, seed, index) gives each element; the sum of its four 16-bit fields is nearly normal and scales
//! exactly to every stored format. Gains keep activations near 1 through any depth, and scales vary block by block.

use super::spec::{Dtype, TensorSpec};
pub use super::synth_files::{SynthError, SynthPlan, Written, write};
use crate::tensor::format::{exp2i, f32_to_bf16, f32_to_e2m1, f32_to_f8e4m3fn};

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
/// Sums of four 16-bit fields run from 0 to this.
const MAX_SUM: usize = 4 * 0xFFFF;

/// Fills tensors of one checkpoint.
pub struct Generator {
    seed: u64,
    /// Routed experts of a layer: the modulus of hash tables.
    n_experts: usize,
    fp8_by_sum: Vec<u8>,  // [MAX_SUM + 1] f8e4m3fn
    e2m1_by_sum: Vec<u8>, // [MAX_SUM + 1] e2m1
}

/// How the stored elements of one tensor follow from their noise; z is nearly normal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// z * gain + offset, as BF16.
    Bf16 {
        /// Factor.
        gain: f32,
        /// What is added.
        offset: f32,
    },
    /// z * gain, as F32.
    F32 {
        /// Factor.
        gain: f32,
    },
    /// 0.5 + 16 bits / 2^18, as F32.
    HyperScale,
    /// z * 32.
    Fp8,
    /// z * 2, two a byte.
    Mxfp4,
    /// `first` and the two bytes after it.
    Scale {
        /// The least of them.
        first: u8,
    },
    /// Distinct experts for each token.
    ExpertTable {
        /// Experts of a token.
        n_cols: usize,
    },
}

impl Generator {
    /// A generator for a model with `n_experts` routed experts a layer.
    #[must_use]
    pub fn new(seed: u64, n_experts: usize) -> Self {
        Self {
            seed,
            n_experts,
            fp8_by_sum: (0..=MAX_SUM).map(|sum| f32_to_f8e4m3fn(scaled(sum) * 32.0)).collect(),
            e2m1_by_sum: (0..=MAX_SUM).map(|sum| f32_to_e2m1(scaled(sum) * 2.0)).collect(),
        }
    }

    /// Whether the formula can fill this tensor.
    ///
    /// # Errors
    /// It has no rule for this name, or a token of a hash table would get one expert twice.
    pub fn check(&self, spec: &TensorSpec) -> Result<(), SynthError> {
        match rule(spec)? {
            Rule::ExpertTable { n_cols } => check_experts(self.n_experts, n_cols),
            _ => Ok(()),
        }
    }

    /// Writes the stored elements `first ..` of a tensor, as many whole ones as `out` holds.
    ///
    /// # Errors
    /// As [`Generator::check`].
    pub fn fill(&self, spec: &TensorSpec, first: usize, out: &mut [u8]) -> Result<(), SynthError> {
        self.check(spec)?;
        let noise = Noise::new(self.seed, &spec.name);
        let first = first as u64;
        let z = |i: u64| scaled(noise.sum(i));
        match rule(spec)? {
            Rule::Bf16 { gain, offset } => each(out, first, |i| f32_to_bf16(z(i) * gain + offset).to_le_bytes()),
            Rule::F32 { gain } => each(out, first, |i| (z(i) * gain).to_le_bytes()),
            Rule::HyperScale => each(out, first, |i| hyper_scale(noise.bits(i)).to_le_bytes()),
            Rule::Fp8 => each(out, first, |i| [self.fp8_by_sum[noise.sum(i)]]),
            Rule::Mxfp4 => each(out, first, |i| {
                let [low, high] = [2 * i, 2 * i + 1].map(|column| self.e2m1_by_sum[noise.sum(column)]);
                [low | high << 4]
            }),
            Rule::Scale { first: base } => each(out, first, |i| [base + (noise.bits(i) % 3) as u8]),
            Rule::ExpertTable { n_cols } => self.fill_expert_table(&spec.name, n_cols as u64, first, out),
        }
        Ok(())
    }

    fn fill_expert_table(&self, name: &str, n_cols: u64, first: u64, out: &mut [u8]) {
        let starts = Noise::new(self.seed, name);
        let steps = Noise::new(self.seed, &format!("{name}#step"));
        let n_experts = self.n_experts as u64;
        each(out, first, |i| {
            let (token, column) = (i / n_cols, i % n_cols);
            let (start, step) = (starts.bits(token) % n_experts, (steps.bits(token) % n_experts) | 1);
            ((start + column * step) % n_experts).to_le_bytes()
        });
    }
}

/// The noise of one tensor.
struct Noise {
    base: u64,
}

impl Noise {
    fn new(seed: u64, name: &str) -> Self {
        Self { base: noise_base(seed, name) }
    }

    /// 64 bits for element i.
    fn bits(&self, i: u64) -> u64 {
        mix(self.base.wrapping_add(i))
    }

    fn sum(&self, i: u64) -> usize {
        noise_sum(self.base, i)
    }
}

fn each<const N: usize>(out: &mut [u8], first: u64, element: impl Fn(u64) -> [u8; N]) {
    for (i, place) in (first..).zip(out.as_chunks_mut().0) {
        *place = element(i);
    }
}

/// The sum of the four 16-bit fields of an element's noise.
#[must_use]
pub fn noise_sum(base: u64, i: u64) -> usize {
    let bits = mix(base.wrapping_add(i));
    ((bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48)) as usize
}

/// Such a sum as a nearly normal number z, exact in f32.
#[must_use]
pub fn scaled(sum: usize) -> f32 {
    (sum as i32 - MAX_SUM as i32 / 2) as f32 * (1.75 / 65536.0)
}

fn hyper_scale(bits: u64) -> f32 {
    0.5 + (bits & 0xFFFF) as f32 / 262_144.0
}

/// What is added to an element's index before it is mixed.
#[must_use]
pub fn noise_base(seed: u64, name: &str) -> u64 {
    fnv1a64(name) ^ seed.wrapping_mul(GOLDEN)
}

/// Steps through the experts are odd, so columns differ while they are no more than the largest power of two that divides the
/// number of experts.
fn check_experts(n_experts: usize, n_cols: usize) -> Result<(), SynthError> {
    let most_cols = n_experts & n_experts.wrapping_neg();
    if n_cols <= most_cols { Ok(()) } else { Err(SynthError::Experts { n_experts, n_cols }) }
}

fn fnv1a64(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// The output function of SplitMix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(GOLDEN);
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

/// The exponent of a matrix's gain: minus the least k with 4^k >= n.
fn lg(n_cols: usize) -> i32 {
    let bits = n_cols.next_power_of_two().trailing_zeros() as i32;
    -(bits + 1) / 2
}

/// The rule of a tensor, by its name, element type and columns.
///
/// # Errors
/// The formula has none for this name.
pub fn rule(spec: &TensorSpec) -> Result<Rule, SynthError> {
    let n_cols = spec.shape.last().copied().unwrap_or(1);
    let rule = match spec.dtype {
        Dtype::BF16 => bf16_rule(&spec.name, n_cols),
        Dtype::F32 => f32_rule(&spec.name, n_cols),
        Dtype::F8_E4M3 => Some(Rule::Fp8),
        Dtype::I8 => Some(Rule::Mxfp4),
        Dtype::F8_E8M0 => Some(scale_rule(&spec.name, n_cols)),
        Dtype::I64 => Some(Rule::ExpertTable { n_cols }),
        _ => None,
    };
    rule.ok_or_else(|| SynthError::NoRule { tensor: spec.name.clone(), form: spec.form() })
}

fn bf16_rule(name: &str, n_cols: usize) -> Option<Rule> {
    const MATRICES: [&str; 6] = [
        "compressor.wkv.weight",
        "compressor.wgate.weight",
        "weights_proj.weight",
        "ffn.gate.weight",
        "markov_w2.weight",
        "confidence_head.proj.weight",
    ];
    if name.ends_with("norm.weight") {
        return Some(Rule::Bf16 { gain: 0.125, offset: 1.0 });
    }
    let gain = match name {
        "head.weight" => 2.0 * exp2i(lg(n_cols)),
        "embed.weight" => 1.0,
        _ if name.ends_with("markov_w1.weight") => 1.0,
        _ if MATRICES.iter().any(|matrix| name.ends_with(matrix)) => exp2i(lg(n_cols)),
        _ => return None,
    };
    Some(Rule::Bf16 { gain, offset: 0.0 })
}

fn f32_rule(name: &str, n_cols: usize) -> Option<Rule> {
    let gain = match name {
        _ if name.ends_with("_scale") => return Some(Rule::HyperScale),
        _ if name.ends_with("attn_sink") => 1.0,
        _ if name.ends_with(".ape") || name.ends_with("_base") => 0.5,
        _ if name.ends_with("gate.bias") => 0.125,
        _ if name.ends_with("_fn") => 0.5 * exp2i(lg(n_cols)),
        _ => return None,
    };
    Some(Rule::F32 { gain })
}

/// Codes are about 2^5 (FP8) or 2^1 (MXFP4) too large for a gain of 2^lg; the scale takes that back.
fn scale_rule(name: &str, n_cols: usize) -> Rule {
    let (n_inputs, code_exponent) = if name.contains(".experts.") { (n_cols * 32, 1) } else { (n_cols * 128, 5) };
    let damping = i32::from(name.ends_with(".wo_b.scale") || name.ends_with(".w2.scale"));
    Rule::Scale { first: (127 + lg(n_inputs) - code_exponent - damping - 1) as u8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gain_exponents() {
        for n in 1..5000 {
            let k = (0..).find(|&k| 4usize.pow(k) >= n).unwrap();
            assert_eq!(lg(n), -(k as i32), "{n}");
        }
    }

    #[test]
    fn known_answers_of_the_hashes() {
        // Published test vectors of FNV-1a and SplitMix64 (first output of seed 1234567).
        assert_eq!(fnv1a64(""), 0xCBF2_9CE4_8422_2325);
        assert_eq!(fnv1a64("foobar"), 0x8594_4171_F739_67E8);
        assert_eq!(mix(1_234_567), 6_457_827_717_110_365_317);
    }

    #[test]
    fn any_range_of_a_tensor_equals_the_same_part_of_the_whole() {
        let generator = Generator::new(7, 8);
        let spec =
            |name: &str, dtype, shape: &[usize]| TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() };
        for spec in [
            spec("layers.0.ffn.experts.1.w2.weight", Dtype::I8, &[6, 32]),
            spec("layers.0.ffn.experts.1.w2.scale", Dtype::F8_E8M0, &[6, 2]),
            spec("layers.0.ffn.gate.tid2eid", Dtype::I64, &[16, 3]),
            spec("norm.weight", Dtype::BF16, &[77]),
            spec("hc_head_scale", Dtype::F32, &[5]),
        ] {
            let mut whole = vec![0; spec.n_bytes()];
            generator.fill(&spec, 0, &mut whole).unwrap();
            for (first, n) in [(0, 1), (1, 3), (3, 2)] {
                let mut part = vec![0; n * spec.element_bytes()];
                generator.fill(&spec, first, &mut part).unwrap();
                let start = first * spec.element_bytes();
                assert_eq!(part, whole[start..start + part.len()], "{} from {first}", spec.name);
            }
        }
    }

    #[test]
    fn unknown_tensors_and_expert_counts_are_refused() {
        let spec = TensorSpec { name: "lm_head.bias".to_owned(), dtype: Dtype::BF16, shape: vec![4] };
        let error = Generator::new(1, 8).fill(&spec, 0, &mut [0; 8]).unwrap_err().to_string();
        assert!(error.contains("lm_head.bias") && error.contains("BF16 [4]"), "{error}");
    }

    #[test]
    fn a_token_gets_distinct_experts_or_the_number_is_refused() {
        let table = |n_cols| TensorSpec {
            name: "layers.0.ffn.gate.tid2eid".to_owned(),
            dtype: Dtype::I64,
            shape: vec![500, n_cols],
        };
        for (n_experts, n_cols) in [(8, 2), (192, 6), (192, 64), (24, 8), (1, 1)] {
            let spec = table(n_cols);
            let mut bytes = vec![0; spec.n_bytes()];
            Generator::new(3, n_experts).fill(&spec, 0, &mut bytes).unwrap();
            for row in bytes.chunks_exact(8 * n_cols) {
                let mut experts: Vec<u64> =
                    row.as_chunks().0.iter().map(|&expert| u64::from_le_bytes(expert)).collect();
                experts.sort_unstable();
                experts.dedup();
                assert!(experts.len() == n_cols && experts[n_cols - 1] < n_experts as u64, "{n_experts} {experts:?}");
            }
        }
        for (n_experts, n_cols) in [(6, 6), (200, 9), (193, 2), (0, 1)] {
            let error = Generator::new(3, n_experts).check(&table(n_cols)).unwrap_err().to_string();
            assert!(error.contains(&n_experts.to_string()) && error.contains("power of two"), "{error}");
        }
    }
}
