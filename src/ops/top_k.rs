//! The k largest scores of a row: equal scores go to the lowest index, -0 equals +0, NaN counts as the lowest.

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
