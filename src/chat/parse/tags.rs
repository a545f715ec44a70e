//! The tags of DSML, matched at the start of text that may be cut anywhere.

use std::borrow::Cow;

/// The control token in every tag.
pub const DSML: &str = "｜DSML｜";
/// Stands for that control token where the caller knows it from the same characters spelt in ordinary tokens. It is no
/// character of any text (a Unicode noncharacter); outside tags it never shows.
pub const CONTROL: char = '\u{FDD0}';

/// Opens a block of calls.
pub(super) const BLOCK: &str = "<｜DSML｜tool_calls>";
/// Closes a block of calls.
pub(super) const BLOCK_END: &str = "</｜DSML｜tool_calls>";
/// Closes a call.
pub(super) const INVOKE_END: &str = "</｜DSML｜invoke>";
/// Closes a parameter.
pub(super) const PARAMETER_END: &str = "</｜DSML｜parameter>";

const INVOKE: &str = "<｜DSML｜invoke name=\"";
const PARAMETER: &str = "<｜DSML｜parameter name=\"";

/// A name and what it is quoted in; a longer one is no tag.
const MAX_NAME_BYTES: usize = 256;
/// White space between two tags that are looked at together; more of it parts them.
const MAX_GAP_BYTES: usize = 32;

/// What stands at the start of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Look<T> {
    /// The tag, and its length in bytes.
    Yes(T, usize),
    /// Something else.
    No,
    /// The start of the tag: more text decides.
    Maybe,
}

impl<T> Look<T> {
    /// The same with another value.
    pub(super) fn map<U>(self, change: impl FnOnce(T) -> U) -> Look<U> {
        match self {
            Self::Yes(value, length) => Look::Yes(change(value), length),
            Self::No => Look::No,
            Self::Maybe => Look::Maybe,
        }
    }

    /// This, or `other` where this is `No`.
    pub(super) fn or(self, other: impl FnOnce() -> Self) -> Self {
        if matches!(self, Self::No) { other() } else { self }
    }
}

/// `tag` itself, its control token spelt or as [`CONTROL`].
pub(super) fn literal(text: &str, tag: &str) -> Look<()> {
    let Some((before, after)) = tag.split_once(DSML) else { return plain(text, tag) };
    let mut end = 0;
    for part in [before, DSML, after] {
        let rest = &text[end..];
        let look = if part == DSML && rest.starts_with(CONTROL) {
            Look::Yes((), CONTROL.len_utf8())
        } else {
            plain(rest, part)
        };
        let Look::Yes((), length) = look else { return look };
        end += length;
    }
    Look::Yes((), end)
}

fn plain(text: &str, tag: &str) -> Look<()> {
    if text.starts_with(tag) {
        Look::Yes((), tag.len())
    } else if tag.starts_with(text) {
        Look::Maybe
    } else {
        Look::No
    }
}

/// The opening of a call that a parameter or the call's end follows: its name and its own length. A tag that only is
/// mentioned has other text behind it.
pub(super) fn invoke(text: &str) -> Look<&str> {
    let Look::Yes(name, length) = named(text, INVOKE) else { return named(text, INVOKE) };
    match gap(&text[length..]) {
        Look::Yes((), gap) => {
            let next = &text[length + gap..];
            let follows = literal(next, PARAMETER).or(|| literal(next, INVOKE_END));
            match follows {
                Look::Yes(..) => Look::Yes(name, length),
                Look::Maybe => Look::Maybe,
                Look::No => Look::No,
            }
        }
        Look::Maybe => Look::Maybe,
        Look::No => Look::No,
    }
}

/// The opening of a parameter: its name and its string flag as written, if it has one.
pub(super) fn parameter(text: &str) -> Look<(&str, Option<&str>)> {
    named(text, PARAMETER).map(|inner| match inner.rsplit_once("\" string=\"") {
        Some((name, flag)) => (name, Some(flag)),
        None => (inner, None),
    })
}

/// Where a value that lacks its own closer ends: at a call's closer that the block's end, the next call or the end of
/// the text follows, or at the block's closer that ends the text. The length is that of the line end before.
pub(super) fn value_end(text: &str, is_last: bool) -> Look<()> {
    let break_bytes = usize::from(text.starts_with('\n'));
    let rest = &text[break_bytes..];
    let after_call = |length: usize| match gap(&rest[length..]) {
        Look::Yes((), gap) => {
            let next = &rest[length + gap..];
            literal(next, BLOCK_END).or(|| literal(next, INVOKE))
        }
        Look::Maybe if is_last => Look::Yes((), 0),
        other => other,
    };
    let after_block = |length: usize| match gap(&rest[length..]) {
        Look::Maybe if is_last => Look::Yes((), 0),
        Look::Maybe => Look::Maybe,
        _ => Look::No,
    };
    let end = match literal(rest, INVOKE_END) {
        Look::Yes((), length) => after_call(length),
        other => other,
    };
    let end = match (end, literal(rest, BLOCK_END)) {
        (Look::No, Look::Yes((), length)) => after_block(length),
        (Look::No, other) => other,
        (end, _) => end,
    };
    match end {
        Look::Yes(..) => Look::Yes((), break_bytes),
        other => other,
    }
}

/// A closing tag of another format, such as `</tool_call>`.
pub(super) fn foreign_closer(text: &str) -> Look<()> {
    let Look::Yes((), start) = literal(text, "</") else { return literal(text, "</") };
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '_' | ':' | '-' | '.');
    let length = text[start..].find(|letter| !is_name(letter));
    match length {
        Some(length) if length > 0 && text[start + length..].starts_with('>') => Look::Yes((), start + length + 1),
        None if text.len() <= MAX_NAME_BYTES => Look::Maybe,
        _ => Look::No,
    }
}

/// White space up to other text; `Maybe` when the text ends in it, `No` when it is too long.
fn gap(text: &str) -> Look<()> {
    let length = text.len() - text.trim_start().len();
    if length > MAX_GAP_BYTES {
        Look::No
    } else if length == text.len() {
        Look::Maybe
    } else {
        Look::Yes((), length)
    }
}

/// `prefix`, then a name up to `">` on one line.
fn named<'a>(text: &'a str, prefix: &str) -> Look<&'a str> {
    let Look::Yes((), start) = literal(text, prefix) else { return literal(text, prefix).map(|()| "") };
    let rest = &text[start..];
    for (at, letter) in rest.char_indices() {
        if rest[at..].starts_with("\">") {
            return Look::Yes(&rest[..at], start + at + 2);
        }
        if letter == '\n' || at > MAX_NAME_BYTES {
            return Look::No;
        }
    }
    Look::Maybe
}

/// Text of a call, where the control token is data: spelt out.
pub(super) fn spelt(text: &str) -> Cow<'_, str> {
    if text.contains(CONTROL) { Cow::Owned(text.replace(CONTROL, DSML)) } else { Cow::Borrowed(text) }
}

/// Line ends at the end of `text`, at most two.
pub fn trailing_breaks(text: &str) -> usize {
    text.bytes().rev().take(2).take_while(|byte| *byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_certain_once_something_of_it_follows() {
        let open = "<｜DSML｜invoke name=\"f\">";
        for (tail, want) in [
            ("", Look::Maybe),
            ("\n", Look::Maybe),
            ("\n<｜DSML｜para", Look::Maybe),
            ("\n<｜DSML｜parameter name=\"", Look::Yes("f", open.len())),
            ("</｜DSML｜invoke>", Look::Yes("f", open.len())),
            (" is a tag", Look::No),
        ] {
            assert_eq!(invoke(&format!("{open}{tail}")), want, "{tail:?}");
        }
        assert_eq!(invoke("<｜DSML｜inv"), Look::Maybe);
        assert_eq!(invoke("<｜DSML｜invoke name=\"a\nb\">"), Look::No);
        assert_eq!(invoke(&format!("<｜DSML｜invoke name=\"{}", "x".repeat(300))), Look::No);
    }

    #[test]
    fn a_parameter_has_a_name_and_a_flag() {
        let flag = |text| match parameter(text) {
            Look::Yes(header, _) => header,
            other => panic!("{other:?}"),
        };
        assert_eq!(flag("<｜DSML｜parameter name=\"a\" string=\"true\">x"), ("a", Some("true")));
        assert_eq!(flag("<｜DSML｜parameter name=\"a\">x"), ("a", None));
        assert_eq!(flag("<｜DSML｜parameter name=\"q\"q\" string=\"no\">"), ("q\"q", Some("no")));
        assert_eq!(parameter("<｜DSML｜parameter name=\"a\" string=\"true\""), Look::Maybe);
    }

    #[test]
    fn a_value_without_closer_ends_where_nothing_else_can_be_meant() {
        assert_eq!(value_end("\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>", false), Look::Yes((), 1));
        assert_eq!(value_end("</｜DSML｜invoke>\n<｜DSML｜invoke name=\"", false), Look::Yes((), 0));
        assert_eq!(value_end("</｜DSML｜invoke> is text", false), Look::No);
        assert_eq!(value_end("</｜DSML｜invoke>", false), Look::Maybe);
        assert_eq!(value_end("</｜DSML｜invoke>", true), Look::Yes((), 0));
        assert_eq!(value_end("\n</｜DSML｜tool_calls>\n", true), Look::Yes((), 1));
        assert_eq!(value_end("</｜DSML｜tool_calls> x", true), Look::No);
        assert_eq!(value_end("\n", false), Look::Maybe);
        assert_eq!(value_end("\nx", false), Look::No);
    }

    #[test]
    fn the_control_token_has_two_spellings() {
        let control = |text: &str| text.replace(DSML, &CONTROL.to_string());
        assert_eq!(literal(&control(BLOCK), BLOCK), Look::Yes((), BLOCK.len() - DSML.len() + CONTROL.len_utf8()));
        for end in 0..control(BLOCK).chars().count() {
            let start: String = control(BLOCK).chars().take(end).collect();
            assert_eq!(literal(&start, BLOCK), Look::Maybe, "{start}");
            assert_eq!(literal(&(start + "x"), BLOCK), Look::No);
        }
        let open = control("<｜DSML｜invoke name=\"f\">");
        assert_eq!(invoke(&(open.clone() + "\n</｜DSML｜invoke>")), Look::Yes("f", open.len()));
    }

    #[test]
    fn closers_of_other_formats() {
        assert_eq!(foreign_closer("</tool_call></function>"), Look::Yes((), 12));
        assert_eq!(foreign_closer("</tool_c"), Look::Maybe);
        assert_eq!(foreign_closer("</>"), Look::No);
        assert_eq!(foreign_closer("<b>"), Look::No);
    }
}
