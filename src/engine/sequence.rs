//! The state of one choice of a request, waiting or running.

use std::sync::Arc;

use super::chunk::Prefill;
use super::event::FinishReason;
use crate::ids::{RequestId, SlotIdx, TokenId};
use crate::kv::cache::BlockTable;
use crate::kv::identity::{BlockHash, HashChain};
use crate::kv::lease::Lease;
use crate::kv::tokens::TokenView;
use crate::sample::params::{SamplingParams, SlotInit, TokenLogprobs};

/// Who goes first: lower priority, then earlier arrival, then lower choice. It also names the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank {
    /// The request's priority; lower runs earlier.
    pub priority: i32,
    /// Numbers are given in order of arrival.
    pub request: RequestId,
    /// Which of the request's choices.
    pub choice: u32,
}

/// What all choices of a request share.
#[derive(Clone, Debug)]
pub struct SequenceSpec {
    /// The prompt; at least one token.
    pub prompt: Arc<[TokenId]>,
    /// Sampling settings with their seed.
    pub sampling: SamplingParams,
    /// Tokens a choice may generate; prompt and these fit the pool.
    pub max_tokens: usize,
    /// No end by EOS or stop id before this many.
    pub min_tokens: usize,
    /// The model's end token; `None` to go on past it.
    pub eos: Option<TokenId>,
    /// Ids that end a choice; sorted.
    pub stop_token_ids: Vec<TokenId>,
    /// Log-probabilities with each generated token.
    pub logprobs: Option<u32>,
    /// Log-probabilities of the prompt, for the first choice.
    pub prompt_logprobs: Option<u32>,
    /// Names what the sequence may share ([`crate::kv::identity::CacheIdentity::root`]).
    pub cache_root: BlockHash,
}

/// One choice.
#[derive(Debug)]
pub struct Sequence {
    /// Its rank and name.
    pub rank: Rank,
    /// What was asked for.
    pub spec: Arc<SequenceSpec>,
    /// Generated tokens known on the host.
    pub output: Vec<TokenId>,
    /// Samples planned and not yet home.
    pub n_pending: usize,
    /// Steps in flight that hold rows of it.
    pub n_in_flight: usize,
    /// Names of its full blocks.
    pub chain: HashChain,
    /// Leading prompt rows whose score has been planned.
    pub n_scores_planned: usize,
    /// Prompt scores that came home.
    pub scores: Vec<TokenLogprobs>,
    /// It has been admitted before.
    pub has_started: bool,
}

/// A sequence with a slot and blocks.
#[derive(Debug)]
pub struct Running {
    /// The sequence.
    pub seq: Sequence,
    /// Its slot.
    pub slot: Lease<SlotIdx>,
    /// Its blocks.
    pub table: BlockTable,
    /// Tokens in the caches once all planned steps are done.
    pub n_rows: usize,
    /// Where the last checkpoint was saved or restored.
    pub n_rows_kept: usize,
    /// The slot holds the sequence's last sampled token.
    pub has_sampled: bool,
}

/// What a running sequence can do in the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// One row: the last sampled token.
    Decode,
    /// Known tokens.
    Prefill {
        /// How many are left.
        n_left: usize,
    },
    /// Everything is planned; results are on their way.
    Wait,
}

impl Sequence {
    /// A sequence that has not run.
    #[must_use]
    pub fn new(rank: Rank, spec: Arc<SequenceSpec>) -> Self {
        let chain = HashChain::new(spec.cache_root);
        Self {
            rank,
            spec,
            output: Vec::new(),
            n_pending: 0,
            n_in_flight: 0,
            chain,
            n_scores_planned: 0,
            scores: Vec::new(),
            has_started: false,
        }
    }

    /// Prompt tokens.
    #[must_use]
    pub fn n_prompt(&self) -> usize {
        self.spec.prompt.len()
    }

    /// Tokens known on the host.
    #[must_use]
    pub fn n_known(&self) -> usize {
        self.n_prompt() + self.output.len()
    }

    /// The known tokens.
    #[must_use]
    pub fn tokens(&self) -> TokenView<'_> {
        TokenView { prompt: &self.spec.prompt, output: &self.output }
    }

    /// The known tokens, with the chain to name them.
    pub fn chain_and_tokens(&mut self) -> (&mut HashChain, TokenView<'_>) {
        (&mut self.chain, TokenView { prompt: &self.spec.prompt, output: &self.output })
    }

    /// One more token may be sampled.
    #[must_use]
    pub fn may_sample(&self) -> bool {
        self.output.len() + self.n_pending < self.spec.max_tokens
    }

    /// Prompt rows to be scored in all: every one but the last predicts a prompt token.
    #[must_use]
    pub fn n_scores(&self) -> usize {
        match self.spec.prompt_logprobs {
            Some(_) if self.rank.choice == 0 => self.n_prompt() - 1,
            _ => 0,
        }
    }

    /// Tokens that a prefix hit may cover at most: the last known one is always run, and so is every row to be scored.
    #[must_use]
    pub fn max_hit_tokens(&self) -> usize {
        let last = self.n_known() - 1;
        if self.n_scores_planned < self.n_scores() { last.min(self.n_scores_planned) } else { last }
    }

    /// What the sampler must know before the first row.
    #[must_use]
    pub fn slot_init(&self) -> SlotInit {
        let spec = &self.spec;
        SlotInit {
            sampling: spec.sampling.clone(),
            choice: self.rank.choice,
            prompt: Arc::clone(&spec.prompt),
            output: self.output.clone(),
            banned_until_min: spec.eos.iter().chain(&spec.stop_token_ids).copied().collect(),
            min_tokens: u32::try_from(spec.min_tokens).unwrap_or(u32::MAX),
            n_logprobs: spec.logprobs,
        }
    }

    /// Takes a sampled token; says whether the choice ends with it.
    pub fn accept(&mut self, token: TokenId) -> Option<FinishReason> {
        self.output.push(token);
        let n_output = self.output.len();
        let spec = &self.spec;
        if n_output > spec.min_tokens {
            if spec.eos == Some(token) {
                return Some(FinishReason::Eos);
            }
            if spec.stop_token_ids.binary_search(&token).is_ok() {
                return Some(FinishReason::StopToken(token));
            }
        }
        (n_output >= spec.max_tokens).then_some(FinishReason::Length)
    }
}

impl Running {
    /// What the next step can do for it.
    #[must_use]
    pub fn next(&self) -> Next {
        let n_known = self.seq.n_known();
        if self.has_sampled {
            // Position n_rows holds the last sampled token; a row for it makes the next one.
            let is_last = self.n_rows + 1 == n_known + self.seq.n_pending;
            if is_last && self.seq.may_sample() { Next::Decode } else { Next::Wait }
        } else if self.n_rows < n_known {
            Next::Prefill { n_left: n_known - self.n_rows }
        } else {
            Next::Wait
        }
    }

    /// What is left of its known tokens, for [`super::chunk`].
    #[must_use]
    pub fn to_prefill(&self) -> Prefill {
        let (end, n_prompt) = (self.seq.n_known(), self.seq.n_prompt());
        Prefill { start: self.n_rows, end, n_prompt, n_rows_kept: self.n_rows_kept }
    }

    /// A decode row has no place yet.
    #[must_use]
    pub const fn needs_block(&self) -> bool {
        self.n_rows >= self.table.n_token_places()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::identity::CacheIdentity;

    fn sequence(change: impl FnOnce(&mut SequenceSpec)) -> Sequence {
        let [model_id, row_format, numerics_id] = ["m", "r", "n"].map(str::to_owned);
        let mut spec = SequenceSpec {
            prompt: [1, 2, 3].map(TokenId).into(),
            sampling: SamplingParams::default(),
            max_tokens: 5,
            min_tokens: 0,
            eos: Some(TokenId(0)),
            stop_token_ids: [7, 9].map(TokenId).to_vec(),
            logprobs: None,
            prompt_logprobs: None,
            cache_root: CacheIdentity { model_id, row_format, numerics_id }.root(None),
        };
        change(&mut spec);
        Sequence::new(Rank { priority: 0, request: RequestId(1), choice: 0 }, Arc::new(spec))
    }

    fn accept(seq: &mut Sequence, tokens: &[u32]) -> Vec<Option<FinishReason>> {
        tokens.iter().map(|&token| seq.accept(TokenId(token))).collect()
    }

    #[test]
    fn a_choice_ends_by_eos_stop_or_length() {
        let mut seq = sequence(|_| {});
        assert_eq!(accept(&mut seq, &[4, 0]), [None, Some(FinishReason::Eos)]);
        let mut seq = sequence(|_| {});
        assert_eq!(accept(&mut seq, &[9]), [Some(FinishReason::StopToken(TokenId(9)))]);
        let mut seq = sequence(|_| {});
        assert_eq!(accept(&mut seq, &[4, 4, 4, 4, 4])[4], Some(FinishReason::Length));
        // EOS as the last token allowed is still EOS.
        let mut seq = sequence(|spec| spec.max_tokens = 1);
        assert_eq!(accept(&mut seq, &[0]), [Some(FinishReason::Eos)]);
    }

    #[test]
    fn ignored_eos_and_min_tokens_go_on() {
        let mut seq = sequence(|spec| spec.eos = None);
        assert_eq!(accept(&mut seq, &[0, 0]), [None, None]);
        let mut seq = sequence(|spec| spec.min_tokens = 2);
        assert_eq!(accept(&mut seq, &[0, 7, 7])[..2], [None, None]);
        assert_eq!(accept(&mut seq, &[0]), [Some(FinishReason::Eos)]);
        assert_eq!(seq.slot_init().banned_until_min, [0, 7, 9].map(TokenId));
        assert_eq!(sequence(|spec| spec.eos = None).slot_init().banned_until_min, [7, 9].map(TokenId));
    }

    #[test]
    fn hits_leave_the_last_token_and_every_row_to_be_scored() {
        let mut seq = sequence(|_| {});
        assert_eq!(seq.max_hit_tokens(), 2);
        accept(&mut seq, &[4, 4]);
        assert_eq!(seq.max_hit_tokens(), 4);
        let mut seq = sequence(|spec| spec.prompt_logprobs = Some(0));
        assert_eq!((seq.n_scores(), seq.max_hit_tokens()), (2, 0));
        seq.n_scores_planned = 2;
        assert_eq!(seq.max_hit_tokens(), 2);
        seq.rank.choice = 1;
        assert_eq!(seq.n_scores(), 0);
    }

    #[test]
    fn samples_in_flight_count_against_max_tokens() {
        let mut seq = sequence(|spec| spec.max_tokens = 2);
        seq.n_pending = 1;
        assert!(seq.may_sample());
        accept(&mut seq, &[4]);
        assert!(!seq.may_sample());
        assert!(!sequence(|spec| spec.max_tokens = 0).may_sample());
    }
}
