//! Random matrices, repacked on the device: what the cases of `repack` and of the products work on.

use super::{RepackArgs, WeightFormat, WeightShape, launch};
use crate::device::{Buffer, Device, DeviceError};
use crate::ops::case::data::{Noise, download, nan_buffer, upload};
use crate::tensor::matrix::{Matrix, MatrixData};

/// A matrix on the device and on the host.
pub(crate) struct Weight {
    pub shape: WeightShape,
    pub matrix: Matrix,
    pub codes: Buffer,
    pub scales: Buffer,
}

/// A matrix of random codes without NaN whose values are near 1.
pub(crate) fn random_matrix(noise: &mut Noise, shape: WeightShape) -> Matrix {
    let (n_rows, n_cols) = (shape.n_rows as usize, shape.n_cols as usize);
    let mut near = |n: usize, low: u8| -> Vec<u8> { noise.bytes(n).iter().map(|b| low + b % 3).collect() };
    let n_blocks = n_rows.div_ceil(128) * n_cols.div_ceil(128);
    let data = match shape.format {
        WeightFormat::Fp8 => {
            let scales = near(n_blocks, 118).into();
            let codes = noise.bytes(n_rows * n_cols).iter().map(|b| if b & 0x7F == 0x7F { 0x3A } else { *b }).collect();
            MatrixData::Fp8 { codes: Vec::into(codes), scales }
        }
        WeightFormat::Mxfp4 => {
            let scales = near(n_rows * n_cols / 32, 124).into();
            MatrixData::Mxfp4 { codes: noise.bytes(n_rows * n_cols / 2).into(), scales }
        }
        WeightFormat::Bf16 => {
            let bits = noise.bf16s(n_rows * n_cols).into_iter().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
            MatrixData::Bf16 { bits: bits.into() }
        }
    };
    Matrix { name: "".into(), n_rows, n_cols, data }
}

/// A matrix's codes and scales as they are in a checkpoint.
pub(crate) fn stored_bytes(matrix: &Matrix) -> (&[u8], &[u8]) {
    match &matrix.data {
        MatrixData::Fp8 { codes, scales } | MatrixData::Mxfp4 { codes, scales } => (codes, scales),
        MatrixData::Bf16 { bits } => (bits, &[]),
        MatrixData::F32 { .. } => (&[], &[]),
    }
}

/// Repacks a matrix on the device into fresh buffers.
pub(crate) fn repacked(device: &Device, shape: WeightShape, matrix: Matrix) -> Result<Weight, DeviceError> {
    let codes = nan_buffer(device, shape.code_bytes() as usize)?;
    let scales = nan_buffer(device, shape.scale_bytes() as usize)?;
    repack_into(device, shape, &matrix, [codes.address(), scales.address()])?;
    Ok(Weight { shape, matrix, codes, scales })
}

/// Repacks a matrix on the device to two addresses; returns how many codes and scales were refused.
pub(crate) fn repack_into(
    device: &Device,
    shape: WeightShape,
    matrix: &Matrix,
    to: [u64; 2],
) -> Result<u32, DeviceError> {
    let (codes, scales) = stored_bytes(matrix);
    // An odd address, as in a mapped file.
    let src_codes = upload(device, &[&[0xFF], codes].concat())?;
    let src_scales = upload(device, scales)?;
    let n_refused = upload(device, &[0u32])?;
    let args = RepackArgs {
        src_codes: src_codes.address() + 1,
        src_scales: src_scales.address(),
        dst_codes: to[0],
        dst_scales: to[1],
        n_refused: n_refused.address(),
        ..RepackArgs::new(shape)
    };
    launch(device, shape, &args)?;
    Ok(download(device, &n_refused, 1)?[0])
}
