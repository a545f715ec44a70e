//! Names of cached content: a chain of SHA-256 hashes over full blocks, rooted in what the bytes depend on.
//!
//! Two sequences share a block only if every token before its end, the model, the row format, the numerics and the salt
//! are the same. Hashes are cut to 128 bits.

use sha2::{Digest, Sha256};

use super::tokens::TokenView;
use crate::model::cache::BLOCK_TOKENS;

/// Version of the block's content and of this hash.
const FORMAT_VERSION: u32 = 1;

/// What the bytes of a cached block depend on beside its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheIdentity {
    /// SHA-256 of config.json, shard headers and sizes, as hexadecimal text.
    pub model_id: String,
    /// How rows are stored.
    pub row_format: String,
    /// Device family and kernel set: what the bits depend on.
    pub numerics_id: String,
}

/// The name of a block's content, or of a chain's root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(u128);

/// Hashes of a sequence's full blocks, computed as far as they were asked for.
#[derive(Clone, Debug)]
pub struct HashChain {
    root: BlockHash,
    hashes: Vec<BlockHash>,
}

impl CacheIdentity {
    /// The first link of every chain of this identity; sequences with another salt never meet.
    #[must_use]
    pub fn root(&self, cache_salt: Option<&str>) -> BlockHash {
        let mut hasher = Sha256::new();
        field(&mut hasher, "flashd", b"kv root");
        field(&mut hasher, "format_version", &FORMAT_VERSION.to_le_bytes());
        field(&mut hasher, "block_tokens", &(BLOCK_TOKENS as u64).to_le_bytes());
        field(&mut hasher, "model_id", self.model_id.as_bytes());
        field(&mut hasher, "row_format", self.row_format.as_bytes());
        field(&mut hasher, "numerics_id", self.numerics_id.as_bytes());
        if let Some(salt) = cache_salt {
            field(&mut hasher, "cache_salt", salt.as_bytes());
        }
        truncate(hasher)
    }
}

impl HashChain {
    /// A chain without blocks.
    #[must_use]
    pub const fn new(root: BlockHash) -> Self {
        Self { root, hashes: Vec::new() }
    }

    /// The name of block `block_idx`, whose tokens must all be known.
    pub fn block(&mut self, block_idx: usize, tokens: TokenView<'_>) -> BlockHash {
        debug_assert!((block_idx + 1) * BLOCK_TOKENS <= tokens.len(), "block {block_idx} is not full");
        while self.hashes.len() <= block_idx {
            let start = self.hashes.len() * BLOCK_TOKENS;
            let parent = *self.hashes.last().unwrap_or(&self.root);
            self.hashes.push(child(parent, tokens, start));
        }
        self.hashes[block_idx]
    }

    /// The name of everything before block `block_idx`: the block before it, or the root.
    pub fn before(&mut self, block_idx: usize, tokens: TokenView<'_>) -> BlockHash {
        match block_idx.checked_sub(1) {
            Some(previous) => self.block(previous, tokens),
            None => self.root,
        }
    }
}

fn child(parent: BlockHash, tokens: TokenView<'_>, start: usize) -> BlockHash {
    let mut bytes = Vec::with_capacity(BLOCK_TOKENS * 4);
    for token in tokens.range(start, start + BLOCK_TOKENS) {
        bytes.extend_from_slice(&token.0.to_le_bytes());
    }
    let mut hasher = Sha256::new();
    field(&mut hasher, "parent", &parent.0.to_le_bytes());
    field(&mut hasher, "tokens", &bytes);
    truncate(hasher)
}

/// Tag and value, each after its length: no two lists of fields give the same bytes.
fn field(hasher: &mut Sha256, tag: &str, value: &[u8]) {
    hasher.update((tag.len() as u64).to_le_bytes());
    hasher.update(tag.as_bytes());
    hasher.update((value.len() as u64).to_le_bytes());
    hasher.update(value);
}

fn truncate(hasher: Sha256) -> BlockHash {
    let digest = hasher.finalize();
    let mut first = [0; 16];
    first.copy_from_slice(&digest[..16]);
    BlockHash(u128::from_le_bytes(first))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::ids::TokenId;

    fn identity(model_id: &str, row_format: &str, numerics_id: &str) -> CacheIdentity {
        let [model_id, row_format, numerics_id] = [model_id, row_format, numerics_id].map(str::to_owned);
        CacheIdentity { model_id, row_format, numerics_id }
    }

    #[test]
    fn every_field_separates_and_none_flows_into_the_next() {
        let roots = [
            identity("a", "b", "c").root(None),
            identity("x", "b", "c").root(None),
            identity("a", "x", "c").root(None),
            identity("a", "b", "x").root(None),
            identity("ab", "", "c").root(None),
            identity("", "ab", "c").root(None),
            identity("a", "b", "c").root(Some("")),
            identity("a", "b", "c").root(Some("c")),
            // A salt that spells out a field of the root is still only a salt.
            identity("a", "b", "").root(Some("c")),
        ];
        assert_eq!(HashSet::from(roots).len(), roots.len());
        assert_eq!(identity("a", "b", "c").root(Some("s")), identity("a", "b", "c").root(Some("s")));
    }

    #[test]
    fn a_block_is_named_by_all_tokens_up_to_its_end() {
        let root = identity("a", "b", "c").root(None);
        let tokens: Vec<TokenId> = (0..3 * BLOCK_TOKENS as u32).map(TokenId).collect();
        let named = |prompt: &[TokenId], output: &[TokenId], block_idx| {
            HashChain::new(root).block(block_idx, TokenView { prompt, output })
        };
        let last = named(&tokens, &[], 2);
        // Where the prompt ends does not matter.
        assert_eq!(named(&tokens[..300], &tokens[300..], 2), last);
        let mut changed = tokens.clone();
        changed[0] = TokenId(9);
        assert_ne!(named(&changed, &[], 2), last);
        changed[0] = tokens[0];
        changed.swap(1, 2);
        assert_ne!(named(&changed, &[], 2), last);
        assert_ne!(named(&tokens, &[], 1), last);
    }

    #[test]
    fn the_chain_knows_what_came_before() {
        let tokens: Vec<TokenId> = (0..2 * BLOCK_TOKENS as u32).map(TokenId).collect();
        let view = TokenView { prompt: &tokens, output: &[] };
        let root = identity("a", "b", "c").root(None);
        let mut chain = HashChain::new(root);
        assert_eq!(chain.before(0, view), root);
        assert_eq!(chain.before(2, view), chain.block(1, view));
    }
}
