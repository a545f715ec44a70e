//! What kernels are built from, tested by itself on a device: elementary functions, number formats, wave collectives, the tile.

use bytemuck::{Pod, Zeroable};

use super::case::data::{Noise, download, nan_buffer, upload};
use super::case::{CaseError, Deviation, OpCase};
use super::{round_fp4, round_fp8};
use crate::device::cpu::Level;
use crate::device::cpu::tile::multiply;
use crate::device::{Buffer, Device, SimWave};
use crate::tensor::format;

/// Threads of a block.
const N_THREADS: u32 = 256;
/// Rows of a tile, and what one product sums over.
const TILE: usize = 16;
/// Functions of `primitive_math`.
const N_FUNCTIONS: usize = 10;
/// What a function may be off by, in units of the last place of the exact result.
const MAX_ULPS: [f64; N_FUNCTIONS] = [2.5, 2.5, 5.0, 4.0, 4.0, 5.0, 0.5, 1.5, 0.6, 0.6];

/// What exp and ln in f64 may be off by: two units in the last place, and one of the host's own.
const MAX_ULPS_F64: f64 = 3.0;

/// Results below this may be 0: exp has no subnormal results, and silu ends where exp is infinite.
const TINY: f64 = 1e-36;

/// Arguments of the kernels, field for field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct PrimitivesArgs {
    input: u64,
    out: u64,
    n: u32,
    pad: u32,
}

const _: () = assert!(size_of::<PrimitivesArgs>() == 24);

/// The elementary functions in f64: exp, ln, ln(1 + x), sigmoid, silu, softplus, square root and its inverse, sine, cosine.
#[must_use]
pub fn reference(x: f32) -> [f64; N_FUNCTIONS] {
    let x = f64::from(x);
    let sigmoid = 1.0 / (1.0 + (-x).exp());
    let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
    [x.exp(), x.ln(), x.ln_1p(), sigmoid, x * sigmoid, softplus, x.sqrt(), 1.0 / x.sqrt(), x.sin(), x.cos()]
}

/// The cases: every function over its range, every code, every collective, chained products.
#[must_use]
pub fn cases() -> Vec<OpCase> {
    vec![
        OpCase::new("primitives", "elementary functions, in units of their limits", check_math),
        OpCase::new("primitives", "exp and ln in f64, in units of their limit", check_math_f64),
        OpCase::new("primitives", "rounding to bf16, FP8, E2M1 and scales", check_encode),
        OpCase::new("primitives", "every code of FP8, E8M0 and E2M1", check_decode),
        OpCase::new("primitives", "shuffles, votes and sums", check_wave),
        OpCase::new("primitives", "1 product of tiles", |device| check_tile(device, 1)),
        OpCase::new("primitives", "5 products of tiles", |device| check_tile(device, 5)),
        OpCase::new("primitives", "5 products of tiles, the order of sums", check_tile_sums),
    ]
}

fn launch(device: &Device, kernel: &'static str, input: &Buffer, out: &Buffer, n: u32) -> Result<(), CaseError> {
    let args = PrimitivesArgs { input: input.address(), out: out.address(), n, pad: 0 };
    let (n_blocks, n_threads) = match kernel {
        "primitive_math" | "primitive_math_f64" | "primitive_encode" => (n.div_ceil(N_THREADS), N_THREADS),
        "primitive_tile" => (1, device.info().wave),
        _ => (1, N_THREADS),
    };
    Ok(device.launch(device.kernel(kernel)?, [n_blocks, 1, 1], n_threads, &args)?)
}

/// Numbers of either sign from 2^-24 to 2^20 evenly in the exponent, then special ones.
fn numbers() -> Vec<f32> {
    let mut noise = Noise::new(31);
    let mut x: Vec<f32> = (0..4000)
        .map(|i| (2f32.powf(i as f32 / 4000.0 * 43.0 - 24.0) + noise.unit() * 1e-8).copysign(noise.unit()))
        .collect();
    x.extend((0..2000).map(|_| noise.unit() * 90.0));
    x.extend([0.0, -0.0, 1.0, -1.0, 88.7, -87.3, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 464.0, 448.0, 1e30, -1e30]);
    x
}

fn check_math(device: &Device) -> Result<Deviation, CaseError> {
    let x = numbers();
    let (input, out) = (upload(device, &x)?, nan_buffer(device, x.len() * N_FUNCTIONS * 4)?);
    launch(device, "primitive_math", &input, &out, x.len() as u32)?;
    let got = download::<f32>(device, &out, x.len() * N_FUNCTIONS)?;
    let mut worst = 0.0f64;
    for (x, got) in x.iter().zip(got.chunks_exact(N_FUNCTIONS)) {
        for (i, (got, want)) in got.iter().zip(reference(*x)).enumerate() {
            // Angles are reduced up to 1e6.
            if (i >= 8 && x.abs() > 1e6) || want.is_nan() && got.is_nan() || f64::from(*got) == f64::from(want as f32) {
                continue;
            }
            let ulp = f64::from(f32::EPSILON) * 2f64.powf(want.abs().max(f64::from(f32::MIN_POSITIVE)).log2().floor());
            let off = (f64::from(*got) - want).abs() / ulp / MAX_ULPS[i];
            let off = if want.abs() < TINY && f64::from(got.abs()) < TINY { 0.0 } else { off };
            worst = if off.is_nan() { f64::INFINITY } else { worst.max(off) };
        }
    }
    Ok(Deviation { worst, limit: 1.0 })
}

fn check_math_f64(device: &Device) -> Result<Deviation, CaseError> {
    let mut noise = Noise::new(34);
    let mut wide = || f64::from(noise.unit()) * (1.0 + f64::from(noise.unit()) * 1e-9);
    let mut x: Vec<f64> = (0..4000).map(|i| wide() * 2f64.powi(i % 60 - 50)).collect();
    // Near 1, where the logarithm vanishes, and next to where exp does.
    x.extend((0..2000).map(|i| 1.0 + wide() * 2f64.powi(-(i % 50))));
    x.extend((0..2000).map(|_| 700.0 + wide() * 7.0));
    x.extend([1.0, 0.5, 2.0, 1.0 - 2f64.powi(-25), 2f64.powi(-25), 707.99]);
    let (input, out) = (upload(device, &x)?, nan_buffer(device, x.len() * 16)?);
    launch(device, "primitive_math_f64", &input, &out, x.len() as u32)?;
    let got = download::<f64>(device, &out, x.len() * 2)?;
    let mut worst = 0.0f64;
    for (x, got) in x.iter().zip(got.chunks_exact(2)) {
        for (got, want) in got.iter().zip([(-x.abs()).exp(), x.abs().ln()]) {
            let ulp = f64::EPSILON * 2f64.powf(want.abs().max(f64::MIN_POSITIVE).log2().floor());
            let off = (got - want).abs() / ulp / MAX_ULPS_F64;
            worst = if off.is_nan() { f64::INFINITY } else { worst.max(off) };
        }
    }
    Ok(Deviation { worst, limit: 1.0 })
}

fn check_encode(device: &Device) -> Result<Deviation, CaseError> {
    let x = numbers();
    let (input, out) = (upload(device, &x)?, nan_buffer(device, x.len() * 32)?);
    launch(device, "primitive_encode", &input, &out, x.len() as u32)?;
    let got = download::<u32>(device, &out, x.len() * 8)?;
    let want: Vec<u32> = x.iter().flat_map(|x| encodings(*x)).collect();
    Ok(Deviation::exact(&got, &want))
}

fn encodings(x: f32) -> [u32; 8] {
    let pair = u32::from(format::f32_to_bf16(-x)) << 16 | u32::from(format::f32_to_bf16(x));
    let f8 = format::f32_to_f8e4m3fn(x);
    // A key with `x` alone in its second group: the code is that of a scale of 1 when a 6 stands beside it.
    let mut key = [0.0; round_fp4::KEY_DIMS];
    (key[0], key[1]) = (6.0, x.clamp(-6.0, 6.0));
    let mut packed = [0; round_fp4::KEY_ROW_BYTES];
    round_fp4::encode_key(&key, &mut packed);
    [
        pair & 0xFFFF,
        pair,
        u32::from(f8),
        u32::from(format::f32_to_e2m1(x)),
        u32::from(packed[0] >> 4),
        u32::from(round_fp8::scale_byte(x.abs())),
        u32::from(round_fp4::scale_byte(x.abs())),
        format::f8e4m3fn_to_f32(f8).abs().to_bits(),
    ]
}

fn check_decode(device: &Device) -> Result<Deviation, CaseError> {
    let (input, out) = (nan_buffer(device, 4)?, nan_buffer(device, 256 * 16 * 4)?);
    launch(device, "primitive_decode", &input, &out, 256)?;
    let got = download::<f32>(device, &out, 256 * 16)?;
    let f8 = |code: u32| format::f8e4m3fn_to_f32(code as u8);
    let codes = (0..256u32).flat_map(|i| {
        let scale = format::e8m0_to_f32(i as u8);
        let e2m1 = format::e2m1_to_f32(i as u8 & 15);
        [f8(i), scale, e2m1, f8(i), f8(i), f8(i ^ 0x80), f8(255 - i), f8(i / 2)]
    });
    let nibbles = (0..256u32).flat_map(|i| {
        let word = (i << 24 | i << 12 | i) ^ 0x3050_0070;
        (0..8).map(move |j| format::e2m1_to_f32((word >> (4 * j)) as u8 & 15))
    });
    // Codes of FP8 lose the sign of a zero where they are FNUZ, so values are compared, and a NaN is a NaN.
    let is_wrong = |(got, want): &(&f32, f32)| !(*got == want || got.is_nan() && want.is_nan());
    let n_wrong = got.iter().zip(codes.chain(nibbles)).filter(is_wrong).count();
    Ok(Deviation { worst: n_wrong as f64, limit: 0.0 })
}

fn check_wave(device: &Device) -> Result<Deviation, CaseError> {
    let n = N_THREADS as usize;
    // Small whole numbers: every sum is exact in any order.
    let mut noise = Noise::new(32);
    let x: Vec<f32> = (0..n).map(|_| noise.below(64) as f32 - 32.0).collect();
    let (input, out) = (upload(device, &x)?, nan_buffer(device, n * 48)?);
    launch(device, "primitive_wave", &input, &out, N_THREADS)?;
    let got = download::<u32>(device, &out, n * 12)?;
    let wave = device.info().wave as usize;
    let largest = |x: &[f32]| x.iter().fold(f32::MIN, |a, b| a.max(*b));
    let want: Vec<u32> = (0..n)
        .flat_map(|i| {
            let (lane, first) = (i % wave, i / wave * wave);
            let mine = &x[first..][..wave];
            let votes = mine.iter().enumerate().fold(0u64, |v, (l, x)| v | u64::from(*x > 0.0) << l);
            let far = first + wave - 1 - lane;
            [
                (lane | (i / wave) << 8 | (n / wave) << 16) as u32,
                ((first + (lane * 7 + 3) % wave) * 3) as u32,
                far as u32,
                x[far].to_bits(),
                x[first + (lane ^ 5)].to_bits(),
                votes as u32,
                (votes >> 32) as u32,
                mine.iter().sum::<f32>().to_bits(),
                (largest(mine) + 0.0).to_bits(),
                x.iter().sum::<f32>().to_bits(),
                (largest(&x) + 0.0).to_bits(),
                // Bytes 3, 7, 1, 5 of the pair, the lowest first.
                (i as u32) | (!i as u32 & 0xFF) << 8 | (i as u32) << 16 | (!i as u32 & 0xFF) << 24,
            ]
        })
        .collect();
    Ok(Deviation::exact(&got, &want))
}

fn check_tile(device: &Device, n_products: usize) -> Result<Deviation, CaseError> {
    let n_cols = if device.info().wave == 64 { 16 } else { 8 };
    // Small whole numbers, so that the sums are exact whatever the order.
    let mut noise = Noise::new(33);
    let mut values = |n: usize| -> Vec<f32> { (0..n).map(|_| noise.below(17) as f32 - 8.0).collect() };
    let a = values(n_products * TILE * TILE);
    let b = values(n_products * n_cols * TILE);
    let bf16s: Vec<u16> = a.iter().chain(&b).map(|x| format::f32_to_bf16(*x)).collect();
    let (input, out) = (upload(device, &bf16s)?, nan_buffer(device, TILE * n_cols * 4)?);
    launch(device, "primitive_tile", &input, &out, n_products as u32)?;
    let got = download::<f32>(device, &out, TILE * n_cols)?;
    let dot = |row: usize, col: usize| -> f32 {
        let at = |p: usize, k: usize| a[(p * TILE + row) * TILE + k] * b[(p * n_cols + col) * TILE + k];
        (0..n_products).flat_map(|p| (0..TILE).map(move |k| (p, k))).map(|(p, k)| at(p, k)).sum()
    };
    let want: Vec<f32> = (0..TILE * n_cols).map(|i| dot(i / n_cols, i % n_cols)).collect();
    Ok(Deviation::exact(&got, &want))
}

/// Products that are cut off in a sum, and the bits of the CPU's rule for them.
fn check_tile_sums(device: &Device) -> Result<Deviation, CaseError> {
    const N: usize = 5;
    let (wave, n_cols) = if device.info().wave == 64 { (SimWave::W64, 16) } else { (SimWave::W32, 8) };
    let mut noise = Noise::new(34);
    let mut values = |n: usize| -> Vec<f32> {
        let value = |noise: &mut Noise| noise.unit() * 2f32.powi(noise.below(24) as i32 - 12);
        (0..n).map(|_| format::bf16_to_f32(format::f32_to_bf16(value(&mut noise)))).collect()
    };
    let (a, b) = (values(N * TILE * TILE), values(N * n_cols * TILE));
    let bf16s: Vec<u16> = a.iter().chain(&b).map(|x| format::f32_to_bf16(*x)).collect();
    let (input, out) = (upload(device, &bf16s)?, nan_buffer(device, TILE * n_cols * 4)?);
    launch(device, "primitive_tile", &input, &out, N as u32)?;
    let got = download::<f32>(device, &out, TILE * n_cols)?;
    let rows_last: Vec<f32> =
        (0..a.len()).map(|i| a[i / TILE / TILE * TILE * TILE + i % TILE * TILE + i / TILE % TILE]).collect();
    let mut want = vec![0.0; TILE * n_cols];
    for col in 0..n_cols {
        let column: Vec<f32> = (0..N).flat_map(|p| &b[(p * n_cols + col) * TILE..][..TILE]).copied().collect();
        let mut sums = [0.0; TILE];
        multiply(Level::best(), wave, &mut sums, &rows_last, &column);
        sums.iter().enumerate().for_each(|(row, sum)| want[row * n_cols + col] = *sum);
    }
    if device.info().arch == "gfx942" {
        // The order inside that instruction is not known; the largest of the sums are near 2^22.
        let exact: Vec<f64> = want.iter().map(|sum| f64::from(*sum)).collect();
        return Ok(Deviation::scaled(&got, &exact, 2f64.powi(22), 1e-6));
    }
    Ok(Deviation::exact(&got, &want))
}

#[cfg(test)]
mod tests {
    #[test]
    fn cases_pass() {
        crate::device::testing::run_cases(&super::cases());
    }
}
