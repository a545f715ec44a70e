//! Accepting connections, and ending: drain with a bound, then close.

use std::future::{Future, IntoFuture};
use std::time::{Duration, Instant};

use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use super::state::AppState;

/// What a drain may take beyond its bound, so that error events and last bytes still leave.
const GRACE: Duration = Duration::from_millis(1500);

/// Serves until `shutdown` resolves, then drains: new requests get 503, running ones finish or fail at the bound of
/// [`super::settings::ApiConfig::drain_timeout`]. A client that reads nothing cannot hold the server longer than that.
///
/// # Errors
/// When the listener fails for good.
pub async fn serve(
    listener: TcpListener,
    state: AppState,
    shutdown: impl Future<Output = ()> + Send,
) -> std::io::Result<()> {
    let (close, closed) = oneshot::channel::<()>();
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY was not set");
        }
    });
    let server = axum::serve(listener, super::router(state.clone())).with_graceful_shutdown(async {
        // Either way, the answer is to close.
        let _ = closed.await;
    });
    let mut server = tokio::spawn(server.into_future());
    tokio::select! {
        result = &mut server => return flatten(result),
        () = shutdown => {}
    }
    drain(&state).await;
    let _ = close.send(());
    match tokio::time::timeout(GRACE, &mut server).await {
        Ok(result) => flatten(result),
        Err(_) => {
            tracing::warn!("connections are still open after the drain; closing them");
            server.abort();
            Ok(())
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

fn flatten(result: Result<std::io::Result<()>, tokio::task::JoinError>) -> std::io::Result<()> {
    result.map_err(std::io::Error::other)?
}
