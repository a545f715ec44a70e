//! The k largest scores of a row: equal scores go to the lowest index, -0 equals +0, NaN counts as the lowest.

pub mod device;

/// Writes the indices of the k largest scores (all of them while there are at most k), ascending.
pub fn top_k(scores: &[f32], k: usize, out: &mut Vec<u32>) {
    out.clear();
    let n = u32::try_from(scores.len()).unwrap_or(u32::MAX);
    if scores.len() <= k {
        return out.extend(0..n);
    }
    let Some(kth) = k.checked_sub(1) else { return };
    let mut keys: Vec<u32> = scores.iter().map(|s| order_key(*s)).collect();
    let (larger, threshold, _) = keys.select_nth_unstable_by(kth, |a, b| b.cmp(a));
    let threshold = *threshold;
    let n_larger = larger.iter().filter(|key| **key > threshold).count();
    let mut n_equal = k - n_larger;
    out.extend((0..n).zip(scores).filter_map(|(i, score)| {
        let key = order_key(*score);
        let take = key > threshold || (key == threshold && n_equal > 0);
        n_equal -= usize::from(take && key == threshold);
        take.then_some(i)
    }));
}

/// The same set by a full sort.
#[must_use]
pub fn reference(scores: &[f32], k: usize) -> Vec<u32> {
    let value = |i: u32| {
        let score = scores[i as usize];
        if score.is_nan() { (0, 0.0) } else { (1, score) }
    };
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_by(|a, b| {
        let (a, b) = (value(*a), value(*b));
        b.0.cmp(&a.0).then(b.1.partial_cmp(&a.1).unwrap_or(std::cmp::Ordering::Equal))
    });
    order.truncate(k);
    order.sort_unstable();
    order
}

/// An integer in the order of the scores.
fn order_key(score: f32) -> u32 {
    if score.is_nan() {
        return 0;
    }
    // Adding +0 turns -0 into +0.
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::testing::Rng;

    fn run(scores: &[f32], k: usize) -> Vec<u32> {
        let mut out = vec![77];
        top_k(scores, k, &mut out);
        out
    }

    #[test]
    fn agrees_with_a_full_sort_on_rows_full_of_ties() {
        let mut rng = Rng(91);
        for n in [0usize, 1, 2, 7, 128, 129, 1000, 4097] {
            for n_values in [1, 2, 5, 1000] {
                let value = |rng: &mut Rng| match rng.next_u64() % 40 {
                    0 => f32::NAN,
                    1 => f32::NEG_INFINITY,
                    2 => f32::INFINITY,
                    3 => -0.0,
                    4 => 0.0,
                    5 => -f32::NAN,
                    _ => (rng.next_u64() % n_values) as f32 - 1.0,
                };
                let scores: Vec<f32> = (0..n).map(|_| value(&mut rng)).collect();
                for k in [0, 1, 2, 127, 128, 512] {
                    let got = run(&scores, k);
                    assert_eq!(got, reference(&scores, k), "n {n} k {k}");
                    assert!(got.windows(2).all(|w| w[0] < w[1]));
                }
            }
        }
    }

    #[test]
    fn ties_go_to_the_lowest_index_and_zeros_are_equal() {
        assert_eq!(run(&[1.0; 10], 3), [0, 1, 2]);
        assert_eq!(run(&[-0.0, 0.0, -0.0, 0.0], 2), [0, 1]);
        assert_eq!(run(&[f32::NAN, f32::NEG_INFINITY, f32::NAN, -1.0], 2), [1, 3]);
        assert_eq!(run(&[f32::NAN; 4], 2), [0, 1]);
        assert_eq!(run(&[3.0, 1.0], 5), [0, 1]);
    }
}
