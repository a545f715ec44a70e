//! The model on a device with kernels: weights, caches, the forward pass, and the executor over them.

mod cache;
mod experts;
mod forward;
pub mod runner;
mod sampling;
mod step;
mod weights;
mod workspace;

pub use cache::DeviceLayout;
pub use weights::WeightSource;
