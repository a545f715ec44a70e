//! The operations of the forward pass, one file each: contract, scalar f64 `reference`, fast CPU path, tests.
