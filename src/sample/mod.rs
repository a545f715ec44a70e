//! From logits to a token: processors in a fixed order, counter-based noise, log-probabilities. Pure: no device, no clock.

pub mod params;
pub mod philox;
pub mod processors;
pub mod sampler;
