//! The [`Simd`] operations on x86-64 with AVX-512 F: one register is the 16 virtual lanes.

use std::arch::x86_64::*;

use super::avx2::{e2m1_half_bytes, fold_last};
use super::simd::{BlockSums, Simd, TILE_ROWS};

/// One of these registers holds the 16 virtual lanes.
pub struct Avx512;

// SAFETY of all blocks below: AVX-512 F (and with it AVX2, FMA and F16C) is present and pointers are valid for the lanes they
// stand for, as the contract of `Simd` says; loads and stores are unaligned forms.
impl Simd for Avx512 {
    type V = __m512;
    const WIDTH: usize = 16;
    const TILE_TOKENS: usize = 6;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m512) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to, value) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn select_lt(a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes) }
    }
    #[inline(always)]
    unsafe fn exp2_int(n: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }
    #[inline(always)]
    unsafe fn load_f8e4m3fn_scaled<const NAN: bool>(from: *const u8) -> __m512 {
        // SAFETY: see above; sixteen bytes are read.
        unsafe {
            // As on AVX2: the fields of a code moved to where a half float wants them, the two NaN codes made all ones.
            let high = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast())));
            let half = _mm256_and_si256(_mm256_srai_epi16::<1>(high), _mm256_set1_epi16(0xBF80u16 as i16));
            if !NAN {
                return _mm512_cvtph_ps(half);
            }
            let nan_code = _mm256_set1_epi16(0x3F80);
            let nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, nan_code), nan_code);
            _mm512_cvtph_ps(_mm256_or_si256(half, nan))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> __m512 {
        // SAFETY: see above; thirty-two bytes are read.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_e2m1(from: *const u8) -> [__m512; 2] {
        // SAFETY: see above; sixteen bytes are read.
        unsafe {
            let bytes = _mm_loadu_si128(from.cast());
            let low = e2m1_half_bytes(bytes);
            let high = e2m1_half_bytes(_mm_srli_si128::<8>(bytes));
            [half_bytes_to_f32(low), half_bytes_to_f32(high)]
        }
    }
    #[inline(always)]
    unsafe fn dot_block(n: usize, w: [&[f32]; TILE_ROWS], x: &[f32], x_stride: usize, sums: &mut BlockSums) {
        // SAFETY: see above; passed on unchanged.
        unsafe { block(n, w, x, x_stride, sums) }
    }
    #[inline(always)]
    unsafe fn fold4(lanes: *const f32, stride: usize, to: *mut f32) {
        // SAFETY: see above; sixteen floats are read at each of four rows, four are written.
        unsafe {
            let a = fold_to_4(lanes);
            let b = fold_to_4(lanes.add(stride));
            let c = fold_to_4(lanes.add(2 * stride));
            let d = fold_to_4(lanes.add(3 * stride));
            _mm_storeu_ps(to, fold_last(a, b, c, d));
        }
    }
}

/// One function for all uses of the dot kernel.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
#[inline(never)]
unsafe fn block(n: usize, w: [&[f32]; TILE_ROWS], x: &[f32], x_stride: usize, sums: &mut BlockSums) {
    // SAFETY: passed on unchanged.
    unsafe { super::linear::dot_block::<Avx512>(n, w, x, x_stride, sums) }
}

/// Sixteen half floats given by their high bytes.
#[inline(always)]
unsafe fn half_bytes_to_f32(high: __m128i) -> __m512 {
    // SAFETY: the caller promises AVX-512 F.
    unsafe { _mm512_cvtph_ps(_mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(high))) }
}

/// Lanes 8..15 to 0..7, then 4..7 to 0..3.
#[inline(always)]
unsafe fn fold_to_4(lanes: *const f32) -> __m128 {
    // SAFETY: the caller promises AVX and sixteen readable floats.
    unsafe {
        let eight = _mm256_add_ps(_mm256_loadu_ps(lanes), _mm256_loadu_ps(lanes.add(8)));
        _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight))
    }
}
