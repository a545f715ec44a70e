//! Attention of one query over an explicit list of latent rows, and the pooling of a compressed row.

// Register tiles are indexed by position, so that every loop unrolls alike on all instruction sets.
#![allow(clippy::needless_range_loop)]

use super::math::exp;
use super::simd::{BLOCK_TOKENS, DotBlock, LANES, Portable, Simd, TILE_ROWS};

simd_fn! {
    /// `scores[h * rows.len() + r] = (q[h] . rows[r]) * scale`.
    pub(crate) fn attention_scores(q: &[f32], rows: &[&[f32]], scale: f32, scores: &mut [f32]) = scores_kernel
}

simd_fn! {
    /// Turns the scores of one head into exp(score - max) and returns 1 / (their sum + exp(sink - max)); max is over the
    /// scores and the sink. The sum runs over 16 lanes by row index, folded as a dot product is, the sink last.
    pub(crate) fn softmax_with_sink(scores: &mut [f32], sink: f32) -> f32 = softmax_kernel
}

simd_fn! {
    /// `out[h * d + i] = (sum over rows, ascending, by fused multiply-add, of p[h * rows.len() + r] * rows[r][i]) * norm[h]`.
    pub(crate) fn weighted_rows(p: &[f32], norm: &[f32], rows: &[&[f32]], out: &mut [f32]) = weighted_kernel
}

simd_fn! {
    /// Per element: softmax over the rows of `s`, times the rows of `a`, summed in row order.
    pub(crate) fn pool_rows(a: &[&[f32]], s: &[&[f32]], out: &mut [f32]) = pool_kernel
}

#[inline(always)]
unsafe fn scores_kernel<S: Simd>(q: &[f32], rows: &[&[f32]], scale: f32, scores: &mut [f32]) {
    let Some(d) = rows.first().map(|r| r.len()) else { return };
    assert!(d.is_multiple_of(LANES) && q.len().is_multiple_of(d), "attention: row of {d}, q of {}", q.len());
    let n_heads = q.len() / d;
    for (group, four) in rows.chunks(TILE_ROWS).enumerate() {
        // A short group repeats its last row; the extra sums are dropped.
        let last = four.len() - 1;
        let w = [&four[0][..d], &four[1.min(last)][..d], &four[2.min(last)][..d], &four[3.min(last)][..d]];
        for head in (0..n_heads).step_by(BLOCK_TOKENS) {
            let n_tokens = (n_heads - head).min(BLOCK_TOKENS);
            let mut sums = [0.0; BLOCK_TOKENS * TILE_ROWS];
            let block = DotBlock { w, x: &q[head * d..(head + n_tokens) * d], x_stride: d, n_tokens };
            // SAFETY: q holds n_tokens heads of d elements from `head`; the caller vouches for the instruction set.
            unsafe { S::dot_block(block, &mut sums, TILE_ROWS) };
            for (h, sums) in sums.chunks_exact(TILE_ROWS).take(n_tokens).enumerate() {
                let at = (head + h) * rows.len() + group * TILE_ROWS;
                for (score, sum) in scores[at..at + four.len()].iter_mut().zip(sums) {
                    *score = sum * scale;
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn softmax_kernel<S: Simd>(scores: &mut [f32], sink: f32) -> f32 {
    // A NaN score is passed over here and reaches the sum through exp.
    let max = scores.iter().fold(sink, |m, s| if *s > m { *s } else { m });
    let n = scores.len();
    let n_vector = n - n % S::WIDTH;
    // SAFETY: vector steps stay below n; the rest is portable; the caller vouches for the instruction set.
    unsafe {
        for i in (0..n_vector).step_by(S::WIDTH) {
            let at = scores.as_mut_ptr().add(i);
            S::store(at, exp::<S>(S::sub(S::load(at), S::splat(max))));
        }
        for score in &mut scores[n_vector..] {
            *score = exp::<Portable>(*score - max);
        }
        let mut lanes = [0.0f32; LANES];
        for chunk in scores.chunks(LANES) {
            for (lane, p) in lanes.iter_mut().zip(chunk) {
                *lane += p;
            }
        }
        let mut sums = [0.0f32; 4];
        let last = S::load(lanes.as_ptr().add(LANES - S::WIDTH));
        S::fold4(lanes.as_ptr(), 0, [last; TILE_ROWS], sums.as_mut_ptr());
        1.0 / (sums[0] + exp::<Portable>(sink - max))
    }
}

#[inline(always)]
unsafe fn weighted_kernel<S: Simd>(p: &[f32], norm: &[f32], rows: &[&[f32]], out: &mut [f32]) {
    let n_heads = norm.len();
    let d = out.len().checked_div(n_heads).unwrap_or(0);
    assert!(d.is_multiple_of(LANES) && p.len() >= n_heads * rows.len(), "attention: out row of {d}, p of {}", p.len());
    for row in rows {
        assert!(row.len() >= d, "attention: row of {}, want {d}", row.len());
    }
    // SAFETY: head and column bounds are those of `out`, `p` and the rows checked above.
    unsafe {
        let mut head = 0;
        while head + 4 <= n_heads {
            weighted_heads::<S, 4>(head, p, norm, rows, d, out);
            head += 4;
        }
        while head < n_heads {
            weighted_heads::<S, 1>(head, p, norm, rows, d, out);
            head += 1;
        }
    }
}

/// `H` heads from `head`, two registers of columns at a time.
#[inline(always)]
unsafe fn weighted_heads<S: Simd, const H: usize>(
    head: usize,
    p: &[f32],
    norm: &[f32],
    rows: &[&[f32]],
    d: usize,
    out: &mut [f32],
) {
    let n = rows.len();
    let p = &p[head * n..(head + H) * n];
    let out = &mut out[head * d..(head + H) * d];
    // WIDTH divides 16 but two registers of 16 lanes may not divide d.
    let step = if 2 * S::WIDTH <= LANES { 2 } else { 1 };
    for column in (0..d).step_by(step * S::WIDTH) {
        // SAFETY: columns end at d (a multiple of 16), the length of every row; p and out were cut to H heads above.
        unsafe {
            let mut acc = [[S::splat(0.0); 2]; H];
            for (r, row) in rows.iter().enumerate() {
                let from = row.as_ptr().add(column);
                let v = [S::load(from), S::load(from.add((step - 1) * S::WIDTH))];
                for h in 0..H {
                    let p = S::splat(*p.get_unchecked(h * n + r));
                    for i in 0..step {
                        acc[h][i] = S::fma(p, v[i], acc[h][i]);
                    }
                }
            }
            for h in 0..H {
                for i in 0..step {
                    let to = out.as_mut_ptr().add(h * d + column + i * S::WIDTH);
                    S::store(to, S::mul(acc[h][i], S::splat(norm[head + h])));
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn pool_kernel<S: Simd>(a: &[&[f32]], s: &[&[f32]], out: &mut [f32]) {
    let n = out.len();
    for row in a.iter().chain(s) {
        assert!(row.len() >= n, "compress: row of {}, want {n}", row.len());
    }
    let n_vector = n - n % S::WIDTH;
    // SAFETY: every row has n elements; vector steps stay below n; the caller vouches for the instruction set.
    unsafe {
        for i in (0..n_vector).step_by(S::WIDTH) {
            S::store(out.as_mut_ptr().add(i), pool_column::<S>(a, s, i));
        }
        for i in n_vector..n {
            out[i] = pool_column::<Portable>(a, s, i);
        }
    }
}

#[inline(always)]
unsafe fn pool_column<S: Simd>(a: &[&[f32]], s: &[&[f32]], i: usize) -> S::V {
    // SAFETY: i + WIDTH is inside every row by the caller's promise.
    unsafe {
        let mut max = S::splat(f32::NEG_INFINITY);
        for s in s {
            // The maximum so far stands second: a NaN is passed over here and reaches the sums through exp.
            max = S::max(S::load(s.as_ptr().add(i)), max);
        }
        let (mut sum, mut total) = (S::splat(0.0), S::splat(0.0));
        for (a, s) in a.iter().zip(s) {
            let p = exp::<S>(S::sub(S::load(s.as_ptr().add(i)), max));
            total = S::add(total, p);
            sum = S::fma(p, S::load(a.as_ptr().add(i)), sum);
        }
        S::div(sum, total)
    }
}
