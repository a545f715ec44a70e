//! JSON bodies in: content type, size and shape are refused in the API's own words, with the path of the wrong field.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::DeserializeOwned;

use super::error::{ApiError, ErrorKind};
use super::state::AppState;

/// A body that is JSON of type `T`.
#[derive(Debug)]
pub struct ApiJson<T>(pub T);

impl<T: DeserializeOwned> FromRequest<AppState> for ApiJson<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, Self::Rejection> {
        let max_bytes = state.config().max_body_bytes;
        check_media_type(request.headers())?;
        check_length(request.headers(), max_bytes)?;
        let bytes = Bytes::from_request(request, state).await.map_err(|rejection| match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => too_large(max_bytes),
            _ => ApiError::new(ErrorKind::Invalid, "the body could not be read to its end"),
        })?;
        parse(&bytes).map(Self)
    }
}

/// Parses a JSON text; unknown fields are ignored, nesting is bounded.
///
/// # Errors
/// 400 with the path of the field that is wrong.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        json_error(&path, error.inner())
    })?;
    deserializer.end().map_err(|error| json_error(".", &error))?;
    Ok(value)
}

fn json_error(path: &str, error: &serde_json::Error) -> ApiError {
    let text = error.to_string();
    if !error.is_data() {
        return ApiError::new(ErrorKind::Invalid, format!("the body is not valid JSON: {text}"));
    }
    // serde gives a missing field the path of its parent, and its name between back-ticks.
    let missing = text.strip_prefix("missing field `").and_then(|rest| rest.split_once('`'));
    match (path, missing) {
        (".", Some((field, _))) => ApiError::invalid(field, "is required"),
        (_, Some((field, _))) => ApiError::invalid(format!("{path}.{field}"), "is required"),
        (".", None) => ApiError::new(ErrorKind::Invalid, text),
        (_, None) => ApiError::invalid(path, text),
    }
}

fn check_media_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let essence = value.to_str().unwrap_or("").split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    Err(ApiError::new(ErrorKind::MediaType, format!("Content-Type: must be application/json, got {essence:?}")))
}

/// Refuses a body that announces too much before a byte of it is read.
fn check_length(headers: &HeaderMap, max_bytes: usize) -> Result<(), ApiError> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|n| n > max_bytes as u64) { Err(too_large(max_bytes)) } else { Ok(()) }
}

fn too_large(max_bytes: usize) -> ApiError {
    ApiError::new(ErrorKind::BodyTooLarge, format!("the body is larger than the limit of {max_bytes} bytes"))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct Sample {
        #[allow(dead_code)] // Only its parsing is of interest.
        list: Vec<Option<u8>>,
    }

    #[test]
    fn errors_name_the_path() {
        let param = |text: &str| parse::<Sample>(text.as_bytes()).unwrap_err().param;
        assert_eq!(param(r#"{"list":[1,"x"]}"#).as_deref(), Some("list[1]"));
        assert_eq!(param(r#"{"list":[300]}"#).as_deref(), Some("list[0]"));
        assert_eq!(param("{}").as_deref(), Some("list"));
        assert_eq!(param("[").as_deref(), None);
        assert!(parse::<Sample>(br#"{"list":[null],"other":{}}"#).is_ok());
        assert!(parse::<Sample>(br#"{"list":[]} x"#).is_err());
    }

    #[test]
    fn deep_nesting_is_harmless() {
        let deep = |n: usize| format!(r#"{{"list":[],"ignored":{}{}}}"#, "[".repeat(n), "]".repeat(n));
        assert!(parse::<Sample>(deep(100_000).as_bytes()).is_ok());
        assert!(parse::<serde_json::Value>(deep(100_000).as_bytes()).is_err());
    }
}
