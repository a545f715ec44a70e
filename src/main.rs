//! argv → config → device → weights → engine → serve; exit codes; nothing else.
fn main() {}
