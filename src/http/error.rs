//! Every error the API can answer, with its status, in one table, in OpenAI's shape.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::engine::event::FailReason;
use crate::engine::handle::EngineHealth;
use crate::engine::request::RejectReason;

/// What went wrong, as far as a status is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A field is wrong.
    Invalid,
    /// A field is right for OpenAI's API but not supported here.
    Unsupported,
    /// Prompt and output do not fit the context.
    ContextLength,
    /// No key, or a wrong one.
    Unauthorized,
    /// No such model.
    ModelNotFound,
    /// No such path.
    NotFound,
    /// The path exists, the method does not.
    MethodNotAllowed,
    /// The body stopped coming.
    BodyTimeout,
    /// The body is over the limit.
    BodyTooLarge,
    /// The body is not JSON by its content type.
    MediaType,
    /// Too many unfinished requests.
    QueueFull,
    /// Loading, draining or dead.
    NotServing,
    /// The server's own fault.
    Internal,
}

impl ErrorKind {
    /// The one status table: status, OpenAI's `type`, `code`, and seconds for Retry-After.
    #[must_use]
    pub const fn row(self) -> (StatusCode, &'static str, &'static str, Option<u32>) {
        const INVALID: &str = "invalid_request_error";
        match self {
            Self::Invalid => (StatusCode::BAD_REQUEST, INVALID, "invalid_value", None),
            Self::Unsupported => (StatusCode::BAD_REQUEST, INVALID, "unsupported_parameter", None),
            Self::ContextLength => (StatusCode::BAD_REQUEST, INVALID, "context_length_exceeded", None),
            Self::Unauthorized => (StatusCode::UNAUTHORIZED, "authentication_error", "invalid_api_key", None),
            Self::ModelNotFound => (StatusCode::NOT_FOUND, INVALID, "model_not_found", None),
            Self::NotFound => (StatusCode::NOT_FOUND, INVALID, "not_found", None),
            Self::MethodNotAllowed => (StatusCode::METHOD_NOT_ALLOWED, INVALID, "method_not_allowed", None),
            Self::BodyTimeout => (StatusCode::REQUEST_TIMEOUT, INVALID, "request_timeout", None),
            Self::BodyTooLarge => (StatusCode::PAYLOAD_TOO_LARGE, INVALID, "request_too_large", None),
            Self::MediaType => (StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, "unsupported_media_type", None),
            Self::QueueFull => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "queue_full", Some(1)),
            Self::NotServing => (StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", "not_serving", Some(5)),
            Self::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal_error", None),
        }
    }
}

/// An error on its way to a client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Decides the status.
    pub kind: ErrorKind,
    /// Says the field, the limit and the value.
    pub message: String,
    /// The field.
    pub param: Option<String>,
}

/// The body of every error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// OpenAI's error object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorDetail {
    /// What is wrong, for people.
    pub message: String,
    /// The class of the error.
    #[serde(rename = "type")]
    pub class: String,
    /// The field at fault, if one is.
    pub param: Option<String>,
    /// What is wrong, for programs.
    pub code: Option<String>,
}

impl ApiError {
    /// An error without a field.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None }
    }

    /// A wrong field; the message starts with its name.
    #[must_use]
    pub fn invalid(param: impl Into<String>, message: impl std::fmt::Display) -> Self {
        let param = param.into();
        Self { kind: ErrorKind::Invalid, message: format!("{param}: {message}"), param: Some(param) }
    }

    /// A field that would change the output and is not supported.
    #[must_use]
    pub fn unsupported(param: impl Into<String>, message: impl std::fmt::Display) -> Self {
        Self { kind: ErrorKind::Unsupported, ..Self::invalid(param, message) }
    }

    /// A fault of the server; the cause goes to the log, not to the client.
    #[must_use]
    pub fn internal(cause: impl std::fmt::Display) -> Self {
        tracing::error!(%cause, "internal error");
        Self::new(ErrorKind::Internal, "internal error")
    }

    /// A name that is not served.
    #[must_use]
    pub fn unknown_model(name: &str) -> Self {
        let message = format!("The model `{name}` does not exist.");
        Self { kind: ErrorKind::ModelNotFound, message, param: Some("model".to_owned()) }
    }

    /// The status.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        self.kind.row().0
    }

    /// The body, also sent inside a stream that has begun.
    #[must_use]
    pub fn body(&self) -> ErrorBody {
        let (_, class, code, _) = self.kind.row();
        ErrorBody {
            error: ErrorDetail {
                message: self.message.clone(),
                class: class.to_owned(),
                param: self.param.clone(),
                code: Some(code.to_owned()),
            },
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, _, _, retry_after_s) = self.kind.row();
        let mut response = (status, Json(self.body())).into_response();
        if let Some(seconds) = retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.kind == ErrorKind::Unauthorized {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<RejectReason> for ApiError {
    fn from(reason: RejectReason) -> Self {
        let message = reason.to_string();
        let (kind, param) = match reason {
            RejectReason::EmptyPrompt => (ErrorKind::Invalid, Some("prompt")),
            RejectReason::ContextLength { .. } | RejectReason::NeverFits { .. } => (ErrorKind::ContextLength, None),
            RejectReason::TokenId { field, .. }
            | RejectReason::OutOfRange { field, .. }
            | RejectReason::TextLength { field, .. } => (ErrorKind::Invalid, Some(field)),
            RejectReason::QueueFull { .. } => (ErrorKind::QueueFull, None),
            RejectReason::NotServing(health) => return not_serving(&health),
        };
        Self { kind, message, param: param.map(str::to_owned) }
    }
}

impl From<FailReason> for ApiError {
    fn from(reason: FailReason) -> Self {
        match reason {
            FailReason::ShuttingDown => Self::new(ErrorKind::NotServing, reason.to_string()),
            FailReason::Device(_) | FailReason::Numerics(_) | FailReason::Internal => {
                Self::new(ErrorKind::Internal, reason.to_string())
            }
        }
    }
}

/// The 503 of a server in this state.
#[must_use]
pub fn not_serving(health: &EngineHealth) -> ApiError {
    let why = match health {
        EngineHealth::Starting => "the model is loading",
        EngineHealth::Draining => "the server is shutting down",
        EngineHealth::Stalled => "a step of the engine overran its deadline",
        EngineHealth::Dead(_) => "the engine has ended",
        EngineHealth::Ready => "the server is not ready",
    };
    ApiError::new(ErrorKind::NotServing, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejections_keep_field_limit_and_value() {
        let error = ApiError::from(RejectReason::OutOfRange {
            field: "temperature",
            range: "from 0 to 2".to_owned(),
            value: "3".to_owned(),
        });
        assert_eq!(error.status(), StatusCode::BAD_REQUEST);
        assert_eq!(error.param.as_deref(), Some("temperature"));
        for part in ["temperature", "from 0 to 2", "3"] {
            assert!(error.message.contains(part), "{}", error.message);
        }
    }

    #[test]
    fn a_full_queue_says_when_to_come_back() {
        let response = ApiError::from(RejectReason::QueueFull { max_queued: 4 }).into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(response.headers().contains_key(header::RETRY_AFTER));
    }
}
