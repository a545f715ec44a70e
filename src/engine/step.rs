//! What passes between scheduler and loop: a step to launch, and what its results mean.

use super::event::FinishReason;
use super::sequence::Rank;
use super::stage::StepTicket;
use crate::model::batch::StepPlan;
use crate::sample::params::{RowError, Sampled, TokenLogprobs};

/// A step to launch.
#[derive(Debug)]
pub struct Step {
    /// For the executor.
    pub plan: StepPlan,
    /// To be handed back with its output.
    pub ticket: StepTicket,
    /// Sequences that run for the first time.
    pub started: Vec<Started>,
    /// Sequences preempted.
    pub n_preempted: usize,
}

/// A sequence that left the queue for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// Which.
    pub rank: Rank,
    /// Its prompt's tokens.
    pub n_prompt_tokens: usize,
    /// Those of them that came from the cache.
    pub n_cached_tokens: usize,
}

/// What a step's output means for a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// Part of a prompt is done.
    Progress {
        /// Whose.
        rank: Rank,
        /// Prompt tokens done.
        n_done: usize,
        /// Prompt tokens in all.
        n_total: usize,
    },
    /// All prompt scores are home.
    Scores(Rank, Vec<TokenLogprobs>),
    /// A token.
    Token(Rank, Sampled),
    /// The choice has ended and is gone.
    Finished(Rank, FinishReason),
    /// The choice cannot go on and is gone.
    Failed(Rank, RowError),
}

impl Update {
    /// Whose it is.
    #[must_use]
    pub const fn rank(&self) -> Rank {
        match self {
            Self::Progress { rank, .. }
            | Self::Scores(rank, _)
            | Self::Token(rank, _)
            | Self::Finished(rank, _)
            | Self::Failed(rank, _) => *rank,
        }
    }
}

/// A step's output does not fit its plan: the executor is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device returned {n_got} {what} for {n_want}")]
pub struct OutputMismatch {
    /// Samples or scores.
    pub what: &'static str,
    /// Planned.
    pub n_want: usize,
    /// Returned.
    pub n_got: usize,
}

impl OutputMismatch {
    /// Compares planned and returned numbers.
    ///
    /// # Errors
    /// When they differ.
    pub const fn check(what: &'static str, n_want: usize, n_got: usize) -> Result<(), Self> {
        if n_want == n_got { Ok(()) } else { Err(Self { what, n_want, n_got }) }
    }
}
