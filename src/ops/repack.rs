//! Weights in the layout that device kernels read: its sizes, and the kernel that makes it from the checkpoint's bytes.
//!
//! Rows are cut into tiles of 16, columns into steps of 128, both padded with zero codes; a step of a tile is one (MXFP4), two (FP8)
//! or four (BF16) units of 1,024 bytes, each 64 pieces of 16 bytes. A piece is what one lane reads; kernels/common/weight_tile.h says which
//! columns it holds and why.

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::OpCase;
use crate::tensor::matrix::{FP8_BLOCK, MXFP4_BLOCK, Matrix, MatrixData};

mod cases;
pub(crate) mod random;

/// Rows of a row tile.
pub const TILE_ROWS: u32 = 16;
/// Columns of a step.
pub const STEP_COLS: u32 = 128;
/// Waves of a block of a product.
pub const PRODUCT_WAVES: u32 = 8;
/// Bytes of a unit.
const UNIT_BYTES: u64 = 1024;
/// Columns of a block; a quarter of a wave owns 8 of them.
const BLOCK_COLS: u32 = 32;
/// Threads of a block of `repack`, and blocks at most.
const N_THREADS: u32 = 256;
const MAX_BLOCKS: u64 = 1 << 16;

/// How a weight's codes are stored; the numbers are the kernels'.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum WeightFormat {
    /// E4M3 with an E8M0 scale for 128 x 128.
    Fp8 = 0,
    /// E2M1 with an E8M0 scale for 32 columns of a row.
    Mxfp4 = 1,
    /// BF16.
    Bf16 = 2,
}

/// A weight's shape, which decides sizes and the order of sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightShape {
    /// Output features (N).
    pub n_rows: u32,
    /// Input features (K); a multiple of 8, of 32 for MXFP4.
    pub n_cols: u32,
    /// Storage.
    pub format: WeightFormat,
}

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct RepackArgs {
    /// The checkpoint's codes, row-major; any alignment.
    pub src_codes: u64,
    /// The checkpoint's scales.
    pub src_scales: u64,
    /// Room for [`WeightShape::code_bytes`].
    pub dst_codes: u64,
    /// Room for [`WeightShape::scale_bytes`].
    pub dst_scales: u64,
    /// Counted up for each code or scale that has no value: NaN codes, NaN scales, and on gfx942 FP8 scales that can't be doubled.
    pub n_refused: u64, // [1] u32
    /// N.
    pub n_rows: u32,
    /// K.
    pub n_cols: u32,
    /// A [`WeightFormat`].
    pub format: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<RepackArgs>() == 56);

impl WeightShape {
    /// The shape of a stored matrix; none for F32, which no device product reads.
    #[must_use]
    pub fn of(matrix: &Matrix) -> Option<Self> {
        let format = match matrix.data {
            MatrixData::Fp8 { .. } => WeightFormat::Fp8,
            MatrixData::Mxfp4 { .. } => WeightFormat::Mxfp4,
            MatrixData::Bf16 { .. } => WeightFormat::Bf16,
            MatrixData::F32 { .. } => return None,
        };
        let (n_rows, n_cols) = (u32::try_from(matrix.n_rows).ok()?, u32::try_from(matrix.n_cols).ok()?);
        Some(Self { n_rows, n_cols, format })
    }

    /// Row tiles.
    #[must_use]
    pub const fn n_row_tiles(self) -> u32 {
        self.n_rows.div_ceil(TILE_ROWS)
    }

    /// Steps of 128 columns.
    #[must_use]
    pub const fn n_steps(self) -> u32 {
        self.n_cols.div_ceil(STEP_COLS)
    }

    /// Bytes of the repacked codes, a multiple of 1,024.
    #[must_use]
    pub const fn code_bytes(self) -> u64 {
        self.n_row_tiles() as u64 * self.n_steps() as u64 * self.units_per_step() as u64 * UNIT_BYTES
    }

    /// Bytes of the repacked scales; a multiple of 64 for MXFP4.
    #[must_use]
    pub const fn scale_bytes(self) -> u64 {
        match self.format {
            WeightFormat::Fp8 => self.n_rows.div_ceil(FP8_BLOCK as u32) as u64 * self.n_steps() as u64,
            WeightFormat::Mxfp4 => self.n_row_tiles() as u64 * self.n_steps() as u64 * 64,
            WeightFormat::Bf16 => 0,
        }
    }

    /// Into how many ranges K is split: by the shape alone, the same as in the kernels. `n_like_it` matrices work at the same time.
    #[must_use]
    pub const fn n_splits(self, n_like_it: u32) -> u32 {
        let mut splits = 1;
        while splits < PRODUCT_WAVES && self.n_row_tiles() * n_like_it * splits < 3072 && self.n_steps() >= 4 * splits {
            splits *= 2;
        }
        splits
    }

    /// Units of a step.
    const fn units_per_step(self) -> u32 {
        match self.format {
            WeightFormat::Fp8 => 2,
            WeightFormat::Mxfp4 => 1,
            WeightFormat::Bf16 => 4,
        }
    }

    /// Panics when kernels can't work with the shape: a bug in the caller.
    pub(crate) fn check(self, op: &str) {
        assert!(self.n_cols > 0 && self.n_cols.is_multiple_of(8), "{op}: K: {}, want a multiple of 8", self.n_cols);
        let is_whole = self.format != WeightFormat::Mxfp4 || (self.n_cols as usize).is_multiple_of(MXFP4_BLOCK);
        assert!(is_whole, "{op}: K: {}, want a multiple of {MXFP4_BLOCK}", self.n_cols);
    }
}

impl RepackArgs {
    /// Arguments for a shape; the addresses are the caller's to set.
    #[must_use]
    pub fn new(shape: WeightShape) -> Self {
        let WeightShape { n_rows, n_cols, format } = shape;
        Self { n_rows, n_cols, format: format as u32, ..Self::default() }
    }
}

/// Repacks one matrix. `shape` is that of the arguments.
///
/// # Errors
/// When the device refuses the launch.
pub fn launch(device: &Device, shape: WeightShape, args: &RepackArgs) -> Result<(), DeviceError> {
    shape.check("repack");
    let n_scales = if shape.format == WeightFormat::Mxfp4 { shape.scale_bytes() / 4 } else { shape.scale_bytes() };
    let n_items = shape.code_bytes() / 16 + n_scales;
    if n_items == 0 {
        return Ok(());
    }
    let n_blocks = n_items.div_ceil(u64::from(N_THREADS)).min(MAX_BLOCKS) as u32;
    device.launch(device.kernel("repack")?, [n_blocks, 1, 1], N_THREADS, args)
}

/// The layout, element by element: the repacked codes and scales of a matrix for waves of `wave` lanes (64 also means FNUZ codes).
#[must_use]
pub fn reference(
    shape: WeightShape,
    wave: u32,
    codes: &[u8],  // [N, K] in the format's bytes
    scales: &[u8], // [ceil(N/128), ceil(K/128)] or [N, K/32]
) -> (Vec<u8>, Vec<u8>) {
    let mut out = (vec![0; shape.code_bytes() as usize], vec![0; shape.scale_bytes() as usize]);
    let (n, k) = (shape.n_rows as usize, shape.n_cols as usize);
    let (unit_cols, fnuz) = (STEP_COLS / shape.units_per_step(), wave == 64);
    for (row, col) in (0..n).flat_map(|row| (0..k).map(move |col| (row, col))) {
        let (tile, unit) = (row as u32 / TILE_ROWS, col as u32 / unit_cols);
        let (row_in_tile, quarter) = (row as u32 % TILE_ROWS, col as u32 % BLOCK_COLS / 8);
        let piece = if wave == 64 { quarter * 16 + row_in_tile } else { row_in_tile * 4 + quarter };
        let n_units = shape.n_steps() * shape.units_per_step();
        let at = (u64::from(tile * n_units + unit) * UNIT_BYTES) as usize + 16 * piece as usize;
        let (block, i) = ((col as u32 % unit_cols / BLOCK_COLS) as usize, col % 8);
        match shape.format {
            WeightFormat::Fp8 => {
                let code = codes[row * k + col];
                let byte = if wave == 64 { i } else { i / 4 * 4 + [0, 2, 1, 3][i % 4] };
                out.0[at + 8 * block + byte] = if fnuz && code == 0x80 { 0 } else { code };
            }
            WeightFormat::Mxfp4 => {
                let code = codes[(row * k + col) / 2] >> (4 * (col % 2)) & 15;
                let bit = i / 2 * 4 + i % 2 * 16;
                out.0[at + 4 * block + bit / 8] |= code << (bit % 8);
                let step = (shape.n_steps() * tile) as usize + col / STEP_COLS as usize;
                out.1[step * 64 + row_in_tile as usize * 4 + col % 128 / 32] = scales[(row * k + col) / MXFP4_BLOCK];
            }
            WeightFormat::Bf16 => {
                out.0[at + 2 * i..][..2].copy_from_slice(&codes[2 * (row * k + col)..][..2]);
            }
        }
    }
    if shape.format == WeightFormat::Fp8 {
        out.1 = scales.iter().map(|s| s + u8::from(fnuz)).collect();
    }
    out
}

/// The kernel's cases.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    cases::cases()
}
