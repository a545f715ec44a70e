//! The engine against a device that models its state honestly: any stale block, window or slot changes the output.

mod bench;
mod device;
mod directed;
mod oracle;
mod random;
mod server;
