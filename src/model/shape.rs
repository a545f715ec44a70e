//! The model's shape: every value of config.json that the forward pass uses, checked once.

use serde::Deserialize;

/// Values the kernels are written for; a config that says otherwise is refused.
pub const HEAD_DIM: usize = 512;
/// Rotated dimensions: the last ones of a head.
pub const ROPE_HEAD_DIM: usize = 64;
/// Dimensions of an indexer head.
pub const INDEX_HEAD_DIM: usize = 128;
/// Positions of the sliding window.
pub const SLIDING_WINDOW: usize = 128;
/// Copies of the residual in the hyper-connections.
pub const HC_MULT: usize = 4;

/// The official config.json: what a checkpoint of the published weights says of its shape.
pub const OFFICIAL_CONFIG: &str = include_str!("official_config.json");

const MODEL_TYPE: &str = "deepseek_v4";

/// config.json, checked. Fields keep the names of the file; what is not used is not read.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ModelShape {
    /// Always `deepseek_v4`.
    pub model_type: String,
    /// Entries of the vocabulary (V).
    pub vocab_size: usize,
    /// Width of the residual (D).
    pub hidden_size: usize,
    /// Layers of the trunk (L), without the draft stages.
    pub num_hidden_layers: usize,
    /// Attention heads (H).
    pub num_attention_heads: usize,
    /// Always 1: keys and values are one latent row.
    pub num_key_value_heads: usize,
    /// Dimensions of a head (DH), always 512.
    pub head_dim: usize,
    /// Rotated dimensions of a head (R), always 64, the last ones.
    pub qk_rope_head_dim: usize,
    /// Rank of the query projection (QR).
    pub q_lora_rank: usize,
    /// Rank of the output projection of one group (OR).
    pub o_lora_rank: usize,
    /// Groups of heads in the output projection (G).
    pub o_groups: usize,
    /// Width of an expert (F).
    pub moe_intermediate_size: usize,
    /// Routed experts of a layer (E).
    pub n_routed_experts: usize,
    /// Always 1.
    pub n_shared_experts: usize,
    /// Routed experts a token takes (K).
    pub num_experts_per_tok: usize,
    /// First layers whose experts come from a table by token id.
    pub num_hash_layers: usize,
    /// Always `sqrtsoftplus`.
    pub scoring_func: String,
    /// Always `noaux_tc`.
    pub topk_method: String,
    /// Always true: the weights of the chosen experts are divided by their sum.
    #[serde(default = "yes")]
    pub norm_topk_prob: bool,
    /// Factor on the routed experts' weights.
    pub routed_scaling_factor: f32,
    /// Clamp inside every expert: the gate from above, the up projection on both sides.
    pub swiglu_limit: f32,
    /// Always `silu`.
    #[serde(default = "silu")]
    pub hidden_act: String,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Positions of the sliding window (W), always 128.
    pub sliding_window: usize,
    /// 0 (window only), 4 or 128 for each layer, then one entry (0) for each draft stage.
    pub compress_ratios: Vec<usize>,
    /// Rotation base of layers with ratio 0 and of the draft stages.
    pub rope_theta: f64,
    /// Rotation base of layers with ratio 4 or 128.
    pub compress_rope_theta: f64,
    /// Longest sequence in tokens.
    pub max_position_embeddings: usize,
    /// YaRN of layers with ratio 4 or 128.
    pub rope_scaling: RopeScaling,
    /// Heads of the indexer (IH).
    pub index_n_heads: usize,
    /// Dimensions of an indexer head (ID), always 128.
    pub index_head_dim: usize,
    /// Compressed rows a query of a ratio-4 layer attends to at most.
    pub index_topk: usize,
    /// Copies of the residual (HC), always 4.
    pub hc_mult: usize,
    /// Row and column normalisations of the residual mixing matrix.
    pub hc_sinkhorn_iters: usize,
    /// Epsilon of the hyper-connections.
    pub hc_eps: f32,
    /// What the config says of next-token layers; the draft stages are counted from `compress_ratios` instead.
    #[serde(default)]
    pub num_nextn_predict_layers: usize,
    /// Tokens a draft stage was trained to draft at once.
    #[serde(default)]
    pub dspark_block_size: usize,
    /// Token that fills the places to be drafted.
    #[serde(default)]
    pub dspark_noise_token_id: u32,
    /// Rank of the Markov term of the draft head (MR).
    #[serde(default)]
    pub dspark_markov_rank: usize,
    /// Layers whose output feeds the draft stages, ascending.
    #[serde(default)]
    pub dspark_target_layer_ids: Vec<usize>,
    /// Token that begins a sequence.
    pub bos_token_id: u32,
    /// Token that ends one.
    pub eos_token_id: u32,
    /// Storage of the routed experts, always `fp4` (MXFP4).
    pub expert_dtype: String,
    /// Always false: the head has its own matrix.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Always false.
    #[serde(default)]
    pub attention_bias: bool,
    /// Storage of the dense weights.
    pub quantization_config: QuantizationConfig,
}

/// YaRN parameters.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct RopeScaling {
    /// Always `yarn`.
    #[serde(rename = "type", alias = "rope_type")]
    pub kind: String,
    /// How far positions are stretched.
    pub factor: f64,
    /// Rotations above which a frequency is kept.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Positions of the original training.
    pub original_max_position_embeddings: usize,
}

/// Storage of the dense weights: E4M3 with one E8M0 scale per 128 x 128 block.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct QuantizationConfig {
    /// Always `fp8`.
    pub quant_method: String,
    /// Always `e4m3`.
    pub fmt: String,
    /// Always `ue8m0`.
    pub scale_fmt: String,
    /// Always `[128, 128]`.
    pub weight_block_size: Vec<usize>,
}

/// Why a config.json was refused.
#[derive(Debug, thiserror::Error)]
pub enum ShapeError {
    /// Not JSON, or a field is missing or of the wrong type (the message names it).
    #[error("config.json: {0}")]
    Json(#[from] serde_json::Error),
    /// A value this program can't run.
    #[error("config.json: {field} is {got}; want {want}")]
    Unsupported {
        /// The field.
        field: String,
        /// What would do.
        want: String,
        /// What the file says.
        got: String,
    },
}

impl ModelShape {
    /// Reads and checks config.json.
    ///
    /// # Errors
    /// [`ShapeError`] names the field, what was wanted and what the file says. Another `model_type` is refused before
    /// anything else is read, so that a foreign model isn't reported as a missing field.
    pub fn from_json(bytes: &[u8]) -> Result<Self, ShapeError> {
        let probe: ModelType = serde_json::from_slice(bytes)?;
        want_text("model_type", &probe.model_type, MODEL_TYPE)?;
        let shape: Self = serde_json::from_slice(bytes)?;
        shape.check()?;
        Ok(shape)
    }

    /// DSpark stages the checkpoint was made with: entries of `compress_ratios` beyond the trunk's layers.
    #[must_use]
    pub fn n_draft_stages(&self) -> usize {
        self.compress_ratios.len() - self.num_hidden_layers
    }

    /// Values the hyper-connections compute for a token and sublayer: HC in, HC out, HC x HC between.
    #[must_use]
    pub fn hc_mix(&self) -> usize {
        (2 + self.hc_mult) * self.hc_mult
    }

    /// Trunk layers with this compression ratio.
    #[must_use]
    pub fn n_layers_with_ratio(&self, ratio: usize) -> usize {
        self.compress_ratios[..self.num_hidden_layers].iter().filter(|&&r| r == ratio).count()
    }

    /// Width of a compressor's projections: an overlapping (ratio-4) one pools two halves.
    #[must_use]
    pub fn compressor_width(ratio: usize, head_dim: usize) -> usize {
        if ratio == 4 { 2 * head_dim } else { head_dim }
    }

    fn check(&self) -> Result<(), ShapeError> {
        self.check_words()?;
        self.check_fixed()?;
        self.check_ranges()?;
        self.check_blocks()?;
        self.check_reals()?;
        self.check_layers()?;
        if self.n_draft_stages() > 0 { self.check_stages() } else { Ok(()) }
    }

    fn check_words(&self) -> Result<(), ShapeError> {
        want_text("scoring_func", &self.scoring_func, "sqrtsoftplus")?;
        want_text("topk_method", &self.topk_method, "noaux_tc")?;
        want_text("hidden_act", &self.hidden_act, "silu")?;
        want_text("expert_dtype", &self.expert_dtype, "fp4")?;
        want_text("rope_scaling.type", &self.rope_scaling.kind, "yarn")?;
        let quantization = &self.quantization_config;
        want_text("quantization_config.quant_method", &quantization.quant_method, "fp8")?;
        want_text("quantization_config.fmt", &quantization.fmt, "e4m3")?;
        want_text("quantization_config.scale_fmt", &quantization.scale_fmt, "ue8m0")?;
        want(
            quantization.weight_block_size == [128, 128],
            "quantization_config.weight_block_size",
            "[128, 128]",
            &format_args!("{:?}", quantization.weight_block_size),
        )?;
        want(self.norm_topk_prob, "norm_topk_prob", "true", &self.norm_topk_prob)?;
        want(!self.tie_word_embeddings, "tie_word_embeddings", "false", &self.tie_word_embeddings)?;
        want(!self.attention_bias, "attention_bias", "false", &self.attention_bias)
    }

    fn check_fixed(&self) -> Result<(), ShapeError> {
        let fixed = [
            ("num_key_value_heads", self.num_key_value_heads, 1),
            ("n_shared_experts", self.n_shared_experts, 1),
            ("head_dim", self.head_dim, HEAD_DIM),
            ("qk_rope_head_dim", self.qk_rope_head_dim, ROPE_HEAD_DIM),
            ("index_head_dim", self.index_head_dim, INDEX_HEAD_DIM),
            ("sliding_window", self.sliding_window, SLIDING_WINDOW),
            ("hc_mult", self.hc_mult, HC_MULT),
        ];
        fixed.iter().try_for_each(|&(field, got, value)| want(got == value, field, &value.to_string(), &got))
    }

    /// Bounds far above any real model, so that no product of two dimensions can overflow.
    fn check_ranges(&self) -> Result<(), ShapeError> {
        const DIM: usize = 1 << 20;
        let ranges = [
            ("vocab_size", self.vocab_size, DIM),
            ("hidden_size", self.hidden_size, DIM),
            ("num_hidden_layers", self.num_hidden_layers, 256),
            ("num_attention_heads", self.num_attention_heads, 1024),
            ("q_lora_rank", self.q_lora_rank, DIM),
            ("o_lora_rank", self.o_lora_rank, DIM),
            ("o_groups", self.o_groups, 1024),
            ("moe_intermediate_size", self.moe_intermediate_size, DIM),
            ("n_routed_experts", self.n_routed_experts, 1024),
            ("num_experts_per_tok", self.num_experts_per_tok, self.n_routed_experts),
            ("max_position_embeddings", self.max_position_embeddings, 1 << 30),
            ("index_n_heads", self.index_n_heads, 1024),
            ("index_topk", self.index_topk, DIM),
            ("hc_sinkhorn_iters", self.hc_sinkhorn_iters, 1000),
            (
                "rope_scaling.original_max_position_embeddings",
                self.rope_scaling.original_max_position_embeddings,
                1 << 30,
            ),
        ];
        ranges
            .iter()
            .try_for_each(|&(field, got, max)| want((1..=max).contains(&got), field, &format!("1 to {max}"), &got))?;
        let n_layers = self.num_hidden_layers;
        want(
            self.num_hash_layers <= n_layers,
            "num_hash_layers",
            &format!("at most num_hidden_layers ({n_layers})"),
            &self.num_hash_layers,
        )?;
        for (field, token_id) in [("bos_token_id", self.bos_token_id), ("eos_token_id", self.eos_token_id)] {
            self.check_token(field, token_id)?;
        }
        Ok(())
    }

    /// FP8 blocks are whole: no block of 128 x 128 reaches over an edge or from one output group into the next.
    fn check_blocks(&self) -> Result<(), ShapeError> {
        let blocked = [
            ("hidden_size", self.hidden_size),
            ("q_lora_rank", self.q_lora_rank),
            ("o_lora_rank", self.o_lora_rank),
            ("moe_intermediate_size", self.moe_intermediate_size),
        ];
        blocked.iter().try_for_each(|&(field, got)| {
            want(got.is_multiple_of(128), field, "a multiple of 128 (an FP8 block)", &got)
        })?;
        want(
            self.num_attention_heads.is_multiple_of(self.o_groups),
            "o_groups",
            &format!("a divisor of num_attention_heads ({})", self.num_attention_heads),
            &self.o_groups,
        )
    }

    fn check_reals(&self) -> Result<(), ShapeError> {
        let positive = [
            ("routed_scaling_factor", f64::from(self.routed_scaling_factor)),
            ("swiglu_limit", f64::from(self.swiglu_limit)),
            ("rms_norm_eps", f64::from(self.rms_norm_eps)),
            ("hc_eps", f64::from(self.hc_eps)),
            ("rope_scaling.beta_fast", self.rope_scaling.beta_fast),
            ("rope_scaling.beta_slow", self.rope_scaling.beta_slow),
        ];
        positive
            .iter()
            .try_for_each(|&(field, got)| want(got.is_finite() && got > 0.0, field, "a positive number", &got))?;
        for (field, got) in [("rope_theta", self.rope_theta), ("compress_rope_theta", self.compress_rope_theta)] {
            want(got.is_finite() && got > 1.0, field, "a number above 1", &got)?;
        }
        let factor = self.rope_scaling.factor;
        want(factor.is_finite() && factor >= 1.0, "rope_scaling.factor", "at least 1", &factor)
    }

    fn check_layers(&self) -> Result<(), ShapeError> {
        let n_layers = self.num_hidden_layers;
        let n_entries = self.compress_ratios.len();
        want(
            (n_layers..=n_layers + 16).contains(&n_entries),
            "compress_ratios",
            &format!("one entry for each of the {n_layers} layers and at most 16 draft stages"),
            &format_args!("{n_entries} entries"),
        )?;
        for (layer_idx, &ratio) in self.compress_ratios.iter().enumerate() {
            let field = format!("compress_ratios[{layer_idx}]");
            if layer_idx < n_layers {
                want(matches!(ratio, 0 | 4 | 128), &field, "0, 4 or 128", &ratio)?;
            } else {
                want(ratio == 0, &field, "0 (a draft stage)", &ratio)?;
            }
        }
        Ok(())
    }

    fn check_stages(&self) -> Result<(), ShapeError> {
        for (field, got, max) in [
            ("dspark_block_size", self.dspark_block_size, 64),
            ("dspark_markov_rank", self.dspark_markov_rank, 1 << 16),
            ("dspark_target_layer_ids (entries)", self.dspark_target_layer_ids.len(), 16),
        ] {
            want((1..=max).contains(&got), field, &format!("1 to {max}, since there are draft stages"), &got)?;
        }
        self.check_token("dspark_noise_token_id", self.dspark_noise_token_id)?;
        let targets = &self.dspark_target_layer_ids;
        let ascending = targets.windows(2).all(|pair| pair[0] < pair[1]);
        want(
            ascending && targets.iter().all(|&id| id < self.num_hidden_layers),
            "dspark_target_layer_ids",
            &format!("ascending layers below {}", self.num_hidden_layers),
            &format_args!("{targets:?}"),
        )
    }

    fn check_token(&self, field: &str, token_id: u32) -> Result<(), ShapeError> {
        want(
            (token_id as usize) < self.vocab_size,
            field,
            &format!("below vocab_size ({})", self.vocab_size),
            &token_id,
        )
    }
}

#[derive(Deserialize)]
struct ModelType {
    model_type: String,
}

const fn yes() -> bool {
    true
}

fn silu() -> String {
    "silu".to_owned()
}

fn want(ok: bool, field: &str, want: &str, got: &dyn std::fmt::Display) -> Result<(), ShapeError> {
    if ok {
        return Ok(());
    }
    Err(ShapeError::Unsupported { field: field.to_owned(), want: want.to_owned(), got: got.to_string() })
}

fn want_text(field: &str, got: &str, value: &str) -> Result<(), ShapeError> {
    want(got == value, field, value, &got)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const SMALL: &[u8] = include_bytes!("../../tests/fixtures/small/config.json");

    fn refusal(change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> String {
        let mut config: Value = serde_json::from_slice(SMALL).unwrap();
        change(config.as_object_mut().unwrap());
        ModelShape::from_json(config.to_string().as_bytes()).unwrap_err().to_string()
    }

    fn with(field: &str, value: Value) -> String {
        refusal(|config| {
            config.insert(field.to_owned(), value);
        })
    }

    #[test]
    fn reads_the_fixture() {
        let shape = ModelShape::from_json(SMALL).unwrap();
        assert_eq!((shape.num_hidden_layers, shape.n_draft_stages(), shape.hc_mix()), (6, 3, 24));
        assert_eq!(
            (shape.n_layers_with_ratio(0), shape.n_layers_with_ratio(4), shape.n_layers_with_ratio(128)),
            (2, 2, 2)
        );
        assert_eq!(shape.compress_rope_theta, 160_000.0);
        assert_eq!(shape.rms_norm_eps, 1e-6);
    }

    #[test]
    fn a_foreign_model_is_named_before_its_missing_fields() {
        let error = ModelShape::from_json(br#"{"model_type": "llama"}"#).unwrap_err().to_string();
        assert_eq!(error, "config.json: model_type is llama; want deepseek_v4");
    }

    #[test]
    fn values_that_must_not_be_guessed_are_required() {
        for field in ["compress_rope_theta", "swiglu_limit", "rope_scaling", "compress_ratios", "expert_dtype"] {
            let error = refusal(|config| {
                config.remove(field);
            });
            assert!(error.contains(&format!("missing field `{field}`")), "{error}");
        }
    }

    #[test]
    fn every_unsupported_value_is_refused_by_name() {
        let cases = [
            ("head_dim", json!(256), "head_dim is 256; want 512"),
            ("qk_rope_head_dim", json!(32), "want 64"),
            ("index_head_dim", json!(64), "want 128"),
            ("sliding_window", json!(4096), "want 128"),
            ("hc_mult", json!(2), "want 4"),
            ("expert_dtype", json!("fp8"), "want fp4"),
            ("o_groups", json!(3), "a divisor of num_attention_heads (4)"),
            ("o_groups", json!(0), "want 1 to 1024"),
            ("hidden_size", json!(192), "hidden_size is 192; want a multiple of 128"),
            ("moe_intermediate_size", json!(96), "moe_intermediate_size is 96"),
            ("compress_ratios", json!([0, 0, 4, 64, 4, 128, 0, 0, 0]), "compress_ratios[3] is 64; want 0, 4 or 128"),
            ("compress_ratios", json!([0, 0, 4, 128, 4, 128, 4]), "compress_ratios[6] is 4; want 0"),
            ("compress_ratios", json!([0, 0, 4]), "3 entries"),
            ("num_experts_per_tok", json!(9), "want 1 to 8"),
            ("num_hash_layers", json!(7), "at most num_hidden_layers (6)"),
            ("n_shared_experts", json!(2), "want 1"),
            ("topk_method", json!("greedy"), "want noaux_tc"),
            ("tie_word_embeddings", json!(true), "want false"),
            ("swiglu_limit", json!(0), "a positive number"),
            ("dspark_target_layer_ids", json!([5, 4]), "ascending layers below 6"),
            ("dspark_noise_token_id", json!(512), "below vocab_size (512)"),
            ("eos_token_id", json!(600), "below vocab_size (512)"),
        ];
        for (field, value, message) in cases {
            let error = with(field, value);
            assert!(error.contains(message) && error.contains(field), "{field}: {error}");
        }
        let block = with(
            "quantization_config",
            json!({"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [1, 128]}),
        );
        assert!(block.contains("weight_block_size is [1, 128]; want [128, 128]"), "{block}");
    }

    #[test]
    fn broken_json_says_where() {
        let error = ModelShape::from_json(b"{\"model_type\": \"deepseek_v4\",").unwrap_err().to_string();
        assert!(error.starts_with("config.json: ") && error.contains("line 1"), "{error}");
    }
}
