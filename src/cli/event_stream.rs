//! Server-sent events of a streamed answer: bytes in any pieces become the `data` of whole events.

use anyhow::{Context, bail};

/// Longest line that is kept; an answer's chunk is far below it.
const MAX_LINE_BYTES: usize = 16 << 20;

/// Reads events off a response.
pub struct EventStream {
    response: reqwest::Response,
    lines: Lines,
}

/// Cuts bytes into lines.
#[derive(Default)]
struct Lines {
    buffer: Vec<u8>,
    /// Bytes of `buffer` that are used up.
    start: usize,
    /// Bytes of `buffer` known to hold no line end.
    searched: usize,
}

impl EventStream {
    /// Takes over a response whose status is a success; otherwise reads the error out of the body.
    ///
    /// # Errors
    /// The status and the server's message.
    pub async fn new(response: reqwest::Response) -> anyhow::Result<Self> {
        let status = response.status();
        if status.is_success() {
            return Ok(Self { response, lines: Lines::default() });
        }
        let body = response.text().await.unwrap_or_default();
        bail!("{status}: {}", error_message(&body))
    }

    /// The data of the next event, or None at the end of the body. Comments and other fields are passed over; OpenAI's
    /// servers send each event's data in one line.
    ///
    /// # Errors
    /// The connection broke, or a line has no end.
    pub async fn next(&mut self) -> anyhow::Result<Option<String>> {
        loop {
            while let Some(line) = self.lines.next()? {
                if let Some(data) = line.strip_prefix("data:") {
                    return Ok(Some(data.strip_prefix(' ').unwrap_or(data).to_owned()));
                }
            }
            match self.response.chunk().await.context("the stream broke")? {
                Some(bytes) => self.lines.push(&bytes)?,
                None => return Ok(None),
            }
        }
    }
}

/// The message of an OpenAI error body, or the body itself.
#[must_use]
pub fn error_message(body: &str) -> String {
    let json: Option<serde_json::Value> = serde_json::from_str(body).ok();
    let message = json.as_ref().and_then(|json| json.get("error")).map(|error| error.get("message").unwrap_or(error));
    match message.map(|message| message.as_str().map_or_else(|| message.to_string(), str::to_owned)) {
        Some(message) => message,
        None => body.trim().chars().take(500).collect(),
    }
}

impl Lines {
    fn push(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.buffer.drain(..self.start);
        self.searched -= self.start;
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() > MAX_LINE_BYTES {
            bail!("a line of the stream has no end after {MAX_LINE_BYTES} bytes");
        }
        Ok(())
    }

    fn next(&mut self) -> anyhow::Result<Option<&str>> {
        let Some(offset) = self.buffer[self.searched..].iter().position(|&byte| byte == b'\n') else {
            self.searched = self.buffer.len();
            return Ok(None);
        };
        let (start, end) = (self.start, self.searched + offset);
        self.start = end + 1;
        self.searched = end + 1;
        let line = std::str::from_utf8(&self.buffer[start..end]).context("the stream isn't UTF-8")?;
        Ok(Some(line.strip_suffix('\r').unwrap_or(line)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_the_same_however_the_bytes_are_cut() {
        let text = "data: {\"a\": \"é\"}\r\n\n: comment\ndata:b\n\ndata: [DONE]\n\n";
        let want: Vec<&str> = text.lines().collect();
        for size in 1..text.len() {
            let (mut lines, mut got) = (Lines::default(), Vec::new());
            for piece in text.as_bytes().chunks(size) {
                lines.push(piece).unwrap();
                while let Some(line) = lines.next().unwrap() {
                    got.push(line.to_owned());
                }
            }
            assert_eq!(got, want, "pieces of {size}");
        }
    }

    #[test]
    fn errors_are_told_in_the_servers_words() {
        assert_eq!(error_message(r#"{"error": {"message": "too long", "code": 400}}"#), "too long");
        assert_eq!(error_message(r#"{"error": "too long"}"#), "too long");
        assert_eq!(error_message(" Bad Gateway\n"), "Bad Gateway");
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut lines = Lines::default();
        let piece = vec![b'x'; MAX_LINE_BYTES / 2 + 1];
        lines.push(&piece).unwrap();
        assert!(lines.push(&piece).is_err());
    }
}
