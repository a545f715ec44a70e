//! API keys: Bearer or x-api-key, compared in constant time.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::Response;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use super::error::{ApiError, ErrorKind};
use super::state::AppState;

/// SHA-256 of each accepted key: digests have one length, so comparing them tells nothing about a key's.
#[derive(Clone, Debug, Default)]
pub struct KeyRing {
    digests: Vec<[u8; 32]>,
}

impl KeyRing {
    /// A ring of these keys; empty keys are left out.
    #[must_use]
    pub fn new(keys: &[String]) -> Self {
        Self { digests: keys.iter().filter(|key| !key.is_empty()).map(|key| digest(key.as_bytes())).collect() }
    }

    /// Whether no key is asked for.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.digests.is_empty()
    }

    /// Whether this is one of the keys; takes as long for a wrong one as for a right one.
    #[must_use]
    pub fn accepts(&self, key: &[u8]) -> bool {
        let given = digest(key);
        self.digests.iter().fold(Choice::from(0), |found, known| found | known.ct_eq(&given)).into()
    }
}

/// Lets only requests with a key through.
pub async fn require_key(State(state): State<AppState>, request: Request, next: Next) -> Result<Response, ApiError> {
    let keys = state.keys();
    if keys.is_open() || presented_keys(request.headers()).any(|key| keys.accepts(key)) {
        return Ok(next.run(request).await);
    }
    Err(ApiError::new(
        ErrorKind::Unauthorized,
        "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
    ))
}

fn presented_keys(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearer = headers.get_all(header::AUTHORIZATION).into_iter().filter_map(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    bearer.chain(headers.get_all("x-api-key").into_iter().map(|value| value.as_bytes()))
}

fn digest(key: &[u8]) -> [u8; 32] {
    Sha256::digest(key).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_keys_open() {
        let ring = KeyRing::new(&["alpha".to_owned(), String::new(), "beta".to_owned()]);
        assert!(!ring.is_open());
        assert!(ring.accepts(b"alpha") && ring.accepts(b"beta"));
        for wrong in [&b""[..], b"alph", b"alphaa", b"ALPHA"] {
            assert!(!ring.accepts(wrong));
        }
    }

    #[test]
    fn both_headers_are_read() {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, "bearer  one".parse().unwrap());
        headers.insert("x-api-key", "two".parse().unwrap());
        assert_eq!(presented_keys(&headers).collect::<Vec<_>>(), [&b"one"[..], b"two"]);
        headers.insert(header::AUTHORIZATION, "Basic abc".parse().unwrap());
        assert_eq!(presented_keys(&headers).collect::<Vec<_>>(), [&b"two"[..]]);
    }
}
