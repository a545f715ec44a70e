//! The [`Simd`] operations on AArch64: four lanes a register.

use std::arch::aarch64::*;

use super::simd::{DotBlock, Simd, TILE_ROWS};

/// Four of these registers hold the 16 virtual lanes.
pub struct Neon;

/// 2^112 and 2^126: what moves a small format's exponent, put in f32's field without change of bias, to its place.
const F8E4M3FN_LIFT: f32 = f32::from_bits((127 + 112) << 23);
const E2M1_LIFT: f32 = f32::from_bits((127 + 126) << 23);

// SAFETY of all blocks below: every AArch64 processor this target runs on has NEON, and pointers are valid for the lanes they
// stand for, as the contract of `Simd` says.
impl Simd for Neon {
    type V = float32x4_t;
    const WIDTH: usize = 4;
    const TILE_TOKENS: usize = 6;

    #[inline(always)]
    unsafe fn splat(value: f32) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vdupq_n_f32(value) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vld1q_f32(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: float32x4_t) {
        // SAFETY: see above.
        unsafe { vst1q_f32(to, value) }
    }
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see above. Not vminq: that one returns a NaN for a NaN on either side.
        unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }
    #[inline(always)]
    unsafe fn select_lt(a: float32x4_t, b: float32x4_t, yes: float32x4_t, no: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vbslq_f32(vcltq_f32(a, b), yes, no) }
    }
    #[inline(always)]
    unsafe fn exp2_int(n: float32x4_t) -> float32x4_t {
        // SAFETY: see above.
        unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)))) }
    }
    #[inline(always)]
    unsafe fn load_f8e4m3fn_scaled<const NAN: bool>(from: *const u8) -> float32x4_t {
        // SAFETY: see above; four bytes are read.
        unsafe {
            let code = load_4_bytes(from);
            let magnitude = vandq_u32(code, vdupq_n_u32(0x7F));
            // The two NaN codes become all ones, an f32 NaN.
            let nan = if NAN { vceqq_u32(magnitude, vdupq_n_u32(0x7F)) } else { vdupq_n_u32(0) };
            let sign = vshlq_n_u32::<24>(vandq_u32(code, vdupq_n_u32(0x80)));
            let bits = vorrq_u32(vorrq_u32(sign, vshlq_n_u32::<20>(magnitude)), nan);
            vmulq_f32(vreinterpretq_f32_u32(bits), vdupq_n_f32(F8E4M3FN_LIFT))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> float32x4_t {
        // SAFETY: see above; eight bytes are read.
        unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vreinterpret_u16_u8(vld1_u8(from))))) }
    }
    #[inline(always)]
    unsafe fn load_e2m1(from: *const u8) -> [float32x4_t; 2] {
        // SAFETY: see above; four bytes are read.
        unsafe {
            let bytes = load_4_bytes(from);
            let (low, high) = (vandq_u32(bytes, vdupq_n_u32(0x0F)), vshrq_n_u32::<4>(bytes));
            [e2m1_to_f32x4(vzip1q_u32(low, high)), e2m1_to_f32x4(vzip2q_u32(low, high))]
        }
    }
    #[inline(always)]
    unsafe fn dot_block(block: DotBlock, sums: &mut [f32], sums_stride: usize) {
        // SAFETY: see above; passed on unchanged.
        unsafe { dot_block(block, sums, sums_stride) }
    }
    #[inline(always)]
    unsafe fn fold4(lanes: *const f32, stride: usize, last: [float32x4_t; TILE_ROWS], to: *mut f32) {
        for (row, last) in last.into_iter().enumerate() {
            // SAFETY: see above; twelve floats are read at each of four rows, four are written.
            unsafe {
                let at = lanes.add(row * stride);
                let low = vaddq_f32(vld1q_f32(at), vld1q_f32(at.add(8)));
                let high = vaddq_f32(vld1q_f32(at.add(4)), last);
                let four = vaddq_f32(low, high);
                let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
                *to.add(row) = vget_lane_f32::<0>(vpadd_f32(two, two));
            }
        }
    }
}

/// One function for all uses of the dot kernel.
#[inline(never)]
unsafe fn dot_block(block: DotBlock, sums: &mut [f32], sums_stride: usize) {
    // SAFETY: passed on unchanged.
    unsafe { super::linear::dot_block::<Neon>(block, sums, sums_stride) }
}

/// Four bytes, each in 32 bits.
#[inline(always)]
unsafe fn load_4_bytes(from: *const u8) -> uint32x4_t {
    // SAFETY: the caller promises four readable bytes.
    unsafe {
        let bytes = vreinterpret_u8_u32(vdup_n_u32(u32::from_le(from.cast::<u32>().read_unaligned())));
        vmovl_u16(vget_low_u16(vmovl_u8(bytes)))
    }
}

/// E2M1 codes 0..=15.
#[inline(always)]
unsafe fn e2m1_to_f32x4(code: uint32x4_t) -> float32x4_t {
    // SAFETY: register arithmetic on AArch64.
    unsafe {
        let magnitude = vshlq_n_u32::<22>(vandq_u32(code, vdupq_n_u32(7)));
        let sign = vshlq_n_u32::<28>(vandq_u32(code, vdupq_n_u32(8)));
        vmulq_f32(vreinterpretq_f32_u32(vorrq_u32(magnitude, sign)), vdupq_n_f32(E2M1_LIFT))
    }
}
