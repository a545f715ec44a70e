//! The engine: takes valid requests, plans steps, runs them on one thread and sends events home.
//!
//! In reading order: what comes in, what goes out, the door between; then the pure part (sequence, chunk, stage,
//! step, scheduler), and the thread that drives it (active, watchdog, tick).

pub mod event;
pub mod handle;
pub mod pace;
pub mod request;

pub mod chunk;
pub mod scheduler;
pub mod sequence;
pub mod stage;
pub mod step;

mod active;
pub mod tick;
mod watchdog;
