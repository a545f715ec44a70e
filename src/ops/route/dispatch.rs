//! The rows of a step sorted by expert, and the work items over them: what the grouped products of [`expert_linear`] read.
//!
//! Sorted rows are in order of expert, then of the step's rows, so they follow from the routing alone. An item is an expert and up to
//! `rows_per_item` of its rows.
//!
//! [`expert_linear`]: crate::ops::expert_linear

use bytemuck::{Pod, Zeroable};

use crate::device::{Device, DeviceError};
use crate::ops::case::OpCase;
use crate::ops::step::Step;

mod cases;

/// Experts that the kernel has room for.
const MAX_EXPERTS: u32 = 512;
/// Threads of the one block.
pub(super) const N_THREADS: u32 = 512;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct DispatchArgs {
    /// The step's rows, runs and counts.
    pub step: Step,
    /// The experts of each row.
    pub experts: u64, // [T, K] u32, below E
    /// Their weights.
    pub weights: u64, // [T, K] f32
    /// The sorted row of each (row, choice).
    pub row_of: u64, // [T, K] u32
    /// The step's row of each sorted row.
    pub row_token: u64, // [T * K] u32
    /// The weight of each sorted row.
    pub row_weight: u64, // [T * K] f32
    /// The first sorted row of each expert, and their number.
    pub expert_first: u64, // [E + 1] u32
    /// Expert and first sorted row.
    pub items: u64, // [max_items, 2] u32
    /// Items made.
    pub n_items: u64, // [1] u32
    /// E.
    pub n_experts: u32,
    /// K.
    pub top_k: u32,
    /// Rows of an item at most.
    pub rows_per_item: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<DispatchArgs>() == 112);

impl DispatchArgs {
    /// Panics on more experts than there is room for.
    pub(super) fn check(&self) {
        assert!(self.n_experts <= MAX_EXPERTS, "dispatch: E: {}, want at most {MAX_EXPERTS}", self.n_experts);
        assert!(
            self.top_k > 0 && self.rows_per_item > 0,
            "dispatch: K {}, items of {}",
            self.top_k,
            self.rows_per_item
        );
    }
}

/// What `dispatch` makes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dispatched {
    /// The sorted row of each (row, choice).
    pub row_of: Vec<u32>, // [T, K]
    /// The step's row of each sorted row.
    pub row_token: Vec<u32>, // [T * K]
    /// The weight of each sorted row.
    pub row_weight: Vec<f32>, // [T * K]
    /// The first sorted row of each expert, and their number.
    pub expert_first: Vec<u32>, // [E + 1]
    /// Expert and first sorted row.
    pub items: Vec<[u32; 2]>,
}

/// Items that a step of `n_rows` rows can have at most: the room of `items` and the grid of `expert_linear`.
#[must_use]
pub const fn max_items(n_rows: u32, n_experts: u32, top_k: u32, rows_per_item: u32) -> u32 {
    // Each expert with rows has one item that may be partly filled.
    let n_pairs = n_rows * top_k;
    let n_partly = if n_pairs < n_experts { n_pairs } else { n_experts };
    let most = n_pairs / rows_per_item + n_partly;
    if most < n_pairs { most } else { n_pairs }
}

/// The contract in scalar code.
#[must_use]
pub fn reference(
    experts: &[u32], // [T, K]
    weights: &[f32], // [T, K]
    args: &DispatchArgs,
) -> Dispatched {
    let mut order: Vec<usize> = (0..experts.len()).collect();
    order.sort_by_key(|&pair| (experts[pair], pair));
    let mut out = Dispatched { row_of: vec![0; experts.len()], ..Dispatched::default() };
    for (row, &pair) in order.iter().enumerate() {
        out.row_of[pair] = row as u32;
        out.row_token.push(pair as u32 / args.top_k);
        out.row_weight.push(weights[pair]);
    }
    out.expert_first.push(0);
    for expert in 0..args.n_experts {
        let first = out.expert_first[expert as usize];
        let end = first + experts.iter().filter(|e| **e == expert).count() as u32;
        out.items.extend((first..end).step_by(args.rows_per_item as usize).map(|row| [expert, row]));
        out.expert_first.push(end);
    }
    out
}

/// Sorts the step's rows.
///
/// # Errors
/// When the device refuses the launch. Panics on more experts than there is room for.
pub fn launch(device: &Device, args: &DispatchArgs) -> Result<(), DeviceError> {
    args.check();
    device.launch(device.kernel("dispatch")?, [1, 1, 1], N_THREADS, args)
}

/// The cases of the kernel.
#[must_use]
pub(super) fn cases() -> Vec<OpCase> {
    cases::cases()
}
