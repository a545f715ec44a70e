//! Cases of `fill`: weights to the byte of the generator's, rows to that of the reference, nothing written outside.

use super::{CacheRows, FillArgs, Parts, launch, reference};
use crate::checkpoint::spec::{Dtype, TensorSpec};
use crate::checkpoint::synth::Generator;
use crate::device::Device;
use crate::ops::case::data::{download, nan_buffer};
use crate::ops::case::{CaseError, Deviation, OpCase};

const SEED: u64 = 11;
/// Bytes behind the last part that must stay.
const GUARD: usize = 64;

pub(super) fn cases() -> Vec<OpCase> {
    let tensors = [
        ("head.weight", Dtype::BF16, [3, 520]),
        ("norm.weight", Dtype::BF16, [1, 259]),
        ("layers.0.hc_attn_fn", Dtype::F32, [5, 67]),
        ("layers.1.attn.wo_b.weight", Dtype::F8_E4M3, [130, 77]),
        ("layers.1.attn.wo_b.scale", Dtype::F8_E8M0, [33, 7]),
        ("layers.2.ffn.experts.7.w2.weight", Dtype::I8, [90, 48]),
        ("layers.2.ffn.experts.7.w2.scale", Dtype::F8_E8M0, [9, 3]),
    ];
    // Elements behind the first ones, some past 2^32 as in no tensor.
    let of_tensor = |(name, dtype, shape): (&str, Dtype, [usize; 2])| {
        let spec = TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() };
        [(0, spec.n_elements()), (5, 1), (17, 100), ((1 << 33) + 3, 33), (0, 0)].map(|(first, n)| {
            let spec = spec.clone();
            let name = format!("{} {}, {n} from {first}", spec.name, spec.form());
            OpCase::new("fill", name, move |device| weight(device, &spec, first, n))
        })
    };
    let of_rows = |(kind, n_bytes, stride, n): (CacheRows, u64, u64, u16)| {
        let name = format!("{kind:?} rows, {n} parts of {n_bytes} bytes every {stride}");
        OpCase::new("fill", name, move |device| rows(device, kind, [n_bytes, stride], n))
    };
    let lists = [
        (CacheRows::Kv, 584 * 3, 2048, 4),
        (CacheRows::Kv, 584 * 64, 584 * 64, 2),
        (CacheRows::Index, 68 * 64, 8192, 3),
        (CacheRows::Index, 68, 80, 1),
        (CacheRows::Raw, 4 * 40, 256, 5),
    ];
    tensors.into_iter().flat_map(of_tensor).chain(lists.into_iter().map(of_rows)).collect()
}

fn weight(device: &Device, spec: &TensorSpec, first: u64, n: usize) -> Result<Deviation, CaseError> {
    let rule = |error: crate::checkpoint::synth::SynthError| CaseError::Rule(error.to_string());
    let n_bytes = n * spec.element_bytes();
    let mut want = vec![0; n_bytes];
    Generator::new(SEED, 8).fill(spec, first as usize, &mut want).map_err(rule)?;
    let args = FillArgs::of_weight(spec, SEED, first).map_err(rule)?;
    let start = first * spec.element_bytes() as u64;
    let by_reference: Vec<u8> = (start..start + n_bytes as u64).map(|index| reference(&args, index)).collect();
    if by_reference != want {
        return Err(CaseError::Rule("the reference and the generator differ".to_owned()));
    }
    want.resize(n_bytes + GUARD, 0xFF);
    let buffer = nan_buffer(device, n_bytes + GUARD)?;
    launch(device, &args, Parts { out: buffer.address(), n_bytes: n_bytes as u64, stride_bytes: 0, n: 1 })?;
    Ok(Deviation::exact(&download::<u8>(device, &buffer, n_bytes + GUARD)?, &want))
}

fn rows(device: &Device, kind: CacheRows, [n_bytes, stride_bytes]: [u64; 2], n: u16) -> Result<Deviation, CaseError> {
    let args = FillArgs::of_rows(kind, SEED);
    let n_all = (u64::from(n) * stride_bytes) as usize + GUARD;
    let mut want = vec![0xFF; n_all];
    for part in 0..u64::from(n) {
        for at in 0..n_bytes {
            want[(part * stride_bytes + at) as usize] = reference(&args, part * n_bytes + at);
        }
    }
    let buffer = nan_buffer(device, n_all)?;
    launch(device, &args, Parts { out: buffer.address(), n_bytes, stride_bytes, n })?;
    Ok(Deviation::exact(&download::<u8>(device, &buffer, n_all)?, &want))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_fills_as_the_formula() {
        crate::device::testing::run_cases(&super::cases());
    }
}
