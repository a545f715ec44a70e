//! Number formats and typed views of stored weights; no arithmetic beyond decoding one element.

pub mod format;
pub mod matrix;
