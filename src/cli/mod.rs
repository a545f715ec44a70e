//! The command line: one file a subcommand.
pub mod inspect;
pub mod synth;
