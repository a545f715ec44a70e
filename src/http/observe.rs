//! What the server says about every request: an id, counters and times (as vLLM's instrumentator names them), a log line.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;
use futures::Stream;
use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounterVec, Opts, Registry};

use super::state::AppState;

/// The header that carries the id of a request, both ways.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Paths that are polled; they are not counted, so that the figures show clients.
const UNCOUNTED: [&str; 6] = ["/metrics", "/livez", "/health", "/readyz", "/ping", "/version"];

/// nginx's number for a client that went away before its answer; it is only counted, never sent.
const CLIENT_CLOSED: u16 = 499;

const MAX_REQUEST_ID_CHARS: usize = 128;

/// The id of a request: the client's x-request-id where it is sound, else a new one. In the request's extensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestTag(pub String);

/// Counters and times of the HTTP layer.
#[derive(Debug)]
pub struct HttpMetrics {
    requests: IntCounterVec,
    duration_seconds: HistogramVec,
    duration_highr_seconds: Histogram,
}

impl HttpMetrics {
    /// Makes and registers them.
    ///
    /// # Errors
    /// When their names are taken.
    pub fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let requests = IntCounterVec::new(
            Opts::new("http_requests_total", "Total number of requests by method, status and handler."),
            &["handler", "method", "status"],
        )?;
        let duration = HistogramOpts::new("http_request_duration_seconds", "Latency by handler, until the last byte.")
            .buckets(vec![0.1, 0.5, 1.0]);
        let duration_seconds = HistogramVec::new(duration, &["handler", "method"])?;
        let highr = HistogramOpts::new("http_request_duration_highr_seconds", "Latency in many buckets, no labels.")
            .buckets(vec![
                0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0,
                30.0, 60.0,
            ]);
        let duration_highr_seconds = Histogram::with_opts(highr)?;
        registry.register(Box::new(requests.clone()))?;
        registry.register(Box::new(duration_seconds.clone()))?;
        registry.register(Box::new(duration_highr_seconds.clone()))?;
        Ok(Self { requests, duration_seconds, duration_highr_seconds })
    }

    fn record(&self, request: &Observed, status: u16) {
        if UNCOUNTED.contains(&request.handler.as_str()) {
            return;
        }
        let seconds = request.start.elapsed().as_secs_f64();
        let class = format!("{}xx", status / 100);
        self.requests.with_label_values(&[&request.handler, &request.method, &class]).inc();
        self.duration_seconds.with_label_values(&[&request.handler, &request.method]).observe(seconds);
        self.duration_highr_seconds.observe(seconds);
    }
}

/// Gives the request its id, counts it, and logs it at debug level; requests that generate log a line of their own.
pub async fn observe(State(state): State<AppState>, mut request: Request, next: Next) -> Response {
    let tag = RequestTag::of(request.headers());
    request.extensions_mut().insert(tag.clone());
    // If the client goes away first, this function is dropped, and the guard counts what would otherwise be lost.
    let mut finish = Finish { state, observed: Observed::new(&request), status: CLIENT_CLOSED, tag: tag.clone() };
    let mut response = next.run(request).await;
    finish.status = response.status().as_u16();
    if let Ok(value) = HeaderValue::from_str(&tag.0) {
        response.headers_mut().insert(X_REQUEST_ID, value);
    }
    if response.body().size_hint().exact().is_some() {
        return response;
    }
    // A stream is over when its body is: the guard goes with it.
    response.map(|body| Body::from_stream(Guarded { inner: body, _finish: finish }))
}

impl RequestTag {
    fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(X_REQUEST_ID).and_then(|value| value.to_str().ok());
        let sound = |id: &&str| {
            (1..=MAX_REQUEST_ID_CHARS).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
        };
        Self(given.filter(sound).map_or_else(new_id, str::to_owned))
    }
}

/// A new random id: 32 hexadecimal digits.
#[must_use]
pub fn new_id() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

struct Observed {
    start: Instant,
    handler: String,
    method: String,
}

impl Observed {
    fn new(request: &Request) -> Self {
        let handler = request.extensions().get::<MatchedPath>().map_or("none", MatchedPath::as_str).to_owned();
        Self { start: Instant::now(), handler, method: known_method(request.method()).to_owned() }
    }
}

/// Methods are the client's to invent; labels are not.
fn known_method(method: &Method) -> &str {
    match *method {
        Method::GET | Method::POST | Method::PUT | Method::DELETE | Method::HEAD | Method::OPTIONS | Method::PATCH => {
            method.as_str()
        }
        _ => "other",
    }
}

struct Finish {
    state: AppState,
    observed: Observed,
    status: u16,
    tag: RequestTag,
}

impl Drop for Finish {
    fn drop(&mut self) {
        self.state.http_metrics().record(&self.observed, self.status);
        let Observed { start, handler, method } = &self.observed;
        let status = self.status;
        tracing::debug!(request_id = %self.tag.0, %method, %handler, status, elapsed_us = start.elapsed().as_micros() as u64, "request");
    }
}

struct Guarded {
    inner: Body,
    _finish: Finish,
}

impl Stream for Guarded {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            return match std::task::ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
                None => Poll::Ready(None),
                Some(Err(error)) => Poll::Ready(Some(Err(error))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => Poll::Ready(Some(Ok(data))),
                    // Trailers: this server sends none.
                    Err(_) => continue,
                },
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sound_ids_are_echoed() {
        let tag = |id: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(X_REQUEST_ID, HeaderValue::from_bytes(id).unwrap());
            RequestTag::of(&headers).0
        };
        assert_eq!(tag(b"abc-1"), "abc-1");
        for unsound in [&b""[..], b"a b", b"\xff", "x".repeat(129).as_bytes()] {
            assert_eq!(tag(unsound).len(), 32);
        }
    }

    #[test]
    fn labels_are_closed() {
        assert_eq!(known_method(&Method::from_bytes(b"EVIL").unwrap()), "other");
        assert_eq!(known_method(&Method::POST), "POST");
    }
}
