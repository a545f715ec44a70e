//! `flashd debug`: what the parts of the server make of given input, for tests and for bug reports.

pub mod logits;
pub mod parse;
pub mod render;

/// A part to look at.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum DebugCommand {
    /// Write the logits after a prompt and after each forced token
    Logits(logits::LogitsArgs),
    /// Print the prompt of a conversation
    Render(render::RenderArgs),
    /// Print the message that a completion holds
    Parse(parse::ParseArgs),
}

/// Runs the command.
///
/// # Errors
/// The command's own.
pub fn run(command: &DebugCommand) -> anyhow::Result<()> {
    match command {
        DebugCommand::Logits(args) => logits::run(args),
        DebugCommand::Render(args) => render::run(args),
        DebugCommand::Parse(args) => parse::run(args),
    }
}
