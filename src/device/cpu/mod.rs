//! The CPU device: SIMD kernels behind safe, run-time dispatched functions, and the thread pool they share.
