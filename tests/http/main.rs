//! The HTTP API over a stand-in for the engine: every answer is known, so every byte of the protocol can be checked.

// Panicking is how a test fails, in its helpers too.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod chat;
mod completions;
mod engine;
mod harness;
mod life;
mod tools;
mod wire;
