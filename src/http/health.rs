//! Probes and metrics: what an orchestrator polls.

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody, not_serving};
use super::state::AppState;
use crate::engine::handle::EngineHealth;

/// Which build answers.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Version {
    /// Version of flashd.
    pub version: String,
}

/// 200 while the process lives.
#[utoipa::path(get, path = "/livez", tag = "operations", responses((status = 200, description = "The process lives")))]
pub async fn livez() -> &'static str {
    ""
}

/// 200 only when the server can serve: the engine is ready and does not drain.
#[utoipa::path(get, path = "/health", tag = "operations", responses(
    (status = 200, description = "Serving"),
    (status = 503, description = "Loading, stalled, draining or dead", body = ErrorBody),
))]
pub async fn health(State(state): State<AppState>) -> Result<&'static str, ApiError> {
    match state.health() {
        EngineHealth::Ready => Ok(""),
        other => Err(not_serving(&other)),
    }
}

/// The same as /health.
#[utoipa::path(get, path = "/readyz", tag = "operations", responses(
    (status = 200, description = "Serving"),
    (status = 503, description = "Loading, stalled, draining or dead", body = ErrorBody),
))]
pub async fn readyz(state: State<AppState>) -> Result<&'static str, ApiError> {
    health(state).await
}

/// The same as /health, where SageMaker and its like look for it.
#[utoipa::path(method(get, post), path = "/ping", tag = "operations", responses(
    (status = 200, description = "Serving"),
    (status = 503, description = "Loading, stalled, draining or dead", body = ErrorBody),
))]
pub async fn ping(state: State<AppState>) -> Result<&'static str, ApiError> {
    health(state).await
}

/// Prometheus text, with vLLM's metric names.
#[utoipa::path(get, path = "/metrics", tag = "operations", responses(
    (status = 200, description = "Prometheus text", body = String, content_type = "text/plain"),
))]
pub async fn metrics(State(state): State<AppState>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], state.metrics().render()).into_response()
}

/// The version of flashd.
#[utoipa::path(get, path = "/version", tag = "operations", responses((status = 200, description = "The version", body = Version)))]
pub async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION").to_owned() })
}
