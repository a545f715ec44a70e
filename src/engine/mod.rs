//! The engine: takes valid requests, plans steps, runs them on one thread and sends events home.

pub mod event;
pub mod handle;
pub mod request;
