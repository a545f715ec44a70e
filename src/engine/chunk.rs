//! How many rows of a prompt a step takes, and where it must stop.

use crate::model::cache::BLOCK_TOKENS;

/// Rows a step may score at most: each needs a row of logits as wide as the vocabulary.
pub const MAX_SCORED_ROWS: usize = BLOCK_TOKENS;

/// The part of a prompt that is to be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefill {
    /// First row: tokens in the caches.
    pub start: usize,
    /// Known tokens; the last chunk ends here.
    pub end: usize,
    /// Prompt tokens; beyond `end` never, below it when output is recomputed.
    pub n_prompt: usize,
    /// Where the last checkpoint is.
    pub n_rows_kept: usize,
}

/// Who else there is while a prompt is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Company {
    /// Nobody runs or waits.
    Alone,
    /// Others run; none of them wants rows for a prompt.
    Streams,
    /// Other prompts want rows.
    Prompts,
}

/// Rows by share of the `n_left` that the step has for prompts. In company a long prompt takes at most the threshold, and
/// beside other prompts at most half of what is left, so that short prompts behind it start within a few steps however
/// many long ones there are. Long is what exceeds the threshold or can't end in this step; a threshold of 0 splits nothing.
#[must_use]
pub const fn share(n_wanted: usize, n_left: usize, company: Company, long_threshold: usize) -> usize {
    let is_long = long_threshold > 0 && n_wanted > min(long_threshold, n_left);
    let most = match company {
        Company::Streams if is_long => min(long_threshold, n_left),
        // At least one row, so that the first in line moves on whatever is left.
        Company::Prompts if is_long => min(long_threshold, max(n_left / 2, min(n_left, 1))),
        _ => n_left,
    };
    min(n_wanted, most)
}

/// Cuts a chunk of `n_rows` rows where a checkpoint is due: at the last block boundary before the prompt's end, and at its
/// own last boundary when that is `every_blocks` blocks or more after the last checkpoint. A chunk is not cut to less than
/// half for the latter, unless the checkpoint is four times overdue.
#[must_use]
pub const fn cut(prefill: Prefill, n_rows: usize, every_blocks: usize) -> usize {
    let Prefill { start, end, n_prompt, n_rows_kept } = prefill;
    let mut stop = min(start + n_rows, end);
    let last_boundary = (n_prompt - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
    if start < last_boundary && last_boundary < stop {
        stop = last_boundary;
    }
    let boundary = stop / BLOCK_TOKENS * BLOCK_TOKENS;
    if stop < end && boundary > start && is_due(boundary, n_rows_kept, every_blocks) {
        let is_half = 2 * (boundary - start) >= stop - start;
        if is_half || is_due(boundary, n_rows_kept, 4 * every_blocks) {
            stop = boundary;
        }
    }
    stop - start
}

/// Cuts off a prompt's last row when siblings wait for it: they can share all the rows before it, while that one has to be
/// run by each, for its logits. So the row is run in the next step, beside theirs.
#[must_use]
pub const fn spare_last(prefill: Prefill, n_rows: usize) -> usize {
    if n_rows > 1 && prefill.start + n_rows == prefill.n_prompt { n_rows - 1 } else { n_rows }
}

/// Whether the state after `n_tokens` tokens is worth a checkpoint.
#[must_use]
pub const fn is_kept(n_tokens: usize, n_prompt: usize, n_rows_kept: usize, every_blocks: usize) -> bool {
    if n_tokens == n_prompt {
        return true;
    }
    let is_boundary = n_tokens.is_multiple_of(BLOCK_TOKENS);
    let is_last_of_prompt = n_tokens == (n_prompt - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
    is_boundary && (is_last_of_prompt || is_due(n_tokens, n_rows_kept, every_blocks))
}

const fn is_due(boundary: usize, n_rows_kept: usize, every_blocks: usize) -> bool {
    boundary >= n_rows_kept / BLOCK_TOKENS * BLOCK_TOKENS + every_blocks * BLOCK_TOKENS
}

const fn min(a: usize, b: usize) -> usize {
    if a < b { a } else { b }
}

const fn max(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Chunk ends of a prompt with `n_rows` rows a step.
    fn ends(n_prompt: usize, n_rows: usize, every_blocks: usize) -> Vec<usize> {
        let mut prefill = Prefill { start: 0, end: n_prompt, n_prompt, n_rows_kept: 0 };
        let mut ends = Vec::new();
        while prefill.start < n_prompt {
            let n_cut = cut(prefill, n_rows, every_blocks);
            assert!(n_cut >= 1 && n_cut <= n_rows, "{prefill:?}");
            prefill.start += n_cut;
            if is_kept(prefill.start, n_prompt, prefill.n_rows_kept, every_blocks) {
                prefill.n_rows_kept = prefill.start;
            }
            ends.push(prefill.start);
        }
        ends
    }

    #[test]
    fn long_prompts_leave_room_for_others() {
        assert_eq!(share(5000, 2048, Company::Alone, 1024), 2048);
        assert_eq!(share(5000, 2048, Company::Prompts, 1024), 1024);
        assert_eq!(share(5000, 1000, Company::Prompts, 1024), 500);
        assert_eq!(share(5000, 1, Company::Prompts, 1024), 1);
        assert_eq!(share(5000, 0, Company::Prompts, 1024), 0);
        assert_eq!(share(1024, 1030, Company::Prompts, 1024), 1024, "a short prompt is not split for others");
        assert_eq!(share(700, 64, Company::Prompts, 1024), 32, "in a short step it is a long one");
        assert_eq!(share(5000, 2048, Company::Prompts, 0), 2048, "0 turns the cap off");
    }

    #[test]
    fn nothing_is_left_for_prompts_that_are_not_there() {
        assert_eq!(share(5000, 2048, Company::Streams, 1024), 1024);
        assert_eq!(share(5000, 64, Company::Streams, 1024), 64);
        assert_eq!(share(50, 64, Company::Streams, 1024), 50);
    }

    #[test]
    fn chunks_end_at_the_last_boundary_and_at_the_end() {
        assert_eq!(ends(255, 2048, 8), [255]);
        assert_eq!(ends(256, 2048, 8), [256]);
        assert_eq!(ends(257, 2048, 8), [256, 257]);
        assert_eq!(ends(700, 2048, 8), [512, 700]);
        assert_eq!(ends(700, 300, 8), [300, 512, 700]);
    }

    #[test]
    fn long_prompts_get_checkpoints_without_tiny_chunks() {
        assert_eq!(ends(5000, 1984, 4), [1792, 3584, 4864, 5000]);
        assert_eq!(ends(5000, 1984, 8), [1984, 3840, 4864, 5000]);
        assert_eq!(ends(1200, 100, 1)[..6], [100, 200, 256, 356, 456, 512]);
        assert_eq!(ends(5000, 127, 1)[..9], [127, 254, 381, 508, 635, 762, 889, 1016, 1024], "once in four blocks");
    }

    #[test]
    fn the_last_row_is_spared_for_siblings() {
        let prefill = Prefill { start: 512, end: 700, n_prompt: 700, n_rows_kept: 512 };
        assert_eq!([188, 187, 1].map(|n_rows| spare_last(prefill, n_rows)), [187, 187, 1]);
        assert_eq!(spare_last(Prefill { start: 699, ..prefill }, 1), 1, "in the end it is run");
    }

    #[test]
    fn boundaries_are_kept_when_due() {
        assert!(is_kept(300, 300, 256, 8) && is_kept(512, 700, 300, 8) && is_kept(2048, 5000, 0, 8));
        assert!(!is_kept(1792, 5000, 0, 8) && !is_kept(300, 700, 0, 1));
        assert!(is_kept(2560, 700, 512, 8) && !is_kept(2304, 700, 512, 8), "generated text too");
        assert!(is_kept(2048, 5000, 100, 8), "a tail inside the first block counts as its start");
    }
}
