//! Cases of `expert_linear`: one matrix and two, gathered and own rows, every item size, bits over batches.

use super::{ExpertLinearArgs, launch, reference, takes_beside};
use crate::device::{Buffer, Device, DeviceError};
use crate::ops::case::data::{Noise, bf16_rows, download, nan_buffer, same_bits, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::linear::device::{self as linear, DeviceProduct, RowsCount};
use crate::ops::repack::random::{Weight, random_matrix, repack_into, repacked};
use crate::ops::repack::{WeightFormat, WeightShape};
use crate::ops::route::dispatch;
use crate::ops::step::{Step, StepCounts};
use crate::ops::swiglu::device::{self as swiglu, SwigluArgs};
use crate::tensor::format::bf16_to_f32;
use crate::tensor::matrix::Matrix;

const N_EXPERTS: u32 = 5;
const TOP_K: u32 = 2;

pub(super) fn cases() -> Vec<OpCase> {
    // (N, K, T): official K with N cut, the demo model, odd, one, none.
    let shapes = [
        (17, 4096, 3),
        (33, 2048, 5),
        (33, 1024, 7),
        (49, 512, 9),
        (128, 256, 20),
        (17, 160, 170),
        (1, 32, 1),
        (16, 128, 0),
    ];
    let mut cases = Vec::new();
    for (n_rows, n_cols, t) in shapes {
        let shape = WeightShape { n_rows, n_cols, format: WeightFormat::Mxfp4 };
        for n_matrices in [1, 2] {
            let name = format!("{n_matrices} x {shape:?}, {t} rows");
            cases.push(OpCase::new("expert_linear", name, move |device| every_item_size(device, shape, n_matrices, t)));
        }
        let name = format!("the activation of 2 x {shape:?}, {t} rows, and a product beside");
        cases.push(OpCase::new("expert_linear", name, move |device| activation(device, shape, t)));
    }
    cases
}

/// Experts on the device, with room between them that holds NaN bytes.
struct Experts {
    shape: WeightShape,
    n_matrices: u32,
    matrices: Vec<Vec<Matrix>>, // [n_matrices][E]
    codes: Buffer,
    scales: Buffer,
    strides: [u64; 2],
}

impl Experts {
    fn new(device: &Device, noise: &mut Noise, shape: WeightShape, n_matrices: u32) -> Result<Self, DeviceError> {
        let bytes = [shape.code_bytes(), shape.scale_bytes()];
        let strides = bytes.map(|bytes| bytes * u64::from(n_matrices) + 1024);
        let [codes, scales] = strides.map(|stride| nan_buffer(device, (stride * u64::from(N_EXPERTS)) as usize));
        let (codes, scales) = (codes?, scales?);
        let mut matrices = Vec::new();
        for m in 0..u64::from(n_matrices) {
            let mut all = Vec::new();
            for e in 0..u64::from(N_EXPERTS) {
                let matrix = random_matrix(noise, shape);
                let to =
                    [codes.address() + e * strides[0] + m * bytes[0], scales.address() + e * strides[1] + m * bytes[1]];
                repack_into(device, shape, &matrix, to)?;
                all.push(matrix);
            }
            matrices.push(all);
        }
        Ok(Self { shape, n_matrices, matrices, codes, scales, strides })
    }

    /// Runs sorted rows through the experts: y of each matrix.
    fn run(
        &self,
        device: &Device,
        x: &Buffer,
        rows: &dispatch::Dispatched,
        (is_gathered, rows_per_item): (bool, u32),
    ) -> Result<Vec<Vec<f32>>, CaseError> {
        let n = rows.row_token.len() * self.shape.n_rows as usize;
        let one = |matrix: u64| {
            let y = nan_buffer(device, n * 4 + 64)?;
            let args = ExpertLinearArgs {
                codes: self.codes.address() + matrix * self.shape.code_bytes(),
                scales: self.scales.address() + matrix * self.shape.scale_bytes(),
                y: y.address(),
                n_matrices: 1,
                rows_per_item,
                ..self.args(x)
            };
            self.launch(device, args, rows, (is_gathered, None))?;
            let mut all: Vec<f32> = download(device, &y, n + 16)?;
            if all[n..].iter().any(|v| v.to_bits() != u32::MAX) {
                return Err(CaseError::Rule("written past the last row".to_owned()));
            }
            all.truncate(n);
            Ok(all)
        };
        (0..u64::from(self.n_matrices)).map(one).collect()
    }

    /// What every launch has.
    fn args(&self, x: &Buffer) -> ExpertLinearArgs {
        ExpertLinearArgs {
            codes: self.codes.address(),
            scales: self.scales.address(),
            code_stride_bytes: self.strides[0],
            scale_stride_bytes: self.strides[1],
            x: x.address(),
            n_rows: self.shape.n_rows,
            n_cols: self.shape.n_cols,
            ..ExpertLinearArgs::default()
        }
    }

    /// Launches over sorted rows, beside a product for a number of rows if one is given.
    fn launch(
        &self,
        device: &Device,
        args: ExpertLinearArgs,
        rows: &dispatch::Dispatched,
        (is_gathered, beside): (bool, Option<(&DeviceProduct, u32)>),
    ) -> Result<(), CaseError> {
        let row_token = upload(device, &rows.row_token)?;
        // Items that are not there name an expert far outside.
        let items: Vec<u32> = rows.items.iter().copied().chain([[u32::MAX; 2]; 3]).flatten().collect();
        let (items, n_items) = (upload(device, &items)?, upload(device, &[rows.items.len() as u32])?);
        let expert_first = upload(device, &rows.expert_first)?;
        let n_rows = beside.map_or(0, |(_, n_rows)| n_rows);
        let counts = upload(device, &[StepCounts { n_rows, ..StepCounts::default() }])?;
        let args = ExpertLinearArgs {
            step: Step { counts: counts.address(), ..Step::default() },
            row_token: if is_gathered { row_token.address() } else { 0 },
            items: items.address(),
            n_items: n_items.address(),
            expert_first: expert_first.address(),
            ..args
        };
        launch(device, &args, rows.items.len() as u32 + 3, beside.map(|(product, _)| product))?;
        Ok(device.synchronize()?)
    }
}

/// A product of FP8 that is made beside those of the experts.
struct Beside {
    weight: Weight,
    x: Buffer,
}

impl Beside {
    const N: usize = 40;
    const K: usize = 544;
    const ROWS: usize = 32;

    fn new(device: &Device, noise: &mut Noise) -> Result<Self, DeviceError> {
        let shape = WeightShape { n_rows: Self::N as u32, n_cols: Self::K as u32, format: WeightFormat::Fp8 };
        let matrix = random_matrix(noise, shape);
        Ok(Self { weight: repacked(device, shape, matrix)?, x: upload(device, &noise.bf16s(Self::ROWS * Self::K))? })
    }

    fn product(&self, y: &Buffer) -> DeviceProduct {
        DeviceProduct {
            weight: self.weight.shape,
            codes: self.weight.codes.address(),
            scales: self.weight.scales.address(),
            x: self.x.address(),
            y: y.address(),
            x_stride: Self::K as u32,
            y_stride: Self::N as u32,
            n_groups: 1,
            rows_count: RowsCount::Rows,
            is_rounded: false,
        }
    }
}

/// The activation of two matrices is that of their products, bit for bit, for every item size; a product beside has the bits of `linear`.
fn activation(device: &Device, shape: WeightShape, t: u32) -> Result<Deviation, CaseError> {
    let mut noise = Noise::new(32);
    let experts = Experts::new(device, &mut noise, shape, 2)?;
    let beside = Beside::new(device, &mut noise)?;
    let (n, k) = (t as usize, shape.n_cols as usize);
    let x = upload(device, &bf16_rows(&mut noise, [n, n + 2], k, k))?;
    let (chosen, weights) = choices(&mut noise, n);
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for rows_per_item in [8, 16, 32, 64] {
        let args = dispatch::DispatchArgs { n_experts: N_EXPERTS, top_k: TOP_K, rows_per_item, ..Default::default() };
        let rows = dispatch::reference(&chosen, &weights, &args);
        let n_values = rows.row_token.len() * shape.n_rows as usize + 16;
        let both = || -> Result<[Buffer; 2], DeviceError> {
            Ok([nan_buffer(device, 2 * n_values)?, nan_buffer(device, 4 * Beside::ROWS * Beside::N)?])
        };
        let (apart, joined) = (both()?, both()?);
        let row_weight = upload(device, &rows.row_weight)?;
        let n_beside = rows_per_item.min(32) - 3;
        let product = beside.product(&apart[1]);
        let is_taken = takes_beside(&product, n_beside, rows_per_item);
        swiglu_apart(device, &experts.run(device, &x, &rows, (true, rows_per_item))?, &row_weight, shape, &apart[0])?;
        if is_taken {
            let counts = upload(device, &[StepCounts { n_rows: n_beside, ..StepCounts::default() }])?;
            linear::launch(device, Step { counts: counts.address(), ..Step::default() }, &[product], n_beside)?;
        }
        let (y, row_weight) = (joined[0].address(), row_weight.address());
        let args = experts.args(&x);
        let args = ExpertLinearArgs { y, row_weight, n_matrices: 2, rows_per_item, limit: LIMIT, ..args };
        let product = beside.product(&joined[1]);
        experts.launch(device, args, &rows, (true, is_taken.then_some((&product, n_beside))))?;
        for (all, buffers) in [(&mut got, &joined), (&mut want, &apart)] {
            all.extend(download::<u16>(device, &buffers[0], n_values)?);
            all.extend(download::<u16>(device, &buffers[1], 2 * Beside::ROWS * Beside::N)?);
        }
    }
    Ok(Deviation::exact(&got, &want))
}

/// Results beyond it on either side are clamped.
const LIMIT: f32 = 0.5;

/// The activation by the kernel `swiglu`.
fn swiglu_apart(
    device: &Device,
    ys: &[Vec<f32>],
    row_weight: &Buffer,
    shape: WeightShape,
    out: &Buffer,
) -> Result<(), CaseError> {
    let n_rows = (ys[0].len() / shape.n_rows as usize) as u32;
    let (gate, up, count) = (upload(device, &ys[0])?, upload(device, &ys[1])?, upload(device, &[n_rows])?);
    let args = SwigluArgs {
        gate: gate.address(),
        up: up.address(),
        weight: row_weight.address(),
        out: out.address(),
        n_rows: count.address(),
        multiplier: 1,
        n_cols: shape.n_rows,
        limit: LIMIT,
        pad: 0,
    };
    swiglu::launch(device, &args, n_rows)?;
    Ok(device.synchronize()?)
}

/// Item sizes and gathering change no bits; a token alone gives the bits it gives among others.
fn every_item_size(device: &Device, shape: WeightShape, n_matrices: u32, t: u32) -> Result<Deviation, CaseError> {
    let mut noise = Noise::new(31);
    let experts = Experts::new(device, &mut noise, shape, n_matrices)?;
    let (n, k) = (t as usize, shape.n_cols as usize);
    let x_bits = bf16_rows(&mut noise, [n, n + 2], k, k);
    let x = upload(device, &x_bits)?;
    let (chosen, weights) = choices(&mut noise, n);
    let sorted = |rows_per_item| {
        let args = dispatch::DispatchArgs { n_experts: N_EXPERTS, top_k: TOP_K, rows_per_item, ..Default::default() };
        dispatch::reference(&chosen, &weights, &args)
    };
    let mut first: Option<Vec<Vec<f32>>> = None;
    for rows_per_item in [8, 16, 32, 64, 64] {
        let ys = experts.run(device, &x, &sorted(rows_per_item), (true, rows_per_item))?;
        let want = first.get_or_insert_with(|| ys.clone());
        for (y, want) in ys.iter().zip(want) {
            same_bits(&format!("items of {rows_per_item}"), y, want)?;
        }
    }
    let (ys, rows) = (first.unwrap_or_default(), sorted(8));
    let own: Vec<u16> = rows.row_token.iter().flat_map(|t| &x_bits[*t as usize * k..][..k]).copied().collect();
    let own = experts.run(device, &upload(device, &own)?, &rows, (false, 8))?;
    same_bits("rows of their own", &own.concat(), &ys.concat())?;
    let float: Vec<f32> = x_bits.iter().map(|x| bf16_to_f32(*x)).collect();
    let expert_of: Vec<u32> =
        rows.expert_first.windows(2).zip(0..).flat_map(|(w, e)| (w[0]..w[1]).map(move |_| e)).collect();
    let want: Vec<f64> =
        experts.matrices.iter().flat_map(|m| reference(m, &float, &expert_of, &rows.row_token)).collect();
    let scale = want.iter().fold(1e-30f64, |m, w| m.max(w.abs()));
    // The largest result is about a fifth of a row's absolute sum or more (signs are random, K at most 4,096 and rows many); of that sum,
    // steps truncate to 2^-23 sixteen times at most and 40 additions round to 2^-24.
    Ok(Deviation::scaled(&ys.concat(), &want, scale, 2e-5))
}

/// Two different experts a row; the last expert is never chosen, the first often.
fn choices(noise: &mut Noise, n_rows: usize) -> (Vec<u32>, Vec<f32>) {
    let pairs = (0..n_rows).flat_map(|_| {
        let second = 1 + noise.below(N_EXPERTS - 2);
        let first = if noise.below(3) > 0 { 0 } else { 1 + second % (N_EXPERTS - 2) };
        [first, second]
    });
    let experts: Vec<u32> = pairs.collect();
    let weights = noise.floats(experts.len());
    (experts, weights)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_agrees_with_the_reference_for_every_item_size() {
        crate::device::testing::run_cases(&super::cases());
    }
}
