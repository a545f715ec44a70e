//! The operations of the forward pass, one file each: contract, scalar f64 `reference`, fast CPU path, tests.

pub mod attention;
pub mod case;
pub mod compress;
pub mod copy;
pub mod embed;
pub mod hadamard;
pub mod hyper_head;
pub mod hyper_mix;
pub mod hyper_post;
pub mod index_query;
pub mod index_score;
pub mod kv_row;
pub mod linear;
pub mod query;
pub mod ring_store;
pub mod rms_norm;
pub mod rope;
pub mod round_fp4;
pub mod round_fp8;
pub mod route;
pub mod row_norm;
pub mod step;
pub mod swiglu;
pub mod top_k;
