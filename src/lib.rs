//! flashd serves one model, DeepSeek-V4-Flash: docs/architecture.md tells the request in a straight line.
//!
//! Modules are listed from the top of the dependency order to the bottom; imports point only down this list.

pub mod cli;
pub mod config;

pub mod http;

pub mod chat;
pub mod tokenizer;

pub mod engine;

pub mod kv;

pub mod model;

pub mod ops;
pub mod sample;

pub mod checkpoint;

pub mod device;

#[allow(unsafe_code)] // The one home of file maps; each block says why it is sound.
pub mod mmap;

pub mod ids;
pub mod telemetry;
pub mod tensor;
