//! Products of stored weights on a device: arguments, launch and cases of `linear`; weights are in the layout of [`repack`].
//!
//! Bits: K is split into ranges by the weight's shape alone; a range sums its steps of 128 columns in ascending order, each begun at zero
//! and scaled by its FP8 block's scale; the ranges' sums are added in ascending order. So a result depends on its own row of x only,
//! whatever the form of the kernel and the number of rows are.
//!
//! [`repack`]: crate::ops::repack

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::OpCase;
use crate::ops::repack::{PRODUCT_WAVES, TILE_ROWS, WeightShape};
use crate::ops::step::Step;

mod cases;

/// Products of one launch.
pub const MAX_PROBLEMS: usize = 8;

/// Where a product's number of rows is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum RowsCount {
    /// The step's rows.
    Rows = 0,
    /// The rows whose logits are wanted.
    LogitRows = 1,
}

/// One product y = W x.
#[derive(Clone, Copy, Debug)]
pub struct DeviceProduct {
    /// Shape of W, all groups together.
    pub weight: WeightShape,
    /// Repacked codes.
    pub codes: u64,
    /// Repacked scales; 0 for BF16.
    pub scales: u64,
    /// Inputs.
    pub x: u64, // [T, x_stride] bf16, 16-byte aligned rows
    /// Outputs.
    pub y: u64, // [T, y_stride] f32, or bf16; the first N of each row are written
    /// Elements from one row of x to the next, a multiple of 8.
    pub x_stride: u32,
    /// Elements from one row of y to the next.
    pub y_stride: u32,
    /// Groups of consecutive rows of W; group g reads columns g K .. (g + 1) K of x. 1 when there are none, else N / groups is a multiple
    /// of 16.
    pub n_groups: u32,
    /// Rows of x and y.
    pub rows_count: RowsCount,
    /// Whether outputs are rounded to bf16, as the next product's input.
    pub is_rounded: bool,
}

/// Which entry point runs: how many rows of x a block takes. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductForm {
    /// A block splits K over its waves and takes up to so many rows: 8, 16, 32 or 64.
    Few(u32),
    /// A wave walks all of K for 32 weight rows and 32 of the block's 64 rows.
    Many,
}

/// One problem as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(in crate::ops) struct LinearProblem {
    codes: u64,
    scales: u64,
    x: u64,
    y: u64,
    n_rows: u32,
    n_cols: u32,
    x_stride: u32,
    y_stride: u32,
    group_rows: u32,
    format: u32,
    first_tile: u32,
    rows_count_source: u16,
    is_rounded: u16,
}

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct LinearArgs {
    step: Step,
    problems: [LinearProblem; MAX_PROBLEMS],
    n_problems: u32,
    n_tiles_total: u32,
}

const _: () = assert!(size_of::<LinearProblem>() == 64 && size_of::<LinearArgs>() == 552);

impl ProductForm {
    /// Row tiles that a block of the Many form takes.
    const MANY_ROW_TILES: u32 = 8;

    /// The form for a bucket of rows.
    #[must_use]
    pub const fn of(n_rows: u32) -> Self {
        match n_rows {
            0..=8 => Self::Few(8),
            9..=16 => Self::Few(16),
            17..=32 => Self::Few(32),
            33..=64 => Self::Few(64),
            _ => Self::Many,
        }
    }

    /// Rows of x a block takes on a device of this wave width.
    pub(crate) const fn rows_per_block(self, wave: u32) -> u32 {
        match self {
            // A tile of 16 columns is the least there.
            Self::Few(rows) if wave == 64 && rows < 16 => 16,
            Self::Few(rows) => rows,
            Self::Many => 64,
        }
    }

    /// Row tiles of a weight a block takes.
    pub(crate) const fn row_tiles_per_block(self, n_splits: u32) -> u32 {
        match self {
            Self::Few(_) => PRODUCT_WAVES / n_splits,
            Self::Many => Self::MANY_ROW_TILES,
        }
    }

    fn kernel(self, device: &Device) -> Result<crate::device::Kernel, DeviceError> {
        device.kernel(match self {
            Self::Few(..=8) => "linear_8",
            Self::Few(..=16) => "linear_16",
            Self::Few(..=32) => "linear_32",
            Self::Few(_) => "linear_64",
            Self::Many => "linear_many",
        })
    }
}

/// Computes up to eight products in one launch. `n_rows` is the largest number of rows of any of them: the bucket's, or that of logit rows.
///
/// # Errors
/// When the device refuses the launch. Panics on shapes that don't fit: a bug in the caller.
pub fn launch(device: &Device, step: Step, products: &[DeviceProduct], n_rows: u32) -> Result<(), DeviceError> {
    launch_as(device, ProductForm::of(n_rows), step, products, n_rows)
}

/// As [`launch`], in a given form.
///
/// # Errors
/// As [`launch`].
pub fn launch_as(
    device: &Device,
    form: ProductForm,
    step: Step,
    products: &[DeviceProduct],
    n_rows: u32,
) -> Result<(), DeviceError> {
    assert!(products.len() <= MAX_PROBLEMS, "linear: {} products, want at most {MAX_PROBLEMS}", products.len());
    let mut args = LinearArgs { step, ..LinearArgs::default() };
    for product in products.iter().filter(|product| product.weight.n_rows > 0) {
        let problem = problem(product, args.n_tiles_total);
        args.problems[args.n_problems as usize] = problem;
        args.n_problems += 1;
        args.n_tiles_total += n_blocks(product, form);
    }
    if args.n_problems == 0 || n_rows == 0 {
        return Ok(());
    }
    let wave = device.info().wave;
    let grid = [args.n_tiles_total, n_rows.div_ceil(form.rows_per_block(wave)), 1];
    device.launch(form.kernel(device)?, grid, PRODUCT_WAVES * wave, &args)
}

/// The cases of the kernel.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    cases::cases()
}

/// Blocks over a product's weight rows.
pub(in crate::ops) fn n_blocks(product: &DeviceProduct, form: ProductForm) -> u32 {
    let weight = product.weight;
    let tiles_per_block = form.row_tiles_per_block(weight.n_splits(1));
    match form {
        ProductForm::Few(_) => weight.n_row_tiles().div_ceil(tiles_per_block),
        // A block's rows are of one group.
        ProductForm::Many => {
            product.n_groups * (weight.n_rows / product.n_groups).div_ceil(TILE_ROWS).div_ceil(tiles_per_block)
        }
    }
}

/// One problem of a launch, whose first block is `first_tile`.
pub(in crate::ops) fn problem(p: &DeviceProduct, first_tile: u32) -> LinearProblem {
    let WeightShape { n_rows, n_cols, format } = p.weight;
    p.weight.check("linear");
    assert!(p.n_groups > 0 && n_rows.is_multiple_of(p.n_groups), "linear: N: {n_rows} rows in {} groups", p.n_groups);
    let group_rows = n_rows / p.n_groups;
    assert!(
        p.n_groups == 1 || group_rows.is_multiple_of(TILE_ROWS),
        "linear: N: groups of {group_rows} rows, want a multiple of {TILE_ROWS}"
    );
    assert!(
        p.x.is_multiple_of(16) && p.x_stride.is_multiple_of(8),
        "linear: x: {:#x} by {}, want rows at 16 bytes",
        p.x,
        p.x_stride
    );
    assert!(p.x_stride >= n_cols * p.n_groups, "linear: K: x_stride {}, want {}", p.x_stride, n_cols * p.n_groups);
    assert!(p.y_stride >= n_rows, "linear: N: y_stride {}, want {n_rows}", p.y_stride);
    LinearProblem {
        codes: p.codes,
        scales: p.scales,
        x: p.x,
        y: p.y,
        n_rows,
        n_cols,
        x_stride: p.x_stride,
        y_stride: p.y_stride,
        group_rows,
        format: format as u32,
        first_tile,
        rows_count_source: p.rows_count as u16,
        is_rounded: u16::from(p.is_rounded),
    }
}
