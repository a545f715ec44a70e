//! Exact expansion of stored numbers to f32: FP8, E2M1 and BF16, code value times scale.

use super::simd::Simd;
use crate::tensor::format::{bf16_to_f32, e8m0_to_f32, f8e4m3fn_to_f32};
use crate::tensor::matrix::{FP8_BLOCK, MXFP4_BLOCK, Matrix, MatrixData};

/// Scale bytes up to this one can be multiplied by 2^8 without overflow.
const MAX_LIFTED_E8M0: u8 = 246;

simd_fn! {
    /// Expands one weight row to f32 (exactly: code times scale).
    pub(crate) fn expand_row(weight: &Matrix, row: usize, out: &mut [f32]) = expand_row_kernel
}

simd_fn! {
    /// Decodes E4M3 codes, `group` elements a scale.
    pub(crate) fn decode_fp8(codes: &[u8], scales: &[u8], group: usize, out: &mut [f32]) = decode_fp8_kernel
}

simd_fn! {
    /// Decodes packed E2M1 codes (low nibble first), 32 elements a scale.
    pub(crate) fn decode_e2m1(codes: &[u8], scales: &[u8], out: &mut [f32]) = decode_e2m1_kernel
}

/// One weight row.
///
/// # Safety
/// The instruction set of `S` must be present.
#[inline(always)]
pub(crate) unsafe fn expand_row_kernel<S: Simd>(weight: &Matrix, row: usize, out: &mut [f32]) {
    let k = weight.n_cols;
    let out = &mut out[..k];
    match &weight.data {
        MatrixData::Fp8 { codes, scales } => {
            let per_row = k.div_ceil(FP8_BLOCK);
            let scales = &scales[row / FP8_BLOCK * per_row..][..per_row];
            // SAFETY: the caller vouches for the instruction set.
            unsafe { decode_codes::<S, false>(&codes[row * k..][..k], scales, FP8_BLOCK, out) };
        }
        MatrixData::Mxfp4 { codes, scales } => {
            let scales = &scales[row * k / MXFP4_BLOCK..][..k / MXFP4_BLOCK];
            // SAFETY: the caller vouches for the instruction set.
            unsafe { decode_e2m1_kernel::<S>(&codes[row * k / 2..][..k / 2], scales, out) };
        }
        // SAFETY: the caller vouches for the instruction set.
        MatrixData::Bf16 { bits } => unsafe { expand_bf16::<S>(&bits[row * k * 2..][..k * 2], out) },
        MatrixData::F32 { values } => out.copy_from_slice(&values[row * k..][..k]),
    }
}

#[inline(always)]
unsafe fn decode_fp8_kernel<S: Simd>(codes: &[u8], scales: &[u8], group: usize, out: &mut [f32]) {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { decode_codes::<S, true>(codes, scales, group, out) }
}

#[inline(always)]
unsafe fn decode_codes<S: Simd, const NAN: bool>(codes: &[u8], scales: &[u8], group: usize, out: &mut [f32]) {
    for ((codes, out), scale) in codes.chunks(group).zip(out.chunks_mut(group)).zip(scales) {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { expand_fp8::<S, NAN>(codes, *scale, out) };
    }
}

#[inline(always)]
unsafe fn decode_e2m1_kernel<S: Simd>(codes: &[u8], scales: &[u8], out: &mut [f32]) {
    let groups = codes.chunks_exact(MXFP4_BLOCK / 2).zip(out.chunks_exact_mut(MXFP4_BLOCK));
    for ((codes, out), scale) in groups.zip(scales) {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { expand_e2m1::<S>(codes, *scale, out) };
    }
}

/// E4M3 codes under one scale.
///
/// # Safety
/// The instruction set of `S` must be present.
#[inline(always)]
unsafe fn expand_fp8<S: Simd, const NAN: bool>(codes: &[u8], scale: u8, out: &mut [f32]) {
    let n = codes.len().min(out.len());
    let n_vector = if scale > MAX_LIFTED_E8M0 { 0 } else { n - n % S::WIDTH };
    let lifted = e8m0_to_f32(scale) * 256.0;
    for i in (0..n_vector).step_by(S::WIDTH) {
        // SAFETY: i + WIDTH <= n, the length of both slices; the caller vouches for the instruction set.
        unsafe {
            let v = S::load_f8e4m3fn_scaled::<NAN>(codes.as_ptr().add(i));
            S::store(out.as_mut_ptr().add(i), S::mul(v, S::splat(lifted)));
        }
    }
    for i in n_vector..n {
        out[i] = f8e4m3fn_to_f32(codes[i]) * e8m0_to_f32(scale);
    }
}

/// Packed E2M1 codes under one scale; `codes` holds a multiple of 16 bytes.
///
/// # Safety
/// The instruction set of `S` must be present.
#[inline(always)]
unsafe fn expand_e2m1<S: Simd>(codes: &[u8], scale: u8, out: &mut [f32]) {
    assert!(
        codes.len().is_multiple_of(16) && out.len() >= 2 * codes.len(),
        "e2m1: {} bytes to {}",
        codes.len(),
        out.len()
    );
    for i in (0..codes.len()).step_by(S::WIDTH) {
        // SAFETY: WIDTH divides 16 and the assertion covers reads and writes; the caller vouches for the instruction set.
        unsafe {
            let scale = S::splat(e8m0_to_f32(scale));
            let [a, b] = S::load_e2m1(codes.as_ptr().add(i));
            S::store(out.as_mut_ptr().add(2 * i), S::mul(a, scale));
            S::store(out.as_mut_ptr().add(2 * i + S::WIDTH), S::mul(b, scale));
        }
    }
}

/// Little-endian BF16.
///
/// # Safety
/// The instruction set of `S` must be present.
#[inline(always)]
unsafe fn expand_bf16<S: Simd>(bits: &[u8], out: &mut [f32]) {
    let n = (bits.len() / 2).min(out.len());
    let n_vector = n - n % S::WIDTH;
    for i in (0..n_vector).step_by(S::WIDTH) {
        // SAFETY: i + WIDTH <= n elements of both slices; the caller vouches for the instruction set.
        unsafe { S::store(out.as_mut_ptr().add(i), S::load_bf16(bits.as_ptr().add(2 * i))) };
    }
    for i in n_vector..n {
        out[i] = bf16_to_f32(u16::from_le_bytes([bits[2 * i], bits[2 * i + 1]]));
    }
}
