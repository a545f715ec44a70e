//! Stop strings in a stream of text: nothing after a match, and only an ambiguous tail held back.

/// Watches for the stop strings of one choice.
///
/// The match that is whole first wins, and of several that end together the longest: generation can stop at once, and the
/// result does not depend on how the text is split.
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
        if self.stops.is_empty() {
            return (text.to_owned(), None);
        }
        self.held.push_str(text);
        let found = self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        let Some((start, stop)) = found.min_by_key(|(start, stop)| (start + stop.len(), *start)) else {
            let tail = self.held.split_off(self.first_open());
            return (std::mem::replace(&mut self.held, tail), None);
        };
        let stop = stop.clone();
        self.held.truncate(if self.include { start + stop.len() } else { start });
        (std::mem::take(&mut self.held), Some(stop))
    }

    /// What was held back, when the text ends without a match.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Where the first unfinished match begins; the end of the text if there is none.
    fn first_open(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or_default();
        let from = self.held.len().saturating_sub(longest);
        let starts = self.held.char_indices().map(|(at, _)| at).skip_while(|at| *at < from);
        let mut open = starts.filter(|at| {
            let tail = &self.held[*at..];
            self.stops.iter().any(|stop| stop.len() > tail.len() && stop.starts_with(tail))
        });
        open.next().unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matched(pieces: &[&str], stops: &[&str], include: bool) -> (String, Option<String>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|stop| (*stop).to_owned()).collect(), include);
        let mut shown = String::new();
        for piece in pieces {
            let (text, stop) = matcher.push(piece);
            shown.push_str(&text);
            if stop.is_some() {
                return (shown, stop);
            }
        }
        (shown + &matcher.finish(), None)
    }

    fn everywhere(text: &str, stops: &[&str], include: bool) -> (String, Option<String>) {
        let whole = matched(&[text], stops, include);
        let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        for step in [1, 2] {
            let bounds: Vec<usize> = starts.iter().copied().step_by(step).chain([text.len()]).collect();
            let pieces: Vec<&str> = bounds.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            assert_eq!(matched(&pieces, stops, include), whole, "in steps of {step}");
        }
        for at in starts {
            assert_eq!(matched(&[&text[..at], &text[at..]], stops, include), whole, "split at {at}");
        }
        whole
    }

    #[test]
    fn text_ends_before_a_stop_over_several_pieces() {
        let text = "the quick brown fox jumps";
        assert_eq!(everywhere(text, &["own fox"], false), ("the quick br".into(), Some("own fox".into())));
        assert_eq!(everywhere(text, &["own fox"], true), ("the quick brown fox".into(), Some("own fox".into())));
        assert_eq!(everywhere(text, &["fox hole"], false), (text.into(), None));
        assert_eq!(everywhere(text, &["fox jumpsuit", ""], false), (text.into(), None), "the tail is given at the end");
        assert_eq!(everywhere(text, &[], false), (text.into(), None));
    }

    #[test]
    fn the_match_that_is_whole_first_counts() {
        assert_eq!(everywhere("a END. b", &["END.", "END"], false), ("a ".into(), Some("END".into())));
        assert_eq!(everywhere("abcabd", &["abd", "bca"], false), ("a".into(), Some("bca".into())));
        assert_eq!(everywhere("xabcdy", &["bc", "abcd"], false), ("xa".into(), Some("bc".into())));
        assert_eq!(everywhere("xabc", &["bc", "abc"], false), ("x".into(), Some("abc".into())));
        assert_eq!(everywhere("🎉🔥🚀", &["🔥"], false), ("🎉".into(), Some("🔥".into())));
    }

    #[test]
    fn only_an_ambiguous_tail_is_held() {
        let mut matcher = StopMatcher::new(vec!["\n\nUser:".into()], false);
        assert_eq!(matcher.push("one\ntwo\n\nU"), ("one\ntwo".into(), None));
        assert_eq!(matcher.push("ser"), (String::new(), None));
        assert_eq!(matcher.push("s\n"), ("\n\nUsers".into(), None));
        assert_eq!(matcher.finish(), "\n");
    }

    proptest! {
        #[test]
        fn every_split_gives_the_same(text in "[ab泉]{0,12}", stops in prop::collection::vec("[ab泉]{1,4}", 0..4)) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (shown, stop) = everywhere(&text, &stops, false);
            prop_assert!(text.starts_with(&shown));
            prop_assert_eq!(stop.is_some(), stops.iter().any(|stop| text.contains(stop)));
            prop_assert!(stops.iter().all(|stop| !shown.contains(stop)));
        }
    }
}
