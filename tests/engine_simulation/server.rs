//! The whole engine thread behind its handle: events, cancelling, draining, faults.

use std::sync::Arc;
use std::time::{Duration, Instant};

use flashd::engine::event::{Event, FailReason, FinishReason};
use flashd::engine::handle::{EngineHandle, EngineHealth, Submission};
use flashd::engine::request::{GenerateRequest, RejectReason, ValidRequest};
use flashd::engine::tick::{Engine, EngineConfig, EngineError, EngineThread};
use flashd::ids::TokenId;
use flashd::sample::params::SamplingParams;
use flashd::telemetry::metrics::{Metrics, Outcome};

use crate::bench::{EOS, Size, VOCAB, identity, prompt, spec};
use crate::device::{FakeDevice, Faults, Gate};
use crate::oracle::expected;

const SIZE: Size = Size { n_slots: 8, n_blocks: 40, n_checkpoints: 20, n_rows: 256 };

struct Server {
    handle: EngineHandle,
    thread: EngineThread,
    metrics: Arc<Metrics>,
    gate: Gate,
}

fn config(lag: usize) -> EngineConfig {
    EngineConfig {
        scheduler: SIZE.config(),
        async_scheduling: lag == 1,
        warm_up_rows: SIZE.n_rows,
        ..EngineConfig::new(identity(), EOS)
    }
}

fn start(lag: usize, faults: Faults) -> Server {
    start_with(config(lag), faults)
}

fn start_with(config: EngineConfig, faults: Faults) -> Server {
    let device = FakeDevice::new(SIZE.capacity(), usize::from(config.async_scheduling)).with_faults(faults);
    let (gate, metrics) = (device.gate(), Metrics::new("fake"));
    let (handle, thread) = Engine::spawn(Box::new(device), config, Arc::clone(&metrics)).expect("starts");
    let server = Server { handle, thread, metrics, gate };
    server.wait_for(|health| *health != EngineHealth::Starting);
    server
}

impl Server {
    /// Waits for a state; there is no deadline but the test runner's.
    fn wait_for(&self, is_there: impl Fn(&EngineHealth) -> bool) {
        while !is_there(&self.handle.health()) {
            std::thread::yield_now();
        }
    }

    fn submit(&self, request: GenerateRequest) -> Submission {
        let valid = ValidRequest::new(request, self.handle.limits()).expect("valid");
        self.handle.submit(valid).expect("accepted")
    }

    /// Drains with all the time in the world and checks that nothing is left behind.
    fn stop(self) -> Arc<Metrics> {
        self.handle.drain(Instant::now() + Duration::from_secs(3600));
        self.thread.join().expect("a clean end");
        let metrics = self.metrics;
        assert_eq!((metrics.num_requests_running.get(), metrics.num_requests_waiting.get()), (0, 0));
        assert!(metrics.kv_cache_usage_perc.get().abs() < 1e-9);
        metrics
    }
}

fn request(prompt: Vec<TokenId>, max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        id: "r".to_owned(),
        prompt: prompt.into(),
        max_tokens: Some(max_tokens),
        n: 1,
        sampling: SamplingParams { seed: Some(1), ..SamplingParams::default() },
        stop_token_ids: Vec::new(),
        ignore_eos: true,
        min_tokens: 0,
        logprobs: None,
        prompt_logprobs: None,
        cache_salt: None,
        priority: 0,
    }
}

/// All events up to the end of the stream, and the proof that exactly the last one is terminal.
async fn events(mut submission: Submission) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some(event) = submission.next().await {
        events.push(event);
    }
    let n_terminal = events.iter().filter(|event| event.is_terminal()).count();
    assert!(n_terminal == 1 && events.last().is_some_and(Event::is_terminal), "{events:?}");
    events
}

fn tokens(events: &[Event], wanted: u32) -> Vec<TokenId> {
    let token = |event: &Event| match event {
        Event::Token { choice, token, .. } if *choice == wanted => Some(*token),
        _ => None,
    };
    events.iter().filter_map(token).collect()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().expect("runtime").block_on(future)
}

#[test]
fn a_request_is_started_streamed_and_finished() {
    for lag in 0..=1 {
        let server = start(lag, Faults::default());
        let mut wanted = request(prompt(700, 1), 5);
        (wanted.logprobs, wanted.prompt_logprobs) = (Some(2), Some(1));
        let got = block_on(events(server.submit(wanted)));
        assert_eq!(got[0], Event::Started { n_cached_tokens: 0 });
        let Event::Prefill { n_done, n_total: 700 } = got[1] else { panic!("{got:?}") };
        assert!(n_done > 0 && n_done < 700);
        let n_scored: Vec<usize> =
            got.iter().filter_map(|e| if let Event::PromptLogprobs(s) = e { Some(s.len()) } else { None }).collect();
        assert_eq!(n_scored, [699]);
        assert_eq!(tokens(&got, 0), expected(&spec(prompt(700, 1), 5), 0, VOCAB).tokens);
        let tops = got.iter().filter_map(|e| if let Event::Token { logprobs, .. } = e { Some(logprobs) } else { None });
        assert!(tops.into_iter().all(|top| top.as_ref().is_some_and(|top| top.top.len() == 2)));
        assert_eq!(got[got.len() - 2], Event::ChoiceFinished { choice: 0, reason: FinishReason::Length });
        let Some(Event::Finished(stats)) = got.last() else { panic!("{got:?}") };
        assert_eq!((stats.n_prompt_tokens, stats.n_output_tokens, stats.n_cached_tokens), (700, 5, 0));
        let metrics = server.stop();
        assert_eq!((metrics.prompt_tokens_total.get(), metrics.generation_tokens_total.get()), (700, 5));
        assert_eq!(metrics.time_to_first_token_seconds.get_sample_count(), 1);
        assert_eq!(metrics.inter_token_latency_seconds.get_sample_count(), 4);
        assert_eq!(metrics.outcome_count(Outcome::Length), 1);
    }
}

#[test]
fn prefix_hits_are_reported_to_client_and_metrics() {
    let server = start(0, Faults::default());
    block_on(async {
        events(server.submit(request(prompt(600, 1), 2))).await;
        let got = events(server.submit(request(prompt(600, 1), 2))).await;
        assert_eq!(got[0], Event::Started { n_cached_tokens: 512 });
    });
    let metrics = server.stop();
    assert_eq!(metrics.prefix_cache_queries_total.get(), 1200);
    assert_eq!(metrics.prefix_cache_hits_total.get(), 512);
    assert_eq!(metrics.prompt_tokens_cached_total.get(), 512);
}

#[test]
fn eos_stop_ids_and_min_tokens_end_a_choice() {
    let server = start(1, Faults::default());
    block_on(async {
        for seed in 0..20 {
            let mut wanted = request(prompt(20, seed), 400);
            (wanted.ignore_eos, wanted.min_tokens, wanted.stop_token_ids) = (false, 3, vec![TokenId(5)]);
            let got = events(server.submit(wanted)).await;
            let mut spec = spec(prompt(20, seed), 400);
            (spec.eos, spec.min_tokens, spec.stop_token_ids) = (Some(EOS), 3, vec![TokenId(5)]);
            let want = expected(&spec, 0, VOCAB);
            assert_eq!(tokens(&got, 0), want.tokens);
            assert_eq!(got[got.len() - 2], Event::ChoiceFinished { choice: 0, reason: want.reason });
        }
    });
    server.stop();
}

#[test]
fn choices_end_one_by_one_and_the_front_end_can_end_one() {
    let server = start(0, Faults::default());
    block_on(async {
        server.gate.close();
        let mut submission = server.submit(GenerateRequest { n: 3, ..request(prompt(20, 1), 30) });
        submission.finish_choice(1);
        server.gate.open();
        let mut got = Vec::new();
        while let Some(event) = submission.next().await {
            got.push(event);
        }
        assert_eq!((tokens(&got, 0).len(), tokens(&got, 1).len(), tokens(&got, 2).len()), (30, 0, 30));
        let n_ends = got.iter().filter(|event| matches!(event, Event::ChoiceFinished { .. })).count();
        assert_eq!(n_ends, 3);
        assert!(got.contains(&Event::ChoiceFinished { choice: 1, reason: FinishReason::Requested }));
        assert!(matches!(got.last(), Some(Event::Finished(stats)) if stats.n_output_tokens == 60));
    });
    server.stop();
}

#[test]
fn unseeded_requests_differ_and_seeded_ones_repeat() {
    let server = start(0, Faults::default());
    block_on(async {
        let unseeded = || {
            let mut wanted = request(prompt(20, 1), 20);
            wanted.sampling.seed = None;
            wanted
        };
        let a = tokens(&events(server.submit(unseeded())).await, 0);
        let b = tokens(&events(server.submit(unseeded())).await, 0);
        assert_ne!(a, b);
        let c = tokens(&events(server.submit(request(prompt(20, 1), 20))).await, 0);
        let d = tokens(&events(server.submit(request(prompt(20, 1), 20))).await, 0);
        assert_eq!(c, d);
    });
    server.stop();
}

#[test]
fn max_tokens_0_scores_and_finishes_without_a_token() {
    let server = start(1, Faults::default());
    let mut wanted = request(prompt(300, 1), 0);
    wanted.prompt_logprobs = Some(0);
    let got = block_on(events(server.submit(wanted)));
    assert!(tokens(&got, 0).is_empty());
    assert!(got.iter().any(|event| matches!(event, Event::PromptLogprobs(scores) if scores.len() == 299)));
    assert!(got.contains(&Event::ChoiceFinished { choice: 0, reason: FinishReason::Length }));
    assert_eq!(server.stop().prompt_tokens_total.get(), 300);
}

#[test]
fn e4_clients_that_go_away_leave_nothing_behind() {
    for lag in 0..=1 {
        let server = start(lag, Faults::default());
        block_on(async {
            for round in 0..100 {
                let mut submissions: Vec<Submission> = (0..12)
                    .map(|i| server.submit(GenerateRequest { n: 1 + i % 2, ..request(prompt(300, round), 2000) }))
                    .collect();
                // Some go at once, some after their first events.
                for _ in 0..round % 9 {
                    if let Some(first) = submissions.first_mut() {
                        first.next().await;
                    }
                }
            }
            // The engine still serves.
            let got = events(server.submit(request(prompt(50, 1), 3))).await;
            assert_eq!(tokens(&got, 0).len(), 3);
        });
        let metrics = server.stop();
        let n_ended: u64 = Outcome::ALL.iter().map(|&outcome| metrics.outcome_count(outcome)).sum();
        assert_eq!(n_ended, 1201);
        assert!(metrics.outcome_count(Outcome::Abort) > 0);
    }
}

#[test]
fn many_streams_with_a_third_cancelled_leave_everything_free() {
    let server = start(1, Faults::default());
    block_on(async {
        let mut kept = Vec::new();
        for i in 0..192u64 {
            let submission = server.submit(request(prompt(20 + i as usize, i), 30));
            if i % 3 != 0 {
                kept.push((i, submission));
            }
        }
        for (i, submission) in kept {
            let got = events(submission).await;
            assert_eq!(tokens(&got, 0), expected(&spec(prompt(20 + i as usize, i), 30), 0, VOCAB).tokens);
        }
    });
    let metrics = server.stop();
    assert!(metrics.outcome_count(Outcome::Length) >= 128);
    assert_eq!(metrics.outcome_count(Outcome::Length) + metrics.outcome_count(Outcome::Abort), 192);
}

#[test]
fn e7_what_never_fits_is_refused_and_the_queue_goes_on() {
    let server = start(0, Faults::default());
    let n_pool = SIZE.n_blocks * 256;
    let too_long = ValidRequest::new(request(prompt(n_pool + 1, 1), 1), server.handle.limits());
    assert_eq!(too_long, Err(RejectReason::NeverFits { needed: n_pool + 1, available: n_pool }));
    // The largest that fits runs to its end.
    let got = block_on(events(server.submit(request(prompt(n_pool, 1), 5))));
    assert_eq!(tokens(&got, 0).len(), 1);
    server.stop();
}

#[test]
fn a_full_queue_refuses() {
    let server = start_with(EngineConfig { max_queued: 2, ..config(0) }, Faults::default());
    server.gate.close();
    let valid = ValidRequest::new(request(prompt(5, 1), 5), server.handle.limits()).expect("valid");
    let held: Vec<Submission> = (0..2).map(|_| server.handle.submit(valid.clone()).expect("room")).collect();
    assert_eq!(server.handle.submit(valid.clone()).err(), Some(RejectReason::QueueFull { max_queued: 2 }));
    server.gate.open();
    block_on(async {
        for submission in held {
            events(submission).await;
        }
    });
    server.stop();
}

#[test]
fn a_row_of_nan_fails_one_request_alone() {
    let bad = TokenId(60);
    let server = start(0, Faults { nan_token: Some(bad), ..Faults::default() });
    let clean: Vec<TokenId> = vec![TokenId(1); 30];
    block_on(async {
        let other = server.submit(request(clean.clone(), 1));
        let got = events(server.submit(request(vec![bad], 5))).await;
        assert!(matches!(got.last(), Some(Event::Failed(FailReason::Numerics(_)))), "{got:?}");
        assert_eq!(tokens(&events(other).await, 0).len(), 1);
    });
    let metrics = server.stop();
    assert_eq!((metrics.numerics_errors_total.get(), metrics.outcome_count(Outcome::Error)), (1, 1));
}

#[test]
fn h4_a_drain_finishes_what_runs_and_refuses_what_comes() {
    let server = start(1, Faults::default());
    block_on(async {
        server.gate.close();
        let running = server.submit(request(prompt(20, 1), 30));
        let queued: Vec<Submission> = (0..20).map(|i| server.submit(request(prompt(20, i), 30))).collect();
        server.handle.drain(Instant::now() + Duration::from_secs(3600));
        server.gate.open();
        server.wait_for(|health| *health != EngineHealth::Ready);
        let valid = ValidRequest::new(request(prompt(20, 1), 30), server.handle.limits()).expect("valid");
        assert!(matches!(server.handle.submit(valid).err(), Some(RejectReason::NotServing(_))));
        for submission in std::iter::once(running).chain(queued) {
            assert_eq!(tokens(&events(submission).await, 0).len(), 30);
        }
    });
    server.wait_for(|health| matches!(health, EngineHealth::Dead(_)));
    server.stop();
}

#[test]
fn h4_after_the_deadline_every_stream_ends_with_an_error() {
    for lag in 0..=1 {
        let server = start(lag, Faults::default());
        block_on(async {
            server.gate.close();
            // One whose client reads nothing until the end, and some that are queued.
            let submissions: Vec<Submission> = (0..20).map(|i| server.submit(request(prompt(20, i), 9000))).collect();
            server.handle.drain(Instant::now() + Duration::from_secs(3600));
            // A second signal brings the end nearer.
            server.handle.drain(Instant::now());
            server.gate.open();
            for submission in submissions {
                let got = events(submission).await;
                assert_eq!(got.last(), Some(&Event::Failed(FailReason::ShuttingDown)));
            }
        });
        server.thread.join().expect("a clean end");
    }
}

#[test]
fn h10_a_lost_device_ends_every_stream_and_the_engine() {
    for lag in 0..=1 {
        let server = start(lag, Faults { n_launches_until_lost: Some(6), ..Faults::default() });
        server.gate.close();
        let submissions: Vec<Submission> = (0..20).map(|i| server.submit(request(prompt(20, i), 3000))).collect();
        server.gate.open();
        block_on(async {
            for submission in submissions {
                let got = events(submission).await;
                assert!(matches!(got.last(), Some(Event::Failed(FailReason::Device(_)))), "{got:?}");
            }
        });
        let error = server.thread.join().expect_err("a fault");
        assert!(error.contains("an injected fault"), "{error}");
        assert!(matches!(server.handle.health(), EngineHealth::Dead(reason) if reason.contains("an injected fault")));
        assert_eq!(server.metrics.outcome_count(Outcome::Error), 20);
    }
}

#[test]
fn h10_a_panic_in_the_step_ends_every_stream_and_the_engine() {
    let server = start(0, Faults { n_launches_until_panic: Some(6), ..Faults::default() });
    server.gate.close();
    let submissions: Vec<Submission> = (0..20).map(|i| server.submit(request(prompt(20, i), 3000))).collect();
    server.gate.open();
    block_on(async {
        for submission in submissions {
            let got = events(submission).await;
            assert_eq!(got.last(), Some(&Event::Failed(FailReason::Internal)));
        }
    });
    assert!(server.thread.join().expect_err("a fault").contains("an injected panic"));
    let valid = ValidRequest::new(request(prompt(20, 1), 30), server.handle.limits()).expect("valid");
    assert!(matches!(server.handle.submit(valid).err(), Some(RejectReason::NotServing(EngineHealth::Dead(_)))));
}

#[test]
fn h3_a_device_that_fails_its_warm_up_is_never_ready() {
    let server = start(0, Faults { n_launches_until_lost: Some(0), ..Faults::default() });
    assert!(matches!(server.handle.health(), EngineHealth::Dead(_)));
    assert!(server.thread.join().is_err());
}

#[test]
fn h3_a_step_that_overruns_is_seen_and_taken_back() {
    let server = start_with(EngineConfig { step_deadline: Duration::from_millis(5), ..config(0) }, Faults::default());
    server.gate.close();
    let submission = server.submit(request(prompt(20, 1), 30));
    server.wait_for(|health| *health == EngineHealth::Stalled);
    server.gate.open();
    block_on(events(submission));
    server.wait_for(|health| *health == EngineHealth::Ready);
    assert!(server.metrics.stalled_steps_total.get() >= 1);
    server.stop();
}

#[test]
fn the_engine_ends_when_every_handle_is_gone() {
    let Server { handle, thread, .. } = start(0, Faults::default());
    drop(handle);
    thread.join().expect("a clean end");
}

#[test]
fn settings_that_do_not_fit_the_device_are_refused() {
    let refused = |change: fn(&mut EngineConfig)| {
        let mut config = config(0);
        change(&mut config);
        let device = Box::new(FakeDevice::new(SIZE.capacity(), 0));
        match Engine::spawn(device, config, Metrics::new("fake")) {
            Err(EngineError::Setting { field, .. }) => field,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(|c| c.scheduler.max_num_seqs = 9), "max_num_seqs");
    assert_eq!(refused(|c| c.scheduler.max_num_seqs = 0), "max_num_seqs");
    assert_eq!(refused(|c| c.scheduler.max_num_batched_tokens = 7), "max_num_batched_tokens");
    assert_eq!(refused(|c| c.scheduler.max_num_batched_tokens = 257), "max_num_batched_tokens");
    assert_eq!(refused(|c| c.scheduler.checkpoint_every_blocks = 0), "checkpoint_every_blocks");
    assert_eq!(refused(|c| c.max_queued = 0), "max_queued");
    assert_eq!(refused(|c| c.warm_up_rows = 257), "warm_up_rows");
}
