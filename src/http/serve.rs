//! Accepting connections, and ending: drain with a bound, then close.

use std::future::Future;
use std::pin::pin;
use std::time::{Duration, Instant};

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::state::AppState;

/// What a drain may take beyond its bound, so that error events and last bytes still leave.
const GRACE: Duration = Duration::from_millis(1500);

/// Serves until `shutdown` resolves, then drains: new requests get 503, running ones finish or fail at the bound of
/// [`super::settings::ApiConfig::drain_timeout`]. A client that reads nothing cannot hold the server longer than that,
/// and one that sends no head within [`super::settings::ApiConfig::header_timeout`] is let go.
///
/// # Errors
/// None so far: a connection that can't be accepted is no reason to stop, and accepting is tried again.
pub async fn serve(
    mut listener: TcpListener,
    state: AppState,
    shutdown: impl Future<Output = ()> + Send,
) -> std::io::Result<()> {
    let server = Server::new(&state);
    let mut connections = JoinSet::new();
    let mut drained = pin!(async {
        shutdown.await;
        drain(&state).await;
    });
    loop {
        tokio::select! {
            (stream, _) = Listener::accept(&mut listener) => {
                connections.spawn(server.connection(stream));
            }
            // Only to forget those that have ended.
            Some(_) = connections.join_next() => {}
            () = &mut drained => break,
        }
    }
    drop(listener);
    if tokio::time::timeout(GRACE, server.graceful.shutdown()).await.is_err() {
        tracing::warn!("connections are still open after the drain; closing them");
    }
    connections.shutdown().await;
    Ok(())
}

/// What every connection needs.
struct Server {
    router: Router,
    http: http1::Builder,
    graceful: GracefulShutdown,
}

impl Server {
    fn new(state: &AppState) -> Self {
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(state.config().header_timeout);
        Self { router: super::router(state.clone()), http, graceful: GracefulShutdown::new() }
    }

    /// Answers the requests of one connection, one after the other.
    fn connection(&self, stream: TcpStream) -> impl Future<Output = ()> + Send + 'static {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY was not set");
        }
        let service = TowerToHyperService::new(self.router.clone());
        let connection = self.graceful.watch(self.http.serve_connection(TokioIo::new(stream), service));
        async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection ended");
            }
        }
    }
}

async fn drain(state: &AppState) {
    let bound = state.config().drain_timeout;
    tracing::info!(bound_s = bound.as_secs_f32(), "shutting down: new requests are refused");
    if tokio::time::timeout(bound + GRACE, state.drain(Instant::now() + bound)).await.is_err() {
        tracing::warn!("requests are still open after the drain bound");
    }
}
