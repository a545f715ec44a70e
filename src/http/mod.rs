//! HTTP: OpenAI-compatible routes over the engine, server-sent events, health, metrics and errors.

use std::any::Any;
use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::HeaderValue;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Router, http::Uri};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, Any as AnyOrigin, CorsLayer};

pub mod auth;
pub mod choice;
pub mod error;
pub mod extract;
pub mod generate;
pub mod health;
pub mod models;
pub mod observe;
pub mod openai;
pub mod openapi;
pub mod serve;
pub mod settings;
pub mod shape;
pub mod sse;
pub mod state;
pub mod tokenize;

pub use serve::serve;
pub use settings::{ApiConfig, DefaultThinking};
pub use state::AppState;

use error::{ApiError, ErrorKind};

/// All routes.
pub fn router(state: AppState) -> Router {
    let guarded = Router::new()
        .route("/v1/chat/completions", post(openai::chat::chat_completions))
        .route("/v1/completions", post(openai::completions::completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::get))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route_layer(from_fn_with_state(state.clone(), admit))
        .route_layer(from_fn_with_state(state.clone(), auth::require_key));
    let open = Router::new()
        .route("/livez", get(health::livez))
        .route("/health", get(health::health))
        .route("/readyz", get(health::readyz))
        .route("/ping", get(health::ping).post(health::ping))
        .route("/metrics", get(health::metrics))
        .route("/version", get(health::version))
        .route("/openapi.json", get(openapi::openapi));
    let router = guarded
        .merge(open)
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(DefaultBodyLimit::max(state.config().max_body_bytes))
        .layer(CatchPanicLayer::custom(panicked));
    let router = match cors(&state.config().allowed_origins) {
        Some(cors) => router.layer(cors),
        None => router,
    };
    router.layer(from_fn_with_state(state.clone(), observe::observe)).with_state(state)
}

/// Counts a request in, so that a drain waits for it; refuses it while the server cannot serve.
async fn admit(State(state): State<AppState>, mut request: Request, next: Next) -> Result<Response, ApiError> {
    request.extensions_mut().insert(Arc::new(state.enter()?));
    Ok(next.run(request).await)
}

async fn not_found(uri: Uri) -> ApiError {
    ApiError::new(ErrorKind::NotFound, format!("there is nothing at {}", uri.path()))
}

async fn method_not_allowed(request: Request) -> ApiError {
    let message = format!("{} is not allowed at {}", request.method(), request.uri().path());
    ApiError::new(ErrorKind::MethodNotAllowed, message)
}

fn panicked(cause: Box<dyn Any + Send + 'static>) -> Response {
    let text = cause.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| cause.downcast_ref::<&str>().copied()).unwrap_or("no message");
    ApiError::internal(format_args!("panic in a handler: {text}")).into_response()
}

fn cors(origins: &[String]) -> Option<CorsLayer> {
    // Not `*`: to browsers that does not cover Authorization.
    let headers = AllowHeaders::mirror_request();
    let layer =
        CorsLayer::new().allow_methods(AnyOrigin).allow_headers(headers).expose_headers([observe::X_REQUEST_ID]);
    if origins.iter().any(|origin| origin == "*") {
        return Some(layer.allow_origin(AnyOrigin));
    }
    let origins: Vec<HeaderValue> = origins.iter().filter_map(|origin| origin.parse().ok()).collect();
    (!origins.is_empty()).then(|| layer.allow_origin(AllowOrigin::list(origins)))
}
