//! A weight matrix as it is stored: codes and scales stay in the checkpoint's bytes until a kernel expands them in registers.

use bytes::Bytes;

/// Columns (and rows) that share one scale of an FP8 weight.
pub const FP8_BLOCK: usize = 128;
/// Columns that share one scale of an MXFP4 weight.
pub const MXFP4_BLOCK: usize = 32;

/// A weight `[n_rows, n_cols]`, row-major, `y = M·x`. Bytes are views into mapped shards.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// The checkpoint's tensor of the elements; empty where there is no checkpoint.
    pub name: std::sync::Arc<str>,
    /// Output features.
    pub n_rows: usize,
    /// Input features.
    pub n_cols: usize,
    /// How the elements are stored.
    pub data: MatrixData,
}

/// The stored form of a [`Matrix`]; lengths are checked by the binder.
#[derive(Clone, Debug)]
pub enum MatrixData {
    /// OCP E4M3 with one E8M0 scale per 128 x 128 block.
    Fp8 {
        /// Elements.
        codes: Bytes, // [N, K] f8e4m3fn
        /// One a block, row-major over blocks.
        scales: Bytes, // [ceil(N/128), ceil(K/128)] e8m0
    },
    /// E2M1, two columns a byte (low nibble = even column), one E8M0 scale per 32 columns.
    Mxfp4 {
        /// Elements, two a byte.
        codes: Bytes, // [N, K/2] two e2m1
        /// One for 32 columns of a row.
        scales: Bytes, // [N, K/32] e8m0
    },
    /// BF16, little-endian.
    Bf16 {
        /// Elements.
        bits: Bytes, // [N, K] bf16
    },
    /// F32, little-endian in the file, decoded once at load.
    F32 {
        /// Elements.
        values: std::sync::Arc<[f32]>, // [N, K] f32
    },
}
