//! Weights in device memory: matrices in the order in which kernels read them, experts of one kind at a fixed stride.
//!
//! The same walk over the checkpoint first counts bytes and then uploads. A matrix goes up in the checkpoint's bytes into one
//! staging buffer and is repacked from there by a kernel, so that neither host nor device ever holds a second copy of the model.
//! Synthetic matrices need not be stored anywhere: a kernel writes the bytes that the checkpoint would have into that buffer.

use std::ops::Range;

use crate::checkpoint::spec::{Dtype, TensorSpec};
use crate::device::{Buffer, Device, DeviceError};
use crate::model::runner::RunnerError;
use crate::model::shape::ModelShape;
use crate::model::weights::{
    AttentionWeights, CompressorWeights, ExpertWeights, HyperWeights, IndexerWeights, LayerWeights, MoeWeights, Weights,
};
use crate::ops::fill::{self, FillArgs, Parts};
use crate::ops::linear::device::{DeviceProduct, RowsCount};
use crate::ops::repack::{self, RepackArgs, WeightFormat, WeightShape};
use crate::tensor::matrix::{FP8_BLOCK, MXFP4_BLOCK, Matrix, MatrixData};

const ALIGN_BYTES: usize = 256;
/// Codes that go up at once; they are repacked before the next part comes.
const PART_BYTES: usize = 32 << 20;

/// Where the elements of matrices come from; vectors and tables are always the checkpoint's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightSource {
    /// The checkpoint's bytes.
    Checkpoint,
    /// The formula of synthetic checkpoints, computed on the device; the checkpoint's bytes are not read.
    Formula {
        /// Seed of the weights.
        seed: u64,
    },
}

/// The trunk on a device.
#[derive(Debug)]
pub(super) struct DeviceWeights {
    pub embed: u64,               // [V, D] bf16
    pub layers: Vec<DeviceLayer>, // [L]
    pub norm: u64,                // [D] f32
    pub hc_head: DeviceHyper,
    pub head: DeviceMatrix, // [V, D]
    /// Frequencies of layers without and with compressed rows.
    pub freqs: [u64; 2], // [32] f32
    parts: Vec<Buffer>,
}

/// Bytes of the parts, known before anything is allocated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct WeightBytes {
    /// One allocation a layer, then one for the rest.
    pub parts: Vec<usize>,
    /// The largest matrix as it is stored, while loading.
    pub staging: usize,
}

/// A repacked matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceMatrix {
    pub shape: WeightShape,
    pub codes: u64,
    pub scales: u64,
}

/// Repacked matrices of all experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceExperts {
    pub shape: WeightShape,
    pub codes: u64,
    pub scales: u64,
    pub code_stride_bytes: u64,
    pub scale_stride_bytes: u64,
}

/// As [`HyperWeights`].
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceHyper {
    pub mix: u64,
    pub base: u64,
    pub scale: u64,
}

/// As [`LayerWeights`].
#[derive(Clone, Debug)]
pub(super) struct DeviceLayer {
    pub attn_norm: u64,
    pub ffn_norm: u64,
    pub hc_attn: DeviceHyper,
    pub hc_ffn: DeviceHyper,
    pub attn: DeviceAttention,
    pub ffn: DeviceMoe,
}

/// As [`AttentionWeights`].
#[derive(Clone, Debug)]
pub(super) struct DeviceAttention {
    pub wq_a: DeviceMatrix,
    pub q_norm: u64,
    pub wq_b: DeviceMatrix,
    pub wkv: DeviceMatrix,
    pub kv_norm: u64,
    pub wo_a: DeviceMatrix,
    pub wo_b: DeviceMatrix,
    pub attn_sink: u64,
    pub compressor: Option<DeviceCompressor>,
    pub indexer: Option<DeviceIndexer>,
}

/// As [`CompressorWeights`].
#[derive(Clone, Debug)]
pub(super) struct DeviceCompressor {
    pub wkv: DeviceMatrix,
    pub wgate: DeviceMatrix,
    pub ape: u64,
    pub norm: u64,
    pub row_dim: u32,
}

/// As [`IndexerWeights`].
#[derive(Clone, Debug)]
pub(super) struct DeviceIndexer {
    pub wq_b: DeviceMatrix,
    pub weights_proj: DeviceMatrix,
    pub compressor: DeviceCompressor,
}

/// As [`MoeWeights`]; an absent table or bias is 0.
#[derive(Clone, Debug)]
pub(super) struct DeviceMoe {
    pub gate: DeviceMatrix,
    pub bias: u64,
    pub tid2eid: u64,
    /// w1, then w3 of each expert.
    pub w13: DeviceExperts,
    pub w2: DeviceExperts,
    pub shared: DeviceExpert,
}

/// As [`ExpertWeights`].
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceExpert {
    pub w1: DeviceMatrix,
    pub w2: DeviceMatrix,
    pub w3: DeviceMatrix,
}

/// Gives parts of an allocation away in order and fills them; without a target it only counts.
struct Loader<'a> {
    target: Option<Target<'a>>,
    used_bytes: usize,
    staging_bytes: usize,
}

/// Some rows of a matrix as they are stored: bytes of the codes and of the scales.
struct StoredRows {
    codes: Range<usize>,
    scales: Range<usize>,
    /// Where the scales go in the staging buffer; the codes are at its start.
    scales_offset: usize,
}

#[derive(Clone, Copy)]
struct Target<'a> {
    device: &'a Device,
    part: &'a Buffer,
    staging: &'a Buffer,
    source: WeightSource,
    /// Codes and scales that have no value.
    refused: &'a Buffer, // [1] u32
}

/// The bytes of a stored matrix.
struct Stored<'a> {
    codes: &'a [u8],
    scales: &'a [u8],
    shape: WeightShape,
}

impl WeightBytes {
    /// Counts.
    ///
    /// # Errors
    /// Never; counting shares the code of loading.
    pub fn count(w: &Weights, freqs: &[&[f32]; 2]) -> Result<Self, DeviceError> {
        let mut bytes = Self::default();
        for layer in &w.layers {
            let mut loader = Loader::counting();
            loader.layer(layer)?;
            bytes.add(&loader);
        }
        let mut loader = Loader::counting();
        Rest::load(&mut loader, w, freqs)?;
        bytes.add(&loader);
        Ok(bytes)
    }

    fn add(&mut self, loader: &Loader<'_>) {
        self.parts.push(loader.used_bytes.max(ALIGN_BYTES));
        self.staging = self.staging.max(loader.staging_bytes).max(ALIGN_BYTES);
    }

    /// What stays.
    pub fn n_bytes(&self) -> usize {
        self.parts.iter().sum()
    }
}

/// What is not in a layer.
struct Rest {
    embed: u64,
    norm: u64,
    hc_head: DeviceHyper,
    head: DeviceMatrix,
    freqs: [u64; 2],
}

impl Rest {
    fn load(loader: &mut Loader<'_>, w: &Weights, freqs: &[&[f32]; 2]) -> Result<Self, DeviceError> {
        Ok(Self {
            embed: loader.plain(&w.embed)?,
            norm: loader.floats(&w.norm)?,
            hc_head: loader.hyper(&w.hc_head)?,
            head: loader.matrix(&w.head)?,
            freqs: [loader.floats(freqs[0])?, loader.floats(freqs[1])?],
        })
    }
}

impl DeviceWeights {
    /// Allocates and fills everything. `bytes` are the counted ones; `progress` gets the bytes that are done so far.
    ///
    /// # Errors
    /// When the device has not enough memory or is lost, or a code or scale has no value.
    pub fn load(
        device: &Device,
        w: &Weights,
        source: WeightSource,
        freqs: &[&[f32]; 2], // [32] f32 each
        bytes: &WeightBytes,
        progress: &dyn Fn(usize),
    ) -> Result<Self, RunnerError> {
        let (staging, refused) = (device.alloc(bytes.staging)?, device.alloc(size_of::<u32>())?);
        device.fill(&refused, 0, size_of::<u32>(), 0)?;
        let parts: Vec<Buffer> = bytes.parts.iter().map(|n| device.alloc(*n)).collect::<Result<_, _>>()?;
        let target = |part| Target { device, part, staging: &staging, source, refused: &refused };
        let mut n_done = 0;
        let mut layers = Vec::with_capacity(w.layers.len());
        for (layer, part) in w.layers.iter().zip(&parts) {
            layers.push(Loader::into(target(part)).layer(layer)?);
            n_done += part.n_bytes();
            progress(n_done);
        }
        let Rest { embed, norm, hc_head, head, freqs } =
            Rest::load(&mut Loader::into(target(&parts[w.layers.len()])), w, freqs)?;
        let mut n_refused = [0u32];
        device.download(&refused, 0, bytemuck::cast_slice_mut(&mut n_refused))?;
        if n_refused[0] > 0 {
            return Err(RunnerError::Weights { n_refused: n_refused[0] });
        }
        progress(bytes.n_bytes());
        Ok(Self { embed, layers, norm, hc_head, head, freqs, parts })
    }

    /// All that was allocated: one part a layer, then one for the rest.
    pub fn parts(&self) -> &[Buffer] {
        &self.parts
    }
}

impl<'a> Loader<'a> {
    const fn counting() -> Self {
        Self { target: None, used_bytes: 0, staging_bytes: 0 }
    }

    const fn into(target: Target<'a>) -> Self {
        Self { target: Some(target), used_bytes: 0, staging_bytes: 0 }
    }

    fn layer(&mut self, w: &LayerWeights) -> Result<DeviceLayer, DeviceError> {
        Ok(DeviceLayer {
            attn_norm: self.floats(&w.attn_norm)?,
            ffn_norm: self.floats(&w.ffn_norm)?,
            hc_attn: self.hyper(&w.hc_attn)?,
            hc_ffn: self.hyper(&w.hc_ffn)?,
            attn: self.attention(&w.attn)?,
            ffn: self.moe(&w.ffn)?,
        })
    }

    fn attention(&mut self, w: &AttentionWeights) -> Result<DeviceAttention, DeviceError> {
        Ok(DeviceAttention {
            wq_a: self.matrix(&w.wq_a)?,
            q_norm: self.floats(&w.q_norm)?,
            wq_b: self.matrix(&w.wq_b)?,
            wkv: self.matrix(&w.wkv)?,
            kv_norm: self.floats(&w.kv_norm)?,
            wo_a: self.matrix(&w.wo_a)?,
            wo_b: self.matrix(&w.wo_b)?,
            attn_sink: self.floats(&w.attn_sink)?,
            compressor: w.compressor.as_ref().map(|w| self.compressor(w)).transpose()?,
            indexer: w.indexer.as_ref().map(|w| self.indexer(w)).transpose()?,
        })
    }

    fn compressor(&mut self, w: &CompressorWeights) -> Result<DeviceCompressor, DeviceError> {
        Ok(DeviceCompressor {
            wkv: self.matrix(&w.wkv)?,
            wgate: self.matrix(&w.wgate)?,
            ape: self.floats(&w.ape)?,
            norm: self.floats(&w.norm)?,
            row_dim: w.norm.len() as u32,
        })
    }

    fn indexer(&mut self, w: &IndexerWeights) -> Result<DeviceIndexer, DeviceError> {
        Ok(DeviceIndexer {
            wq_b: self.matrix(&w.wq_b)?,
            weights_proj: self.matrix(&w.weights_proj)?,
            compressor: self.compressor(&w.compressor)?,
        })
    }

    fn moe(&mut self, w: &MoeWeights) -> Result<DeviceMoe, DeviceError> {
        let ExpertWeights { w1, w2, w3 } = &w.shared;
        Ok(DeviceMoe {
            gate: self.matrix(&w.gate)?,
            bias: w.bias.as_ref().map_or(Ok(0), |bias| self.floats(bias))?,
            tid2eid: w.tid2eid.as_ref().map_or(Ok(0), |table| self.bytes(bytemuck::cast_slice(table)))?,
            w13: self.experts(&w.experts.iter().map(|e| [&e.w1, &e.w3]).collect::<Vec<_>>())?,
            w2: self.experts(&w.experts.iter().map(|e| [&e.w2]).collect::<Vec<_>>())?,
            shared: DeviceExpert { w1: self.matrix(w1)?, w2: self.matrix(w2)?, w3: self.matrix(w3)? },
        })
    }

    fn hyper(&mut self, w: &HyperWeights) -> Result<DeviceHyper, DeviceError> {
        let mix = match &w.mix.data {
            MatrixData::F32 { values } => self.floats(values)?,
            _ => self.bytes(stored(&w.mix).codes)?,
        };
        Ok(DeviceHyper { mix, base: self.floats(&w.base)?, scale: self.floats(&w.scale)? })
    }

    fn matrix(&mut self, m: &Matrix) -> Result<DeviceMatrix, DeviceError> {
        let DeviceExperts { shape, codes, scales, .. } = self.experts(&[[m]])?;
        Ok(DeviceMatrix { shape, codes, scales })
    }

    /// Matrices of one shape, N an expert: all codes, then all scales.
    fn experts<const N: usize>(&mut self, experts: &[[&Matrix; N]]) -> Result<DeviceExperts, DeviceError> {
        let shape = stored(experts[0][0]).shape;
        let [codes, scales] =
            [shape.code_bytes(), shape.scale_bytes()].map(|n_bytes| self.take(experts.len() * N * n_bytes as usize));
        for (i, m) in (0..).zip(experts.iter().flatten()) {
            self.repack(m, codes + i * shape.code_bytes(), scales + i * shape.scale_bytes())?;
        }
        let n = N as u64;
        let (code_stride_bytes, scale_stride_bytes) = (n * shape.code_bytes(), n * shape.scale_bytes());
        Ok(DeviceExperts { shape, codes, scales, code_stride_bytes, scale_stride_bytes })
    }

    /// Stages some rows at a time and repacks them: a multiple of the rows that share a scale, so that each part is a matrix.
    fn repack(&mut self, m: &Matrix, to_codes: u64, to_scales: u64) -> Result<(), DeviceError> {
        let from = stored(m);
        let row_bytes = from.codes.len() / m.n_rows;
        let n_part = (PART_BYTES / row_bytes).max(FP8_BLOCK) / FP8_BLOCK * FP8_BLOCK;
        let scales_offset = (n_part.min(m.n_rows) * row_bytes).next_multiple_of(ALIGN_BYTES);
        let scale_rows = if from.shape.format == WeightFormat::Fp8 { FP8_BLOCK } else { 1 };
        let scale_row_bytes = from.scales.len() / m.n_rows.div_ceil(scale_rows);
        let n_scale_rows = n_part.min(m.n_rows).div_ceil(scale_rows);
        self.staging_bytes = self.staging_bytes.max(scales_offset + n_scale_rows * scale_row_bytes);
        let Some(target) = self.target else { return Ok(()) };
        let Target { device, staging, refused, .. } = target;
        for first in (0..m.n_rows).step_by(n_part) {
            let end = (first + n_part).min(m.n_rows);
            let scales = first / scale_rows * scale_row_bytes..end.div_ceil(scale_rows) * scale_row_bytes;
            target.stage(m, StoredRows { codes: first * row_bytes..end * row_bytes, scales, scales_offset })?;
            let before = WeightShape { n_rows: first as u32, ..from.shape };
            let part = WeightShape { n_rows: (end - first) as u32, ..from.shape };
            let args = RepackArgs {
                src_codes: staging.address(),
                src_scales: staging.address() + scales_offset as u64,
                dst_codes: to_codes + before.code_bytes(),
                dst_scales: to_scales + before.scale_bytes(),
                n_refused: refused.address(),
                ..RepackArgs::new(part)
            };
            repack::launch(device, part, &args)?;
        }
        Ok(())
    }

    /// The address of a matrix that stays as it is stored.
    fn plain(&mut self, m: &Matrix) -> Result<u64, DeviceError> {
        let codes = stored(m).codes;
        match self.target {
            Some(target @ Target { source: WeightSource::Formula { seed }, .. }) => {
                let address = self.take(codes.len());
                target.fill(&codes_spec(m), seed, 0..codes.len(), address)?;
                Ok(address)
            }
            _ => self.bytes(codes),
        }
    }

    fn floats(&mut self, values: &[f32]) -> Result<u64, DeviceError> {
        self.bytes(bytemuck::cast_slice(values))
    }

    /// The address of the bytes.
    fn bytes(&mut self, bytes: &[u8]) -> Result<u64, DeviceError> {
        let offset = self.used_bytes;
        let address = self.take(bytes.len());
        if let Some(Target { device, part, .. }) = self.target {
            device.upload(part, offset, bytes)?;
        }
        Ok(address)
    }

    fn take(&mut self, n_bytes: usize) -> u64 {
        let offset = self.used_bytes;
        self.used_bytes += n_bytes.next_multiple_of(ALIGN_BYTES);
        self.target.map_or(0, |target| target.part.address()) + offset as u64
    }
}

impl Target<'_> {
    /// Puts rows of a matrix into the staging buffer.
    fn stage(&self, m: &Matrix, rows: StoredRows) -> Result<(), DeviceError> {
        let StoredRows { codes, scales, scales_offset } = rows;
        match self.source {
            WeightSource::Checkpoint => {
                let from = stored(m);
                self.device.upload(self.staging, 0, &from.codes[codes])?;
                self.device.upload(self.staging, scales_offset, &from.scales[scales])
            }
            WeightSource::Formula { seed } => {
                let address = self.staging.address();
                self.fill(&codes_spec(m), seed, codes, address)?;
                match scales_spec(m) {
                    Some(spec) => self.fill(&spec, seed, scales, address + scales_offset as u64),
                    None => Ok(()),
                }
            }
        }
    }

    /// Writes some bytes of a tensor by the formula.
    fn fill(&self, spec: &TensorSpec, seed: u64, bytes: Range<usize>, out: u64) -> Result<(), DeviceError> {
        let device = self.device;
        let args = FillArgs::of_weight(spec, seed, (bytes.start / spec.element_bytes()) as u64)
            .map_err(|error| DeviceError::Step { device: device.label().to_owned(), reason: error.to_string() })?;
        fill::launch(device, &args, Parts { out, n_bytes: bytes.len() as u64, stride_bytes: 0, n: 1 })
    }
}

/// A matrix's elements as a tensor of the checkpoint.
fn codes_spec(m: &Matrix) -> TensorSpec {
    let (dtype, n_cols) = match &m.data {
        MatrixData::Fp8 { .. } => (Dtype::F8_E4M3, m.n_cols),
        MatrixData::Mxfp4 { .. } => (Dtype::I8, m.n_cols / 2),
        MatrixData::Bf16 { .. } => (Dtype::BF16, m.n_cols),
        MatrixData::F32 { .. } => (Dtype::F32, m.n_cols),
    };
    TensorSpec { name: m.name.to_string(), dtype, shape: vec![m.n_rows, n_cols] }
}

/// A matrix's scales as a tensor of the checkpoint, where it has some.
fn scales_spec(m: &Matrix) -> Option<TensorSpec> {
    let shape = match &m.data {
        MatrixData::Fp8 { .. } => vec![m.n_rows.div_ceil(FP8_BLOCK), m.n_cols.div_ceil(FP8_BLOCK)],
        MatrixData::Mxfp4 { .. } => vec![m.n_rows, m.n_cols / MXFP4_BLOCK],
        MatrixData::Bf16 { .. } | MatrixData::F32 { .. } => return None,
    };
    let stem = m.name.strip_suffix(".weight").unwrap_or(&m.name);
    Some(TensorSpec { name: format!("{stem}.scale"), dtype: Dtype::F8_E8M0, shape })
}

/// The bytes of a matrix of codes. Those of f32 are uploaded as they are; the shape then says nothing.
fn stored(m: &Matrix) -> Stored<'_> {
    let (codes, scales, format): (&[u8], &[u8], _) = match &m.data {
        MatrixData::Fp8 { codes, scales } => (codes, scales, WeightFormat::Fp8),
        MatrixData::Mxfp4 { codes, scales } => (codes, scales, WeightFormat::Mxfp4),
        MatrixData::Bf16 { bits } => (bits, &[], WeightFormat::Bf16),
        MatrixData::F32 { values } => (bytemuck::cast_slice(values), &[], WeightFormat::Bf16),
    };
    Stored { codes, scales, shape: WeightShape { n_rows: m.n_rows as u32, n_cols: m.n_cols as u32, format } }
}

impl DeviceMatrix {
    /// Its product with rows that follow one another.
    pub fn product(
        &self,
        x: u64, // [T, K] bf16
        y: u64, // [T, N] f32
    ) -> DeviceProduct {
        self.grouped(1, x, y)
    }

    /// As [`DeviceMatrix::product`], each group of rows with its own columns of x.
    pub fn grouped(
        &self,
        n_groups: u32,
        x: u64, // [T, n_groups * K] bf16
        y: u64, // [T, N] f32
    ) -> DeviceProduct {
        let &Self { shape: weight, codes, scales } = self;
        let (x_stride, y_stride) = (n_groups * weight.n_cols, weight.n_rows);
        let rows_count = RowsCount::Rows;
        DeviceProduct { weight, codes, scales, x, y, x_stride, y_stride, n_groups, rows_count, is_rounded: false }
    }
}

/// Letters of the shape that every launch needs, as kernels take them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dims {
    pub d: u32,
    pub n_heads: u32,
    pub head_dim: u32,
    pub n_groups: u32,
    pub index_n_heads: u32,
    pub index_head_dim: u32,
    pub index_topk: u32,
    pub n_experts: u32,
    pub top_k: u32,
    pub expert_width: u32,
    pub vocab_size: u32,
    pub window: u32,
}

impl Dims {
    /// Narrows the shape.
    pub fn new(shape: &ModelShape) -> Self {
        Self {
            d: shape.hidden_size as u32,
            n_heads: shape.num_attention_heads as u32,
            head_dim: shape.head_dim as u32,
            n_groups: shape.o_groups as u32,
            index_n_heads: shape.index_n_heads as u32,
            index_head_dim: shape.index_head_dim as u32,
            index_topk: shape.index_topk as u32,
            n_experts: shape.n_routed_experts as u32,
            top_k: shape.num_experts_per_tok as u32,
            expert_width: shape.moe_intermediate_size as u32,
            vocab_size: shape.vocab_size as u32,
            window: shape.sliding_window as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::checkpoint::Checkpoint;
    use crate::checkpoint::synth::{SynthPlan, write};
    use crate::device::SimWave;
    use crate::device::testing::sim;
    use crate::model::forward::Ropes;
    use crate::model::inventory;

    /// Every byte of the weights on a device.
    fn load(w: &Weights, shape: &ModelShape, source: WeightSource, wave: SimWave) -> Vec<Vec<u8>> {
        let (device, ropes) = (sim(wave), Ropes::new(shape));
        let bytes = WeightBytes::count(w, &ropes.freqs()).unwrap();
        let weights = DeviceWeights::load(&device, w, source, &ropes.freqs(), &bytes, &|_| ()).unwrap();
        let home = |part: &Buffer| {
            let mut bytes = vec![0; part.n_bytes()];
            device.download(part, 0, &mut bytes).unwrap();
            bytes
        };
        weights.parts().iter().map(home).collect()
    }

    #[test]
    fn weights_by_formula_equal_those_of_the_written_checkpoint() {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/odd/config.json");
        let config_json = std::fs::read(config).unwrap();
        let shape = ModelShape::from_json(&config_json).unwrap();
        let (shards, n_experts, seed) = (inventory::shards(&shape), shape.n_routed_experts, 23);
        let root = tempfile::tempdir().unwrap();
        let plan = SynthPlan { config_json: &config_json, shards: &shards, seed, n_experts, is_sparse: false };
        write(&root.path().join("odd"), &plan, &|_| ()).unwrap();
        let written = Weights::bind(&Checkpoint::open(&root.path().join("odd")).unwrap(), &shape).unwrap();
        let in_memory = Checkpoint::by_formula(&config_json, &shards.concat(), seed, n_experts).unwrap();
        let by_formula = Weights::bind(&in_memory, &shape).unwrap();
        for wave in [SimWave::W32, SimWave::W64] {
            let want = load(&written, &shape, WeightSource::Checkpoint, wave);
            let got = load(&by_formula, &shape, WeightSource::Formula { seed }, wave);
            assert_eq!(got.len(), want.len());
            for (part_idx, (got, want)) in got.iter().zip(&want).enumerate() {
                let first = got.iter().zip(want).position(|(got, want)| got != want);
                assert!(first.is_none() && got.len() == want.len(), "part {part_idx}: byte {first:?}");
            }
        }
    }
}
