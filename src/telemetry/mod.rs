//! Logs and metrics: the only globals.

pub mod log;
pub mod metrics;
