//! The sums of GPU kernels on the CPU, bit for bit: matrix instructions and blocks of threads, for comparing a device closely.
//!
//! sm_90's instruction adds sixteen exact products and the accumulator as one sum: each is cut towards zero to a multiple of 2^-25
//! of 2^e, e the largest exponent among them (a product's is the sum of its factors'), the pieces are added exactly, and the sum is
//! cut towards zero to an f32. (MMA-Sim, arXiv 2511.10909, found this rule and tested it on hardware.) gfx942's is taken as sixteen
//! fused multiply-adds in ascending k, which hardware need not do. The simulator has the same two rules, by wave width.

// Register tiles are indexed by position, so that every loop unrolls alike on all instruction sets.
#![allow(clippy::needless_range_loop)]
// Kernels take the instruction set as a type; these leave the choice of instructions to the compiler.
#![allow(clippy::extra_unused_type_parameters)]

use std::ops::Range;

use super::expand::expand_row_kernel;
use super::simd::Simd;
use super::{Cpu, Level, Shared};
use crate::device::SimWave;
use crate::tensor::matrix::Matrix;

/// Rows and K of a matrix instruction.
pub const TILE: usize = 16;
/// Columns of a step of a product: its instructions start from zero.
const STEP_COLS: usize = 128;
/// Columns of a block, which two instructions share.
const BLOCK_COLS: usize = 32;
/// Threads of a block at most.
const MAX_THREADS: usize = 256;
/// Bits below the largest exponent that sm_90 keeps.
const KEPT_BITS: u32 = 25;
/// Largest summands from this one on have a unit that is a normal f32; what is subnormal is then less than a unit, or counts less than
/// they do.
const SMALL: f32 = 1.0 / (1u128 << 101) as f32;
/// Up to this one nothing overflows.
const LARGE: f32 = (1u128 << 123) as f32;
/// Operands up to this one keep products with subnormals below [`SMALL`].
const LARGE_OPERAND: f32 = (1u32 << 24) as f32;

/// A product y = W x in the order of the kernels; shapes are checked by the caller, a wrong one panics at a slice bound.
pub(crate) struct TileProduct<'a> {
    pub weight: &'a Matrix, // [N, K]
    /// Values of BF16.
    pub x: &'a [f32], // [T, x_stride] f32
    pub x_stride: usize,
    pub n_tokens: usize,
    /// Rows of one group, all or a multiple of 16; group g reads x from column g K on.
    pub group_rows: usize,
    /// Ranges of steps whose sums are added last.
    pub n_splits: usize,
    pub y: &'a mut [f32], // [T, y_stride] f32
    pub y_stride: usize,
}

/// How the threads of a kernel share out the columns of a row: `run` consecutive ones each in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadSums {
    /// Threads, whole waves of them.
    pub n_threads: usize,
    /// Consecutive columns of a thread.
    pub run: usize,
    /// Lanes of a wave.
    pub wave: usize,
}

simd_fn! {
    fn multiply_w32(c: &mut [f32; TILE], a: &[f32], b: &[f32]) = fused_sums
}

simd_fn! {
    fn multiply_w64(c: &mut [f32; TILE], a: &[f32], b: &[f32]) = ordered_sums
}

simd_fn! {
    fn thread_dots(x: &[f32], y: &[f32], shares: ThreadSums, sums: &mut [f32; MAX_THREADS]) = thread_dots_kernel
}

simd_fn! {
    fn expand_row(weight: &Matrix, row: usize, out: &mut [f32]) = expand_row_kernel
}

/// Instructions in a row on one row of B and sixteen rows of A: `c[r] += sum over k of a[i, k, r] * b[i, k]` for each i.
pub(crate) fn multiply(level: Level, wave: SimWave, c: &mut [f32; TILE], a: &[f32], b: &[f32]) {
    assert!(a.len() == b.len() * TILE, "tile: a of {}, b of {}", a.len(), b.len());
    match wave {
        SimWave::W32 => multiply_w32(level, c, a, b),
        SimWave::W64 => multiply_w64(level, c, a, b),
    }
}

impl ThreadSums {
    /// The sum of x[i] * y[i]: every thread its columns in ascending order by fused multiply-add, the lanes of a wave by halving
    /// distances, the waves in order.
    #[must_use]
    pub fn dot(self, level: Level, x: &[f32], y: &[f32]) -> f32 {
        self.wave_dots(level, x, y).into_iter().reduce(|sum, wave| sum + wave).unwrap_or(0.0)
    }

    /// The sums of the waves.
    #[must_use]
    pub fn wave_dots(self, level: Level, x: &[f32], y: &[f32]) -> Vec<f32> {
        assert!(self.n_threads <= MAX_THREADS && self.n_threads.is_multiple_of(self.wave), "{self:?}");
        let mut sums = [0.0; MAX_THREADS];
        thread_dots(level, x, y, self, &mut sums);
        sums[..self.n_threads].chunks_exact_mut(self.wave).map(halving_sum).collect()
    }
}

/// Computes a product on all threads.
pub(crate) fn run(cpu: &Cpu, wave: SimWave, p: TileProduct) {
    let (n_cols, n_groups) = (p.weight.n_cols, p.weight.n_rows.div_ceil(p.group_rows));
    let padded = n_cols.next_multiple_of(STEP_COLS);
    let mut x = vec![0.0; p.n_tokens * n_groups * padded];
    cpu.par_chunks(&mut x, padded, 8, |i, out| {
        let from = &p.x[i / n_groups * p.x_stride + i % n_groups * n_cols..][..n_cols];
        from.iter().enumerate().for_each(|(column, value)| out[place(column)] = *value);
    });
    let y = Shared::new(p.y);
    cpu.par_tiles(p.weight.n_rows.div_ceil(TILE), 1, |tiles| {
        for tile in tiles {
            let rows = tile * TILE..((tile + 1) * TILE).min(p.weight.n_rows);
            let (a, group) = (row_tile(cpu.level(), p.weight, rows.clone(), padded), rows.start / p.group_rows);
            for t in 0..p.n_tokens {
                let b = &x[(t * n_groups + group) * padded..][..padded];
                let sums = split_sums(cpu.level(), wave, p.n_splits, &a, b);
                let at = t * p.y_stride + rows.start;
                // SAFETY: a (token, row) pair belongs to one row tile, and each is given to one call.
                unsafe { y.range(at..at + rows.len()) }.copy_from_slice(&sums[..rows.len()]);
            }
        }
    });
}

/// Where a column stands among the operands: in a block of 32 the quarter q of a wave owns columns 8 q .. 8 q + 7, the first four
/// for the first instruction.
fn place(column: usize) -> usize {
    let (block, quarter, own) = (column / BLOCK_COLS, column % BLOCK_COLS / 8, column % 8);
    block * BLOCK_COLS + own / 4 * TILE + quarter * 4 + own % 4
}

/// Sixteen weight rows as operands `[K / 16, 16, 16 rows]`; rows past the last are zeros.
fn row_tile(level: Level, weight: &Matrix, rows: Range<usize>, padded: usize) -> Vec<f32> {
    let (mut a, mut expanded) = (vec![0.0; padded * TILE], vec![0.0; padded * TILE]);
    for (row, out) in rows.zip(expanded.chunks_exact_mut(padded)) {
        expand_row(level, weight, row, &mut out[..weight.n_cols]);
    }
    for column in 0..padded {
        for (r, out) in a[place(column) * TILE..][..TILE].iter_mut().enumerate() {
            *out = expanded[r * padded + column];
        }
    }
    a
}

/// Sums of one token with sixteen rows. A scale of 128 columns is a power of two, so that it may be applied before its step's sums.
fn split_sums(level: Level, wave: SimWave, n_splits: usize, a: &[f32], b: &[f32]) -> [f32; TILE] {
    let n_steps = b.len() / STEP_COLS;
    let mut total = [0.0; TILE];
    for split in 0..n_splits {
        let mut sums = [0.0; TILE];
        for step in split * n_steps / n_splits..(split + 1) * n_steps / n_splits {
            let (mut part, columns) = ([0.0; TILE], step * STEP_COLS..(step + 1) * STEP_COLS);
            multiply(level, wave, &mut part, &a[columns.start * TILE..columns.end * TILE], &b[columns]);
            add(&mut sums, &part);
        }
        add(&mut total, &sums);
    }
    total
}

fn add(to: &mut [f32; TILE], values: &[f32; TILE]) {
    for r in 0..TILE {
        to[r] += values[r];
    }
}

#[inline(always)]
unsafe fn ordered_sums<S: Simd>(c: &mut [f32; TILE], a: &[f32], b: &[f32]) {
    for (a, b) in a.chunks_exact(TILE).zip(b) {
        for r in 0..TILE {
            c[r] = a[r].mul_add(*b, c[r]);
        }
    }
}

#[inline(always)]
unsafe fn fused_sums<S: Simd>(c: &mut [f32; TILE], a: &[f32], b: &[f32]) {
    let (a, b) = (a.as_chunks::<TILE>().0.as_chunks::<TILE>().0, b.as_chunks::<TILE>().0);
    for (a, b) in a.iter().zip(b) {
        fused_sum(c, a, b);
    }
}

/// One instruction of sm_90. Anything that is not finite gives NaN.
#[inline(always)]
fn fused_sum(c: &mut [f32; TILE], a: &[[f32; TILE]; TILE], b: &[f32; TILE]) {
    // The power of two of the largest summand, and of the largest operand.
    let (mut top, mut largest) = ([0f32; TILE], [0f32; TILE]);
    for r in 0..TILE {
        top[r] = leading(c[r]);
    }
    for k in 0..TILE {
        let of_b = leading(b[k]);
        for r in 0..TILE {
            let of_a = leading(a[k][r]);
            top[r] = larger(of_a * of_b, top[r]);
            largest[r] = larger(larger(of_a, of_b), largest[r]);
        }
    }
    let mut odd = [0u32; TILE];
    for r in 0..TILE {
        let is_small = (top[r] < SMALL) & ((top[r] > 0.0) | (c[r] != 0.0));
        odd[r] = u32::from(is_small | (top[r] > LARGE) | (largest[r] > LARGE_OPERAND));
        // Where all is 0, any unit will do.
        top[r] = larger(top[r], SMALL);
    }
    if odd.iter().fold(0, |any, odd| any | odd) > 0 {
        return odd_sums(c, a, b);
    }
    let mut inverse = [0f32; TILE];
    for r in 0..TILE {
        // 2^25 / top.
        inverse[r] = f32::from_bits(((254 + KEPT_BITS) << 23) - top[r].to_bits());
    }
    // A piece is below 2^27, so that eight of them fit an i32.
    let (mut low, mut high) = ([0i32; TILE], [0i32; TILE]);
    for k in 0..TILE / 2 {
        for r in 0..TILE {
            // SAFETY: all numbers are finite, by the largest operand, and pieces below 2^27, by the largest summand.
            unsafe {
                low[r] += (a[k][r] * b[k] * inverse[r]).to_int_unchecked::<i32>();
                high[r] += (a[k + TILE / 2][r] * b[k + TILE / 2] * inverse[r]).to_int_unchecked::<i32>();
            }
        }
    }
    for r in 0..TILE {
        // SAFETY: as above.
        let own = unsafe { (c[r] * inverse[r]).to_int_unchecked::<i32>() };
        let sum = f64::from(low[r]) + f64::from(high[r]) + f64::from(own);
        let exact = sum * (f64::from(top[r]) * power_of_two(-(KEPT_BITS as i32)));
        // 0, or a normal number: the unit is one.
        c[r] = f64::from_bits(exact.to_bits() & !((1 << 29) - 1)) as f32;
    }
}

/// The power of two of a number's leading bit; 0 for 0 and subnormals, infinite for what is not finite.
#[inline(always)]
fn leading(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & 0x7F80_0000)
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// As [`fused_sum`], for numbers of any size.
#[inline(never)]
fn odd_sums(c: &mut [f32; TILE], a: &[[f32; TILE]; TILE], b: &[f32; TILE]) {
    for r in 0..TILE {
        let products = || b.iter().zip(a.iter().map(|a| a[r]));
        let fields = products()
            .filter(|(b, a)| *a != 0.0 && **b != 0.0)
            .map(|(b, a)| exponent_field(a) + exponent_field(*b) - 127);
        let top = fields.fold(exponent_field(c[r]), i32::max);
        let is_finite = c[r].is_finite() && products().all(|(b, a)| b.is_finite() && a.is_finite());
        let pieces = products().map(|(b, a)| f64::from(a) * f64::from(*b)).chain([f64::from(c[r])]);
        let sum: f64 = pieces.map(|piece| (piece * power_of_two(127 + KEPT_BITS as i32 - top)).trunc()).sum();
        c[r] = if is_finite { cut_to_f32(sum * power_of_two(top - 127 - KEPT_BITS as i32)) } else { f32::NAN };
    }
}

/// The f32 towards zero.
#[inline(always)]
fn cut_to_f32(x: f64) -> f32 {
    let cut = f64::from_bits(x.to_bits() & !((1 << 29) - 1));
    let is_small = x.abs() < f64::from(f32::MIN_POSITIVE);
    // A subnormal is a multiple of 2^-149.
    if is_small { ((x * power_of_two(149)) as i64 as f64 * power_of_two(-149)) as f32 } else { cut as f32 }
}

#[inline(always)]
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The exponent's bits; those of 0 and of a subnormal are taken as 1, the least exponent.
#[inline(always)]
fn exponent_field(x: f32) -> i32 {
    ((x.to_bits() >> 23 & 0xFF) as i32).max(1)
}

#[inline(always)]
unsafe fn thread_dots_kernel<S: Simd>(x: &[f32], y: &[f32], shares: ThreadSums, sums: &mut [f32; MAX_THREADS]) {
    let ThreadSums { n_threads, run, .. } = shares;
    let mut thread = 0;
    for (x, y) in x.chunks(run).zip(y.chunks(run)) {
        let mut sum = sums[thread];
        for (x, y) in x.iter().zip(y) {
            sum = x.mul_add(*y, sum);
        }
        sums[thread] = sum;
        thread = (thread + 1) % n_threads;
    }
}

/// The sum of a power of two of values, those half of them apart first.
fn halving_sum(values: &mut [f32]) -> f32 {
    let mut half = values.len() / 2;
    while half > 0 {
        for l in 0..half {
            values[l] += values[l + half];
        }
        half /= 2;
    }
    values[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::{Rng, bits, cpus, max_error};

    /// One element by the rule in whole numbers.
    fn rule(a: &[f32], b: &[f32], c: f32) -> f32 {
        let exponent = |x: f32| (x.to_bits() >> 23 & 0xFF).max(1) as i32 - 127;
        let products = a.iter().zip(b).filter(|(a, b)| **a != 0.0 && **b != 0.0);
        let top = products.map(|(a, b)| exponent(*a) + exponent(*b)).fold(exponent(c), i32::max);
        let unit = 2f64.powi(top - 25);
        let pieces = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).chain([f64::from(c)]);
        let sum: i64 = pieces.map(|piece| (piece / unit) as i64).sum();
        // Towards zero: the nearest, or the one below it.
        let exact = sum as f64 * unit;
        let near = exact as f32;
        if f64::from(near).abs() > exact.abs() { near.signum() * near.abs().next_down() } else { near }
    }

    #[test]
    fn the_fused_sum_is_the_rule_on_every_level() {
        let mut rng = Rng(301);
        for i in 0..250 {
            // The last kind is of numbers whose products and sums are not normal.
            let (spread, gain) = [(0, 1.0), (3, 1.0), (12, 1.0), (30, 1.0), (8, 2f32.powi(-68))][i % 5];
            let mut operand = |n: usize| -> Vec<f32> {
                let wide = |rng: &mut Rng| {
                    gain * rng.unit() * 2f32.powi((rng.next_u64() % (2 * spread + 1)) as i32 - spread as i32)
                };
                (0..n).map(|_| f32::from_bits(wide(&mut rng).to_bits() & 0xFFFF_0000)).collect()
            };
            let (mut a, b, c) = (operand(TILE * TILE), operand(TILE), operand(TILE));
            a[i % 256] = 0.0;
            let want: Vec<f32> =
                (0..TILE).map(|r| rule(&(0..TILE).map(|k| a[k * TILE + r]).collect::<Vec<_>>(), &b, c[r])).collect();
            for cpu in cpus() {
                let mut got: [f32; TILE] = c.clone().try_into().unwrap();
                multiply(cpu.level(), SimWave::W32, &mut got, &a, &b);
                assert_eq!(bits(&got), bits(&want), "{i} {:?}", cpu.level());
            }
        }
    }

    #[test]
    fn sums_are_cut_towards_zero_and_far_smaller_products_vanish() {
        let sum = |a0: f32, rest: f32, c: f32| {
            let (mut a, b) = ([rest; TILE * TILE], [1.0; TILE]);
            a[..TILE].fill(a0);
            let mut got = [c; TILE];
            multiply(Level::best(), SimWave::W32, &mut got, &a, &b);
            got[0]
        };
        // A unit is 2^-25 here: fifteen of 2^-25 stay, and of 2^-26 none.
        assert_eq!(sum(1.0, 2f32.powi(-25), 0.0), 1.0 + 3.0 * 2f32.powi(-23));
        assert_eq!(sum(1.0, 2f32.powi(-26), 0.0), 1.0);
        assert_eq!(sum(-1.0, -(2f32.powi(-25)), 0.0), -1.0 - 3.0 * 2f32.powi(-23));
        assert_eq!(sum(0.0, 0.0, 0.1), 0.1);
        assert!(sum(f32::NAN, 1.0, 0.0).is_nan() && sum(1.0, 1.0, f32::INFINITY).is_nan());
    }

    #[test]
    fn a_dot_of_threads_takes_every_column_once() {
        let mut rng = Rng(302);
        for (n, n_threads, run, wave) in
            [(512, 32, 4, 32), (512, 64, 4, 64), (256, 256, 1, 64), (1000, 256, 4, 32), (3, 32, 4, 32)]
        {
            let (x, y) = (rng.floats(n), rng.floats(n));
            let want: f64 = x.iter().zip(&y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
            let got = ThreadSums { n_threads, run, wave }.dot(Level::best(), &x, &y);
            // Sums of products of at most 1 each, with a handful of roundings.
            assert!(max_error(&[got], &[want]) < 1e-5, "{n} {n_threads} {run}");
        }
    }
}
