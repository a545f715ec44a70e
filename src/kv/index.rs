//! The prefix index: a forest of cached blocks, with the window states (checkpoints) from which a sequence can resume.
//!
//! A full block is an entry named by its hash and hangs under the block before it. A tail is an entry for a partly filled
//! block at the exact end of a prompt or turn: its first tokens are frozen, and whoever continues from it copies it. Rows
//! alone cannot be resumed from, so only entries with a checkpoint are places to resume; the others carry the chain.
//!
//! Eviction is by least recent use and takes leaves only. Whoever uses a full block uses all blocks above it, so every
//! idle entry can be reached from the leaves.

use std::collections::{BTreeSet, HashMap};

use super::identity::BlockHash;
use super::lease::Lease;
use super::pool::{BlockHold, BlockRef};
use super::tokens::TokenView;
use crate::ids::{BlockId, CheckpointId, TokenId};

/// An entry's number; a child's is larger than its parent's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EntryId(u64);

/// Where an entry hangs: the name of everything before it, and the entry of the block before it unless it is the first.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Name of the chain before the entry.
    pub before: BlockHash,
    /// The block before.
    pub parent: Option<EntryId>,
}

/// All cached prefixes.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    entries: HashMap<EntryId, Entry>,
    by_hash: HashMap<BlockHash, EntryId>,
    /// Tails by the name of what stands before them.
    tails: HashMap<BlockHash, Vec<EntryId>>,
    /// Entries without children, least recently used first.
    leaves: BTreeSet<(u64, EntryId)>,
    /// Entries with a checkpoint, least recently saved or resumed first.
    resumable: BTreeSet<(u64, EntryId)>,
    clock: u64,
    next_id: u64,
}

#[derive(Debug)]
struct Entry {
    kind: Kind,
    place: Place,
    n_children: u32,
    block: BlockHold,
    used_at: u64,
    checkpoint: Option<Saved>,
}

#[derive(Debug)]
enum Kind {
    Full(BlockHash),
    Tail(Box<[TokenId]>),
}

#[derive(Debug)]
struct Saved {
    lease: Lease<CheckpointId>,
    used_at: u64,
}

impl PrefixIndex {
    /// The entry of a full block.
    #[must_use]
    pub fn get(&self, hash: BlockHash) -> Option<EntryId> {
        self.by_hash.get(&hash).copied()
    }

    /// The block of an entry.
    #[must_use]
    pub fn block_id(&self, entry: EntryId) -> Option<BlockId> {
        self.entries.get(&entry).map(|entry| entry.block.id())
    }

    /// A use of an entry's block.
    #[must_use]
    pub fn use_block(&self, entry: EntryId) -> Option<BlockRef> {
        self.entries.get(&entry).map(|entry| entry.block.use_block())
    }

    /// The window state at an entry's end.
    #[must_use]
    pub fn checkpoint(&self, entry: EntryId) -> Option<CheckpointId> {
        self.entries.get(&entry)?.checkpoint.as_ref().map(|saved| saved.lease.id())
    }

    /// Entries in all.
    #[must_use]
    pub fn n_entries(&self) -> usize {
        self.entries.len()
    }

    /// Checkpoints kept.
    #[must_use]
    pub fn n_checkpoints(&self) -> usize {
        self.resumable.len()
    }

    /// The longest tail after `before` whose tokens stand at `start` and end at `max_tokens` or sooner, with its length.
    #[must_use]
    pub fn longest_tail(
        &self,
        before: BlockHash,
        tokens: TokenView<'_>,
        start: usize,
        max_tokens: usize,
    ) -> Option<(EntryId, usize)> {
        let tails = self.tails.get(&before)?;
        let matching = tails.iter().filter_map(|&id| {
            let Kind::Tail(tail) = &self.entries.get(&id)?.kind else { return None };
            (start + tail.len() <= max_tokens && tokens.matches(start, tail)).then_some((id, tail.len()))
        });
        matching.max_by_key(|&(_, n_tokens)| n_tokens)
    }

    /// The tail with exactly these tokens.
    #[must_use]
    pub fn exact_tail(&self, before: BlockHash, tail: &[TokenId]) -> Option<EntryId> {
        let tails = self.tails.get(&before)?;
        tails.iter().copied().find(
            |id| matches!(self.entries.get(id).map(|entry| &entry.kind), Some(Kind::Tail(tokens)) if **tokens == *tail),
        )
    }

    /// Adds a full block.
    pub fn insert_full(&mut self, place: Place, hash: BlockHash, block: BlockHold) -> EntryId {
        let id = self.insert(place, Kind::Full(hash), block, None);
        self.by_hash.insert(hash, id);
        id
    }

    /// Adds a tail with its checkpoint.
    pub fn insert_tail(&mut self, place: Place, tail: Box<[TokenId]>, block: BlockHold, lease: Lease<CheckpointId>) {
        let saved = Saved { lease, used_at: self.clock + 1 };
        let id = self.insert(place, Kind::Tail(tail), block, Some(saved));
        self.tails.entry(place.before).or_default().push(id);
        self.resumable.insert((self.clock, id));
    }

    /// Gives an entry a checkpoint; if it has one already, the new one goes back.
    pub fn attach(&mut self, entry: EntryId, lease: Lease<CheckpointId>) {
        self.clock += 1;
        let used_at = self.clock;
        if let Some(found) = self.entries.get_mut(&entry)
            && found.checkpoint.is_none()
        {
            found.checkpoint = Some(Saved { lease, used_at });
            self.resumable.insert((used_at, entry));
        }
    }

    /// Marks an entry's block as just used.
    pub fn touch(&mut self, entry: EntryId) {
        self.clock += 1;
        let now = self.clock;
        if let Some(found) = self.entries.get_mut(&entry) {
            let before = std::mem::replace(&mut found.used_at, now);
            if self.leaves.remove(&(before, entry)) {
                self.leaves.insert((now, entry));
            }
        }
    }

    /// Marks an entry's checkpoint as just used.
    pub fn touch_checkpoint(&mut self, entry: EntryId) {
        self.clock += 1;
        let now = self.clock;
        if let Some(saved) = self.entries.get_mut(&entry).and_then(|found| found.checkpoint.as_mut()) {
            let before = std::mem::replace(&mut saved.used_at, now);
            self.resumable.remove(&(before, entry));
            self.resumable.insert((now, entry));
        }
    }

    /// Drops the least recently used entry that nobody uses and that has no children; says whether there was one.
    pub fn evict_block(&mut self) -> bool {
        let is_idle = |id: &EntryId| self.entries.get(id).is_some_and(|entry| entry.block.is_idle());
        let victim = self.leaves.iter().map(|&(_, id)| id).find(is_idle);
        victim.map(|id| self.remove(id)).is_some()
    }

    /// Drops the least recently used checkpoint, and with it a tail, which is nothing without one; says whether there was
    /// one.
    pub fn evict_checkpoint(&mut self) -> bool {
        let Some((_, id)) = self.resumable.pop_first() else { return false };
        match self.entries.get_mut(&id) {
            Some(Entry { kind: Kind::Full(_), checkpoint, .. }) => *checkpoint = None,
            _ => self.remove(id),
        }
        true
    }

    /// Drops what may hold unusable numbers: the chain that begins with the block `first` if there is one, and tails of
    /// the root that these tokens begin with.
    pub fn forget(&mut self, root: BlockHash, first: Option<BlockHash>, tokens: TokenView<'_>) {
        let mut doomed: BTreeSet<EntryId> = first.and_then(|hash| self.get(hash)).into_iter().collect();
        while let Some((id, _)) = self.longest_tail(root, tokens, 0, tokens.len()) {
            self.remove(id);
        }
        // A child's number is larger than its parent's: one pass in order finds the whole tree.
        let mut ids: Vec<EntryId> = self.entries.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            if let Some(parent) = self.entries.get(&id).and_then(|entry| entry.place.parent)
                && doomed.contains(&parent)
            {
                doomed.insert(id);
            }
        }
        for id in doomed.into_iter().rev() {
            self.remove(id);
        }
    }

    /// Compares all parts with each other.
    ///
    /// # Errors
    /// What does not agree; for tests and simulation.
    pub fn check(&self) -> Result<(), String> {
        let mut n_children: HashMap<EntryId, u32> = HashMap::new();
        for (id, entry) in &self.entries {
            let name = |what: &str| format!("entry {id:?}: {what}");
            if let Some(parent) = entry.place.parent {
                let above = self.entries.get(&parent).ok_or_else(|| name("its parent is gone"))?;
                *n_children.entry(parent).or_default() += 1;
                if matches!(entry.kind, Kind::Full(_)) && !entry.block.is_idle() && above.block.is_idle() {
                    return Err(name("it is used and its parent is not"));
                }
            }
            if entry.checkpoint.as_ref().is_some_and(|saved| !self.resumable.contains(&(saved.used_at, *id))) {
                return Err(name("its checkpoint is not listed"));
            }
            match &entry.kind {
                Kind::Full(hash) if self.get(*hash) != Some(*id) => return Err(name("its hash leads elsewhere")),
                Kind::Tail(_) if entry.checkpoint.is_none() => return Err(name("a tail without a checkpoint")),
                _ => {}
            }
        }
        for (id, entry) in &self.entries {
            let want = n_children.get(id).copied().unwrap_or(0);
            if entry.n_children != want || self.leaves.contains(&(entry.used_at, *id)) != (want == 0) {
                return Err(format!("entry {id:?}: {want} children, not {}", entry.n_children));
            }
        }
        let n_tails: usize = self.tails.values().map(Vec::len).sum();
        let n_saved = self.entries.values().filter(|entry| entry.checkpoint.is_some()).count();
        if self.by_hash.len() + n_tails != self.entries.len() || self.resumable.len() != n_saved {
            return Err(format!("{} entries, {} full, {n_tails} tails", self.entries.len(), self.by_hash.len()));
        }
        Ok(())
    }

    fn insert(&mut self, place: Place, kind: Kind, block: BlockHold, checkpoint: Option<Saved>) -> EntryId {
        self.clock += 1;
        let id = EntryId(self.next_id);
        self.next_id += 1;
        if let Some(parent) = place.parent {
            self.add_child(parent);
        }
        self.leaves.insert((self.clock, id));
        self.entries.insert(id, Entry { kind, place, n_children: 0, block, used_at: self.clock, checkpoint });
        id
    }

    fn add_child(&mut self, parent: EntryId) {
        if let Some(above) = self.entries.get_mut(&parent) {
            above.n_children += 1;
            self.leaves.remove(&(above.used_at, parent));
        }
    }

    fn remove(&mut self, id: EntryId) {
        let Some(entry) = self.entries.remove(&id) else { return };
        self.leaves.remove(&(entry.used_at, id));
        if let Some(saved) = &entry.checkpoint {
            self.resumable.remove(&(saved.used_at, id));
        }
        match &entry.kind {
            Kind::Full(hash) => {
                self.by_hash.remove(hash);
            }
            Kind::Tail(_) => self.remove_tail(entry.place.before, id),
        }
        if let Some(parent) = entry.place.parent
            && let Some(above) = self.entries.get_mut(&parent)
        {
            above.n_children -= 1;
            if above.n_children == 0 {
                self.leaves.insert((above.used_at, parent));
            }
        }
    }

    fn remove_tail(&mut self, before: BlockHash, id: EntryId) {
        if let Some(tails) = self.tails.get_mut(&before) {
            tails.retain(|&tail| tail != id);
            if tails.is_empty() {
                self.tails.remove(&before);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::identity::{CacheIdentity, HashChain};
    use crate::kv::lease::LeasePool;
    use crate::kv::pool::BlockPool;
    use crate::model::cache::BLOCK_TOKENS;

    struct Bench {
        index: PrefixIndex,
        pool: BlockPool,
        checkpoints: LeasePool<CheckpointId>,
        root: BlockHash,
    }

    impl Bench {
        fn new() -> Self {
            let identity =
                CacheIdentity { model_id: "m".to_owned(), row_format: "r".to_owned(), numerics_id: "n".to_owned() };
            Self {
                index: PrefixIndex::default(),
                pool: BlockPool::new(8),
                checkpoints: LeasePool::new((0..4).map(CheckpointId)),
                root: identity.root(None),
            }
        }

        /// Adds a chain of full blocks; returns its entries and the uses of its blocks.
        fn chain(&mut self, tokens: &[TokenId]) -> (Vec<EntryId>, Vec<BlockRef>) {
            let view = TokenView { prompt: tokens, output: &[] };
            let mut chain = HashChain::new(self.root);
            let mut made: (Vec<EntryId>, Vec<BlockRef>) = Default::default();
            for block_idx in 0..tokens.len() / BLOCK_TOKENS {
                let place = Place { before: chain.before(block_idx, view), parent: made.0.last().copied() };
                let block = self.pool.take().expect("block");
                made.0.push(self.index.insert_full(place, chain.block(block_idx, view), block.hold()));
                made.1.push(block);
            }
            self.check();
            made
        }

        fn check(&self) {
            self.index.check().expect("index");
            self.pool.check().expect("pool");
        }
    }

    fn tokens(n_blocks: usize, first: u32) -> Vec<TokenId> {
        (0..(n_blocks * BLOCK_TOKENS) as u32).map(|i| TokenId(i + first)).collect()
    }

    #[test]
    fn leaves_go_first_and_used_blocks_never() {
        let mut bench = Bench::new();
        let (entries, uses) = bench.chain(&tokens(3, 0));
        assert!(!bench.index.evict_block(), "all are used");
        drop(uses);
        for n_left in (0..3).rev() {
            assert!(bench.index.evict_block());
            bench.check();
            assert_eq!(bench.index.n_entries(), n_left);
            assert!(bench.index.block_id(entries[n_left]).is_none(), "the leaf goes");
        }
        assert!(!bench.index.evict_block());
        assert_eq!(bench.pool.counts().n_free, 8);
    }

    #[test]
    fn the_least_recently_used_leaf_goes_first() {
        let mut bench = Bench::new();
        let (old, _) = bench.chain(&tokens(1, 0));
        let (new, _) = bench.chain(&tokens(1, 5));
        bench.index.touch(old[0]);
        assert!(bench.index.evict_block());
        assert!(bench.index.block_id(old[0]).is_some() && bench.index.block_id(new[0]).is_none());
        bench.check();
    }

    #[test]
    fn tails_match_by_their_tokens_and_the_longest_wins() {
        let mut bench = Bench::new();
        let prompt = tokens(1, 0);
        let place = Place { before: bench.root, parent: None };
        for n_tokens in [5, 9, 7] {
            let (block, lease) = (bench.pool.take().expect("block"), bench.checkpoints.take().expect("checkpoint"));
            bench.index.insert_tail(place, prompt[..n_tokens].into(), block.hold(), lease);
            bench.check();
        }
        let view = TokenView { prompt: &prompt, output: &[] };
        let longest = |max_tokens| bench.index.longest_tail(bench.root, view, 0, max_tokens).map(|(_, n)| n);
        assert_eq!((longest(100), longest(8), longest(7), longest(4)), (Some(9), Some(7), Some(7), None));
        let mut other = prompt.clone();
        other[6] = TokenId(77);
        let other = TokenView { prompt: &other, output: &[] };
        assert_eq!(bench.index.longest_tail(bench.root, other, 0, 100).map(|(_, n)| n), Some(5));
        assert!(bench.index.exact_tail(bench.root, &prompt[..7]).is_some());
        assert!(bench.index.exact_tail(bench.root, &prompt[..6]).is_none());
    }

    #[test]
    fn checkpoints_go_by_last_use_and_take_their_tail_along() {
        let mut bench = Bench::new();
        let prompt = tokens(1, 0);
        let (full, _) = bench.chain(&prompt);
        bench.index.attach(full[0], bench.checkpoints.take().expect("checkpoint"));
        let block = bench.pool.take().expect("block");
        let place = Place { before: bench.root, parent: None };
        let lease = bench.checkpoints.take().expect("checkpoint");
        bench.index.insert_tail(place, prompt[..9].into(), block.hold(), lease);
        bench.index.touch_checkpoint(full[0]);
        bench.check();
        assert!(bench.index.evict_checkpoint());
        bench.check();
        assert!(bench.index.exact_tail(bench.root, &prompt[..9]).is_none());
        assert!(bench.index.checkpoint(full[0]).is_some());
        assert!(bench.index.evict_checkpoint());
        assert!(bench.index.checkpoint(full[0]).is_none() && bench.index.block_id(full[0]).is_some());
        assert!(!bench.index.evict_checkpoint());
        assert_eq!(bench.checkpoints.n_free(), 4);
        bench.check();
    }

    #[test]
    fn a_second_checkpoint_for_an_entry_goes_back() {
        let mut bench = Bench::new();
        let (full, _) = bench.chain(&tokens(1, 0));
        for _ in 0..2 {
            bench.index.attach(full[0], bench.checkpoints.take().expect("checkpoint"));
        }
        assert_eq!(bench.checkpoints.n_free(), 3);
        bench.check();
    }

    #[test]
    fn forgetting_takes_the_tree_and_the_tails_of_the_root() {
        let mut bench = Bench::new();
        let prompt = tokens(2, 0);
        let (_, uses) = bench.chain(&prompt);
        let (other, _) = bench.chain(&tokens(1, 7));
        let place = Place { before: bench.root, parent: None };
        let lease = bench.checkpoints.take().expect("checkpoint");
        bench.index.insert_tail(place, prompt[..9].into(), uses[0].hold(), lease);
        let view = TokenView { prompt: &prompt, output: &[] };
        let first = HashChain::new(bench.root).block(0, view);
        bench.index.forget(bench.root, Some(first), view);
        bench.check();
        assert_eq!(bench.index.n_entries(), 1);
        assert!(bench.index.block_id(other[0]).is_some());
        drop(uses);
        assert_eq!(bench.pool.counts().n_free, 7);
    }
}
