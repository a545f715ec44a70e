//! JSON bodies in: content type, size and shape are refused in the API's own words, with the path of the wrong field.

use std::error::Error;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use serde::de::DeserializeOwned;
use tower_http::timeout::{TimeoutBody, TimeoutError};

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
        let idle = state.config().body_idle_timeout;
        let request = request.map(|body| Body::new(TimeoutBody::new(idle, body)));
        let bytes = Bytes::from_request(request, state).await.map_err(|rejection| match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => too_large(max_bytes),
            _ if is_timeout(&rejection) => stalled(idle),
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
    if let Some((field, _)) = text.strip_prefix("duplicate field `").and_then(|rest| rest.split_once('`')) {
        return ApiError::invalid(field, "is given twice");
    }
    // serde gives a missing field the path of its parent, and its name between back-ticks.
    let missing = text.strip_prefix("missing field `").and_then(|rest| rest.split_once('`'));
    match (path, missing) {
        (".", Some((field, _))) => ApiError::invalid(field, "is required"),
        (_, Some((field, _))) => ApiError::invalid(format!("{path}.{field}"), "is required"),
        (".", None) => ApiError::new(ErrorKind::Invalid, format!("the body {}", plain_words(&text))),
        (_, None) => ApiError::invalid(path, plain_words(&text)),
    }
}

/// serde's words for a wrong value in the API's own, without the names of Rust's types: `must be a string, got 5`.
fn plain_words(text: &str) -> String {
    let is_place = |place: &str| place.split(" column ").all(|n| n.bytes().all(|byte| byte.is_ascii_digit()));
    let text = text.rsplit_once(" at line ").filter(|(_, place)| is_place(place)).map_or(text, |(text, _)| text);
    let wrong = text.strip_prefix("invalid type: ").or_else(|| text.strip_prefix("invalid value: "));
    if let Some((got, expected)) = wrong.and_then(|rest| rest.rsplit_once(", expected ")) {
        return format!("must be {}, got {}", expected_words(expected), got_words(got));
    }
    let unknown = text.strip_prefix("unknown variant `");
    if let Some((got, expected)) = unknown.and_then(|rest| rest.rsplit_once("`, expected ")) {
        return format!("must be {}, got {}", expected.replace('`', ""), shortened(&format!("{got:?}")));
    }
    text.to_owned()
}

fn expected_words(expected: &str) -> &str {
    match expected {
        "f32" | "f64" => "a number",
        "i8" | "i16" | "i32" | "i64" | "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number",
        "a boolean" => "true or false",
        "a sequence" => "an array",
        "a map" => "an object",
        _ if expected.starts_with("struct ") => "an object",
        other => other,
    }
}

fn got_words(got: &str) -> String {
    match got {
        "sequence" => "an array".to_owned(),
        "map" => "an object".to_owned(),
        "unit value" => "null".to_owned(),
        _ => match got.split_once('`') {
            Some(("integer " | "floating point " | "boolean ", value)) => value.trim_end_matches('`').to_owned(),
            _ => shortened(got.strip_prefix("string ").unwrap_or(got)),
        },
    }
}

/// The start of a value that the client chose the length of.
fn shortened(value: &str) -> String {
    const MAX_CHARS: usize = 100;
    match value.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    }
}

fn is_timeout(error: &(dyn Error + 'static)) -> bool {
    std::iter::successors(Some(error), |&error| error.source()).any(|error| error.is::<TimeoutError>())
}

fn stalled(idle: Duration) -> ApiError {
    let message = format!("no byte of the body came for {} seconds", idle.as_secs_f32());
    ApiError::new(ErrorKind::BodyTimeout, message)
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
    fn no_type_of_rust_is_named() {
        for (text, words) in [
            ("invalid type: string \"a\", expected f32 at line 1 column 9", "must be a number, got \"a\""),
            ("invalid value: integer `300`, expected u8", "must be a whole number, got 300"),
            (
                "invalid type: sequence, expected struct ChatRequest at line 1 column 0",
                "must be an object, got an array",
            ),
            ("invalid type: floating point `1.5`, expected a boolean", "must be true or false, got 1.5"),
            ("invalid type: null, expected a string", "must be a string, got null"),
            ("invalid type: string \"x, expected y\", expected a map", "must be an object, got \"x, expected y\""),
            ("unknown variant `a`b`, expected one of `c`, `d` at line 1 column 2", "must be one of c, d, got \"a`b\""),
            ("must not be empty at line 1 column 12", "must not be empty"),
        ] {
            assert_eq!(plain_words(text), words);
        }
        assert!(plain_words(&format!("invalid type: string {:?}, expected f32", "é".repeat(5000))).len() < 300);
    }

    #[test]
    fn deep_nesting_is_harmless() {
        let deep = |n: usize| format!(r#"{{"list":[],"ignored":{}{}}}"#, "[".repeat(n), "]".repeat(n));
        assert!(parse::<Sample>(deep(100_000).as_bytes()).is_ok());
        assert!(parse::<serde_json::Value>(deep(100_000).as_bytes()).is_err());
    }
}
