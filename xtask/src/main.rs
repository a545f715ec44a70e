//! `cargo xtask`: the gate (`ci`) and the house rules (`tidy`) of flashd.
fn main() {}
