//! A checkpoint in memory alone: vectors and tables by formula, matrices as holes that a device fills by itself.

use bytes::Bytes;
use rayon::prelude::*;

use super::spec::{Dtype, TensorSpec};
use super::synth::{Generator, SynthError};
use super::{Checkpoint, Entry, Shard, model_id};
use crate::mmap;

/// The shard of the holes: zeros without memory behind them, long enough for the longest.
const ZEROS: usize = 0;
/// The shard of the tensors that hold data.
const DATA: usize = 1;

impl Checkpoint {
    /// The synthetic checkpoint of these tensors as far as the host reads it when a device makes its matrices by the same
    /// formula: what is no matrix holds its data, matrices and their scales are holes.
    ///
    /// # Errors
    /// The formula has no rule for a tensor, or there is no memory.
    pub fn by_formula(
        config_json: &[u8],
        tensors: &[TensorSpec],
        seed: u64,
        n_experts: usize,
    ) -> Result<Self, SynthError> {
        let generator = Generator::new(seed, n_experts);
        let (holes, stored): (Vec<&TensorSpec>, Vec<_>) = tensors.iter().partition(|spec| is_matrix(spec));
        holes.iter().try_for_each(|spec| generator.check(spec))?;
        let n_zeros = holes.iter().map(|spec| spec.n_bytes()).max().unwrap_or(0);
        let zeros =
            mmap::map_zeros(n_zeros).map_err(|source| SynthError::Memory { n_bytes: n_zeros as u64, source })?;
        let fill = |spec: &&TensorSpec| {
            let mut bytes = vec![0; spec.n_bytes()];
            generator.fill(spec, 0, &mut bytes).map(|()| bytes)
        };
        let data = stored.par_iter().map(fill).collect::<Result<Vec<_>, _>>()?.concat();
        let entry = |spec: &TensorSpec, shard_idx, start| Entry {
            shard_idx,
            dtype: spec.dtype,
            shape: spec.shape.clone(),
            range: start..start + spec.n_bytes(),
            is_hole: shard_idx == ZEROS,
        };
        let mut end = 0;
        let of_data = stored.into_iter().map(|spec| {
            let start = end;
            end += spec.n_bytes();
            (spec.name.clone(), entry(spec, DATA, start))
        });
        let of_holes = holes.into_iter().map(|spec| (spec.name.clone(), entry(spec, ZEROS, 0)));
        let tensors = of_holes.chain(of_data).collect();
        let shard =
            |file_name: &str, map: Bytes| Shard { file_name: file_name.to_owned(), file_bytes: map.len() as u64, map };
        Ok(Self {
            dir: format!("formula-{seed}").into(),
            config: config_json.to_vec(),
            shards: vec![shard("holes", zeros), shard("data", data.into())],
            tensors,
            model_id: model_id(config_json, &[]),
        })
    }
}

/// What a device fills: matrices and their scales.
fn is_matrix(spec: &TensorSpec) -> bool {
    match spec.dtype {
        Dtype::BF16 => spec.shape.len() > 1,
        Dtype::F8_E4M3 | Dtype::F8_E8M0 | Dtype::I8 => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_hold_the_formula_and_matrices_are_holes() {
        let spec =
            |name: &str, dtype, shape: &[usize]| TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() };
        let specs = [
            spec("embed.weight", Dtype::BF16, &[8, 128]),
            spec("norm.weight", Dtype::BF16, &[128]),
            spec("layers.0.ffn.gate.tid2eid", Dtype::I64, &[8, 2]),
            spec("layers.0.attn.wkv.scale", Dtype::F8_E8M0, &[4, 1]),
        ];
        let checkpoint = Checkpoint::by_formula(b"{}", &specs, 5, 8).unwrap();
        assert_eq!(checkpoint.n_tensors(), 4);
        for spec in &specs {
            let view = checkpoint.tensor(&spec.name).unwrap();
            let mut want = vec![0; spec.n_bytes()];
            if !view.is_hole {
                Generator::new(5, 8).fill(spec, 0, &mut want).unwrap();
            }
            assert_eq!((view.dtype, view.shape), (spec.dtype, &spec.shape[..]));
            assert_eq!(&view.bytes[..], want, "{}", spec.name);
            assert_eq!(view.is_hole, is_matrix(spec));
        }
        let unknown = [spec("lm_head.weight", Dtype::BF16, &[8, 128])];
        assert!(Checkpoint::by_formula(b"{}", &unknown, 5, 8).is_err());
    }
}
