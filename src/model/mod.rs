//! DeepSeek-V4-Flash: shape, weights, caches and the forward pass over one ragged batch.

pub mod batch;
pub mod cache;
pub mod row_format;
pub mod shape;
pub mod weights;
