//! The [`Simd`] operations on x86-64 with AVX-512 F: one register is the 16 virtual lanes.

use std::arch::x86_64::*;

use super::avx2::{e2m1_half_bytes, fold_last, fold_to_4};
use super::simd::{DotBlock, Simd, TILE_ROWS};

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
    unsafe fn dot_block(block: DotBlock, sums: &mut [f32], sums_stride: usize) {
        // SAFETY: see above; passed on unchanged.
        unsafe { dot_block(block, sums, sums_stride) }
    }
    #[inline(always)]
    unsafe fn fold4(_lanes: *const f32, _stride: usize, last: [__m512; TILE_ROWS], to: *mut f32) {
        // SAFETY: see above; four floats are written.
        unsafe {
            let (a, b) = (fold_to_4(fold_to_8(last[0])), fold_to_4(fold_to_8(last[1])));
            let (c, d) = (fold_to_4(fold_to_8(last[2])), fold_to_4(fold_to_8(last[3])));
            _mm_storeu_ps(to, fold_last(a, b, c, d));
        }
    }
}

/// One function for all uses of the dot kernel.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
#[inline(never)]
unsafe fn dot_block(block: DotBlock, sums: &mut [f32], sums_stride: usize) {
    // SAFETY: passed on unchanged.
    unsafe { super::linear::dot_block::<Avx512>(block, sums, sums_stride) }
}

/// Sixteen half floats given by their high bytes.
#[inline(always)]
unsafe fn half_bytes_to_f32(high: __m128i) -> __m512 {
    // SAFETY: the caller promises AVX-512 F.
    unsafe { _mm512_cvtph_ps(_mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(high))) }
}

/// Lanes 8..15 to 0..7.
#[inline(always)]
unsafe fn fold_to_8(sixteen: __m512) -> __m256 {
    // SAFETY: the caller promises AVX-512 F.
    unsafe {
        let high = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(sixteen)));
        _mm256_add_ps(_mm512_castps512_ps256(sixteen), high)
    }
}
