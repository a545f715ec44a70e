//! argv → config → device → weights → engine → serve; exit codes; nothing else.

use std::process::ExitCode;

fn main() -> ExitCode {
    flashd::cli::main(std::env::args_os())
}
