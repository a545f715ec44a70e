//! A fixed set of ids (slots, checkpoints), each lent to one owner; dropping the lease gives the id back.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The ids not lent now.
#[derive(Debug)]
pub struct LeasePool<T> {
    free: Arc<Mutex<Vec<T>>>,
    n_total: usize,
}

/// An id that nobody else has.
#[derive(Debug)]
pub struct Lease<T: Copy> {
    id: T,
    home: Arc<Mutex<Vec<T>>>,
}

impl<T: Copy> LeasePool<T> {
    /// A pool of `ids`; the first of them is lent first.
    #[must_use]
    pub fn new(ids: impl DoubleEndedIterator<Item = T>) -> Self {
        let free: Vec<T> = ids.rev().collect();
        let n_total = free.len();
        Self { free: Arc::new(Mutex::new(free)), n_total }
    }

    /// Lends an id, if one is left.
    #[must_use]
    pub fn take(&self) -> Option<Lease<T>> {
        let id = lock(&self.free).pop()?;
        Some(Lease { id, home: Arc::clone(&self.free) })
    }

    /// Ids not lent.
    #[must_use]
    pub fn n_free(&self) -> usize {
        lock(&self.free).len()
    }

    /// Ids in all.
    #[must_use]
    pub const fn n_total(&self) -> usize {
        self.n_total
    }
}

impl<T: Copy> Lease<T> {
    /// The id.
    #[must_use]
    pub const fn id(&self) -> T {
        self.id
    }
}

impl<T: Copy> Drop for Lease<T> {
    fn drop(&mut self) {
        lock(&self.home).push(self.id);
    }
}

/// The list is whole after every push and pop, so a panic elsewhere does not spoil it.
fn lock<T>(free: &Mutex<Vec<T>>) -> MutexGuard<'_, Vec<T>> {
    free.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::SlotIdx;

    #[test]
    fn each_id_has_one_owner_and_comes_back() {
        let pool = LeasePool::new((0..2).map(SlotIdx));
        let (a, b) = (pool.take().expect("first"), pool.take().expect("second"));
        assert_eq!((a.id(), b.id()), (SlotIdx(0), SlotIdx(1)));
        assert!(pool.take().is_none());
        drop(a);
        assert_eq!((pool.n_free(), pool.n_total()), (1, 2));
        assert_eq!(pool.take().expect("again").id(), SlotIdx(0));
    }
}
