//! The table of a checkpoint's tensors by shape: names, element types, dimensions, and which shard each belongs to.

use crate::checkpoint::spec::{Dtype, TensorSpec};
use crate::model::shape::ModelShape;
use crate::tensor::matrix::{FP8_BLOCK, MXFP4_BLOCK};

/// Prefix of every draft tensor.
pub const STAGE_PREFIX: &str = "mtp.";

/// The tensors of a checkpoint, shard by shard as officially published: the embedding, one shard a layer, the head, one shard
/// a draft stage.
#[must_use]
pub fn shards(shape: &ModelShape) -> Vec<Vec<TensorSpec>> {
    let d = shape.hidden_size;
    let mut embed = Table::default();
    embed.bf16("embed.weight", &[shape.vocab_size, d]);
    let mut head = Table::default();
    head.bf16("head.weight", &[shape.vocab_size, d]);
    head.bf16("norm.weight", &[d]);
    head.hyper("hc_head", shape.hc_mult, 1, shape);
    let layers = (0..shape.num_hidden_layers).map(|layer_idx| layer(shape, layer_idx));
    let stages = (0..shape.n_draft_stages()).map(|stage_idx| stage(shape, stage_idx));
    std::iter::once(embed).chain(layers).chain([head]).chain(stages).map(|table| table.specs).collect()
}

/// The same as one list; without the draft stages if they are not wanted.
#[must_use]
pub fn tensors(shape: &ModelShape, with_stages: bool) -> Vec<TensorSpec> {
    let all = shards(shape).into_iter().flatten();
    all.filter(|spec| with_stages || !spec.name.starts_with(STAGE_PREFIX)).collect()
}

#[derive(Default)]
struct Table {
    prefix: String,
    specs: Vec<TensorSpec>,
}

impl Table {
    fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize]) {
        self.specs.push(TensorSpec { name: format!("{}{name}", self.prefix), dtype, shape: shape.to_vec() });
    }

    fn bf16(&mut self, name: &str, shape: &[usize]) {
        self.add(name, Dtype::BF16, shape);
    }

    fn f32(&mut self, name: &str, shape: &[usize]) {
        self.add(name, Dtype::F32, shape);
    }

    fn fp8(&mut self, name: &str, n_rows: usize, n_cols: usize) {
        self.add(&format!("{name}.weight"), Dtype::F8_E4M3, &[n_rows, n_cols]);
        let blocks = [n_rows.div_ceil(FP8_BLOCK), n_cols.div_ceil(FP8_BLOCK)];
        self.add(&format!("{name}.scale"), Dtype::F8_E8M0, &blocks);
    }

    fn mxfp4(&mut self, name: &str, n_rows: usize, n_cols: usize) {
        self.add(&format!("{name}.weight"), Dtype::I8, &[n_rows, n_cols / 2]);
        self.add(&format!("{name}.scale"), Dtype::F8_E8M0, &[n_rows, n_cols / MXFP4_BLOCK]);
    }

    fn hyper(&mut self, name: &str, n_mixes: usize, n_scales: usize, shape: &ModelShape) {
        self.f32(&format!("{name}_fn"), &[n_mixes, shape.hc_mult * shape.hidden_size]);
        self.f32(&format!("{name}_base"), &[n_mixes]);
        self.f32(&format!("{name}_scale"), &[n_scales]);
    }
}

fn layer(shape: &ModelShape, layer_idx: usize) -> Table {
    let mut table = Table { prefix: format!("layers.{layer_idx}."), specs: Vec::new() };
    block(&mut table, shape, layer_idx < shape.num_hash_layers);
    let (d, dh, ratio) = (shape.hidden_size, shape.head_dim, shape.compress_ratios[layer_idx]);
    if ratio != 0 {
        compressor(&mut table, "attn.compressor", ratio, dh, d);
    }
    if ratio == 4 {
        table.fp8("attn.indexer.wq_b", shape.index_n_heads * shape.index_head_dim, shape.q_lora_rank);
        table.bf16("attn.indexer.weights_proj.weight", &[shape.index_n_heads, d]);
        compressor(&mut table, "attn.indexer.compressor", ratio, shape.index_head_dim, d);
    }
    table
}

fn stage(shape: &ModelShape, stage_idx: usize) -> Table {
    let mut table = Table { prefix: format!("{STAGE_PREFIX}{stage_idx}."), specs: Vec::new() };
    block(&mut table, shape, false);
    let (v, d, rank) = (shape.vocab_size, shape.hidden_size, shape.dspark_markov_rank);
    if stage_idx == 0 {
        table.fp8("main_proj", d, shape.dspark_target_layer_ids.len() * d);
        table.bf16("main_norm.weight", &[d]);
    }
    if stage_idx + 1 == shape.n_draft_stages() {
        table.bf16("norm.weight", &[d]);
        table.hyper("hc_head", shape.hc_mult, 1, shape);
        table.bf16("markov_head.markov_w1.weight", &[v, rank]);
        table.bf16("markov_head.markov_w2.weight", &[v, rank]);
        table.bf16("confidence_head.proj.weight", &[1, d + rank]);
    }
    table
}

/// What every layer and every stage has.
fn block(table: &mut Table, shape: &ModelShape, is_hash: bool) {
    let (d, h, dh) = (shape.hidden_size, shape.num_attention_heads, shape.head_dim);
    let (qr, out) = (shape.q_lora_rank, shape.o_groups * shape.o_lora_rank);
    table.fp8("attn.wq_a", qr, d);
    table.bf16("attn.q_norm.weight", &[qr]);
    table.fp8("attn.wq_b", h * dh, qr);
    table.fp8("attn.wkv", dh, d);
    table.bf16("attn.kv_norm.weight", &[dh]);
    table.fp8("attn.wo_a", out, h / shape.o_groups * dh);
    table.fp8("attn.wo_b", d, out);
    table.f32("attn.attn_sink", &[h]);
    table.bf16("attn_norm.weight", &[d]);
    table.bf16("ffn_norm.weight", &[d]);
    table.hyper("hc_attn", shape.hc_mix(), 3, shape);
    table.hyper("hc_ffn", shape.hc_mix(), 3, shape);
    moe(table, shape, is_hash);
}

fn moe(table: &mut Table, shape: &ModelShape, is_hash: bool) {
    let (d, f, n_experts) = (shape.hidden_size, shape.moe_intermediate_size, shape.n_routed_experts);
    table.bf16("ffn.gate.weight", &[n_experts, d]);
    if is_hash {
        table.add("ffn.gate.tid2eid", Dtype::I64, &[shape.vocab_size, shape.num_experts_per_tok]);
    } else {
        table.f32("ffn.gate.bias", &[n_experts]);
    }
    for expert_idx in 0..n_experts {
        table.mxfp4(&format!("ffn.experts.{expert_idx}.w1"), f, d);
        table.mxfp4(&format!("ffn.experts.{expert_idx}.w2"), d, f);
        table.mxfp4(&format!("ffn.experts.{expert_idx}.w3"), f, d);
    }
    table.fp8("ffn.shared_experts.w1", f, d);
    table.fp8("ffn.shared_experts.w2", d, f);
    table.fp8("ffn.shared_experts.w3", f, d);
}

fn compressor(table: &mut Table, name: &str, ratio: usize, head_dim: usize, hidden_size: usize) {
    let width = ModelShape::compressor_width(ratio, head_dim);
    table.f32(&format!("{name}.ape"), &[ratio, width]);
    table.bf16(&format!("{name}.norm.weight"), &[head_dim]);
    table.bf16(&format!("{name}.wgate.weight"), &[width, hidden_size]);
    table.bf16(&format!("{name}.wkv.weight"), &[width, hidden_size]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shape::OFFICIAL_CONFIG;
    use std::collections::BTreeMap;

    #[derive(serde::Deserialize)]
    struct Recorded {
        dtype: String,
        shape: Vec<usize>,
    }

    #[test]
    fn equals_the_fixtures_tensor_lists() {
        for (config, recorded) in [
            (
                &include_bytes!("../../tests/fixtures/small/config.json")[..],
                &include_bytes!("../../tests/fixtures/small/tensors.json")[..],
            ),
            (
                include_bytes!("../../tests/fixtures/odd/config.json"),
                include_bytes!("../../tests/fixtures/odd/tensors.json"),
            ),
        ] {
            let recorded: BTreeMap<String, Recorded> = serde_json::from_slice(recorded).unwrap();
            let want: BTreeMap<String, (String, Vec<usize>)> =
                recorded.into_iter().map(|(name, r)| (name, (r.dtype, r.shape))).collect();
            let shape = ModelShape::from_json(config).unwrap();
            let got: BTreeMap<String, (String, Vec<usize>)> =
                tensors(&shape, true).into_iter().map(|s| (s.name, (s.dtype.to_string(), s.shape))).collect();
            assert_eq!(got, want);
        }
    }

    #[test]
    fn official_totals() {
        let shape = ModelShape::from_json(OFFICIAL_CONFIG.as_bytes()).unwrap();
        let shards = shards(&shape);
        assert_eq!(shards.len(), 48);
        let size = |shard: &Vec<TensorSpec>| (shard.len(), shard.iter().map(TensorSpec::n_bytes).sum::<usize>());
        assert_eq!(size(&shards[1]), (1_565, 3_566_148_952));
        assert_eq!(size(&shards[3]), (1_576, 3_596_055_640));
        assert_eq!(size(&shards[4]), (1_569, 3_568_596_312));
        assert_eq!(size(&shards[5]), (1_576, 3_589_851_224));
        assert_eq!(
            [45, 46, 47].map(|i| size(&shards[i])),
            [(1_568, 3_610_287_448), (1_565, 3_559_944_536), (1_572, 3_692_606_316)]
        );
        let all = shards.iter().map(size).fold((0, 0), |sum, (n, bytes)| (sum.0 + n, sum.1 + bytes));
        assert_eq!(all, (72_317, 166_878_536_440));
    }
}
