//! A bounded cache of encoded pieces, so that a long conversation with one new turn encodes only that turn.

use std::{collections::HashMap, sync::Arc, sync::Mutex, sync::PoisonError};

use sha2::{Digest, Sha256};

use crate::ids::TokenId;

/// A piece's name: the first 16 bytes of the SHA-256 of its text, so that no one can make two texts collide.
pub(super) type Key = [u8; 16];

/// The name of `text`.
pub(super) fn key(text: &str) -> Key {
    let digest = Sha256::digest(text.as_bytes());
    let mut key = Key::default();
    key.copy_from_slice(&digest[..16]);
    key
}

/// Two generations of pieces: what is used stays young; when the young fill half the cache, the old are dropped.
#[derive(Debug)]
pub(super) struct Cache {
    max_tokens: usize,
    inner: Mutex<Generations>,
}

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<Key, Arc<[TokenId]>>,
    old: HashMap<Key, Arc<[TokenId]>>,
    n_young_tokens: usize,
}

impl Cache {
    /// A cache of at most `max_tokens` ids.
    pub(super) fn new(max_tokens: usize) -> Self {
        Self { max_tokens, inner: Mutex::default() }
    }

    /// The ids of a piece.
    pub(super) fn get(&self, key: &Key) -> Option<Arc<[TokenId]>> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ids) = inner.young.get(key) {
            return Some(Arc::clone(ids));
        }
        let ids = inner.old.remove(key)?;
        inner.put(*key, Arc::clone(&ids), self.max_tokens);
        Some(ids)
    }

    /// Keeps the ids of a piece.
    pub(super) fn put(&self, key: Key, ids: Arc<[TokenId]>) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).put(key, ids, self.max_tokens);
    }
}

impl Generations {
    fn put(&mut self, key: Key, ids: Arc<[TokenId]>, max_tokens: usize) {
        if ids.len() > max_tokens / 2 {
            return;
        }
        if self.n_young_tokens + ids.len() > max_tokens / 2 {
            self.old = std::mem::take(&mut self.young);
            self.n_young_tokens = 0;
        }
        let n_tokens = ids.len();
        if self.young.insert(key, ids).is_none() {
            self.n_young_tokens += n_tokens;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(n: usize) -> Arc<[TokenId]> {
        vec![TokenId(7); n].into()
    }

    #[test]
    fn keeps_what_is_used_and_stays_bounded() {
        let cache = Cache::new(100);
        cache.put(key("hot"), ids(10));
        for i in 0..50 {
            cache.put(key(&format!("cold {i}")), ids(10));
            assert!(cache.get(&key("hot")).is_some(), "used each time, so it stays");
            let inner = cache.inner.lock().unwrap();
            let n_tokens: usize = inner.young.values().chain(inner.old.values()).map(|ids| ids.len()).sum();
            assert!(n_tokens <= 100, "{n_tokens} ids after {i}");
        }
        assert!(cache.get(&key("cold 0")).is_none());
        cache.put(key("too long"), ids(51));
        assert!(cache.get(&key("too long")).is_none());
    }
}
