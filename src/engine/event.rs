//! What comes home from the engine: closed enums; every accepted request ends in exactly one terminal event.

use crate::ids::TokenId;
use crate::sample::params::TokenLogprobs;

/// An event of one request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The request left the queue; sent once, before its first token.
    Started {
        /// Prompt tokens whose state came from the prefix cache (of the first choice).
        n_cached_tokens: usize,
    },
    /// Log-probabilities of prompt positions 1.., sent once before the first token when they were asked for.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// Progress of a long prefill, at most one a step: for progress bars and keep-alives.
    Prefill {
        /// Prompt tokens done.
        n_done: usize,
        /// Prompt tokens in all.
        n_total: usize,
    },
    /// A generated token.
    Token {
        /// Which choice.
        choice: u32,
        /// The token (EOS and stop ids included).
        token: TokenId,
        /// When they were asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// One choice ended. Not terminal when n > 1.
    ChoiceFinished {
        /// Which choice.
        choice: u32,
        /// Why.
        reason: FinishReason,
    },
    /// Terminal: every choice ended.
    Finished(RequestStats),
    /// Terminal: the request cannot go on.
    Failed(FailReason),
    /// Terminal: the client went away or asked to stop.
    Cancelled,
}

impl Event {
    /// Nothing follows a terminal event.
    #[must_use]
    pub const fn is_terminal(&self) -> bool {
        matches!(self, Self::Finished(_) | Self::Failed(_) | Self::Cancelled)
    }
}

/// Why a choice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// End-of-sequence token.
    Eos,
    /// One of the request's stop ids.
    StopToken(TokenId),
    /// max_tokens or the context's end.
    Length,
    /// The front end ended it (a stop string): `Submission::finish_choice`.
    Requested,
}

/// Why an accepted request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FailReason {
    /// The device is lost; the server is going down.
    #[error("the device failed: {0}")]
    Device(String),
    /// The model gave no usable numbers for this request.
    #[error("the model gave no usable output: {0}")]
    Numerics(String),
    /// The server is shutting down and the drain time is over.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// A fault inside the engine; the message is in the log.
    #[error("internal error")]
    Internal,
}

/// Numbers of a finished request, for usage and metrics. Times in microseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestStats {
    /// Tokens of the prompt.
    pub n_prompt_tokens: usize,
    /// Prompt tokens taken from the prefix cache.
    pub n_cached_tokens: usize,
    /// Generated tokens over all choices.
    pub n_output_tokens: usize,
    /// Arrival to first scheduled.
    pub queue_us: u64,
    /// First scheduled to first token.
    pub prefill_us: u64,
    /// First token to last token.
    pub decode_us: u64,
}
