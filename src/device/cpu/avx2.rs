//! The [`Simd`] operations on x86-64 with AVX2, FMA and F16C: eight lanes a register.

use std::arch::x86_64::*;

use super::simd::{DotBlock, Simd, TILE_ROWS};

/// Two of these registers hold the 16 virtual lanes.
pub struct Avx2;

/// High bytes of the half-float bits of the sixteen E2M1 codes; the low bytes are 0.
const E2M1_F16_HIGH: [u8; 16] = [
    0x00, 0x38, 0x3C, 0x3E, 0x40, 0x42, 0x44, 0x46, // 0 .5 1 1.5 2 3 4 6
    0x80, 0xB8, 0xBC, 0xBE, 0xC0, 0xC2, 0xC4, 0xC6, // the same, negative
];

// SAFETY of all blocks below: AVX2, FMA and F16C are present and pointers are valid for the lanes they stand for, as the
// contract of `Simd` says; loads and stores are unaligned forms.
impl Simd for Avx2 {
    type V = __m256;
    const WIDTH: usize = 8;
    const TILE_TOKENS: usize = 3;

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: __m256) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_ps(to, value) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn select_lt(a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }
    #[inline(always)]
    unsafe fn exp2_int(n: __m256) -> __m256 {
        // SAFETY: see above.
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        }
    }
    #[inline(always)]
    unsafe fn load_f8e4m3fn_scaled<const NAN: bool>(from: *const u8) -> __m256 {
        // SAFETY: see above; eight bytes are read.
        unsafe {
            // A code in the high byte, shifted down one with its sign kept, has its fields where a half float wants them;
            // the bias differs by 8. Bit 14 is a copy of the sign and goes away.
            let high = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64(from.cast()));
            let half = _mm_and_si128(_mm_srai_epi16::<1>(high), _mm_set1_epi16(0xBF80u16 as i16));
            if !NAN {
                return _mm256_cvtph_ps(half);
            }
            // The two NaN codes become all ones, a half-float NaN.
            let nan_code = _mm_set1_epi16(0x3F80);
            let nan = _mm_cmpeq_epi16(_mm_and_si128(half, nan_code), nan_code);
            _mm256_cvtph_ps(_mm_or_si128(half, nan))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> __m256 {
        // SAFETY: see above; sixteen bytes are read.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_e2m1(from: *const u8) -> [__m256; 2] {
        // SAFETY: see above; eight bytes are read, and sixteen of the table.
        unsafe {
            let high = e2m1_half_bytes(_mm_loadl_epi64(from.cast()));
            let zero = _mm_setzero_si128();
            [_mm256_cvtph_ps(_mm_unpacklo_epi8(zero, high)), _mm256_cvtph_ps(_mm_unpackhi_epi8(zero, high))]
        }
    }
    #[inline(always)]
    unsafe fn dot_block(block: DotBlock, sums: &mut [f32], sums_stride: usize) {
        // SAFETY: see above; passed on unchanged.
        unsafe { dot_block(block, sums, sums_stride) }
    }
    #[inline(always)]
    unsafe fn fold4(lanes: *const f32, stride: usize, last: [__m256; TILE_ROWS], to: *mut f32) {
        // SAFETY: see above; eight floats are read at each of four rows, four are written.
        unsafe {
            let a = fold_to_4(_mm256_add_ps(_mm256_loadu_ps(lanes), last[0]));
            let b = fold_to_4(_mm256_add_ps(_mm256_loadu_ps(lanes.add(stride)), last[1]));
            let c = fold_to_4(_mm256_add_ps(_mm256_loadu_ps(lanes.add(2 * stride)), last[2]));
            let d = fold_to_4(_mm256_add_ps(_mm256_loadu_ps(lanes.add(3 * stride)), last[3]));
            _mm_storeu_ps(to, fold_last(a, b, c, d));
        }
    }
}

/// One function for all uses of the dot kernel.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
unsafe fn dot_block(block: DotBlock, sums: &mut [f32], sums_stride: usize) {
    // SAFETY: passed on unchanged.
    unsafe { super::linear::dot_block::<Avx2>(block, sums, sums_stride) }
}

/// The half-float high bytes of the sixteen nibbles in the low eight bytes, low nibble first.
///
/// # Safety
/// AVX2 must be present.
#[inline(always)]
pub(super) unsafe fn e2m1_half_bytes(bytes: __m128i) -> __m128i {
    // SAFETY: the caller's promise; the table has sixteen bytes.
    unsafe {
        let mask = _mm_set1_epi8(0x0F);
        let nibbles = _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask));
        _mm_shuffle_epi8(_mm_loadu_si128(E2M1_F16_HIGH.as_ptr().cast()), nibbles)
    }
}

/// Lanes 4..7 to 0..3.
///
/// # Safety
/// AVX must be present.
#[inline(always)]
pub(super) unsafe fn fold_to_4(eight: __m256) -> __m128 {
    // SAFETY: the caller's promise.
    unsafe { _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight)) }
}

/// Lanes 2..3 to 0..1, then 1 to 0, of four rows at once.
///
/// # Safety
/// AVX must be present.
#[inline(always)]
pub(super) unsafe fn fold_last(a: __m128, b: __m128, c: __m128, d: __m128) -> __m128 {
    // SAFETY: the caller's promise.
    unsafe {
        let ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
        let cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
        _mm_add_ps(_mm_shuffle_ps::<0b10_00_10_00>(ab, cd), _mm_shuffle_ps::<0b11_01_11_01>(ab, cd))
    }
}
