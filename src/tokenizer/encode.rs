//! Encodes the pieces of a prompt: cached ones are copied, the others are spread over a few threads.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use super::{
    Tokenizer,
    cache::{self, Key},
    chunks,
};
use crate::ids::TokenId;

/// Why a text can't be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The tokenizer has no such control token.
    #[error("the tokenizer has no control token {0}")]
    UnknownControl(String),
    /// The caller's check said stop.
    #[error("encoding was cancelled")]
    Cancelled,
    /// The tokenizer failed.
    #[error("encoding failed: {0}")]
    Failed(String),
}

/// Shorter pieces are encoded afresh: that costs no more than their hash and a look into the cache.
const MIN_CACHED_BYTES: usize = 256;

/// A thread more for every so many bytes, up to four: a prompt of this size takes some 50 ms on one.
const BYTES_PER_THREAD: usize = 64 << 10;
const MAX_THREADS: usize = 4;

/// A piece of a prompt.
pub(super) enum Piece<'a> {
    Id(TokenId),
    Known(Arc<[TokenId]>),
    Text(&'a str, Option<Key>),
}

type Ids = Result<Arc<[TokenId]>, EncodeError>;

impl Tokenizer {
    /// Appends the pieces of a text between control tokens.
    pub(super) fn plan_text<'a>(&self, text: &'a str, pieces: &mut Vec<Piece<'a>>) {
        let texts = if self.can_chunk { chunks::chunks(text) } else { vec![text] };
        for text in texts {
            let key = (text.len() >= MIN_CACHED_BYTES).then(|| cache::key(text));
            pieces.push(match key.and_then(|key| self.cache.get(&key)) {
                Some(ids) => Piece::Known(ids),
                None => Piece::Text(text, key),
            });
        }
    }

    /// The ids of all pieces, in order.
    pub(super) fn encode_pieces(
        &self,
        pieces: &[Piece],
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<TokenId>, EncodeError> {
        let texts: Vec<(&str, Option<Key>)> = pieces
            .iter()
            .filter_map(|piece| match piece {
                Piece::Text(text, key) => Some((*text, *key)),
                _ => None,
            })
            .collect();
        let mut encoded = self.encode_texts(&texts, cancelled)?.into_iter();
        let mut ids = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Id(id) => ids.push(*id),
                Piece::Known(known) => ids.extend_from_slice(known),
                Piece::Text(..) => ids.extend_from_slice(&encoded.next().unwrap_or_default()),
            }
        }
        Ok(ids)
    }

    /// The ids of each text. Threads take the next text in turn and stop at the first error or cancellation.
    fn encode_texts(
        &self,
        texts: &[(&str, Option<Key>)],
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Arc<[TokenId]>>, EncodeError> {
        let n_bytes: usize = texts.iter().map(|(text, _)| text.len()).sum();
        let n_cores = thread::available_parallelism().map_or(1, usize::from);
        let n_threads = (n_bytes / BYTES_PER_THREAD + 1).min(n_cores).min(MAX_THREADS);
        if n_threads == 1 {
            return texts.iter().map(|text| self.encode_one(*text, cancelled)).collect();
        }
        let results: Vec<Mutex<Option<Ids>>> = texts.iter().map(|_| Mutex::new(None)).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(text) = texts.get(at) else { break };
                let ids = self.encode_one(*text, cancelled);
                let failed = ids.is_err();
                *results[at].lock().unwrap_or_else(PoisonError::into_inner) = Some(ids);
                if failed {
                    break;
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..n_threads {
                scope.spawn(work);
            }
            work();
        });
        let taken = results.into_iter().map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner));
        taken.map(|ids| ids.unwrap_or(Err(EncodeError::Cancelled))).collect()
    }

    fn encode_one(&self, (text, key): (&str, Option<Key>), cancelled: &(dyn Fn() -> bool + Sync)) -> Ids {
        if cancelled() {
            return Err(EncodeError::Cancelled);
        }
        let encoding = self.text.encode_fast(text, false).map_err(|error| EncodeError::Failed(error.to_string()))?;
        let ids: Arc<[TokenId]> = encoding.get_ids().iter().map(|id| TokenId(*id)).collect();
        if let Some(key) = key {
            self.cache.put(key, Arc::clone(&ids));
        }
        Ok(ids)
    }
}
