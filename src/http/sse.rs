//! Server-sent events: chunks, keep-alive comments, errors in mid-stream, and [DONE].

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, StreamExt};
use serde::Serialize;

use super::error::ApiError;
use super::generate::{Generation, Output};
use super::state::AppState;

/// Turns outputs into the chunks of one API.
pub trait Chunker: Send + 'static {
    /// What goes into a `data:` line.
    type Chunk: Serialize;

    /// The chunks of an output; those of `Done` are the stream's last.
    fn chunks(&mut self, output: Output) -> Vec<Self::Chunk>;
}

/// The response of a stream. Its first byte leaves at once: comments bridge the wait for a place and the prefill.
pub fn respond<C: Chunker>(state: &AppState, generation: Generation, mut chunker: C) -> Response {
    let events = generation.outputs().map(move |output| match output {
        Output::Failed(error) => vec![error_event(&error), done()],
        Output::Done => {
            let mut events = data_events(chunker.chunks(Output::Done));
            events.push(done());
            events
        }
        output => data_events(chunker.chunks(output)),
    });
    // A fault in a parser ends this stream, and nothing else.
    let events = AssertUnwindSafe(events).catch_unwind().map(|caught| {
        caught.unwrap_or_else(|_| vec![error_event(&ApiError::internal("panic while streaming")), done()])
    });
    let events = events.flat_map(|events| stream::iter(events.into_iter().map(Ok::<_, Infallible>)));
    let interval = state.config().sse_keep_alive;
    let mut response = if interval.is_zero() {
        Sse::new(events).into_response()
    } else {
        Sse::new(events).keep_alive(KeepAlive::new().interval(interval).text("keep-alive")).into_response()
    };
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that buffer would hold tokens back.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

fn data_events<T: Serialize>(chunks: Vec<T>) -> Vec<Event> {
    chunks.iter().map(data_event).collect()
}

fn data_event<T: Serialize>(chunk: &T) -> Event {
    Event::default().json_data(chunk).unwrap_or_else(|error| {
        tracing::error!(%error, "a chunk cannot be written as JSON");
        Event::default().comment("a chunk was lost")
    })
}

fn error_event(error: &ApiError) -> Event {
    data_event(&error.body())
}

fn done() -> Event {
    Event::default().data("[DONE]")
}
