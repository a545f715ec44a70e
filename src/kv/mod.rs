//! KV memory: a block pool whose guards free on drop, and the prefix index that shares full blocks.
