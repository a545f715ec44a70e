//! The caches' shape: what a KV block, a slot and a checkpoint hold, in rows and bytes.

/// Tokens whose compressed rows share one KV block.
pub const BLOCK_TOKENS: usize = 256;
