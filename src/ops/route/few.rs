//! Router, sorting and the shared expert's activation of a step of few rows in one launch; the bits are those of the three.

use bytemuck::{Pod, Zeroable};

use crate::device::{Buffer, Device, DeviceError};
use crate::ops::case::data::{Noise, download, nan_buffer, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::route::device::{self, RouteArgs};
use crate::ops::route::dispatch::{self, DispatchArgs};
use crate::ops::step::{Step, StepCounts};
use crate::ops::swiglu::device::{self as swiglu, SwigluArgs};

/// Rows up to which one block routes about as fast as many.
pub const MAX_ROWS: u32 = 64;

/// Arguments of the kernel, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct RouteFewArgs {
    /// The router.
    pub route: RouteArgs,
    /// The sorting of what it chooses.
    pub dispatch: DispatchArgs,
    /// The shared expert's activation, one row for each of the step's.
    pub shared: SwigluArgs,
}

const _: () = assert!(size_of::<RouteFewArgs>() == 264);

/// Does all three for `n_rows` rows (those of the bucket).
///
/// # Errors
/// When the device refuses the launch. Panics on sizes that the kernel has no room for, and on more than [`MAX_ROWS`] rows.
pub fn launch(device: &Device, args: &RouteFewArgs, n_rows: u32) -> Result<(), DeviceError> {
    args.route.check();
    args.dispatch.check();
    assert!(n_rows <= MAX_ROWS, "route: T: {n_rows}, want at most {MAX_ROWS}");
    let n_blocks = 1 + n_rows * args.shared.n_cols.div_ceil(swiglu::BLOCK_COLS);
    device.launch(device.kernel("route_few")?, [n_blocks, 1, 1], dispatch::N_THREADS, args)
}

/// The cases of the kernel.
#[must_use]
pub(super) fn cases() -> Vec<OpCase> {
    let shapes = [(1, 256, 6, 2048), (17, 256, 6, 40), (64, 8, 2, 1025), (0, 8, 2, 64), (5, 512, 16, 1)];
    let case = |(n_rows, n_experts, top_k, n_cols)| {
        let name = format!("few, {n_rows} rows, {top_k} of {n_experts}, F {n_cols}");
        OpCase::new("route", name, move |device| compare(device, n_rows, (n_experts, top_k), n_cols))
    };
    shapes.map(case).into()
}

/// Every output of a step.
fn outputs(device: &Device, lengths: &[usize]) -> Result<Vec<Buffer>, DeviceError> {
    lengths.iter().map(|n| nan_buffer(device, 4 * n)).collect()
}

/// One launch against three: every byte of every output.
fn compare(device: &Device, n_rows: u32, (n_experts, top_k): (u32, u32), n_cols: u32) -> Result<Deviation, CaseError> {
    let mut noise = Noise::new(67);
    let (n_pairs, n_hidden, n_padded) = (n_rows * top_k, n_rows * n_cols, (n_rows + 3).min(MAX_ROWS));
    let mut floats = |n: u32| upload(device, &noise.floats(n as usize).iter().map(|x| x * 12.0).collect::<Vec<f32>>());
    let (logits, bias) = (floats(n_rows * n_experts)?, floats(n_experts)?);
    let (gate, up) = (floats(n_hidden)?, floats(n_hidden)?);
    let counts = upload(device, &[StepCounts { n_rows, ..StepCounts::default() }])?;
    let step = Step { counts: counts.address(), ..Step::default() };
    let items = dispatch::max_items(n_rows, n_experts, top_k, 8);
    let lengths = [n_pairs, n_pairs, n_pairs, n_pairs, n_pairs, n_experts + 1, 2 * items, 1, n_hidden.div_ceil(2)];
    let lengths = lengths.map(|n| n as usize + 4);
    let args = |out: &[Buffer]| {
        let at = |i: usize| out[i].address();
        let (route, dispatch) = (RouteArgs::default(), DispatchArgs::default());
        let (logits, bias, scale, counts) = (logits.address(), bias.address(), 1.5, counts.address());
        let (experts, weights, row_of, row_token, row_weight) = (at(0), at(1), at(2), at(3), at(4));
        let route = RouteArgs { step, logits, bias, experts, weights, n_experts, top_k, scale, ..route };
        let dispatch = DispatchArgs { step, experts, weights, row_of, row_token, row_weight, ..dispatch };
        let (expert_first, items, n_items) = (at(5), at(6), at(7));
        let dispatch = DispatchArgs { expert_first, items, n_items, n_experts, top_k, rows_per_item: 8, ..dispatch };
        let (gate, up, out) = (gate.address(), up.address(), at(8));
        let shared =
            SwigluArgs { gate, up, out, n_rows: counts, multiplier: 1, n_cols, limit: 10.0, ..Default::default() };
        RouteFewArgs { route, dispatch, shared }
    };
    let (one, three) = (outputs(device, &lengths)?, outputs(device, &lengths)?);
    launch(device, &args(&one), n_padded)?;
    let apart = args(&three);
    device::launch(device, &apart.route, n_padded)?;
    dispatch::launch(device, &apart.dispatch)?;
    swiglu::launch(device, &apart.shared, n_padded)?;
    let mut n_wrong = 0.0;
    for ((one, three), n) in one.iter().zip(&three).zip(lengths) {
        n_wrong += Deviation::exact(&download::<u32>(device, one, n)?, &download(device, three, n)?).worst;
    }
    Ok(Deviation { worst: n_wrong, limit: 0.0 })
}
