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
    /// Bytes at the start of `held` in which no match ends.
    n_passed_bytes: usize,
}

impl StopMatcher {
    /// A matcher for `stops` (empty strings are ignored); with `include` the matched text is emitted too.
    #[must_use]
    pub fn new(mut stops: Vec<String>, include: bool) -> Self {
        stops.retain(|stop| !stop.is_empty());
        Self { stops, include, held: String::new(), n_passed_bytes: 0 }
    }

    /// Takes the next text; returns what may be shown, and the stop that ended the text. After a match nothing more
    /// may be pushed.
    pub fn push(&mut self, text: &str) -> (String, Option<String>) {
        if self.stops.is_empty() {
            return (text.to_owned(), None);
        }
        self.held.push_str(text);
        let found = self.stops.iter().filter_map(|stop| Some((self.find(stop)?, stop)));
        let Some((start, stop)) = found.min_by_key(|(start, stop)| (start + stop.len(), *start)) else {
            return (self.release(), None);
        };
        let stop = stop.clone();
        self.held.truncate(if self.include { start + stop.len() } else { start });
        (std::mem::take(&mut self.held), Some(stop))
    }

    /// Takes text in which no stop may end; one that begins in it and ends later counts. Returns what may be shown.
    pub fn pass(&mut self, text: &str) -> String {
        if self.stops.is_empty() {
            return text.to_owned();
        }
        self.held.push_str(text);
        self.n_passed_bytes = self.held.len();
        self.release()
    }

    /// What was held back, when the text ends without a match.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The first match of `stop` that ends after the passed text.
    fn find(&self, stop: &str) -> Option<usize> {
        let from = self.held.ceil_char_boundary((self.n_passed_bytes + 1).saturating_sub(stop.len()));
        self.held[from..].find(stop).map(|at| from + at)
    }

    /// Gives out what no unfinished match needs.
    fn release(&mut self) -> String {
        let tail = self.held.split_off(self.first_open());
        let shown = std::mem::replace(&mut self.held, tail);
        self.n_passed_bytes = self.n_passed_bytes.saturating_sub(shown.len());
        shown
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

    #[test]
    fn a_match_counts_if_it_ends_after_the_passed_text() {
        let after = |passed: &[&str], rest: &str, stop: &str| {
            let mut matcher = StopMatcher::new(vec![stop.to_owned()], false);
            let mut shown: String = passed.iter().map(|text| matcher.pass(text)).collect();
            let (text, found) = matcher.push(rest);
            shown.push_str(&text);
            if found.is_none() {
                shown.push_str(&matcher.finish());
            }
            (shown, found.is_some())
        };
        assert_eq!(after(&["a END b"], " c", "END"), ("a END b c".to_owned(), false));
        assert_eq!(after(&["a END", " b E"], "ND c", "END"), ("a END b ".to_owned(), true));
        assert_eq!(after(&["aa"], "a", "aa"), ("a".to_owned(), true));
        assert_eq!(after(&["泉"], "", "泉"), ("泉".to_owned(), false));
        assert_eq!(after(&["泉"], "泉b", "泉"), ("泉".to_owned(), true));
    }

    proptest! {
        #[test]
        fn passed_text_holds_no_end(text in "[ab泉]{0,12}", n_passed in 0_usize..13, stop in "[ab泉]{1,4}") {
            let bound = text.char_indices().nth(n_passed).map_or(text.len(), |(at, _)| at);
            let want = text.char_indices().map(|(at, _)| at).find(|at| {
                text[*at..].starts_with(&stop) && at + stop.len() > bound
            });
            let mut matcher = StopMatcher::new(vec![stop], false);
            let mut shown = String::new();
            for letter in text[..bound].chars() {
                shown.push_str(&matcher.pass(letter.encode_utf8(&mut [0; 4])));
            }
            let (more, found) = matcher.push(&text[bound..]);
            shown.push_str(&more);
            prop_assert_eq!(found.is_some(), want.is_some());
            if found.is_none() {
                shown.push_str(&matcher.finish());
            }
            prop_assert_eq!(shown, &text[..want.unwrap_or(text.len())]);
        }

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
