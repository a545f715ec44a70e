//! The vector interface every CPU kernel is written against, and its portable form: same operations, same order, same bits.
//!
//! # Numerics contract of the CPU device
//! - A dot product over K uses 16 virtual f32 lanes: lane l accumulates the elements k = l (mod 16) in ascending k by fused
//!   multiply-add, starting from +0. K is padded with zeros to a multiple of 16.
//! - One fold ends it: lanes 8..15 are added to 0..7, then 4..7 to 0..3, then 2..3 to 0..1, then 1 to 0.
//! - A stored weight element is expanded exactly to f32 (code value times scale) before it is multiplied.
//! - An output element is a pure function of its own rows. Tokens in the batch, threads, tiles and the instruction set never
//!   change the order of its sums.
//! - exp is the polynomial in [`super::math`], written once over [`Simd`]; sqrt and division are IEEE operations.
//!
//! AVX-512 holds the 16 lanes in one register, AVX2 in two, NEON in four, the portable form in sixteen; no operation mixes
//! lanes but the fold, so all four give the same bits.

/// Lanes of a dot product.
pub const LANES: usize = 16;
/// Weight rows of a dot tile.
pub const TILE_ROWS: usize = 4;
/// Tokens of one call of the dot kernel, cut into tiles: a multiple of every level's `TILE_TOKENS`.
pub const BLOCK_TOKENS: usize = 12;

/// What one call of the dot kernel multiplies: four weight rows times up to `BLOCK_TOKENS` rows of x.
#[derive(Clone, Copy)]
pub struct DotBlock<'a> {
    /// Weight rows of one length, a multiple of 16.
    pub w: [&'a [f32]; TILE_ROWS], // [4, K] f32
    /// Rows of x, `x_stride` elements apart.
    pub x: &'a [f32], // [T, x_stride] f32
    /// Elements from one row of x to the next.
    pub x_stride: usize,
    /// T.
    pub n_tokens: usize,
}

/// A register of `WIDTH` f32 lanes, of which `LANES / WIDTH` make up the 16 virtual lanes.
///
/// Every function is `unsafe` for one reason: the instruction set that the type stands for must be present, and a pointer must
/// be valid for the lanes that are read or written. The dispatch macro in `super` is the only place that picks a type.
#[allow(clippy::missing_safety_doc)] // Said once above, for all functions of the trait.
pub trait Simd {
    /// The register.
    type V: Copy;
    /// Lanes of the register; divides 16.
    const WIDTH: usize;
    /// Tokens of a dot tile: as many as leave its accumulators in registers.
    const TILE_TOKENS: usize;

    /// All lanes equal.
    unsafe fn splat(value: f32) -> Self::V;
    /// `WIDTH` floats, any alignment.
    unsafe fn load(from: *const f32) -> Self::V;
    /// Writes `WIDTH` floats, any alignment.
    unsafe fn store(to: *mut f32, value: Self::V);
    /// a + b.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// a - b.
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// a * b.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// a / b.
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// a < b ? a : b, so that a NaN in either gives b.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// a > b ? a : b, so that a NaN in either gives b.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// a < b ? yes : no.
    unsafe fn select_lt(a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// 2^n for integral n in -126..=127.
    unsafe fn exp2_int(n: Self::V) -> Self::V;
    /// `WIDTH` E4M3 codes, each multiplied by 2^-8 (an exact step that keeps half-float conversion usable). The two NaN codes
    /// give NaN with `NAN`, else something: weights were searched for them at load, cache rows were not.
    unsafe fn load_f8e4m3fn_scaled<const NAN: bool>(from: *const u8) -> Self::V;
    /// `WIDTH` little-endian BF16 numbers.
    unsafe fn load_bf16(from: *const u8) -> Self::V;
    /// `2 WIDTH` E2M1 codes from `WIDTH` bytes (low nibble first), in order.
    unsafe fn load_e2m1(from: *const u8) -> [Self::V; 2];
    /// [`super::linear::dot_block`] as a function of its own: inlined into a larger one, its accumulators do not all stay in
    /// registers (13 instead of 19 billion multiply-adds a second on one 2.5 GHz core with AVX2).
    unsafe fn dot_block(block: DotBlock, sums: &mut [f32], sums_stride: usize);
    /// Folds four rows of 16 lanes to four sums. The last register of row r is `last[r]`; the lanes before it are read from
    /// `lanes + r * stride`.
    unsafe fn fold4(lanes: *const f32, stride: usize, last: [Self::V; TILE_ROWS], to: *mut f32);
}

/// The form that needs no instruction set.
pub struct Portable;

impl Simd for Portable {
    type V = f32;
    const WIDTH: usize = 1;
    const TILE_TOKENS: usize = 2;

    #[inline(always)]
    unsafe fn splat(value: f32) -> f32 {
        value
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> f32 {
        // SAFETY: the caller promises a readable float at `from`.
        unsafe { from.read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, value: f32) {
        // SAFETY: the caller promises a writable float at `to`.
        unsafe { to.write_unaligned(value) }
    }
    #[inline(always)]
    unsafe fn add(a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    unsafe fn sub(a: f32, b: f32) -> f32 {
        a - b
    }
    #[inline(always)]
    unsafe fn mul(a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline(always)]
    unsafe fn div(a: f32, b: f32) -> f32 {
        a / b
    }
    #[inline(always)]
    unsafe fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
    #[inline(always)]
    unsafe fn min(a: f32, b: f32) -> f32 {
        if a < b { a } else { b }
    }
    #[inline(always)]
    unsafe fn max(a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
    #[inline(always)]
    unsafe fn select_lt(a: f32, b: f32, yes: f32, no: f32) -> f32 {
        if a < b { yes } else { no }
    }
    #[inline(always)]
    unsafe fn exp2_int(n: f32) -> f32 {
        f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23)
    }
    #[inline(always)]
    unsafe fn load_f8e4m3fn_scaled<const NAN: bool>(from: *const u8) -> f32 {
        // SAFETY: the caller promises a readable byte at `from`.
        crate::tensor::format::f8e4m3fn_to_f32(unsafe { *from }) * (1.0 / 256.0)
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> f32 {
        // SAFETY: the caller promises two readable bytes at `from`.
        crate::tensor::format::bf16_to_f32(u16::from_le_bytes(unsafe { from.cast::<[u8; 2]>().read() }))
    }
    #[inline(always)]
    unsafe fn load_e2m1(from: *const u8) -> [f32; 2] {
        // SAFETY: the caller promises a readable byte at `from`.
        let byte = unsafe { *from };
        [crate::tensor::format::e2m1_to_f32(byte & 15), crate::tensor::format::e2m1_to_f32(byte >> 4)]
    }
    unsafe fn dot_block(block: DotBlock, sums: &mut [f32], sums_stride: usize) {
        // SAFETY: passed on unchanged.
        unsafe { super::linear::dot_block::<Self>(block, sums, sums_stride) }
    }
    #[inline(always)]
    unsafe fn fold4(lanes: *const f32, stride: usize, last: [f32; TILE_ROWS], to: *mut f32) {
        for (row, last) in last.into_iter().enumerate() {
            let mut lane = [last; LANES];
            // SAFETY: the caller promises 15 readable floats at each of four rows, and four writable floats at `to`.
            unsafe {
                lane[..LANES - 1].copy_from_slice(std::slice::from_raw_parts(lanes.add(row * stride), LANES - 1));
                for half in [8, 4, 2, 1] {
                    for l in 0..half {
                        lane[l] += lane[l + half];
                    }
                }
                to.add(row).write(lane[0]);
            }
        }
    }
}
