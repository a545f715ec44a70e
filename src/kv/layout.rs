//! From a budget of bytes to numbers of blocks, slots and checkpoints.

use crate::model::cache::BLOCK_TOKENS;

/// Bytes of each kind of state, as the model's caches define them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateBytes {
    /// One block: every layer's compressed rows of its tokens.
    pub block_bytes: u64,
    /// One slot: every layer's window rings and raw rows, sampling state.
    pub slot_bytes: u64,
    /// One checkpoint.
    pub checkpoint_bytes: u64,
}

/// What to fit in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Bytes for everything (--kv-cache-memory-bytes).
    pub total_bytes: u64,
    /// Sequences that run at once (--max-num-seqs).
    pub n_slots: usize,
    /// Per mille of what the slots leave that goes to checkpoints; 0 turns prefix caching off.
    pub checkpoint_permille: u32,
    /// Blocks at most, however large the budget: more than `n_slots` sequences of full length, and a cache, never need.
    pub max_blocks: u32,
}

/// The numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// KV blocks.
    pub n_blocks: u32,
    /// Slots.
    pub n_slots: usize,
    /// Checkpoints.
    pub n_checkpoints: u32,
    /// Bytes all of them take; never more than the budget.
    pub used_bytes: u64,
}

/// The budget is too small to serve anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kv_cache_memory_bytes: {n_slots} sequences and one block need {needed_bytes} bytes, got {total_bytes}")]
pub struct LayoutError {
    /// Sequences asked for.
    pub n_slots: usize,
    /// The least that works.
    pub needed_bytes: u64,
    /// The budget.
    pub total_bytes: u64,
}

/// An eighth of the memory for checkpoints: enough for two a stream and a few shared prefixes of the real model, whose
/// checkpoints are several times the size of a block.
pub const DEFAULT_CHECKPOINT_PERMILLE: u32 = 125;

impl Layout {
    /// Divides the budget: slots first, then checkpoints by their share, blocks with the rest.
    ///
    /// # Errors
    /// When slots and a single block do not fit.
    pub fn plan(budget: Budget, bytes: StateBytes) -> Result<Self, LayoutError> {
        let slot_bytes = bytes.slot_bytes.saturating_mul(budget.n_slots as u64);
        let needed_bytes = slot_bytes.saturating_add(bytes.block_bytes);
        if budget.total_bytes < needed_bytes {
            let (n_slots, total_bytes) = (budget.n_slots, budget.total_bytes);
            return Err(LayoutError { n_slots, needed_bytes, total_bytes });
        }
        let rest_bytes = budget.total_bytes - slot_bytes;
        let share_bytes = rest_bytes / 1000 * u64::from(budget.checkpoint_permille.min(1000));
        let share_bytes = share_bytes.min(rest_bytes - bytes.block_bytes);
        // A checkpoint for every block and two for every slot (its prompt's and its turn's end) is all that can be used.
        let most = u64::from(budget.max_blocks) + 2 * budget.n_slots as u64;
        let n_checkpoints = (share_bytes / bytes.checkpoint_bytes.max(1)).min(most);
        let checkpoint_bytes = n_checkpoints * bytes.checkpoint_bytes;
        let n_blocks = ((rest_bytes - checkpoint_bytes) / bytes.block_bytes.max(1)).min(u64::from(budget.max_blocks));
        Ok(Self {
            n_blocks: u32::try_from(n_blocks).unwrap_or(u32::MAX),
            n_slots: budget.n_slots,
            n_checkpoints: u32::try_from(n_checkpoints).unwrap_or(u32::MAX),
            used_bytes: slot_bytes + checkpoint_bytes + n_blocks * bytes.block_bytes,
        })
    }

    /// Tokens that fit in the blocks.
    #[must_use]
    pub const fn n_tokens(&self) -> usize {
        self.n_blocks as usize * BLOCK_TOKENS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: StateBytes = StateBytes { block_bytes: 900_000, slot_bytes: 20_000_000, checkpoint_bytes: 14_000_000 };

    fn budget(total_bytes: u64) -> Budget {
        Budget { total_bytes, n_slots: 64, checkpoint_permille: DEFAULT_CHECKPOINT_PERMILLE, max_blocks: u32::MAX }
    }

    #[test]
    fn the_whole_budget_is_given_out_and_never_exceeded() {
        for total_bytes in [1_280_900_000, 1_281_800_123, 5_000_000_000, 26_000_000_000, 400_000_000_000] {
            let layout = Layout::plan(budget(total_bytes), BYTES).expect("fits");
            assert!(layout.used_bytes <= total_bytes, "{layout:?}");
            assert!(total_bytes - layout.used_bytes < BYTES.block_bytes, "{layout:?}");
            assert!(layout.n_blocks >= 1, "{layout:?}");
        }
        let layout = Layout::plan(budget(26_000_000_000), BYTES).expect("fits");
        assert_eq!((layout.n_checkpoints, layout.n_blocks), (220, 24_044));
        assert_eq!(layout.n_tokens(), 24_044 * 256);
    }

    #[test]
    fn a_budget_below_one_block_is_refused_with_what_is_needed() {
        let error = Layout::plan(budget(1_280_899_999), BYTES).expect_err("too small");
        assert_eq!(error.needed_bytes, 1_280_900_000);
        assert!(error.to_string().contains("1280900000"));
    }

    #[test]
    fn small_models_stop_at_the_useful_maximum() {
        let tiny = StateBytes { block_bytes: 10, slot_bytes: 10, checkpoint_bytes: 10 };
        let capped = Budget { max_blocks: 100, ..budget(1 << 40) };
        let layout = Layout::plan(capped, tiny).expect("fits");
        assert_eq!((layout.n_blocks, layout.n_checkpoints), (100, 228));
    }

    #[test]
    fn no_share_means_no_checkpoints() {
        let none = Budget { checkpoint_permille: 0, ..budget(5_000_000_000) };
        assert_eq!(Layout::plan(none, BYTES).expect("fits").n_checkpoints, 0);
    }
}
