//! The engine against a device that models its state honestly: any stale block, window or slot changes the output.

// Panicking is how a test fails, in its helpers too.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod bench;
mod device;
mod directed;
mod oracle;
mod random;
mod server;
