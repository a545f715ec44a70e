//! The KV blocks: who uses each one, who caches it, and which are free.
//!
//! A sequence uses a block through a [`BlockRef`], the prefix index caches it through a [`BlockHold`]; both count, and a
//! block without either is free. There is no way to give a block back but to drop its guards, and none to keep one by
//! mistake once they are gone.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::ids::BlockId;

/// All blocks of one device.
#[derive(Debug)]
pub struct BlockPool {
    shared: Shared,
}

/// A use of a block by a running sequence.
#[derive(Debug)]
pub struct BlockRef {
    id: BlockId,
    shared: Shared,
}

/// A block kept by the prefix index.
#[derive(Debug)]
pub struct BlockHold {
    id: BlockId,
    shared: Shared,
}

/// Every block is in exactly one of the three groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Neither used nor cached.
    pub n_free: usize,
    /// Used by at least one sequence.
    pub n_used: usize,
    /// Cached and used by nobody: free space in waiting.
    pub n_cached: usize,
}

impl Counts {
    /// Blocks a sequence could get, if need be by eviction.
    #[must_use]
    pub const fn n_available(&self) -> usize {
        self.n_free + self.n_cached
    }

    /// All blocks.
    #[must_use]
    pub const fn n_total(&self) -> usize {
        self.n_free + self.n_used + self.n_cached
    }
}

type Shared = Arc<Mutex<State>>;

#[derive(Debug)]
struct State {
    /// Sequences that use each block.
    n_users: Vec<u32>,
    /// Index entries that hold each block.
    n_holds: Vec<u32>,
    free: Vec<BlockId>,
    n_used: usize,
}

impl BlockPool {
    /// A pool of `n_blocks` free blocks.
    #[must_use]
    pub fn new(n_blocks: u32) -> Self {
        let n = n_blocks as usize;
        let free = (0..n_blocks).rev().map(BlockId).collect();
        let state = State { n_users: vec![0; n], n_holds: vec![0; n], free, n_used: 0 };
        Self { shared: Arc::new(Mutex::new(state)) }
    }

    /// A free block, if there is one.
    #[must_use]
    pub fn take(&self) -> Option<BlockRef> {
        let id = lock(&self.shared).free.pop()?;
        Some(BlockRef::new(id, &self.shared))
    }

    /// The three groups now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let state = lock(&self.shared);
        let (n_free, n_used) = (state.free.len(), state.n_used);
        Counts { n_free, n_used, n_cached: state.n_users.len() - n_free - n_used }
    }

    /// Counts everything afresh and compares.
    ///
    /// # Errors
    /// What does not agree; for tests and simulation.
    pub fn check(&self) -> Result<(), String> {
        let state = lock(&self.shared);
        let mut is_free = vec![false; state.n_users.len()];
        for id in &state.free {
            if std::mem::replace(&mut is_free[id.index()], true) {
                return Err(format!("block {id} is free twice"));
            }
        }
        for (idx, &free) in is_free.iter().enumerate() {
            if free != (state.n_users[idx] == 0 && state.n_holds[idx] == 0) {
                return Err(format!("block {idx}: free {free}, users {}", state.n_users[idx]));
            }
        }
        let n_used = state.n_users.iter().filter(|&&n| n > 0).count();
        if n_used == state.n_used { Ok(()) } else { Err(format!("{n_used} blocks are used, not {}", state.n_used)) }
    }
}

impl BlockRef {
    fn new(id: BlockId, shared: &Shared) -> Self {
        lock(shared).start_use(id);
        Self { id, shared: Arc::clone(shared) }
    }

    /// Which block.
    #[must_use]
    pub const fn id(&self) -> BlockId {
        self.id
    }

    /// The block kept beyond this use.
    #[must_use]
    pub fn hold(&self) -> BlockHold {
        lock(&self.shared).n_holds[self.id.index()] += 1;
        BlockHold { id: self.id, shared: Arc::clone(&self.shared) }
    }
}

impl Drop for BlockRef {
    fn drop(&mut self) {
        lock(&self.shared).end_use(self.id);
    }
}

impl BlockHold {
    /// Which block.
    #[must_use]
    pub const fn id(&self) -> BlockId {
        self.id
    }

    /// Nobody uses the block.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        lock(&self.shared).n_users[self.id.index()] == 0
    }

    /// A use of the block.
    #[must_use]
    pub fn use_block(&self) -> BlockRef {
        BlockRef::new(self.id, &self.shared)
    }
}

impl Drop for BlockHold {
    fn drop(&mut self) {
        lock(&self.shared).end_hold(self.id);
    }
}

impl State {
    fn start_use(&mut self, id: BlockId) {
        self.n_users[id.index()] += 1;
        if self.n_users[id.index()] == 1 {
            self.n_used += 1;
        }
    }

    fn end_use(&mut self, id: BlockId) {
        self.n_users[id.index()] -= 1;
        if self.n_users[id.index()] == 0 {
            self.n_used -= 1;
            self.free_if_unwanted(id);
        }
    }

    fn end_hold(&mut self, id: BlockId) {
        self.n_holds[id.index()] -= 1;
        self.free_if_unwanted(id);
    }

    fn free_if_unwanted(&mut self, id: BlockId) {
        if self.n_users[id.index()] == 0 && self.n_holds[id.index()] == 0 {
            self.free.push(id);
        }
    }
}

/// Each change of the state is complete before it can panic, so a panic elsewhere does not spoil it.
fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(pool: &BlockPool) -> (usize, usize, usize) {
        pool.check().expect("consistent");
        let counts = pool.counts();
        assert_eq!(counts.n_total(), 3);
        (counts.n_free, counts.n_used, counts.n_cached)
    }

    #[test]
    fn a_block_is_free_when_its_last_guard_is_gone() {
        let pool = BlockPool::new(3);
        let used = pool.take().expect("free block");
        assert_eq!(counts(&pool), (2, 1, 0));
        let hold = used.hold();
        let (second_hold, second_use) = (used.hold(), hold.use_block());
        drop(used);
        assert!(!hold.is_idle());
        drop(second_use);
        assert!(hold.is_idle());
        assert_eq!(counts(&pool), (2, 0, 1));
        drop(hold);
        assert_eq!(counts(&pool), (2, 0, 1));
        drop(second_hold);
        assert_eq!(counts(&pool), (3, 0, 0));
    }

    #[test]
    fn no_block_is_given_twice() {
        let pool = BlockPool::new(3);
        let taken: Vec<BlockRef> = std::iter::from_fn(|| pool.take()).collect();
        let mut ids: Vec<u32> = taken.iter().map(|block| block.id().0).collect();
        ids.sort_unstable();
        assert_eq!(ids, [0, 1, 2]);
        drop(taken);
        assert_eq!(counts(&pool), (3, 0, 0));
    }
}
