//! What a request must produce: a pure function of its prompt and settings, computed without caches, slots or batches.

use flashd::engine::event::FinishReason;
use flashd::engine::sequence::SequenceSpec;
use flashd::ids::TokenId;
use flashd::sample::params::{ScoredToken, SlotInit, TokenLogprobs};

/// State before the first token.
pub const EMPTY: u64 = 0x6a09_e667_f3bc_c908;

/// One step of a hash: splitmix64 over both words.
pub const fn mix(state: u64, word: u64) -> u64 {
    let mut x = state.rotate_left(23) ^ word.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The state after one more token.
pub const fn advance(state: u64, token: TokenId) -> u64 {
    mix(state, token.0 as u64 + 1)
}

/// The token sampled from a state; depends on everything a sampler may use.
pub fn sample(state: u64, init: &SlotInit, output: &[TokenId], position: usize, vocab_size: usize) -> TokenId {
    let mut x = mix(state, init.sampling.seed.expect("a seed"));
    x = mix(mix(x, u64::from(init.choice)), position as u64);
    x = output.iter().fold(x, |x, token| mix(x, u64::from(token.0)));
    loop {
        let token = TokenId((x % vocab_size as u64) as u32);
        if output.len() >= init.min_tokens as usize || !init.banned_until_min.contains(&token) {
            return token;
        }
        x = mix(x, 1);
    }
}

/// Log-probabilities of a token in a state.
pub fn score(state: u64, target: TokenId, n_top: u32) -> TokenLogprobs {
    let logprob = |token: TokenId| -((mix(state, u64::from(token.0)) % 1000) as f32) / 100.0;
    let scored = |token| ScoredToken { token, logprob: logprob(token) };
    TokenLogprobs { chosen: scored(target), rank: 1, top: (0..n_top).map(|i| scored(TokenId(i))).collect() }
}

/// The whole output of one choice.
#[derive(Debug, PartialEq)]
pub struct Expected {
    pub tokens: Vec<TokenId>,
    pub reason: FinishReason,
    pub prompt_scores: Vec<TokenLogprobs>,
}

pub fn expected(spec: &SequenceSpec, choice: u32, vocab_size: usize) -> Expected {
    let mut seq = flashd::engine::sequence::Sequence::new(
        flashd::engine::sequence::Rank { priority: 0, request: flashd::ids::RequestId(0), choice },
        std::sync::Arc::new(spec.clone()),
    );
    let init = seq.slot_init();
    let mut state = EMPTY;
    let mut prompt_scores = Vec::new();
    for (idx, &token) in spec.prompt.iter().enumerate() {
        state = advance(state, token);
        if let (Some(&next), Some(n_top), 0) = (spec.prompt.get(idx + 1), spec.prompt_logprobs, choice) {
            prompt_scores.push(score(state, next, n_top));
        }
    }
    let mut tokens = Vec::new();
    let reason = if spec.max_tokens == 0 {
        FinishReason::Length
    } else {
        loop {
            let token = sample(state, &init, &tokens, spec.prompt.len() + tokens.len(), vocab_size);
            tokens.push(token);
            state = advance(state, token);
            if let Some(reason) = seq.accept(token) {
                break reason;
            }
        }
    };
    Expected { tokens, reason, prompt_scores }
}
