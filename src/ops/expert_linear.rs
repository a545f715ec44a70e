//! Products of the routed experts on a device: each row with its expert's MXFP4 matrix, over work items that [`dispatch`] made. Of two
//! matrices of one input the result is their activation, as [`swiglu`] makes it.
//!
//! Bits: as [`linear`]'s products, with K split as if eight matrices of the shape were at work; then as [`swiglu`]'s.
//!
//! [`dispatch`]: crate::ops::route::dispatch
//! [`linear`]: crate::ops::linear::device
//! [`swiglu`]: crate::ops::swiglu::device

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::OpCase;
use crate::ops::linear::device::{self as linear, DeviceProduct, LinearProblem, ProductForm};
use crate::ops::linear::element;
use crate::ops::repack::{PRODUCT_WAVES, WeightFormat, WeightShape};
use crate::ops::step::Step;
use crate::tensor::matrix::Matrix;

mod cases;

/// Matrices of one shape that are counted to be at work at once, whatever the step's number of experts is.
pub const N_LIKE_IT: u32 = 16;

/// What the products of the experts take.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct ExpertLinearArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// Repacked codes of expert 0; an expert's matrices lie one after the other.
    pub codes: u64,
    /// Repacked scales, as the codes.
    pub scales: u64,
    /// Bytes from one expert's codes to the next, a multiple of 16.
    pub code_stride_bytes: u64,
    /// Bytes from one expert's scales to the next, a multiple of 4.
    pub scale_stride_bytes: u64,
    /// Inputs.
    pub x: u64, // [*, K] bf16
    /// Outputs.
    pub y: u64, // [T * top_k, N] f32; of two matrices bf16
    /// The weight of each row in the activation of two matrices.
    pub row_weight: u64, // [T * top_k] f32
    /// The row of x that a row reads; 0: its own.
    pub row_token: u64, // [T * top_k] u32
    /// Expert and first row of each item.
    pub items: u64, // [n_items, 2] u32
    /// How many.
    pub n_items: u64, // [1] u32
    /// First row of each expert.
    pub expert_first: u64, // [E + 1] u32
    /// N.
    pub n_rows: u32,
    /// K.
    pub n_cols: u32,
    /// Matrices of one input: 1, or 2 (w1, then w3).
    pub n_matrices: u32,
    /// Rows of an item at most, as `dispatch` was told: 8, 16, 32 or 64.
    pub rows_per_item: u32,
    /// The config's swiglu_limit.
    pub limit: f32,
    /// Zero.
    pub pad: u32,
}

/// Arguments of the kernel, field for field: the experts', and the product beside.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct ExpertLaunchArgs {
    experts: ExpertLinearArgs,
    beside: LinearProblem,
    n_beside_blocks: u32,
    pad: u32,
}

const _: () = assert!(size_of::<ExpertLinearArgs>() == 144 && size_of::<ExpertLaunchArgs>() == 216);

/// Whether a product of the step's rows may be made beside those of the experts by [`launch`]: one of FP8 whose rows are an item's at most.
#[must_use]
pub fn takes_beside(product: &DeviceProduct, n_rows: u32, rows_per_item: u32) -> bool {
    product.weight.format == WeightFormat::Fp8 && n_rows <= rows_per_item && rows_per_item <= 32
}

/// The contract with f64 sums: y of each sorted row, from `expert_of` and `row_token` of the row.
#[must_use]
pub fn reference(
    experts: &[Matrix],
    x: &[f32],         // [*, K] f32
    expert_of: &[u32], // [R]
    row_token: &[u32], // [R]
) -> Vec<f64> {
    let rows = expert_of.iter().zip(row_token);
    rows.flat_map(|(expert, token)| {
        let w = &experts[*expert as usize];
        let x = &x[*token as usize * w.n_cols..][..w.n_cols];
        (0..w.n_rows).map(move |r| x.iter().enumerate().map(|(c, x)| f64::from(*x) * f64::from(element(w, r, c))).sum())
    })
    .collect()
}

/// Computes the products of at most `max_items` items (the number there are is read on the device), and one beside them that
/// [`takes_beside`] allows.
///
/// # Errors
/// When the device refuses the launch. Panics on shapes that don't fit: a bug in the caller.
pub fn launch(
    device: &Device,
    args: &ExpertLinearArgs,
    max_items: u32,
    beside: Option<&DeviceProduct>,
) -> Result<(), DeviceError> {
    let shape = WeightShape { n_rows: args.n_rows, n_cols: args.n_cols, format: WeightFormat::Mxfp4 };
    shape.check("expert_linear");
    assert!(args.x.is_multiple_of(16), "expert_linear: x: {:#x}, want rows at 16 bytes", args.x);
    let rows = args.rows_per_item;
    assert!([8, 16, 32, 64].contains(&rows), "expert_linear: rows_per_item: {rows}, want 8, 16, 32 or 64");
    let (form, kernel) = match rows {
        8 => (ProductForm::Few(8), "expert_linear_8"),
        16 => (ProductForm::Few(16), "expert_linear_16"),
        32 => (ProductForm::Few(32), "expert_linear_32"),
        _ => (ProductForm::Many, "expert_linear_many"),
    };
    if args.n_rows == 0 || max_items == 0 {
        return Ok(());
    }
    let mut launched = ExpertLaunchArgs { experts: *args, ..ExpertLaunchArgs::default() };
    let n_blocks_of_item = n_blocks(shape, form, args.n_matrices);
    if let Some(product) = beside {
        launched.beside = linear::problem(product, 0);
        launched.n_beside_blocks = linear::n_blocks(product, form);
    }
    let grid = [n_blocks_of_item, launched.n_beside_blocks.div_ceil(n_blocks_of_item) + max_items, 1];
    device.launch(device.kernel(kernel)?, grid, PRODUCT_WAVES * device.info().wave, &launched)
}

/// Blocks of one item. Those of two matrices hold both, of half as many rows unless that is less than a row tile.
fn n_blocks(shape: WeightShape, form: ProductForm, n_matrices: u32) -> u32 {
    let row_tiles = form.row_tiles_per_block(shape.n_splits(N_LIKE_IT));
    shape.n_row_tiles().div_ceil((row_tiles / n_matrices).max(1))
}

/// The cases of the kernel.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    cases::cases()
}
