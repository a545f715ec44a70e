//! Long random runs over tiny pools: every output is compared with the oracle, every count after every step.

use std::time::Duration;

use flashd::engine::scheduler::SchedulerConfig;
use flashd::engine::sequence::{Rank, SequenceSpec};
use flashd::ids::TokenId;

use crate::bench::{Bench, EOS, Size, VOCAB, identity, prompt, spec};
use crate::oracle::mix;

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(1);
        (mix(0x5eed, self.0) % n as u64) as usize
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

struct Traffic {
    n_requests: usize,
    max_prompt: usize,
    /// One disturbance in as many steps.
    steps_per_disturbance: usize,
    has_priorities: bool,
}

/// A prompt that shares a prefix with others, often at the edge of a block, or goes on where an answer ended.
fn random_prompt(rng: &mut Rng, answers: &[Vec<TokenId>], max_prompt: usize) -> Vec<TokenId> {
    if !answers.is_empty() && rng.below(3) == 0 {
        let mut tokens = answers[rng.below(answers.len())].clone();
        let seed = rng.below(1000) as u64;
        tokens.extend(prompt(rng.below(30), seed));
        if tokens.len() <= max_prompt && !tokens.is_empty() {
            return tokens;
        }
    }
    let base = prompt(max_prompt, 1000 + rng.below(4) as u64);
    let edges = [1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 511, 512, 513, 768];
    let n_shared = if rng.below(2) == 0 { rng.pick(&edges) } else { 1 + rng.below(max_prompt) };
    let mut tokens = base[..n_shared.min(max_prompt)].to_vec();
    if rng.below(2) == 0 && tokens.len() + 40 <= max_prompt {
        let seed = rng.below(1000) as u64;
        tokens.extend(prompt(1 + rng.below(40), seed));
    }
    tokens
}

fn random_spec(rng: &mut Rng, answers: &[Vec<TokenId>], max_prompt: usize) -> SequenceSpec {
    let max_tokens = rng.pick(&[0, 1, 2, 10, 40, 300, 300]);
    let mut spec = spec(random_prompt(rng, answers, max_prompt), max_tokens);
    spec.sampling.seed = Some(rng.below(3) as u64);
    spec.eos = rng.pick(&[None, Some(EOS), Some(EOS)]);
    spec.min_tokens = rng.pick(&[0, 0, 5]).min(max_tokens);
    spec.stop_token_ids = rng.pick::<&[TokenId]>(&[&[], &[TokenId(7)], &[TokenId(3), TokenId(9)]]).to_vec();
    spec.prompt_logprobs = rng.pick(&[None, None, None, Some(2)]);
    spec.cache_root = identity().root(rng.pick(&[None, None, Some("a"), Some("b")]));
    spec
}

/// Cancels, or ends a choice of, a living request now and then.
fn disturb(rng: &mut Rng, bench: &mut Bench, n_steps: usize) {
    let living: Vec<Rank> = bench.produced.iter().filter(|(_, p)| p.reason.is_none()).map(|(rank, _)| *rank).collect();
    if living.is_empty() {
        return;
    }
    let rank = living[rng.below(living.len())];
    match rng.below(2 * n_steps) {
        0 => bench.cancel(rank.request),
        1 => bench.end(rank),
        _ => {}
    }
}

fn simulate(seed: u64, size: Size, lag: usize, traffic: &Traffic) -> Bench {
    simulate_with(seed, Bench::new(size, lag), traffic)
}

fn simulate_with(seed: u64, mut bench: Bench, traffic: &Traffic) -> Bench {
    let mut rng = Rng(seed.wrapping_mul(0x1_0000_0000));
    let mut answers: Vec<Vec<TokenId>> = Vec::new();
    let mut n_added = 0;
    while n_added < traffic.n_requests {
        let stats = bench.scheduler.stats();
        if stats.n_running + stats.n_waiting + stats.n_deferred < 12 && rng.below(3) == 0 {
            let spec = random_spec(&mut rng, &answers, traffic.max_prompt);
            let n = if rng.below(6) == 0 { 2 + rng.below(3) as u32 } else { 1 };
            let priority = if traffic.has_priorities { rng.pick(&[0, 0, -1, 1]) } else { 0 };
            bench.add_many(spec, n, priority);
            n_added += 1;
        }
        disturb(&mut rng, &mut bench, traffic.steps_per_disturbance);
        bench.step();
        if bench.produced.len() > 24 {
            collect(&mut bench, &mut answers);
        }
    }
    bench.drain();
    bench.verify();
    bench
}

/// Checks and forgets what has ended, keeping some answers to go on from.
fn collect(bench: &mut Bench, answers: &mut Vec<Vec<TokenId>>) {
    bench.verify_ended();
    let ended = bench.produced.extract_if(.., |_, produced| produced.reason.is_some());
    for (rank, produced) in ended {
        let tokens = bench.specs[&rank.request].prompt.iter().copied().chain(produced.tokens);
        answers.push(tokens.collect());
    }
    let n_old = answers.len().saturating_sub(5);
    answers.drain(..n_old);
}

const SIZES: [Size; 4] = [
    // Room for one and a half of the longest sequences: preemption all the time.
    Size { n_slots: 4, n_blocks: 6, n_checkpoints: 6, n_rows: 64 },
    Size { n_slots: 8, n_blocks: 12, n_checkpoints: 8, n_rows: 300 },
    Size { n_slots: 3, n_blocks: 24, n_checkpoints: 40, n_rows: 1024 },
    // One slot, no checkpoint to keep.
    Size { n_slots: 1, n_blocks: 6, n_checkpoints: 0, n_rows: 5 },
];

fn traffic(size: Size, n_requests: usize) -> Traffic {
    // The longest request, with 300 tokens of output, must fit the pool.
    let max_prompt = (size.n_blocks * 256 - 300).min(1100);
    let (n_requests, steps_per_disturbance) = if size.n_rows < 10 { (n_requests / 10, 500) } else { (n_requests, 30) };
    Traffic { n_requests, max_prompt, steps_per_disturbance, has_priorities: false }
}

#[test]
fn outputs_are_a_pure_function_of_the_prompt() {
    for (seed, size) in SIZES.into_iter().enumerate() {
        for lag in 0..=1 {
            let traffic = traffic(size, 2500);
            let bench = simulate(seed as u64 * 2 + lag as u64, size, lag, &traffic);
            let totals = &bench.totals;
            println!("{size:?} lag {lag}: {totals:?}");
            assert!(totals.n_finished > traffic.n_requests / 2, "{totals:?}");
            if size.n_checkpoints > 0 {
                assert!(
                    totals.n_restores > 100 && totals.n_copies > 10 && totals.n_cached_tokens > 10_000,
                    "{totals:?}"
                );
            }
            if size.n_slots > 3 {
                assert!(totals.n_preempted > 5, "{totals:?}");
            }
        }
    }
}

#[test]
fn priorities_change_the_order_and_not_the_output() {
    for lag in 0..=1 {
        let traffic = Traffic { has_priorities: true, ..traffic(SIZES[1], 500) };
        simulate(77 + lag as u64, SIZES[1], lag, &traffic);
    }
}

#[test]
fn the_clock_changes_the_chunks_and_not_the_output() {
    for (seed, size) in SIZES.into_iter().enumerate() {
        for lag in 0..=1 {
            let config = SchedulerConfig { prefill_step_time: Duration::from_millis(100), ..size.config() };
            let mut bench = Bench::with_config(size, lag, config);
            // Anything from no time at all to a second, without rhyme or reason.
            let mut clock = Rng(seed as u64);
            bench.step_time = Box::new(move |_| Duration::from_millis(clock.pick(&[0, 1, 30, 99, 101, 1000])));
            let bench = simulate_with(seed as u64 * 2 + lag as u64, bench, &traffic(size, 800));
            assert!(bench.totals.n_finished > 40, "{:?}", bench.totals);
        }
    }
}

#[test]
fn ten_thousand_short_requests_leave_the_pool_whole() {
    // Counts hold after days of mixed prompts under eviction.
    let size = Size { n_slots: 8, n_blocks: 30, n_checkpoints: 12, n_rows: 512 };
    let mut rng = Rng(99);
    let mut bench = Bench::new(size, 1);
    for _ in 0..10_000 {
        while bench.scheduler.stats().n_waiting > 4 {
            bench.step();
        }
        let n_tokens = 1 + rng.below(600);
        let family = rng.below(40) as u64;
        bench.add(spec(prompt(n_tokens, family), rng.below(4)));
        if bench.produced.len() > 500 {
            bench.verify_ended();
            bench.produced.retain(|_, produced| produced.reason.is_none());
        }
    }
    bench.drain();
    bench.verify();
    assert!(bench.totals.n_cached_tokens > 100_000, "{:?}", bench.totals);
    let blocks = bench.scheduler.stats().blocks;
    assert_eq!(blocks.n_free + blocks.n_cached, size.n_blocks);
    assert!(VOCAB > EOS.index());
}
