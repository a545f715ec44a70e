//! Cases of `repack`: its bytes against the layout's definition, and what it refuses.

use super::random::{random_matrix, repack_into, repacked, stored_bytes};
use super::{WeightFormat, WeightShape, reference};
use crate::device::Device;
use crate::ops::case::data::{Noise, download, nan_buffer};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::tensor::matrix::MatrixData;

pub(super) fn cases() -> Vec<OpCase> {
    let formats = [WeightFormat::Fp8, WeightFormat::Mxfp4, WeightFormat::Bf16];
    let shapes = [(16, 128), (1, 32), (17, 160), (130, 416), (0, 64), (48, 256), (300, 96)];
    let shape = move |(n_rows, n_cols)| formats.map(|format| WeightShape { n_rows, n_cols, format });
    let mut cases: Vec<OpCase> = shapes
        .into_iter()
        .flat_map(shape)
        .map(|shape| OpCase::new("repack", format!("{shape:?}"), move |device| layout(device, shape)))
        .collect();
    cases.push(OpCase::new("repack", "NaN codes and scales are counted", refusals));
    cases
}

/// The kernel's bytes against the layout's definition.
fn layout(device: &Device, shape: WeightShape) -> Result<Deviation, CaseError> {
    let weight = repacked(device, shape, random_matrix(&mut Noise::new(11), shape))?;
    let (codes, scales) = stored_bytes(&weight.matrix);
    let want = reference(shape, device.info().wave, codes, scales);
    let got: (Vec<u8>, Vec<u8>) =
        (download(device, &weight.codes, want.0.len())?, download(device, &weight.scales, want.1.len())?);
    Ok(Deviation::exact(&[got.0, got.1].concat(), &[want.0, want.1].concat()))
}

fn refusals(device: &Device) -> Result<Deviation, CaseError> {
    let mut got = Vec::new();
    for (format, scale) in [(WeightFormat::Fp8, 0xFF), (WeightFormat::Fp8, 0xFE), (WeightFormat::Mxfp4, 0xFF)] {
        let shape = WeightShape { n_rows: 17, n_cols: 160, format };
        let mut matrix = random_matrix(&mut Noise::new(12), shape);
        if let MatrixData::Fp8 { codes, scales } | MatrixData::Mxfp4 { codes, scales } = &mut matrix.data {
            let mut bytes = codes.to_vec();
            (bytes[5], bytes[200]) = (0x7F, 0xFF);
            *codes = bytes.into();
            let mut bytes = scales.to_vec();
            bytes[1] = scale;
            *scales = bytes.into();
        }
        let codes = nan_buffer(device, shape.code_bytes() as usize)?;
        let scales = nan_buffer(device, shape.scale_bytes() as usize)?;
        got.push(repack_into(device, shape, &matrix, [codes.address(), scales.address()])?);
    }
    // 2^127 has no double; MXFP4 bytes are four bits each and have no NaN.
    let of_254 = u32::from(device.info().wave == 64);
    Ok(Deviation::exact(&got, &[3, 2 + of_254, 1]))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_agrees_with_the_layout() {
        crate::device::testing::run_cases(&super::cases());
    }
}
