//! Says `Stalled` when a step overruns its deadline and `Ready` again when it ends: health must not lie about a hung device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::handle::EngineHealth;
use crate::telemetry::metrics::Metrics;

/// The engine's side: dropped, it ends the watching thread.
#[derive(Debug)]
pub struct Watchdog {
    pulse: Arc<Pulse>,
    thread: Thread,
}

#[derive(Debug)]
struct Pulse {
    origin: Instant,
    /// Microseconds from `origin` to the start of the tick in progress; 0: the engine is idle.
    busy_since_us: AtomicU64,
    is_stalled: AtomicBool,
    is_over: AtomicBool,
    health: watch::Sender<EngineHealth>,
    metrics: Arc<Metrics>,
    deadline: Duration,
}

impl Watchdog {
    /// Starts the watching thread.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
        health: watch::Sender<EngineHealth>,
        metrics: Arc<Metrics>,
        deadline: Duration,
    ) -> std::io::Result<Self> {
        let pulse = Arc::new(Pulse {
            origin: Instant::now(),
            busy_since_us: AtomicU64::new(0),
            is_stalled: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            health,
            metrics,
            deadline,
        });
        let watched = Arc::clone(&pulse);
        let thread = thread::Builder::new().name("engine-watchdog".to_owned()).spawn(move || watched.watch())?;
        Ok(Self { pulse, thread: thread.thread().clone() })
    }

    /// A tick begins now.
    pub fn beat(&self) {
        let was_idle = self.pulse.busy_since_us.swap(self.pulse.now_us(), Ordering::SeqCst) == 0;
        if was_idle {
            self.thread.unpark();
        }
        self.pulse.recover();
    }

    /// The engine waits for work.
    pub fn rest(&self) {
        self.pulse.busy_since_us.store(0, Ordering::SeqCst);
        self.pulse.recover();
    }

    /// Sets the engine's state.
    pub fn set_health(&self, state: EngineHealth) {
        self.pulse.health.send_replace(state);
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.pulse.is_over.store(true, Ordering::SeqCst);
        self.thread.unpark();
    }
}

impl Pulse {
    /// At least 1, since 0 means idle.
    fn now_us(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX).max(1)
    }

    fn watch(&self) {
        let deadline_us = u64::try_from(self.deadline.as_micros()).unwrap_or(u64::MAX);
        while !self.is_over.load(Ordering::SeqCst) {
            match self.busy_since_us.load(Ordering::SeqCst) {
                0 => thread::park(),
                since_us => match since_us.saturating_add(deadline_us).saturating_sub(self.now_us()) {
                    0 => {
                        self.stall(since_us);
                        thread::park_timeout(self.deadline);
                    }
                    left_us => thread::park_timeout(Duration::from_micros(left_us)),
                },
            }
        }
    }

    /// Says so, if the tick that began at `since_us` still runs. The flag is set before the tick is looked at again, both
    /// under the lock of the health channel; so an engine that begins its next tick meanwhile sees the flag, waits for the
    /// lock and takes the state back.
    fn stall(&self, since_us: u64) {
        let has_changed = self.health.send_if_modified(|health| {
            self.is_stalled.store(true, Ordering::SeqCst);
            let is_late = self.busy_since_us.load(Ordering::SeqCst) == since_us && *health == EngineHealth::Ready;
            if is_late {
                // Counted before it shows, so that whoever sees the state finds it counted.
                self.metrics.stalled_steps_total.inc();
                *health = EngineHealth::Stalled;
            }
            is_late
        });
        if has_changed {
            tracing::error!(deadline_s = self.deadline.as_secs_f64(), "a step overran its deadline");
        }
    }

    fn recover(&self) {
        if !self.is_stalled.swap(false, Ordering::SeqCst) {
            return;
        }
        let has_changed = self.health.send_if_modified(|health| {
            let was_stalled = *health == EngineHealth::Stalled;
            if was_stalled {
                *health = EngineHealth::Ready;
            }
            was_stalled
        });
        if has_changed {
            tracing::warn!("the late step has ended");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait_for(health: &mut watch::Receiver<EngineHealth>, state: &EngineHealth) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("runtime");
        runtime.block_on(async { health.wait_for(|now| now == state).await.expect("sender lives") });
    }

    #[test]
    fn a_late_tick_is_reported_and_taken_back() {
        let (sender, mut health) = watch::channel(EngineHealth::Ready);
        let metrics = Metrics::new("m");
        let dog = Watchdog::start(sender, Arc::clone(&metrics), Duration::from_millis(2)).expect("thread");
        for n in 1..=2 {
            dog.beat();
            wait_for(&mut health, &EngineHealth::Stalled);
            assert_eq!(metrics.stalled_steps_total.get(), n);
            dog.rest();
            assert_eq!(*health.borrow(), EngineHealth::Ready);
        }
    }

    #[test]
    fn the_next_tick_takes_a_stall_back() {
        let (sender, health) = watch::channel(EngineHealth::Ready);
        // The thread never finds this deadline overrun; the stall comes by hand.
        let dog = Watchdog::start(sender, Metrics::new("m"), Duration::from_secs(3600)).expect("thread");
        dog.beat();
        dog.pulse.stall(dog.pulse.busy_since_us.load(Ordering::SeqCst));
        assert_eq!(*health.borrow(), EngineHealth::Stalled);
        dog.beat();
        assert_eq!(*health.borrow(), EngineHealth::Ready);
    }

    #[test]
    fn only_a_ready_engine_stalls() {
        let (sender, health) = watch::channel(EngineHealth::Ready);
        let dog = Watchdog::start(sender, Metrics::new("m"), Duration::ZERO).expect("thread");
        dog.set_health(EngineHealth::Draining);
        let since_us = dog.pulse.now_us();
        dog.pulse.busy_since_us.store(since_us, Ordering::SeqCst);
        dog.pulse.stall(since_us);
        dog.rest();
        assert_eq!(*health.borrow(), EngineHealth::Draining);
    }
}
