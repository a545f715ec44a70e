//! KV memory: a block pool whose guards free on drop, and the prefix index that shares full blocks.
//!
//! Everything here is bookkeeping: the bytes are the device's. A block freed here may be given to another sequence at
//! once, because a device runs steps in the order in which they were launched.

pub mod cache;
pub mod identity;
pub mod index;
pub mod layout;
pub mod lease;
pub mod pool;
pub mod tokens;
