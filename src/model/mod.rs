//! DeepSeek-V4-Flash: shape, weights, caches and the forward pass over one ragged batch.

pub mod batch;
pub mod bind;
pub mod cache;
pub mod cost;
pub mod inventory;
pub mod row_format;
pub mod shape;
pub mod weights;
