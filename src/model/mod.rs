//! DeepSeek-V4-Flash: shape, weights, caches and the forward pass over one ragged batch.

mod attention;
pub mod batch;
pub mod bind;
pub mod cache;
mod compressor;
pub mod cost;
pub mod device;
pub mod forward;
mod hyper;
mod indexer;
pub mod inventory;
mod moe;
mod plan_check;
mod pool;
pub mod row_format;
pub mod runner;
pub mod shape;
mod slots;
pub mod weights;
