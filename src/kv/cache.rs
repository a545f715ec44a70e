//! The KV cache as the scheduler sees it: blocks for sequences, hits for prompts, and what a step leaves behind.

use super::identity::{BlockHash, HashChain};
use super::index::{EntryId, Place, PrefixIndex};
use super::lease::{Lease, LeasePool};
use super::pool::{BlockPool, BlockRef, Counts};
use super::tokens::TokenView;
use crate::ids::{BlockId, CheckpointId, TokenId};
use crate::model::cache::BLOCK_TOKENS;

/// Blocks, checkpoints and the prefix index over them.
#[derive(Debug)]
pub struct KvCache {
    pool: BlockPool,
    checkpoints: LeasePool<CheckpointId>,
    index: PrefixIndex,
    is_caching: bool,
}

/// The blocks of a running sequence, in order of position.
#[derive(Debug)]
pub struct BlockTable {
    blocks: Vec<BlockRef>,
    /// Leading blocks that are the index's own.
    n_published: usize,
    /// Cleared when the chain in the index has been forgotten: later blocks would hang in the air.
    is_publishing: bool,
    /// Window states saved and not yet in the index, with the tokens they describe.
    saved: Vec<(usize, Lease<CheckpointId>)>,
}

/// Where a sequence can resume. Blocks and tail are in use from now on.
#[derive(Debug, Default)]
pub struct Hit {
    /// Tokens whose state is there.
    pub n_tokens: usize,
    /// Window state at that point; `None` only when `n_tokens` is 0.
    pub checkpoint: Option<CheckpointId>,
    /// Shared full blocks.
    pub blocks: Vec<BlockRef>,
    /// A partly filled block to copy after them.
    pub tail: Option<BlockRef>,
    entry: Option<EntryId>,
}

/// A window state to be kept for a sequence that has given its other blocks back.
#[derive(Debug)]
pub struct TurnEnd {
    /// Tokens in the caches.
    pub n_tokens: usize,
    partial: Option<BlockRef>,
}

impl BlockTable {
    /// Blocks of a hit and those that follow.
    #[must_use]
    pub fn new(shared: Vec<BlockRef>, fresh: Vec<BlockRef>) -> Self {
        let n_published = shared.len();
        let mut blocks = shared;
        blocks.extend(fresh);
        Self { blocks, n_published, is_publishing: true, saved: Vec::new() }
    }

    /// Ids in order of position.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        self.blocks.iter().map(BlockRef::id)
    }

    /// Tokens that have a place.
    #[must_use]
    pub const fn n_token_places(&self) -> usize {
        self.blocks.len() * BLOCK_TOKENS
    }

    /// Window states noted and not yet in the index.
    #[must_use]
    pub const fn n_saved(&self) -> usize {
        self.saved.len()
    }

    /// Adds a block at the end.
    pub fn push(&mut self, block: BlockRef) {
        self.blocks.push(block);
    }

    /// Notes a window state that the next step saves; it describes the first `n_tokens` tokens.
    pub fn note_saved(&mut self, n_tokens: usize, lease: Lease<CheckpointId>) {
        self.saved.push((n_tokens, lease));
    }
}

impl TurnEnd {
    /// The block that is still in use.
    #[must_use]
    pub fn block_id(&self) -> Option<BlockId> {
        self.partial.as_ref().map(BlockRef::id)
    }
}

impl KvCache {
    /// An empty cache; without `is_caching` nothing is ever shared.
    #[must_use]
    pub fn new(n_blocks: u32, n_checkpoints: u32, is_caching: bool) -> Self {
        Self {
            pool: BlockPool::new(n_blocks),
            checkpoints: LeasePool::new((0..n_checkpoints).map(CheckpointId)),
            index: PrefixIndex::default(),
            is_caching,
        }
    }

    /// The pool's three groups.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.pool.counts()
    }

    /// `n` blocks, from the free ones and by eviction; `None`, and nothing evicted in vain, when they are not to be had.
    pub fn take(&mut self, n: usize) -> Option<Vec<BlockRef>> {
        if self.counts().n_available() < n {
            return None;
        }
        let mut blocks = Vec::with_capacity(n);
        while blocks.len() < n {
            match self.pool.take() {
                Some(block) => blocks.push(block),
                None if self.index.evict_block() => {}
                None => return None,
            }
        }
        Some(blocks)
    }

    /// A checkpoint to save into, if need be the least recently used one.
    pub fn take_checkpoint(&mut self) -> Option<Lease<CheckpointId>> {
        if !self.is_caching {
            return None;
        }
        if self.checkpoints.n_free() == 0 {
            self.index.evict_checkpoint();
        }
        self.checkpoints.take()
    }

    /// The newest checkpoint inside the longest match, at `max_tokens` or before; tails only if `with_tails`.
    pub fn lookup(&mut self, chain: &mut HashChain, tokens: TokenView<'_>, max_tokens: usize, with_tails: bool) -> Hit {
        if !self.is_caching {
            return Hit::default();
        }
        let path = self.path(chain, tokens, max_tokens);
        for n_blocks in (0..=path.len()).rev() {
            let before = chain.before(n_blocks, tokens);
            let start = n_blocks * BLOCK_TOKENS;
            let tail = self.index.longest_tail(before, tokens, start, max_tokens).filter(|_| with_tails);
            let place = tail.map(|(entry, n)| (entry, start + n)).or_else(|| {
                let entry = *path.get(n_blocks.checked_sub(1)?)?;
                self.index.checkpoint(entry).map(|_| (entry, start))
            });
            if let Some((entry, n_tokens)) = place {
                return Hit {
                    n_tokens,
                    checkpoint: self.index.checkpoint(entry),
                    blocks: path[..n_blocks].iter().filter_map(|&entry| self.index.use_block(entry)).collect(),
                    tail: tail.and_then(|_| self.index.use_block(entry)),
                    entry: Some(entry),
                };
            }
        }
        Hit::default()
    }

    /// Marks what a hit takes as just used.
    pub fn accept(&mut self, hit: &Hit, chain: &mut HashChain, tokens: TokenView<'_>) {
        self.touch(chain, tokens, hit.blocks.len());
        if let Some(entry) = hit.entry {
            self.index.touch(entry);
            self.index.touch_checkpoint(entry);
        }
    }

    /// Whether the window state after `n_tokens` (all known) is kept already.
    #[must_use]
    pub fn has_checkpoint(&self, chain: &mut HashChain, tokens: TokenView<'_>, n_tokens: usize) -> bool {
        let n_blocks = n_tokens / BLOCK_TOKENS;
        let before = chain.before(n_blocks, tokens);
        if n_tokens.is_multiple_of(BLOCK_TOKENS) {
            return self.index.get(before).is_some_and(|entry| self.index.checkpoint(entry).is_some());
        }
        let tail: Vec<TokenId> = tokens.range(n_blocks * BLOCK_TOKENS, n_tokens).collect();
        self.index.exact_tail(before, &tail).is_some()
    }

    /// After a step has been planned: makes the full blocks among its `n_rows` rows, as far as their tokens are known, and
    /// the window states saved with it visible to the steps that follow.
    pub fn settle(&mut self, table: &mut BlockTable, chain: &mut HashChain, tokens: TokenView<'_>, n_rows: usize) {
        if !self.is_caching {
            return;
        }
        let n_known = n_rows.min(tokens.len());
        while table.is_publishing && (table.n_published + 1) * BLOCK_TOKENS <= n_known {
            self.publish(table, chain, tokens);
        }
        let (ready, waiting) = std::mem::take(&mut table.saved).into_iter().partition(|&(n, _)| n <= n_known);
        table.saved = waiting;
        let ready: Vec<(usize, Lease<CheckpointId>)> = ready;
        for (n_tokens, lease) in ready {
            if table.is_publishing {
                let partial = table.blocks.get(n_tokens / BLOCK_TOKENS);
                self.keep(chain, tokens, n_tokens, partial, lease);
            }
        }
    }

    /// Gives a sequence's blocks back, keeping its last, partly filled one for [`Self::keep_turn_end`].
    pub fn end_turn(
        &mut self,
        mut table: BlockTable,
        chain: &mut HashChain,
        tokens: TokenView<'_>,
        n_rows: usize,
    ) -> Option<TurnEnd> {
        self.settle(&mut table, chain, tokens, n_rows);
        self.touch(chain, tokens, table.n_published);
        if !self.is_caching || !table.is_publishing || n_rows > tokens.len() || n_rows == 0 {
            return None;
        }
        if self.has_checkpoint(chain, tokens, n_rows) {
            return None;
        }
        let n_full = n_rows / BLOCK_TOKENS;
        let partial = table.blocks.drain(..).nth(n_full).filter(|_| !n_rows.is_multiple_of(BLOCK_TOKENS));
        Some(TurnEnd { n_tokens: n_rows, partial })
    }

    /// Keeps the window state that the step just planned saves for an ended sequence.
    pub fn keep_turn_end(
        &mut self,
        end: &TurnEnd,
        chain: &mut HashChain,
        tokens: TokenView<'_>,
        lease: Lease<CheckpointId>,
    ) {
        self.keep(chain, tokens, end.n_tokens, end.partial.as_ref(), lease);
    }

    /// Drops everything cached along a sequence whose numbers turned out to be unusable.
    pub fn forget(&mut self, root: BlockHash, chain: &mut HashChain, tokens: TokenView<'_>) {
        let first = (tokens.len() >= BLOCK_TOKENS).then(|| chain.block(0, tokens));
        self.index.forget(root, first, tokens);
    }

    /// Recounts everything; `used` are the blocks of all sequences, `n_pending` the checkpoints they have saved.
    ///
    /// # Errors
    /// What does not agree; for tests and simulation.
    pub fn check(&self, mut used: Vec<BlockId>, n_pending: usize) -> Result<(), String> {
        self.pool.check()?;
        self.index.check()?;
        used.sort_unstable();
        used.dedup();
        let counts = self.counts();
        if counts.n_used != used.len() {
            return Err(format!("{} blocks are used, sequences have {}", counts.n_used, used.len()));
        }
        let n_checkpoints = self.checkpoints.n_free() + self.index.n_checkpoints() + n_pending;
        if n_checkpoints != self.checkpoints.n_total() {
            return Err(format!("{n_checkpoints} checkpoints of {}", self.checkpoints.n_total()));
        }
        Ok(())
    }

    /// Entries of the leading full blocks that end at `max_tokens` or before.
    fn path(&self, chain: &mut HashChain, tokens: TokenView<'_>, max_tokens: usize) -> Vec<EntryId> {
        let n_blocks = max_tokens.min(tokens.len()) / BLOCK_TOKENS;
        (0..n_blocks).map_while(|block_idx| self.index.get(chain.block(block_idx, tokens))).collect()
    }

    fn touch(&mut self, chain: &mut HashChain, tokens: TokenView<'_>, n_blocks: usize) {
        for block_idx in 0..n_blocks {
            if let Some(entry) = self.index.get(chain.block(block_idx, tokens)) {
                self.index.touch(entry);
            }
        }
    }

    /// Puts the table's next full block into the index, or takes the index's block of the same content for it.
    fn publish(&mut self, table: &mut BlockTable, chain: &mut HashChain, tokens: TokenView<'_>) {
        let block_idx = table.n_published;
        let before = chain.before(block_idx, tokens);
        let parent = match block_idx.checked_sub(1) {
            None => None,
            Some(previous) => match self.index.get(before) {
                Some(entry) if self.index.block_id(entry) == Some(table.blocks[previous].id()) => Some(entry),
                _ => {
                    table.is_publishing = false;
                    return;
                }
            },
        };
        let hash = chain.block(block_idx, tokens);
        match self.index.get(hash).and_then(|entry| self.index.use_block(entry)) {
            Some(shared) => table.blocks[block_idx] = shared,
            None => {
                self.index.insert_full(Place { before, parent }, hash, table.blocks[block_idx].hold());
            }
        }
        table.n_published += 1;
    }

    fn keep(
        &mut self,
        chain: &mut HashChain,
        tokens: TokenView<'_>,
        n_tokens: usize,
        partial: Option<&BlockRef>,
        lease: Lease<CheckpointId>,
    ) {
        let n_blocks = n_tokens / BLOCK_TOKENS;
        let before = chain.before(n_blocks, tokens);
        let parent = self.index.get(before);
        if n_tokens.is_multiple_of(BLOCK_TOKENS) {
            if let Some(entry) = parent {
                self.index.attach(entry, lease);
            }
            return;
        }
        let tail: Vec<TokenId> = tokens.range(n_blocks * BLOCK_TOKENS, n_tokens).collect();
        let is_rooted = n_blocks == 0 || parent.is_some();
        if let Some(block) = partial
            && is_rooted
            && self.index.exact_tail(before, &tail).is_none()
        {
            self.index.insert_tail(Place { before, parent }, tail.into(), block.hold(), lease);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::identity::CacheIdentity;

    fn root() -> BlockHash {
        let [model_id, row_format, numerics_id] = ["m", "r", "n"].map(str::to_owned);
        CacheIdentity { model_id, row_format, numerics_id }.root(None)
    }

    fn prompt(n: u32) -> Vec<TokenId> {
        (0..n).map(|i| TokenId(i * 7 % 50)).collect()
    }

    /// Runs a prompt to its end, saving at each of `saves`; the blocks go back afterwards.
    fn run(cache: &mut KvCache, tokens: &[TokenId], saves: &[usize]) {
        let view = TokenView { prompt: tokens, output: &[] };
        let mut chain = HashChain::new(root());
        let blocks = cache.take(tokens.len().div_ceil(BLOCK_TOKENS)).expect("blocks");
        let mut table = BlockTable::new(Vec::new(), blocks);
        for &n_tokens in saves {
            table.note_saved(n_tokens, cache.take_checkpoint().expect("checkpoint"));
        }
        cache.settle(&mut table, &mut chain, view, tokens.len());
        drop(table);
        cache.check(Vec::new(), 0).expect("consistent");
    }

    fn hit(cache: &mut KvCache, tokens: &[TokenId], max_tokens: usize) -> (usize, usize, bool) {
        let view = TokenView { prompt: tokens, output: &[] };
        let hit = cache.lookup(&mut HashChain::new(root()), view, max_tokens, true);
        assert_eq!(hit.checkpoint.is_some(), hit.n_tokens > 0);
        (hit.n_tokens, hit.blocks.len(), hit.tail.is_some())
    }

    #[test]
    fn a_hit_needs_a_checkpoint_inside_the_match() {
        let tokens = prompt(700);
        let mut cache = KvCache::new(8, 4, true);
        run(&mut cache, &tokens, &[256, 700]);
        assert_eq!(hit(&mut cache, &tokens, 699), (256, 1, false), "rows up to 512 match, but nothing resumes there");
        assert_eq!(hit(&mut cache, &tokens, 700), (700, 2, true));
        assert_eq!(hit(&mut cache, &tokens, 255), (0, 0, false));
        assert_eq!(hit(&mut cache, &tokens[..300], 299), (256, 1, false));
        let mut longer = tokens.clone();
        longer.extend(prompt(20));
        assert_eq!(hit(&mut cache, &longer, 719), (700, 2, true));
        longer[699] = TokenId(49);
        assert_eq!(hit(&mut cache, &longer, 719), (256, 1, false));
        longer[10] = TokenId(49);
        assert_eq!(hit(&mut cache, &longer, 719), (0, 0, false));
    }

    #[test]
    fn equal_blocks_become_one() {
        let tokens = prompt(512);
        let mut cache = KvCache::new(8, 4, true);
        run(&mut cache, &tokens, &[512]);
        run(&mut cache, &tokens, &[512]);
        let counts = cache.counts();
        assert_eq!((counts.n_free, counts.n_used, counts.n_cached), (6, 0, 2));
    }

    #[test]
    fn without_caching_nothing_stays() {
        let tokens = prompt(512);
        let mut cache = KvCache::new(8, 4, false);
        assert!(cache.take_checkpoint().is_none());
        run(&mut cache, &tokens, &[]);
        assert_eq!(cache.counts().n_free, 8);
        assert_eq!(hit(&mut cache, &tokens, 511), (0, 0, false));
    }

    #[test]
    fn taking_more_than_there_is_evicts_nothing() {
        let mut cache = KvCache::new(4, 4, true);
        run(&mut cache, &prompt(512), &[512]);
        assert!(cache.take(5).is_none());
        assert_eq!(cache.counts().n_cached, 2);
        assert_eq!(cache.take(4).map(|blocks| blocks.len()), Some(4));
        assert_eq!(hit(&mut cache, &prompt(512), 512), (0, 0, false));
    }

    #[test]
    fn a_turn_end_keeps_its_partial_block() {
        let tokens = prompt(300);
        let mut cache = KvCache::new(4, 4, true);
        let view = TokenView { prompt: &tokens, output: &[] };
        let mut chain = HashChain::new(root());
        let table = BlockTable::new(Vec::new(), cache.take(2).expect("blocks"));
        let partial = table.blocks[1].id();
        let end = cache.end_turn(table, &mut chain, view, 300).expect("worth keeping");
        assert_eq!(cache.counts().n_used, 1);
        let lease = cache.take_checkpoint().expect("checkpoint");
        cache.keep_turn_end(&end, &mut chain, view, lease);
        drop(end);
        let mut longer = tokens.clone();
        longer.push(TokenId(3));
        let view = TokenView { prompt: &longer, output: &[] };
        let hit = cache.lookup(&mut HashChain::new(root()), view, 300, true);
        assert_eq!((hit.n_tokens, hit.tail.map(|block| block.id())), (300, Some(partial)));
    }
}
