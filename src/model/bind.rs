//! The strict binder: every tensor of the table is there with its exact form and sane codes, none is left over.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use rayon::prelude::*;

use crate::checkpoint::spec::{self, Dtype, TensorSpec};
use crate::checkpoint::{Checkpoint, TensorView};
use crate::model::inventory::{self, STAGE_PREFIX};
use crate::model::shape::ModelShape;
use crate::model::weights::{
    AttentionWeights, BindWarning, CompressorWeights, DraftHeadWeights, ExpertWeights, HyperWeights, IndexerWeights,
    LayerWeights, MainWeights, MoeWeights, StageWeights, Weights,
};
use crate::tensor::format::bf16_to_f32;
use crate::tensor::matrix::{Matrix, MatrixData};

/// Bytes one task scans at a time.
const SCAN_BYTES: usize = 1 << 20;

/// Why a checkpoint doesn't fit its config.json.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// A tensor isn't there.
    #[error("{tensor}: missing; want {want} ({n_missing} tensors are missing in all)")]
    Missing {
        /// The first one.
        tensor: String,
        /// Its element type and shape.
        want: String,
        /// How many.
        n_missing: usize,
    },
    /// A tensor has another element type or shape.
    #[error("{tensor}: want {want}, got {got}")]
    Form {
        /// Which one.
        tensor: String,
        /// Element type and shape by config.json.
        want: String,
        /// Element type and shape in the file.
        got: String,
    },
    /// A tensor that no part of the model takes.
    #[error("{tensor}: {got}, but this model has no such tensor ({n_unexpected} such tensors in all)")]
    Unexpected {
        /// The first one.
        tensor: String,
        /// Its element type and shape.
        got: String,
        /// How many.
        n_unexpected: usize,
    },
    /// A code that stands for NaN.
    #[error("{tensor}: want numbers, got NaN ({code}) at element {index}")]
    Nan {
        /// Which tensor.
        tensor: String,
        /// The bits and their format.
        code: String,
        /// Row-major element index.
        index: usize,
    },
    /// A hash table that names an expert the layer doesn't have.
    #[error("{tensor}: want experts 0 to {}, got {got} at element {index}", n_experts - 1)]
    Expert {
        /// Which tensor.
        tensor: String,
        /// Experts of the layer.
        n_experts: usize,
        /// What the table says.
        got: i64,
        /// Row-major element index.
        index: usize,
    },
}

impl Weights {
    /// Binds every tensor of the checkpoint to its place. Matrices stay views; vectors are decoded.
    ///
    /// A checkpoint without a single draft tensor binds with no stages and a warning; with some of them it doesn't bind.
    ///
    /// # Errors
    /// [`BindError`] names the tensor, what was wanted and what the file holds.
    pub fn bind(checkpoint: &Checkpoint, shape: &ModelShape) -> Result<Self, BindError> {
        let has_stages = checkpoint.tensors().any(|(name, _)| name.starts_with(STAGE_PREFIX));
        check_forms(checkpoint, &inventory::tensors(shape, has_stages))?;
        scan_codes(checkpoint)?;
        let source = Source { checkpoint, shape };
        let n_stages = shape.n_draft_stages();
        let warnings =
            if n_stages > 0 && !has_stages { vec![BindWarning::DraftStagesAbsent { n_stages }] } else { vec![] };
        Ok(Self {
            embed: source.bf16("embed.weight")?,
            layers: (0..shape.num_hidden_layers)
                .map(|layer_idx| source.layer(&format!("layers.{layer_idx}."), layer_idx))
                .collect::<Result<_, _>>()?,
            norm: source.vector("norm.weight")?,
            hc_head: source.hyper("hc_head")?,
            head: source.bf16("head.weight")?,
            stages: (0..if has_stages { n_stages } else { 0 })
                .map(|stage_idx| source.stage(stage_idx))
                .collect::<Result<_, _>>()?,
            warnings,
        })
    }
}

/// Takes tensors out of a checkpoint whose forms are checked already.
struct Source<'a> {
    checkpoint: &'a Checkpoint,
    shape: &'a ModelShape,
}

impl Source<'_> {
    fn layer(&self, prefix: &str, layer_idx: usize) -> Result<LayerWeights, BindError> {
        Ok(LayerWeights {
            attn: self.attention(&format!("{prefix}attn."), self.shape.compress_ratios[layer_idx])?,
            attn_norm: self.vector(&format!("{prefix}attn_norm.weight"))?,
            ffn_norm: self.vector(&format!("{prefix}ffn_norm.weight"))?,
            hc_attn: self.hyper(&format!("{prefix}hc_attn"))?,
            hc_ffn: self.hyper(&format!("{prefix}hc_ffn"))?,
            ffn: self.moe(&format!("{prefix}ffn."), layer_idx < self.shape.num_hash_layers)?,
        })
    }

    fn stage(&self, stage_idx: usize) -> Result<StageWeights, BindError> {
        let prefix = format!("{STAGE_PREFIX}{stage_idx}.");
        let is_last = stage_idx + 1 == self.shape.n_draft_stages();
        Ok(StageWeights {
            block: self.layer(&prefix, self.shape.num_hidden_layers + stage_idx)?,
            main: if stage_idx == 0 { Some(self.main(&prefix)?) } else { None },
            head: if is_last { Some(self.draft_head(&prefix)?) } else { None },
        })
    }

    fn main(&self, prefix: &str) -> Result<MainWeights, BindError> {
        Ok(MainWeights {
            main_proj: self.fp8(&format!("{prefix}main_proj"))?,
            main_norm: self.vector(&format!("{prefix}main_norm.weight"))?,
        })
    }

    fn draft_head(&self, prefix: &str) -> Result<DraftHeadWeights, BindError> {
        Ok(DraftHeadWeights {
            hc_head: self.hyper(&format!("{prefix}hc_head"))?,
            norm: self.vector(&format!("{prefix}norm.weight"))?,
            markov_w1: self.bf16(&format!("{prefix}markov_head.markov_w1.weight"))?,
            markov_w2: self.bf16(&format!("{prefix}markov_head.markov_w2.weight"))?,
            confidence: self.bf16(&format!("{prefix}confidence_head.proj.weight"))?,
        })
    }

    fn attention(&self, prefix: &str, ratio: usize) -> Result<AttentionWeights, BindError> {
        let compressor = format!("{prefix}compressor.");
        Ok(AttentionWeights {
            wq_a: self.fp8(&format!("{prefix}wq_a"))?,
            q_norm: self.vector(&format!("{prefix}q_norm.weight"))?,
            wq_b: self.fp8(&format!("{prefix}wq_b"))?,
            wkv: self.fp8(&format!("{prefix}wkv"))?,
            kv_norm: self.vector(&format!("{prefix}kv_norm.weight"))?,
            wo_a: self.fp8(&format!("{prefix}wo_a"))?,
            wo_b: self.fp8(&format!("{prefix}wo_b"))?,
            attn_sink: self.vector(&format!("{prefix}attn_sink"))?,
            compressor: if ratio == 0 { None } else { Some(self.compressor(&compressor)?) },
            indexer: if ratio == 4 { Some(self.indexer(&format!("{prefix}indexer."))?) } else { None },
        })
    }

    fn compressor(&self, prefix: &str) -> Result<CompressorWeights, BindError> {
        Ok(CompressorWeights {
            wkv: self.bf16(&format!("{prefix}wkv.weight"))?,
            wgate: self.bf16(&format!("{prefix}wgate.weight"))?,
            ape: self.vector(&format!("{prefix}ape"))?,
            norm: self.vector(&format!("{prefix}norm.weight"))?,
        })
    }

    fn indexer(&self, prefix: &str) -> Result<IndexerWeights, BindError> {
        Ok(IndexerWeights {
            wq_b: self.fp8(&format!("{prefix}wq_b"))?,
            weights_proj: self.bf16(&format!("{prefix}weights_proj.weight"))?,
            compressor: self.compressor(&format!("{prefix}compressor."))?,
        })
    }

    fn hyper(&self, name: &str) -> Result<HyperWeights, BindError> {
        Ok(HyperWeights {
            mix: self.f32_matrix(&format!("{name}_fn"))?,
            base: self.vector(&format!("{name}_base"))?,
            scale: self.vector(&format!("{name}_scale"))?,
        })
    }

    fn moe(&self, prefix: &str, is_hash: bool) -> Result<MoeWeights, BindError> {
        let bias = format!("{prefix}gate.bias");
        let tid2eid = format!("{prefix}gate.tid2eid");
        Ok(MoeWeights {
            gate: self.bf16(&format!("{prefix}gate.weight"))?,
            bias: if is_hash { None } else { Some(self.vector(&bias)?) },
            tid2eid: if is_hash { Some(self.expert_table(&tid2eid)?) } else { None },
            experts: (0..self.shape.n_routed_experts)
                .map(|expert_idx| self.expert(&format!("{prefix}experts.{expert_idx}."), Self::mxfp4))
                .collect::<Result<_, _>>()?,
            shared: self.expert(&format!("{prefix}shared_experts."), Self::fp8)?,
        })
    }

    fn expert(
        &self,
        prefix: &str,
        matrix: impl Fn(&Self, &str) -> Result<Matrix, BindError>,
    ) -> Result<ExpertWeights, BindError> {
        Ok(ExpertWeights {
            w1: matrix(self, &format!("{prefix}w1"))?,
            w2: matrix(self, &format!("{prefix}w2"))?,
            w3: matrix(self, &format!("{prefix}w3"))?,
        })
    }

    fn fp8(&self, name: &str) -> Result<Matrix, BindError> {
        let weight = format!("{name}.weight");
        let (n_rows, n_cols, codes) = self.codes(&weight)?;
        let scales = self.take(&format!("{name}.scale"))?.bytes;
        Ok(Matrix { name: weight.into(), n_rows, n_cols, data: MatrixData::Fp8 { codes, scales } })
    }

    fn mxfp4(&self, name: &str) -> Result<Matrix, BindError> {
        let weight = format!("{name}.weight");
        let (n_rows, n_bytes, codes) = self.codes(&weight)?;
        let scales = self.take(&format!("{name}.scale"))?.bytes;
        Ok(Matrix { name: weight.into(), n_rows, n_cols: 2 * n_bytes, data: MatrixData::Mxfp4 { codes, scales } })
    }

    fn bf16(&self, name: &str) -> Result<Matrix, BindError> {
        let (n_rows, n_cols, bits) = self.codes(name)?;
        Ok(Matrix { name: name.into(), n_rows, n_cols, data: MatrixData::Bf16 { bits } })
    }

    fn f32_matrix(&self, name: &str) -> Result<Matrix, BindError> {
        let (n_rows, n_cols, _) = self.codes(name)?;
        Ok(Matrix { name: name.into(), n_rows, n_cols, data: MatrixData::F32 { values: self.vector(name)? } })
    }

    /// Rows, stored columns and bytes of a tensor of two dimensions.
    fn codes(&self, name: &str) -> Result<(usize, usize, Bytes), BindError> {
        let view = self.take(name)?;
        match *view.shape {
            [n_rows, n_cols] => Ok((n_rows, n_cols, view.bytes)),
            _ => Err(form_error(name, "two dimensions".to_owned(), &view)),
        }
    }

    /// A small BF16 or F32 tensor, decoded.
    fn vector(&self, name: &str) -> Result<Arc<[f32]>, BindError> {
        let view = self.take(name)?;
        let values: Arc<[f32]> = match view.dtype {
            Dtype::BF16 => view.bytes.as_chunks().0.iter().map(|&pair| bf16_to_f32(u16::from_le_bytes(pair))).collect(),
            Dtype::F32 => view.bytes.as_chunks().0.iter().map(|&quad| f32::from_le_bytes(quad)).collect(),
            _ => return Err(form_error(name, "BF16 or F32".to_owned(), &view)),
        };
        match values.iter().position(|value| value.is_nan()) {
            Some(index) => {
                let code = format!("{} {:#x}", view.dtype, values[index].to_bits());
                Err(BindError::Nan { tensor: name.to_owned(), code, index })
            }
            None => Ok(values),
        }
    }

    fn expert_table(&self, name: &str) -> Result<Arc<[u16]>, BindError> {
        let n_experts = self.shape.n_routed_experts;
        let entries = self.take(name)?.bytes;
        let entries = entries.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes));
        let valid = |(index, entry): (usize, i64)| {
            let expert_idx = u16::try_from(entry).ok().filter(|&expert_idx| usize::from(expert_idx) < n_experts);
            expert_idx.ok_or_else(|| BindError::Expert { tensor: name.to_owned(), n_experts, got: entry, index })
        };
        entries.enumerate().map(valid).collect()
    }

    fn take(&self, name: &str) -> Result<TensorView<'_>, BindError> {
        self.checkpoint.tensor(name).ok_or_else(|| BindError::Missing {
            tensor: name.to_owned(),
            want: "a tensor".to_owned(),
            n_missing: 1,
        })
    }
}

fn check_forms(checkpoint: &Checkpoint, specs: &[TensorSpec]) -> Result<(), BindError> {
    let mut missing = specs.iter().filter(|spec| checkpoint.tensor(&spec.name).is_none());
    if let Some(first) = missing.next() {
        return Err(BindError::Missing {
            tensor: first.name.clone(),
            want: first.form(),
            n_missing: 1 + missing.count(),
        });
    }
    let names: HashSet<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    let mut unexpected = checkpoint.tensors().filter(|(name, _)| !names.contains(name));
    if let Some((name, view)) = unexpected.next() {
        let got = spec::form(view.dtype, view.shape);
        return Err(BindError::Unexpected { tensor: name.to_owned(), got, n_unexpected: 1 + unexpected.count() });
    }
    for spec in specs {
        if let Some(view) = checkpoint.tensor(&spec.name)
            && (view.dtype != spec.dtype || view.shape != spec.shape)
        {
            return Err(form_error(&spec.name, spec.form(), &view));
        }
    }
    Ok(())
}

fn form_error(name: &str, want: String, view: &TensorView<'_>) -> BindError {
    BindError::Form { tensor: name.to_owned(), want, got: spec::form(view.dtype, view.shape) }
}

/// Refuses NaN codes of E8M0 scales and FP8 weights. Holes of sparse files are zeros and aren't read.
fn scan_codes(checkpoint: &Checkpoint) -> Result<(), BindError> {
    let tensors: Vec<(&str, TensorView<'_>)> = checkpoint
        .tensors()
        .filter(|(_, view)| !view.is_hole && matches!(view.dtype, Dtype::F8_E8M0 | Dtype::F8_E4M3))
        .collect();
    let found = tensors.par_iter().find_map_first(|(name, view)| {
        let index = match view.dtype {
            Dtype::F8_E8M0 => find_code(&view.bytes, |byte| byte == 0xFF),
            _ => find_code(&view.bytes, |byte| byte & 0x7F == 0x7F),
        }?;
        Some(BindError::Nan {
            tensor: (*name).to_owned(),
            code: format!("{} {:#04x}", view.dtype, view.bytes[index]),
            index,
        })
    });
    found.map_or(Ok(()), Err)
}

/// The first byte that `is_bad` picks. The inner loop has no early exit, so that it vectorises.
fn find_code(bytes: &[u8], is_bad: impl Fn(u8) -> bool + Sync) -> Option<usize> {
    bytes.par_chunks(SCAN_BYTES).enumerate().find_map_first(|(chunk_idx, chunk)| {
        let is_any = chunk.chunks(4096).any(|part| part.iter().fold(false, |any, &byte| any | is_bad(byte)));
        if !is_any {
            return None;
        }
        chunk.iter().position(|&byte| is_bad(byte)).map(|index| chunk_idx * SCAN_BYTES + index)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::synth::{SynthPlan, write};
    use crate::checkpoint::{CONFIG_FILE, INDEX_FILE};
    use crate::model::shape::OFFICIAL_CONFIG;
    use serde_json::Value;
    use sha2::{Digest, Sha256};
    use std::collections::BTreeMap;
    use std::fs;
    use std::io::{Seek, SeekFrom, Write};
    use std::path::{Path, PathBuf};

    fn fixture(name: &str, file: &str) -> Vec<u8> {
        if (name, file) == ("official", CONFIG_FILE) {
            return OFFICIAL_CONFIG.into();
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        fs::read(root.join(name).join(file)).unwrap()
    }

    fn shape_of(name: &str) -> ModelShape {
        ModelShape::from_json(&fixture(name, CONFIG_FILE)).unwrap()
    }

    /// Writes the checkpoint of a fixture from these shards.
    fn synth(name: &str, seed: u64, shards: &[Vec<TensorSpec>], is_sparse: bool) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("checkpoint");
        let n_experts = shape_of(name).n_routed_experts;
        let plan = SynthPlan { config_json: &fixture(name, CONFIG_FILE), shards, seed, n_experts, is_sparse };
        write(&dir, &plan, &|_| ()).unwrap();
        (root, dir)
    }

    fn small() -> (tempfile::TempDir, PathBuf) {
        synth("small", 11, &inventory::shards(&shape_of("small")), false)
    }

    fn bind(dir: &Path) -> Result<Weights, BindError> {
        let checkpoint = Checkpoint::open(dir).unwrap();
        Weights::bind(&checkpoint, &ModelShape::from_json(checkpoint.config_json()).unwrap())
    }

    /// The small fixture with its tensor list changed before it is written.
    fn bind_changed(change: impl Fn(&mut Vec<TensorSpec>)) -> Result<Weights, BindError> {
        let mut shards = inventory::shards(&shape_of("small"));
        shards.iter_mut().for_each(change);
        let (_root, dir) = synth("small", 11, &shards, true);
        bind(&dir)
    }

    /// Overwrites one byte of a tensor in its shard.
    fn poke(dir: &Path, tensor: &str, index: usize, byte: u8) {
        let index_json: Value = serde_json::from_slice(&fs::read(dir.join(INDEX_FILE)).unwrap()).unwrap();
        let path = dir.join(index_json["weight_map"][tensor].as_str().unwrap());
        let bytes = fs::read(&path).unwrap();
        let header_bytes = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let header: Value = serde_json::from_slice(&bytes[8..8 + header_bytes as usize]).unwrap();
        let start = header[tensor]["data_offsets"][0].as_u64().unwrap();
        let mut file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.seek(SeekFrom::Start(8 + header_bytes + start + index as u64)).unwrap();
        file.write_all(&[byte]).unwrap();
    }

    #[test]
    fn synthetic_tensors_equal_the_fixtures_hashes() {
        for (name, seed) in [("small", 11), ("odd", 23)] {
            let (_root, dir) = synth(name, seed, &inventory::shards(&shape_of(name)), false);
            let checkpoint = Checkpoint::open(&dir).unwrap();
            let recorded: BTreeMap<String, Value> = serde_json::from_slice(&fixture(name, "tensors.json")).unwrap();
            assert_eq!(checkpoint.n_tensors(), recorded.len());
            for (tensor, want) in recorded {
                let digest = Sha256::digest(&checkpoint.tensor(&tensor).unwrap().bytes);
                let got: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
                assert_eq!(got, want["sha256"].as_str().unwrap(), "{name} {tensor}");
            }
        }
    }

    #[test]
    fn binds_every_tensor_to_its_place() {
        let (_root, dir) = small();
        let weights = bind(&dir).unwrap();
        assert_eq!((weights.layers.len(), weights.stages.len(), weights.warnings.len()), (6, 3, 0));
        let size = |matrix: &Matrix| (matrix.n_rows, matrix.n_cols);
        let layer = &weights.layers[2];
        assert_eq!(size(&layer.attn.wq_b), (2048, 128));
        assert_eq!(size(&layer.attn.wo_a), (256, 1024));
        assert_eq!(size(&layer.ffn.experts[7].w2), (256, 128));
        assert!(
            matches!(&layer.ffn.experts[7].w2.data, MatrixData::Mxfp4 { codes, scales } if codes.len() == 256 * 64 && scales.len() == 256 * 4)
        );
        assert_eq!(size(&layer.hc_attn.mix), (24, 1024));
        let compressor = layer.attn.compressor.as_ref().unwrap();
        assert_eq!((size(&compressor.wkv), compressor.ape.len(), compressor.norm.len()), ((1024, 256), 4096, 512));
        assert_eq!(size(&layer.attn.indexer.as_ref().unwrap().compressor.wkv), (256, 256));
        assert!(weights.layers[3].attn.indexer.is_none() && weights.layers[1].attn.compressor.is_none());
        let table = weights.layers[1].ffn.tid2eid.as_ref().unwrap();
        assert!(weights.layers[1].ffn.bias.is_none() && weights.layers[2].ffn.tid2eid.is_none());
        assert_eq!(table.len(), 512 * 2);
        assert!(table.as_chunks::<2>().0.iter().all(|[a, b]| a != b && *a < 8 && *b < 8));
        assert_eq!(
            weights.stages.iter().map(|s| (s.main.is_some(), s.head.is_some())).collect::<Vec<_>>(),
            [(true, false), (false, false), (false, true)]
        );
        assert_eq!(size(&weights.stages[2].head.as_ref().unwrap().confidence), (1, 288));
        // Vectors decode to what the formula says: 1 + z/8.
        let mean = weights.norm.iter().sum::<f32>() / weights.norm.len() as f32;
        assert!((mean - 1.0).abs() < 0.05, "{mean}");
    }

    #[test]
    fn stripped_drafts_bind_with_a_warning_and_half_of_them_do_not() {
        let weights = bind_changed(|shard| shard.retain(|spec| !spec.name.starts_with(STAGE_PREFIX))).unwrap();
        assert!(weights.stages.is_empty());
        assert_eq!(weights.warnings, [BindWarning::DraftStagesAbsent { n_stages: 3 }]);
        let error = bind_changed(|shard| shard.retain(|spec| !spec.name.starts_with("mtp.1."))).unwrap_err();
        assert!(matches!(&error, BindError::Missing { tensor, .. } if tensor.starts_with("mtp.1.")), "{error}");
    }

    #[test]
    fn a_missing_or_renamed_shared_expert_is_fatal() {
        let name = "mtp.0.ffn.shared_experts.w2.scale";
        let error = bind_changed(|shard| shard.retain(|spec| spec.name != name)).unwrap_err().to_string();
        assert_eq!(error, format!("{name}: missing; want F8_E8M0 [2, 1] (1 tensors are missing in all)"));
        let error = bind_changed(|shard| {
            for spec in shard.iter_mut().filter(|spec| spec.name.contains(".shared_experts.")) {
                spec.name = spec.name.replace("shared_experts", "shared_expert");
            }
        });
        assert!(matches!(error, Err(BindError::Missing { n_missing: 54, .. })), "{error:?}");
    }

    #[test]
    fn leftovers_and_wrong_forms_are_fatal() {
        let error = bind_changed(|shard| {
            let twins: Vec<_> = shard.iter().filter(|spec| spec.name == "norm.weight").cloned().collect();
            shard.extend(twins.into_iter().map(|spec| TensorSpec { name: "lm_head.weight".to_owned(), ..spec }));
        });
        assert_eq!(
            error.unwrap_err().to_string(),
            "lm_head.weight: BF16 [256], but this model has no such tensor (1 such tensors in all)"
        );
        let name = "layers.4.attn.wq_a.weight";
        let reshaped = bind_changed(|shard| {
            shard.iter_mut().filter(|spec| spec.name == name).for_each(|spec| spec.shape = vec![256, 128]);
        });
        assert_eq!(
            reshaped.unwrap_err().to_string(),
            format!("{name}: want F8_E4M3 [128, 256], got F8_E4M3 [256, 128]")
        );
        let retyped = bind_changed(|shard| {
            shard.iter_mut().filter(|spec| spec.name == name).for_each(|spec| spec.dtype = Dtype::I8);
        });
        assert_eq!(retyped.unwrap_err().to_string(), format!("{name}: want F8_E4M3 [128, 256], got I8 [128, 256]"));
    }

    #[test]
    fn nan_codes_are_refused_with_their_place() {
        let (_root, dir) = small();
        let scale = "layers.5.ffn.experts.3.w1.scale";
        // Scale bytes 0, 1 and 254 are numbers.
        for byte in [0, 1, 254] {
            poke(&dir, scale, 17, byte);
            assert!(bind(&dir).is_ok(), "{byte}");
        }
        poke(&dir, scale, 17, 255);
        assert_eq!(
            bind(&dir).unwrap_err().to_string(),
            format!("{scale}: want numbers, got NaN (F8_E8M0 0xff) at element 17")
        );
        poke(&dir, scale, 17, 120);
        let weight = "mtp.1.attn.wo_b.weight";
        // -448 and -0 are numbers, both NaN codes are not.
        for (byte, is_number) in [(0xFE, true), (0x80, true), (0x7F, false), (0xFF, false)] {
            poke(&dir, weight, 65_535, byte);
            assert_eq!(bind(&dir).is_ok(), is_number, "{byte:#x}");
        }
        poke(&dir, weight, 65_535, 0);
        poke(&dir, "norm.weight", 7, 0x7F);
        poke(&dir, "norm.weight", 6, 0xC0);
        assert!(matches!(bind(&dir), Err(BindError::Nan { tensor, index: 3, .. }) if tensor == "norm.weight"));
    }

    #[test]
    fn a_hash_table_beyond_the_experts_is_refused() {
        let (_root, dir) = small();
        let table = "layers.0.ffn.gate.tid2eid";
        poke(&dir, table, 8 * 5, 8);
        assert_eq!(bind(&dir).unwrap_err().to_string(), format!("{table}: want experts 0 to 7, got 8 at element 5"));
        poke(&dir, table, 8 * 5, 0);
        poke(&dir, table, 8 * 5 + 7, 0xFF);
        assert!(matches!(bind(&dir), Err(BindError::Expert { index: 5, .. })));
    }

    #[test]
    fn a_sparse_checkpoint_of_the_official_shape_binds() {
        let (_root, dir) = synth("official", 1, &inventory::shards(&shape_of("official")), true);
        let checkpoint = Checkpoint::open(&dir).unwrap();
        assert_eq!((checkpoint.shards().len(), checkpoint.n_tensors()), (48, 72_317));
        assert_eq!(checkpoint.tensor_bytes(), 166_878_536_440);
        let weights = Weights::bind(&checkpoint, &shape_of("official")).unwrap();
        assert_eq!((weights.layers.len(), weights.stages.len()), (43, 3));
        assert_eq!(weights.layers[42].ffn.experts[255].w2.n_cols, 2048);
    }

    #[test]
    fn a_taken_directory_is_left_alone() {
        let (_root, dir) = small();
        let plan = SynthPlan { config_json: b"{}", shards: &[], seed: 1, n_experts: 8, is_sparse: false };
        let error = write(&dir, &plan, &|_| ()).unwrap_err().to_string();
        assert!(error.contains("already exists"), "{error}");
        assert!(bind(&dir).is_ok());
        let leftovers = fs::read_dir(dir.parent().unwrap()).unwrap().count();
        assert_eq!(leftovers, 1);
    }
}
