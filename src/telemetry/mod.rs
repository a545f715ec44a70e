//! Logs and metrics: the only globals.

pub mod metrics;
