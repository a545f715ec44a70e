//! `flashd serve`: listen, load, serve, drain, end.
//!
//! The listener opens before the weights are read, so that /livez answers and /health and /readyz say 503 while loading.

use std::io::ErrorKind;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use super::start::{Door, Prepared};
use crate::config::args::{ServeArgs, ThinkingChoice};
use crate::config::{Config, ServerConfig};
use crate::engine::handle::EngineHealth;
use crate::engine::tick::EngineThread;
use crate::http::{ApiConfig, AppState, DefaultThinking};
use crate::sample::params::SamplingParams;
use crate::telemetry::log;

/// How often the engine's state is looked at for the log and for its end.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);
/// What the engine gets to end after the drain.
const JOIN_BOUND: Duration = Duration::from_secs(2);

/// The address can't be listened on.
#[derive(Debug, thiserror::Error)]
#[error("{host}:{port} can't be listened on: {error}{}", advice(error))]
pub struct AddressError {
    host: String,
    port: u16,
    error: std::io::Error,
}

/// The engine ended while the server was serving.
#[derive(Debug, thiserror::Error)]
#[error("the engine has failed: {0}")]
pub struct EngineDied(pub String);

/// Runs the server until a signal ends it.
///
/// # Errors
/// When the settings, the checkpoint, the device or the address can't be used, or the engine fails.
pub fn run(args: ServeArgs) -> anyhow::Result<()> {
    let config = Config::from_serve(args)?;
    log::init(&config.log)?;
    for note in &config.notes {
        tracing::warn!("{note}");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(serve(&config));
    // Nothing that is left may hold the process: a loader that was told to end, a client that reads nothing.
    runtime.shutdown_background();
    result
}

async fn serve(config: &Config) -> anyhow::Result<()> {
    let start = Instant::now();
    let mut signals = Signals::new()?;
    // A file system that hangs, or a name that isn't resolved, must not keep a signal from ending the program.
    let (prepared, door, listener) = tokio::select! {
        opened = open(config) => opened?,
        () = signals.next() => {
            tracing::info!("shutdown complete; nothing had been loaded");
            return Ok(());
        }
    };
    tracing::info!("listening on http://{}; loading {}", listener.local_addr()?, config.model.dir.display());
    let api = api_config(&config.server, door.default_sampling.clone());
    let state = AppState::new(api, door.engine.clone(), door.tokenizer.clone(), door.metrics.clone())?;
    let loading = load(prepared)?;
    let mut engine = None;
    let mut failure = None;
    let shutdown = async {
        failure = tokio::select! {
            () = signals.next() => None,
            error = watch(loading, &door, &mut engine, start) => Some(error),
        };
        // From here on a signal ends the process at once.
        tokio::spawn(async move {
            signals.next().await;
            std::process::exit(signals.exit_code());
        });
    };
    crate::http::serve(listener, state, shutdown).await?;
    if let Some(error) = failure {
        return Err(error);
    }
    if let Some(engine) = engine {
        let ended = tokio::task::spawn_blocking(move || engine.join());
        if tokio::time::timeout(JOIN_BOUND, ended).await.is_err() {
            tracing::warn!("the engine is still running after the drain");
        }
    }
    tracing::info!("shutdown complete");
    Ok(())
}

/// Reads what is small of the checkpoint, off the threads that see signals, and listens.
async fn open(config: &Config) -> anyhow::Result<(Prepared, Door, TcpListener)> {
    tracing::info!("opening {}", config.model.dir.display());
    let blocking = config.clone();
    let (prepared, door) =
        tokio::task::spawn_blocking(move || Prepared::new(&blocking)).await.context("opening the checkpoint")??;
    Ok((prepared, door, bind(&config.server).await?))
}

async fn bind(server: &ServerConfig) -> Result<TcpListener, AddressError> {
    let (host, port) = (server.host.clone(), server.port);
    TcpListener::bind((host.as_str(), port)).await.map_err(|error| AddressError { host, port, error })
}

fn advice(error: &std::io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::AddrInUse => " (another process listens there; choose another --port)",
        ErrorKind::PermissionDenied => " (ports below 1024 need rights; choose another --port)",
        ErrorKind::AddrNotAvailable => " (this machine has no such address; see --host)",
        _ => "",
    }
}

/// Starts the engine on a thread of its own.
fn load(prepared: Prepared) -> std::io::Result<oneshot::Receiver<anyhow::Result<EngineThread>>> {
    let (sender, receiver) = oneshot::channel();
    std::thread::Builder::new().name("load".to_owned()).spawn(move || {
        // The receiver has gone when a signal came first; then nobody wants the engine.
        let _ = sender.send(prepared.start());
    })?;
    Ok(receiver)
}

/// Hands the engine out once it is there, says when it is ready, and resolves when loading or the engine fails.
async fn watch(
    loading: oneshot::Receiver<anyhow::Result<EngineThread>>,
    door: &Door,
    engine: &mut Option<EngineThread>,
    start: Instant,
) -> anyhow::Error {
    match loading.await.context("the loader ended without a word") {
        Ok(Ok(thread)) => *engine = Some(thread),
        Ok(Err(error)) | Err(error) => return error,
    }
    let mut is_ready = false;
    loop {
        match door.engine.health() {
            EngineHealth::Dead(reason) => return EngineDied(reason).into(),
            EngineHealth::Ready if !is_ready => {
                is_ready = true;
                // Operators wait for this line; the words are vLLM's.
                tracing::info!("Application startup complete. ({:.2} s)", start.elapsed().as_secs_f64());
            }
            _ => {}
        }
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}

fn api_config(server: &ServerConfig, default_sampling: SamplingParams) -> ApiConfig {
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    ApiConfig {
        served_model_names: server.served_model_names.clone(),
        api_keys: server.api_keys.clone(),
        default_thinking: match server.default_thinking {
            ThinkingChoice::Off => DefaultThinking::Off,
            ThinkingChoice::Low => DefaultThinking::Low,
            ThinkingChoice::High => DefaultThinking::High,
            ThinkingChoice::Max => DefaultThinking::Max,
        },
        default_sampling,
        max_body_bytes: server.max_body_bytes,
        sse_keep_alive: server.sse_keep_alive,
        allowed_origins: server.allowed_origins.clone(),
        drain_timeout: server.drain_timeout,
        log_requests: server.log_requests,
        created_unix_s: created,
        ..ApiConfig::new("")
    }
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    last: SignalKind,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt, last: SignalKind::terminate() })
    }

    async fn next(&mut self) {
        self.last = tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate(),
            _ = self.interrupt.recv() => SignalKind::interrupt(),
        };
    }

    /// The code of a process that the last signal ended, as shells give it.
    fn exit_code(&self) -> i32 {
        128 + self.last.as_raw_value()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::args::Settings;

    fn server() -> ServerConfig {
        Config::from_settings(Settings::default()).unwrap().server
    }

    #[tokio::test]
    async fn a_port_in_use_is_named_with_advice() {
        let taken = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = bind(&ServerConfig { port, ..server() }).await.unwrap_err().to_string();
        assert!(error.contains(&format!("127.0.0.1:{port}")) && error.contains("--port"), "{error}");
    }

    fn demo_door() -> (Prepared, Door) {
        Prepared::new(&Config::from_settings(Settings { max_num_seqs: Some(1), ..Settings::default() }).unwrap())
            .unwrap()
    }

    #[tokio::test]
    async fn a_failed_load_ends_the_server_with_its_cause() {
        let (_prepared, door) = demo_door();
        let (sender, loading) = oneshot::channel();
        sender.send(Err(anyhow::anyhow!("tensor x is missing"))).unwrap();
        let mut engine = None;
        let error = watch(loading, &door, &mut engine, Instant::now()).await;
        assert!(error.to_string().contains("tensor x") && engine.is_none());
        let (sender, loading) = oneshot::channel();
        drop(sender);
        assert!(watch(loading, &door, &mut engine, Instant::now()).await.to_string().contains("loader"));
    }

    #[tokio::test]
    async fn an_engine_that_ends_ends_the_server() {
        let (prepared, door) = demo_door();
        let loading = load(prepared).unwrap();
        let drain = async {
            while door.engine.health() != EngineHealth::Ready {
                tokio::task::yield_now().await;
            }
            door.engine.drain(Instant::now());
            std::future::pending::<()>().await;
        };
        let mut engine = None;
        let error = tokio::select! {
            error = watch(loading, &door, &mut engine, Instant::now()) => error,
            () = drain => unreachable!(),
        };
        assert!(error.is::<EngineDied>() && engine.is_some(), "{error}");
    }

    #[test]
    fn every_setting_of_the_server_reaches_the_api() {
        let server = ServerConfig {
            served_model_names: vec!["a".to_owned(), "b".to_owned()],
            api_keys: vec!["k".to_owned()],
            default_thinking: ThinkingChoice::Low,
            max_body_bytes: 5,
            sse_keep_alive: Duration::from_secs(6),
            allowed_origins: vec!["o".to_owned()],
            drain_timeout: Duration::from_secs(7),
            log_requests: true,
            ..server()
        };
        let sampling = SamplingParams { temperature: 0.5, ..SamplingParams::default() };
        let api = api_config(&server, sampling.clone());
        assert_eq!((api.served_model_names, api.api_keys), (server.served_model_names, server.api_keys));
        assert_eq!((api.default_thinking, api.default_sampling), (DefaultThinking::Low, sampling));
        assert_eq!((api.max_body_bytes, api.sse_keep_alive), (5, Duration::from_secs(6)));
        assert_eq!((api.allowed_origins, api.drain_timeout), (server.allowed_origins, Duration::from_secs(7)));
        assert!(api.log_requests && api.created_unix_s > 1_700_000_000);
    }
}
