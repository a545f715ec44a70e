//! What the kernel tests share: every level of this machine, and numbers from a fixed generator.

use super::{Cpu, SimdLevel};
use crate::tensor::matrix::{FP8_BLOCK, MXFP4_BLOCK, Matrix, MatrixData};

/// A small fixed generator (splitmix64).
pub(crate) struct Rng(pub u64);

impl Rng {
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// Uniform in [-1, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next_u64() as u8).collect()
    }
}

/// The four stored forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    Fp8,
    Mxfp4,
    Bf16,
    F32,
}

pub(crate) const STORED: [Stored; 4] = [Stored::Fp8, Stored::Mxfp4, Stored::Bf16, Stored::F32];

/// A random weight with values near 1. Its bytes start at an odd address, as in a mapped file.
pub(crate) fn matrix(rng: &mut Rng, kind: Stored, n_rows: usize, n_cols: usize) -> Matrix {
    let (n, k) = (n_rows, n_cols);
    let scales = |rng: &mut Rng, count: usize, low: u8| {
        unaligned(&rng.bytes(count).iter().map(|b| low + b % 3).collect::<Vec<u8>>())
    };
    let data = match kind {
        Stored::Fp8 => {
            // Neither NaN code, and every subnormal.
            let codes: Vec<u8> = rng.bytes(n * k).iter().map(|b| if b & 0x7F == 0x7F { 0x3A } else { *b }).collect();
            let scales = scales(rng, n.div_ceil(FP8_BLOCK) * k.div_ceil(FP8_BLOCK), 118);
            MatrixData::Fp8 { codes: unaligned(&codes), scales }
        }
        Stored::Mxfp4 => {
            let codes = unaligned(&rng.bytes(n * k / 2));
            MatrixData::Mxfp4 { codes, scales: scales(rng, n * k / MXFP4_BLOCK, 124) }
        }
        Stored::Bf16 => {
            let bits = rng.floats(n * k).into_iter().flat_map(|x| crate::tensor::format::f32_to_bf16(x).to_le_bytes());
            MatrixData::Bf16 { bits: unaligned(&bits.collect::<Vec<u8>>()) }
        }
        Stored::F32 => MatrixData::F32 { values: rng.floats(n * k).into() },
    };
    Matrix { name: "".into(), n_rows, n_cols, data }
}

/// Each level of this machine with one thread, then the best with three.
pub(crate) fn cpus() -> Vec<Cpu> {
    let mut all: Vec<Cpu> =
        SimdLevel::available().into_iter().map(|level| Cpu::with_level(level, 1).unwrap()).collect();
    all.push(Cpu::with_level(all.last().unwrap().level().simd(), 3).unwrap());
    all
}

/// Bits, for comparison: equal floats may differ in the sign of a zero, and a NaN equals nothing.
pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Largest difference from the reference, relative to the reference's largest magnitude.
pub(crate) fn max_error(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(1e-30f64, |m, w| m.max(w.abs()));
    got.iter().zip(want).fold(0.0, |m: f64, (g, w)| m.max((f64::from(*g) - w).abs() / scale))
}

fn unaligned(bytes: &[u8]) -> bytes::Bytes {
    let mut padded = vec![0xAA];
    padded.extend_from_slice(bytes);
    bytes::Bytes::from(padded).slice(1..)
}
