//! What every handler shares: settings, the engine's door, the tokenizer, metrics, and whether the server drains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

use super::auth::KeyRing;
use super::error::{ApiError, not_serving};
use super::observe::HttpMetrics;
use super::settings::ApiConfig;
use crate::engine::handle::{EngineHandle, EngineHealth};
use crate::telemetry::metrics::Metrics;
use crate::tokenizer::Tokenizer;

/// Shared by all handlers; cloning is cheap.
#[derive(Clone, Debug)]
pub struct AppState {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: ApiConfig,
    keys: KeyRing,
    engine: EngineHandle,
    tokenizer: Arc<Tokenizer>,
    metrics: Arc<Metrics>,
    http_metrics: HttpMetrics,
    draining: AtomicBool,
    in_flight: watch::Sender<usize>,
}

/// Counts one request that a drain must wait for, until dropped.
#[derive(Debug)]
pub struct InFlight {
    shared: Arc<Shared>,
}

impl AppState {
    /// The state of a server.
    ///
    /// # Errors
    /// When the HTTP metrics are registered already.
    pub fn new(
        config: ApiConfig,
        engine: EngineHandle,
        tokenizer: Arc<Tokenizer>,
        metrics: Arc<Metrics>,
    ) -> Result<Self, prometheus::Error> {
        let shared = Shared {
            keys: KeyRing::new(&config.api_keys),
            http_metrics: HttpMetrics::new(metrics.registry())?,
            config,
            engine,
            tokenizer,
            metrics,
            draining: AtomicBool::new(false),
            in_flight: watch::Sender::new(0),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Settings.
    #[must_use]
    pub fn config(&self) -> &ApiConfig {
        &self.shared.config
    }

    /// Accepted API keys.
    #[must_use]
    pub fn keys(&self) -> &KeyRing {
        &self.shared.keys
    }

    /// The door to the engine.
    #[must_use]
    pub fn engine(&self) -> &EngineHandle {
        &self.shared.engine
    }

    /// The model's tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.shared.tokenizer
    }

    /// All metrics.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }

    /// Metrics of the HTTP layer.
    #[must_use]
    pub fn http_metrics(&self) -> &HttpMetrics {
        &self.shared.http_metrics
    }

    /// What the server can do now: the engine's state, or draining once a shutdown has begun.
    #[must_use]
    pub fn health(&self) -> EngineHealth {
        if self.shared.draining.load(Ordering::Acquire) { EngineHealth::Draining } else { self.engine().health() }
    }

    /// Counts a request in.
    ///
    /// # Errors
    /// 503 while the server loads, drains or is dead. A stalled engine still takes requests: it may recover.
    pub fn enter(&self) -> Result<InFlight, ApiError> {
        // Counted before the flag is read: a drain that sets the flag first is seen here, one that sets it later sees the count.
        self.shared.in_flight.send_modify(|n| *n += 1);
        let guard = InFlight { shared: Arc::clone(&self.shared) };
        match self.health() {
            EngineHealth::Ready | EngineHealth::Stalled => Ok(guard),
            state => Err(not_serving(&state)),
        }
    }

    /// Refuses what comes from now on, lets the engine finish until `deadline`, and resolves when no request is left.
    pub async fn drain(&self, deadline: std::time::Instant) {
        self.shared.draining.store(true, Ordering::Release);
        self.engine().drain(deadline);
        let mut in_flight = self.shared.in_flight.subscribe();
        // The sender lives in self, so waiting cannot fail.
        let _ = in_flight.wait_for(|n| *n == 0).await;
    }
}

/// Unix time in seconds.
#[must_use]
pub fn unix_now_s() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |elapsed| elapsed.as_secs())
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.shared.in_flight.send_modify(|n| *n -= 1);
    }
}
