//! Cases of `linear`: every form on every shape and format, bits over batches, groups, several products, all codes.

use super::{DeviceProduct, MAX_PROBLEMS, ProductForm, RowsCount, launch, launch_as};
use crate::device::{Buffer, Device, DeviceError};
use crate::ops::case::data::{Noise, bf16_rows, download, nan_buffer, same_bits, upload};
use crate::ops::case::{CaseError, Deviation, OpCase};
use crate::ops::linear::element;
use crate::ops::repack::WeightFormat::{Bf16, Fp8, Mxfp4};
use crate::ops::repack::random::{Weight, random_matrix, repacked};
use crate::ops::repack::{WeightFormat, WeightShape};
use crate::ops::step::{Step, StepCounts};
use crate::tensor::format::{bf16_to_f32, f32_to_bf16};
use crate::tensor::matrix::{Matrix, MatrixData};

const FORMATS: [WeightFormat; 3] = [Fp8, Mxfp4, Bf16];
const FORMS: [ProductForm; 5] =
    [ProductForm::Few(8), ProductForm::Few(16), ProductForm::Few(32), ProductForm::Few(64), ProductForm::Many];
/// (N, K, T): official K with N cut, shapes of the demo model, then 0, 1, odd and just past a tile.
const SHAPES: [(u32, u32, u32); 12] = [
    (17, 4096, 3),
    (1, 8192, 1),
    (33, 2048, 9),
    (144, 1024, 5),
    (128, 256, 17),
    (4, 256, 33),
    (1, 32, 1),
    (0, 32, 3),
    (3, 32, 0),
    (15, 96, 64),
    (33, 160, 16),
    (129, 544, 70),
];

pub(super) fn cases() -> Vec<OpCase> {
    let mut cases: Vec<OpCase> = SHAPES
        .into_iter()
        .flat_map(|(n_rows, n_cols, t)| FORMATS.map(|format| (WeightShape { n_rows, n_cols, format }, t)))
        .map(|(shape, t)| case(format!("{shape:?}, {t} rows"), move |device| every_form(device, shape, 1, t)))
        .collect();
    for (n_groups, n_rows, n_cols, format) in [(2, 256, 256, Fp8), (8, 256, 96, Mxfp4), (3, 48, 40, Bf16)] {
        let shape = WeightShape { n_rows, n_cols, format };
        cases.push(case(format!("{n_groups} groups of {shape:?}"), move |d| every_form(d, shape, n_groups, 11)));
    }
    for format in FORMATS {
        cases.push(case(format!("{format:?}: a row's bits in batches"), move |device| batches(device, format)));
    }
    for format in [Fp8, Mxfp4] {
        cases.push(case(format!("{format:?}: every code and scale"), move |device| every_code(device, format)));
    }
    for format in FORMATS {
        cases.push(case(format!("{format:?}: results rounded to BF16"), move |device| rounded(device, format)));
    }
    cases.push(case("eight products at once".to_owned(), several));
    cases.push(case("results past 4 GiB (not on the simulator)".to_owned(), far_results));
    cases
}

fn case(name: String, run: impl Fn(&Device) -> Result<Deviation, CaseError> + Send + Sync + 'static) -> OpCase {
    OpCase::new("linear", name, run)
}

/// One product with its buffers. Rows of x after `n_rows` and columns after its own are NaN.
struct Problem {
    weight: Weight,
    n_groups: u32,
    n_rows: u32,
    x_stride: usize,
    y_stride: usize,
    x_bits: Vec<u16>, // [n_rows + 5, x_stride]
    x: Buffer,
    y: Buffer, // [n_rows + 5, y_stride]
}

impl Problem {
    fn new(
        device: &Device,
        noise: &mut Noise,
        shape: WeightShape,
        n_groups: u32,
        n_rows: u32,
    ) -> Result<Self, DeviceError> {
        let matrix = random_matrix(noise, shape);
        Self::of(device, noise, (shape, matrix), n_groups, n_rows)
    }

    fn of(
        device: &Device,
        noise: &mut Noise,
        (shape, matrix): (WeightShape, Matrix),
        n_groups: u32,
        n_rows: u32,
    ) -> Result<Self, DeviceError> {
        let used = (shape.n_cols * n_groups) as usize;
        let (x_stride, y_stride) = (used + 8, shape.n_rows as usize + 3);
        let x_bits = bf16_rows(noise, [n_rows as usize, n_rows as usize + 5], used, x_stride);
        let weight = repacked(device, shape, matrix)?;
        let (x, y) = (upload(device, &x_bits)?, nan_buffer(device, (n_rows as usize + 5) * y_stride * 4)?);
        Ok(Self { weight, n_groups, n_rows, x_stride, y_stride, x_bits, x, y })
    }

    /// From row `first` on.
    fn product(&self, first: usize) -> DeviceProduct {
        DeviceProduct {
            weight: self.weight.shape,
            codes: self.weight.codes.address(),
            scales: self.weight.scales.address(),
            x: self.x.address() + (first * self.x_stride * 2) as u64,
            y: self.y.address() + (first * self.y_stride * 4) as u64,
            x_stride: self.x_stride as u32,
            y_stride: self.y_stride as u32,
            n_groups: self.n_groups,
            rows_count: RowsCount::Rows,
            is_rounded: false,
        }
    }

    /// y without its padding, which must be untouched; afterwards y is NaN again.
    fn take(&self, device: &Device, first: usize, n_rows: usize) -> Result<Vec<f32>, CaseError> {
        let all: Vec<f32> = download(device, &self.y, (self.n_rows as usize + 5) * self.y_stride)?;
        device.fill(&self.y, 0, self.y.n_bytes(), 0xFF)?;
        let n = self.weight.shape.n_rows as usize;
        let mut y = Vec::with_capacity(n_rows * n);
        for (t, row) in all.chunks_exact(self.y_stride).enumerate() {
            let n_own = if (first..first + n_rows).contains(&t) { n } else { 0 };
            y.extend_from_slice(&row[..n_own]);
            if let Some(i) = row[n_own..].iter().position(|v| v.to_bits() != u32::MAX) {
                return Err(CaseError::Rule(format!("row {t}: element {} is written", n_own + i)));
            }
        }
        Ok(y)
    }

    /// The largest error over the sum of the absolute products.
    fn deviation(&self, y: &[f32]) -> Deviation {
        let (n, k) = (self.weight.shape.n_rows as usize, self.weight.shape.n_cols as usize);
        let group_rows = (n / self.n_groups as usize).max(1);
        let mut worst = 0f64;
        for r in 0..n {
            let w: Vec<f64> = (0..k).map(|c| f64::from(element(&self.weight.matrix, r, c))).collect();
            for t in 0..self.n_rows as usize {
                let x = &self.x_bits[t * self.x_stride + r / group_rows * k..][..k];
                let products = w.iter().zip(x).map(|(w, x)| w * f64::from(bf16_to_f32(*x)));
                let (sum, size) = products.fold((0.0, 1e-30), |(sum, size), p| (sum + p, size + p.abs()));
                let error = (f64::from(y[t * n + r]) - sum).abs() / size;
                worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
            }
        }
        // In f32 and of the absolute sum: each of a step's eight instructions truncates once or twice (2^-23); a range's additions, one a step,
        // and those of up to eight ranges round (2^-24).
        let limit = (2.0 * 16.0 + k.div_ceil(128) as f64 + 8.0) / f64::from(1 << 24);
        Deviation { worst, limit }
    }
}

/// A step of `n_rows` rows, and its counts.
fn step(device: &Device, n_rows: u32) -> Result<(Step, Buffer), DeviceError> {
    let counts = upload(device, &[StepCounts { n_rows, ..StepCounts::default() }])?;
    Ok((Step { counts: counts.address(), ..Step::default() }, counts))
}

/// Every form, two of them twice: all bits equal, padding untouched, and near the reference.
fn every_form(device: &Device, shape: WeightShape, n_groups: u32, n_rows: u32) -> Result<Deviation, CaseError> {
    let problem = Problem::new(device, &mut Noise::new(21), shape, n_groups, n_rows)?;
    let (step, _counts) = step(device, n_rows)?;
    let mut first: Option<Vec<f32>> = None;
    for form in FORMS.into_iter().chain([ProductForm::Few(8), ProductForm::Many]) {
        // The grid is that of a bucket with three rows more.
        launch_as(device, form, step, &[problem.product(0)], n_rows + 3)?;
        let y = problem.take(device, 0, n_rows as usize)?;
        same_bits(&format!("{form:?}"), &y, first.get_or_insert_with(|| y.clone()))?;
    }
    Ok(problem.deviation(&first.unwrap_or_default()))
}

/// The first rows, and the last one alone, in the form that their number asks for.
fn batches(device: &Device, format: WeightFormat) -> Result<Deviation, CaseError> {
    const ROWS: usize = 300;
    let shape = WeightShape { n_rows: 17, n_cols: 544, format };
    let problem = Problem::new(device, &mut Noise::new(22), shape, 1, ROWS as u32)?;
    let mut all = Vec::new();
    for (first, n_rows) in [(0, 300), (0, 1), (0, 7), (0, 8), (0, 9), (0, 33), (0, 64), (299, 1), (63, 2)] {
        let (step, _counts) = step(device, n_rows as u32)?;
        launch(device, step, &[problem.product(first)], n_rows as u32)?;
        let y = problem.take(device, first, n_rows)?;
        if n_rows == ROWS {
            all = y;
        } else {
            let n = shape.n_rows as usize;
            same_bits(&format!("rows {first} + {n_rows}"), &y, &all[first * n..(first + n_rows) * n])?;
        }
    }
    Ok(problem.deviation(&all))
}

/// Rounded results are those of F32, rounded, in every form.
fn rounded(device: &Device, format: WeightFormat) -> Result<Deviation, CaseError> {
    const ROWS: u32 = 70;
    let shape = WeightShape { n_rows: 33, n_cols: 544, format };
    let problem = Problem::new(device, &mut Noise::new(26), shape, 1, ROWS)?;
    let (step, _counts) = step(device, ROWS)?;
    launch(device, step, &[problem.product(0)], ROWS)?;
    let want = problem.take(device, 0, ROWS as usize)?.into_iter().map(f32_to_bf16);
    let (mut all_got, mut all_want) = (Vec::new(), Vec::new());
    for form in FORMS {
        // Rows of 33 bf16 and one more, in the room of f32.
        let product = DeviceProduct { y_stride: 34, is_rounded: true, ..problem.product(0) };
        launch_as(device, form, step, &[product], ROWS + 3)?;
        let n_values = problem.y.n_bytes() / 2;
        let got: Vec<u16> = download(device, &problem.y, n_values)?;
        device.fill(&problem.y, 0, problem.y.n_bytes(), 0xFF)?;
        let mut expected = vec![u16::MAX; n_values];
        for (row, values) in expected.chunks_mut(34).zip(want.clone().collect::<Vec<u16>>().chunks(33)) {
            row[..33].copy_from_slice(values);
        }
        all_got.extend(got);
        all_want.extend(expected);
    }
    Ok(Deviation::exact(&all_got, &all_want))
}

/// x is the identity, so that y is the expanded weight itself: every code, under scales from 2^-126 to 2^113.
fn every_code(device: &Device, format: WeightFormat) -> Result<Deviation, CaseError> {
    const K: u32 = 128;
    let shape = WeightShape { n_rows: 256, n_cols: K, format };
    let (mut got, mut want) = (Vec::new(), Vec::new());
    let all = [[1, 2], [9, 90], [119, 127], [127, 128], [128, 129], [200, 240]];
    // Repack refuses larger scales of MXFP4.
    for scales in all.into_iter().filter(|scales| format == Fp8 || scales[1] <= 128) {
        let data = all_codes(format, scales);
        let matrix = Matrix { name: "".into(), n_rows: 256, n_cols: K as usize, data };
        let mut problem = Problem::of(device, &mut Noise::new(23), (shape, matrix), 1, K)?;
        let one = |i: usize| if i / problem.x_stride == i % problem.x_stride { f32_to_bf16(1.0) } else { 0 };
        let x: Vec<u16> = (0..K as usize * problem.x_stride).map(one).collect();
        problem.x = upload(device, &x)?;
        let (step, _counts) = step(device, K)?;
        launch(device, step, &[problem.product(0)], K)?;
        got.extend(problem.take(device, 0, K as usize)?);
        let w = &problem.weight.matrix;
        want.extend((0..K as usize).flat_map(|c| (0..256).map(move |r| element(w, r, c))));
    }
    Ok(Deviation::exact(&got, &want))
}

/// [256, 128]: codes count up along a row, starting at the row's index; scales take turns.
fn all_codes(format: WeightFormat, scales: [u8; 2]) -> MatrixData {
    let code = |i: usize| (i / 128 + i % 128) as u8;
    let turns = |n: usize| -> Vec<u8> { (0..n).map(|i| scales[i % 2]).collect() };
    match format {
        Fp8 => {
            let codes: Vec<u8> = (0..256 * 128).map(code).map(|c| if c & 0x7F == 0x7F { 0 } else { c }).collect();
            MatrixData::Fp8 { codes: codes.into(), scales: turns(2).into() }
        }
        Mxfp4 | Bf16 => {
            let codes: Vec<u8> = (0..256 * 64).map(|i| code(2 * i)).collect();
            // A code of 6 under 2^113 and more stays a BF16.
            MatrixData::Mxfp4 { codes: codes.into(), scales: turns(256 * 4).into() }
        }
    }
}

/// Products of all formats, two of them empty, some of logit rows, in one launch: the bits of each alone.
fn several(device: &Device) -> Result<Deviation, CaseError> {
    let shapes = [(64, 256), (5, 32), (0, 64), (130, 512), (16, 128), (33, 96), (1, 1024), (24, 64)];
    let mut noise = Noise::new(24);
    let mut problems = Vec::with_capacity(MAX_PROBLEMS);
    for (i, (n_rows, n_cols)) in shapes.into_iter().enumerate() {
        let shape = WeightShape { n_rows, n_cols, format: FORMATS[i % 3] };
        problems.push(Problem::new(device, &mut noise, shape, 1, if i % 4 == 1 { 2 } else { 6 })?);
    }
    let counts = upload(device, &[StepCounts { n_rows: 6, n_logit_rows: 2, ..StepCounts::default() }])?;
    let step = Step { counts: counts.address(), ..Step::default() };
    let product = |p: &Problem| DeviceProduct {
        rows_count: if p.n_rows == 2 { RowsCount::LogitRows } else { RowsCount::Rows },
        ..p.product(0)
    };
    let products: Vec<DeviceProduct> = problems.iter().map(product).collect();
    let mut worst = Deviation { worst: 0.0, limit: 1.0 };
    for form in FORMS {
        launch_as(device, form, step, &products, 6)?;
        let mut together = Vec::new();
        for problem in &problems {
            together.push(problem.take(device, 0, problem.n_rows as usize)?);
        }
        for (problem, together) in problems.iter().zip(&together) {
            launch_as(device, form, step, &[product(problem)], 6)?;
            let alone = problem.take(device, 0, problem.n_rows as usize)?;
            same_bits(&format!("{:?}", problem.weight.shape), together, &alone)?;
            let deviation = problem.deviation(together);
            // Relative to each one's own limit.
            worst.worst = worst.worst.max(deviation.worst / deviation.limit);
        }
    }
    Ok(worst)
}

/// The second row of y begins 4 GiB after the first.
fn far_results(device: &Device) -> Result<Deviation, CaseError> {
    if device.info().arch.starts_with("sim") {
        return Ok(Deviation { worst: 0.0, limit: 0.0 });
    }
    const STRIDE: usize = (1 << 30) + 16;
    let shape = WeightShape { n_rows: 33, n_cols: 256, format: Fp8 };
    let problem = Problem::new(device, &mut Noise::new(25), shape, 1, 2)?;
    let far = device.alloc(4 * (STRIDE + 33))?;
    let (step, _counts) = step(device, 2)?;
    for form in [ProductForm::Few(8), ProductForm::Many] {
        launch_as(device, form, step, &[problem.product(0)], 2)?;
        let want = problem.take(device, 0, 2)?;
        let product = DeviceProduct { y: far.address(), y_stride: STRIDE as u32, ..problem.product(0) };
        launch_as(device, form, step, &[product], 2)?;
        let mut got = vec![0f32; 66];
        device.download(&far, 0, bytemuck::cast_slice_mut(&mut got[..33]))?;
        device.download(&far, 4 * STRIDE, bytemuck::cast_slice_mut(&mut got[33..]))?;
        same_bits("far away", &got, &want)?;
    }
    Ok(Deviation { worst: 0.0, limit: 0.0 })
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_kernel_agrees_with_the_reference_in_every_form() {
        crate::device::testing::run_cases(&super::cases());
    }
}
