//! The model's weights as typed structs whose fields keep the checkpoint's names.
//!
//! Letters: V vocabulary, D hidden, H heads, DH head dim, QR and OR query and output ranks, G output groups, E experts, K experts
//! a token, F expert width, HC residual copies, IH and ID indexer heads and their dims, MR Markov rank. Matrices are [out, in]
//! views into the mapped shards; small vectors are decoded to f32 once.

use std::sync::Arc;

use crate::tensor::matrix::Matrix;

/// A whole checkpoint.
#[derive(Clone, Debug)]
pub struct Weights {
    /// `embed.weight`.
    pub embed: Matrix, // [V, D] bf16
    /// `layers.0` and on.
    pub layers: Vec<LayerWeights>, // [L]
    /// `norm.weight`.
    pub norm: Arc<[f32]>, // [D] f32
    /// `hc_head_*`: the HC copies of the residual become one row.
    pub hc_head: HyperWeights, // mix [HC, HC*D], base [HC], scale [1]
    /// `head.weight`.
    pub head: Matrix, // [V, D] bf16
    /// `mtp.0` and on; empty when the checkpoint has none of their tensors.
    pub stages: Vec<StageWeights>, // [S]
    /// What the operator should be told.
    pub warnings: Vec<BindWarning>,
}

/// One layer of the trunk, or the block inside a draft stage.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `attn.*`.
    pub attn: AttentionWeights,
    /// `attn_norm.weight`.
    pub attn_norm: Arc<[f32]>, // [D] f32
    /// `ffn_norm.weight`.
    pub ffn_norm: Arc<[f32]>, // [D] f32
    /// `hc_attn_*`.
    pub hc_attn: HyperWeights, // mix [(2+HC)*HC, HC*D], base [(2+HC)*HC], scale [3]
    /// `hc_ffn_*`.
    pub hc_ffn: HyperWeights, // mix [(2+HC)*HC, HC*D], base [(2+HC)*HC], scale [3]
    /// `ffn.*`.
    pub ffn: MoeWeights,
}

/// Latent attention: one row of DH is key and value of every head.
#[derive(Clone, Debug)]
pub struct AttentionWeights {
    /// `wq_a`.
    pub wq_a: Matrix, // [QR, D] fp8
    /// `q_norm.weight`.
    pub q_norm: Arc<[f32]>, // [QR] f32
    /// `wq_b`.
    pub wq_b: Matrix, // [H*DH, QR] fp8
    /// `wkv`.
    pub wkv: Matrix, // [DH, D] fp8
    /// `kv_norm.weight`.
    pub kv_norm: Arc<[f32]>, // [DH] f32
    /// `wo_a`: rows OR*g .. OR*(g+1) belong to group g.
    pub wo_a: Matrix, // [G*OR, H/G*DH] fp8
    /// `wo_b`.
    pub wo_b: Matrix, // [D, G*OR] fp8
    /// `attn_sink`: a logit that joins the softmax denominator.
    pub attn_sink: Arc<[f32]>, // [H] f32
    /// `compressor.*`, where the layer's ratio isn't 0.
    pub compressor: Option<CompressorWeights>, // head dim DH
    /// `indexer.*`, where the layer's ratio is 4.
    pub indexer: Option<IndexerWeights>,
}

/// Pools `ratio` tokens into one row of `head_dim` (DH or ID). CW is 2*head_dim for ratio 4, head_dim for ratio 128.
#[derive(Clone, Debug)]
pub struct CompressorWeights {
    /// `wkv.weight`.
    pub wkv: Matrix, // [CW, D] bf16
    /// `wgate.weight`.
    pub wgate: Matrix, // [CW, D] bf16
    /// `ape`, added to the gate by position inside the group.
    pub ape: Arc<[f32]>, // [ratio, CW] f32
    /// `norm.weight`.
    pub norm: Arc<[f32]>, // [head_dim] f32
}

/// Chooses the compressed rows a query of a ratio-4 layer attends to.
#[derive(Clone, Debug)]
pub struct IndexerWeights {
    /// `wq_b`.
    pub wq_b: Matrix, // [IH*ID, QR] fp8
    /// `weights_proj.weight`.
    pub weights_proj: Matrix, // [IH, D] bf16
    /// `compressor.*` of the index keys.
    pub compressor: CompressorWeights, // head dim ID, ratio 4
}

/// The parameters of one hyper-connection.
#[derive(Clone, Debug)]
pub struct HyperWeights {
    /// `*_fn`: the flattened residual to its mixes.
    pub mix: Matrix, // [M, HC*D] f32
    /// `*_base`.
    pub base: Arc<[f32]>, // [M] f32
    /// `*_scale`.
    pub scale: Arc<[f32]>, // [3] f32 ([1] at the head)
}

/// Router, routed experts and the shared expert. Exactly one of `bias` and `tid2eid` is there.
#[derive(Clone, Debug)]
pub struct MoeWeights {
    /// `gate.weight`.
    pub gate: Matrix, // [E, D] bf16
    /// `gate.bias`: added for the choice, not for the weights.
    pub bias: Option<Arc<[f32]>>, // [E] f32
    /// `gate.tid2eid`: experts by token id, in the first `num_hash_layers` layers; every entry is below E.
    pub tid2eid: Option<Arc<[u16]>>, // [V, K] u16 (i64 in the file)
    /// `experts.0` and on.
    pub experts: Vec<ExpertWeights>, // [E] mxfp4
    /// `shared_experts`.
    pub shared: ExpertWeights, // fp8
}

/// A gated expert: w2 (silu(w1 x) * w3 x).
#[derive(Clone, Debug)]
pub struct ExpertWeights {
    /// Gate.
    pub w1: Matrix, // [F, D]
    /// Down.
    pub w2: Matrix, // [D, F]
    /// Up.
    pub w3: Matrix, // [F, D]
}

/// One DSpark draft stage: a block, plus what only the first or the last stage has.
#[derive(Clone, Debug)]
pub struct StageWeights {
    /// The block; never compressed, routed by score.
    pub block: LayerWeights,
    /// Stage 0: the taps of the trunk become the rows every stage attends to.
    pub main: Option<MainWeights>,
    /// Last stage: from the residual to drafted tokens.
    pub head: Option<DraftHeadWeights>,
}

/// `main_proj` and `main_norm` of stage 0; N is the number of tapped layers.
#[derive(Clone, Debug)]
pub struct MainWeights {
    /// `main_proj`.
    pub main_proj: Matrix, // [D, N*D] fp8
    /// `main_norm.weight`.
    pub main_norm: Arc<[f32]>, // [D] f32
}

/// What the last stage has beyond a block.
#[derive(Clone, Debug)]
pub struct DraftHeadWeights {
    /// `hc_head_*`.
    pub hc_head: HyperWeights, // mix [HC, HC*D], base [HC], scale [1]
    /// `norm.weight`.
    pub norm: Arc<[f32]>, // [D] f32
    /// `markov_head.markov_w1.weight`: a row a previous token.
    pub markov_w1: Matrix, // [V, MR] bf16
    /// `markov_head.markov_w2.weight`.
    pub markov_w2: Matrix, // [V, MR] bf16
    /// `confidence_head.proj.weight`: over [residual row, Markov row].
    pub confidence: Matrix, // [1, D+MR] bf16
}

/// Something unusual that doesn't stop the model from running.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindWarning {
    /// The draft stages were stripped from the checkpoint.
    #[error("the checkpoint has no mtp.* tensors although config.json names {n_stages} draft stages: no drafting")]
    DraftStagesAbsent {
        /// Stages the config names.
        n_stages: usize,
    },
}
