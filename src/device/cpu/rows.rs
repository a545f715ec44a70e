//! Row kernels: sums of squares, scaling, softmax pieces and the gated activation, each over contiguous f32 rows.

use super::math::exp;
use super::simd::{LANES, Portable, Simd, TILE_ROWS};

simd_fn! {
    /// Sum of x[i] * y[i] by the 16-lane contract; the shorter length counts.
    pub fn dot(x: &[f32], y: &[f32]) -> f32 = dot_kernel
}

simd_fn! {
    /// y[i] = x[i] * scale * weight[i] (weight absent: x[i] * scale), left to right.
    pub fn scale_row(x: &mut [f32], scale: f32, weight: Option<&[f32]>) = scale_row_kernel
}

simd_fn! {
    /// out[i] = silu(min(gate[i], limit)) * clamp(up[i], -limit, limit) * weight, left to right.
    pub fn swiglu_row(gate: &[f32], up: &[f32], limit: f32, weight: f32, out: &mut [f32]) = swiglu_row_kernel
}

simd_fn! {
    /// out[i] = sum over c, ascending, by fused multiply-add, of weight[c] * x[c][i]; x is four rows of out's length.
    pub fn weigh_copies(x: &[f32], weight: &[f32; 4], out: &mut [f32]) = weigh_copies_kernel
}

simd_fn! {
    /// h[j][i] = post[j] * output[i] + sum over c, ascending, by fused multiply-add, of comb[c][j] * h[c][i]; h is four rows of
    /// output's length, replaced in place.
    pub fn renew_copies(h: &mut [f32], output: &[f32], post: &[f32; 4], comb: &[[f32; 4]; 4]) = renew_copies_kernel
}

#[inline(always)]
unsafe fn dot_kernel<S: Simd>(x: &[f32], y: &[f32]) -> f32 {
    let n = x.len().min(y.len());
    let n_full = n - n % LANES;
    let (mut x_tail, mut y_tail) = ([0.0f32; LANES], [0.0f32; LANES]);
    x_tail[..n - n_full].copy_from_slice(&x[n_full..n]);
    y_tail[..n - n_full].copy_from_slice(&y[n_full..n]);
    let mut lanes = [0.0f32; LANES];
    let mut sums = [0.0f32; 4];
    // SAFETY: full steps stay below n_full, the tails are LANES long; fold4 with stride 0 reads the one row four times; the
    // caller vouches for the instruction set.
    unsafe {
        for part in (0..LANES).step_by(S::WIDTH) {
            let mut acc = S::splat(0.0);
            for i in (part..n_full).step_by(LANES) {
                acc = S::fma(S::load(x.as_ptr().add(i)), S::load(y.as_ptr().add(i)), acc);
            }
            if n_full < n {
                acc = S::fma(S::load(x_tail.as_ptr().add(part)), S::load(y_tail.as_ptr().add(part)), acc);
            }
            S::store(lanes.as_mut_ptr().add(part), acc);
        }
        let last = S::load(lanes.as_ptr().add(LANES - S::WIDTH));
        S::fold4(lanes.as_ptr(), 0, [last; TILE_ROWS], sums.as_mut_ptr());
    }
    sums[0]
}

#[inline(always)]
unsafe fn scale_row_kernel<S: Simd>(x: &mut [f32], scale: f32, weight: Option<&[f32]>) {
    let n = weight.map_or(x.len(), |w| w.len().min(x.len()));
    let n_vector = n - n % S::WIDTH;
    for i in (0..n_vector).step_by(S::WIDTH) {
        // SAFETY: i + WIDTH <= n, at most the length of both; the caller vouches for the instruction set.
        unsafe {
            let mut v = S::mul(S::load(x.as_ptr().add(i)), S::splat(scale));
            if let Some(w) = weight {
                v = S::mul(v, S::load(w.as_ptr().add(i)));
            }
            S::store(x.as_mut_ptr().add(i), v);
        }
    }
    for i in n_vector..n {
        x[i] = x[i] * scale * weight.map_or(1.0, |w| w[i]);
    }
}

#[inline(always)]
unsafe fn swiglu_row_kernel<S: Simd>(gate: &[f32], up: &[f32], limit: f32, weight: f32, out: &mut [f32]) {
    let n = gate.len().min(up.len()).min(out.len());
    let n_vector = n - n % S::WIDTH;
    for i in (0..n_vector).step_by(S::WIDTH) {
        // SAFETY: i + WIDTH <= n, at most the length of all three; the caller vouches for the instruction set.
        unsafe {
            let (g, u) = (S::load(gate.as_ptr().add(i)), S::load(up.as_ptr().add(i)));
            S::store(out.as_mut_ptr().add(i), swiglu::<S>(g, u, limit, weight));
        }
    }
    for i in n_vector..n {
        // SAFETY: the portable form needs no instruction set.
        out[i] = unsafe { swiglu::<Portable>(gate[i], up[i], limit, weight) };
    }
}

#[inline(always)]
unsafe fn weigh_copies_kernel<S: Simd>(x: &[f32], weight: &[f32; 4], out: &mut [f32]) {
    let n = out.len();
    assert!(x.len() == 4 * n, "weigh_copies: x of {}, out of {n}", x.len());
    let n_vector = n - n % S::WIDTH;
    // SAFETY: vector steps stay below n_vector, single ones below n, in each of the four rows; the caller vouches for the
    // instruction set.
    unsafe {
        for i in (0..n_vector).step_by(S::WIDTH) {
            weigh_copies_at::<S>(x.as_ptr().add(i), n, weight, out.as_mut_ptr().add(i));
        }
        for i in n_vector..n {
            weigh_copies_at::<Portable>(x.as_ptr().add(i), n, weight, out.as_mut_ptr().add(i));
        }
    }
}

/// One register of columns; `n` elements lie between the rows of x.
#[inline(always)]
unsafe fn weigh_copies_at<S: Simd>(x: *const f32, n: usize, weight: &[f32; 4], out: *mut f32) {
    // SAFETY: the caller passes columns that are inside all rows.
    unsafe {
        let mut sum = S::mul(S::splat(weight[0]), S::load(x));
        for (c, weight) in weight.iter().enumerate().skip(1) {
            sum = S::fma(S::splat(*weight), S::load(x.add(c * n)), sum);
        }
        S::store(out, sum);
    }
}

#[inline(always)]
unsafe fn renew_copies_kernel<S: Simd>(h: &mut [f32], output: &[f32], post: &[f32; 4], comb: &[[f32; 4]; 4]) {
    let n = output.len();
    assert!(h.len() == 4 * n, "renew_copies: h of {}, output of {n}", h.len());
    let n_vector = n - n % S::WIDTH;
    // SAFETY: vector steps stay below n_vector, single ones below n, in each of the four rows; the caller vouches for the
    // instruction set.
    unsafe {
        for i in (0..n_vector).step_by(S::WIDTH) {
            renew_copies_at::<S>(h.as_mut_ptr().add(i), n, output.as_ptr().add(i), post, comb);
        }
        for i in n_vector..n {
            renew_copies_at::<Portable>(h.as_mut_ptr().add(i), n, output.as_ptr().add(i), post, comb);
        }
    }
}

/// One register of columns; `n` elements lie between the rows of h.
#[inline(always)]
unsafe fn renew_copies_at<S: Simd>(h: *mut f32, n: usize, output: *const f32, post: &[f32; 4], comb: &[[f32; 4]; 4]) {
    // SAFETY: the caller passes columns that are inside all rows.
    unsafe {
        let output = S::load(output);
        let old = [S::load(h), S::load(h.add(n)), S::load(h.add(2 * n)), S::load(h.add(3 * n))];
        for j in 0..4 {
            let mut sum = S::mul(S::splat(post[j]), output);
            for c in 0..4 {
                sum = S::fma(S::splat(comb[c][j]), old[c], sum);
            }
            S::store(h.add(j * n), sum);
        }
    }
}

/// The clamped gated activation; a NaN in either input stays a NaN.
#[inline(always)]
unsafe fn swiglu<S: Simd>(gate: S::V, up: S::V, limit: f32, weight: f32) -> S::V {
    // SAFETY: register arithmetic; the caller vouches for the instruction set.
    unsafe {
        let g = S::min(S::splat(limit), gate);
        let u = S::max(S::splat(-limit), S::min(S::splat(limit), up));
        let silu = S::div(g, S::add(S::splat(1.0), exp::<S>(S::sub(S::splat(0.0), g))));
        S::mul(S::mul(silu, u), S::splat(weight))
    }
}
