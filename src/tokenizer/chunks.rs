//! Cuts long text where the pre-tokeniser always splits, so that pieces encode apart to the same ids as the whole.

/// The three patterns of the model's pre-tokeniser, in order: digits, CJK and kana, the general one. Each is applied
/// inside the pieces of the one before. The cuts below hold for these and no others.
pub(super) const PATTERNS: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"##,
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+",
        r"| ?[\p{P}\p{S}]+",
        "[\r\n]*|\\s*[\r\n]+",
        r"|\s+(?!\S)|\s+",
    ),
];

/// A piece is at least this long, and ends at the first safe cut after it.
const MIN_BYTES: usize = 8 << 10;

/// Without a safe cut a piece ends here at any character. Only a run of more than this of one kind (letters, spaces,
/// signs, CJK) meets it: then one word is cut in two, and a pattern's backtracking stays bounded.
const MAX_BYTES: usize = 128 << 10;

/// The pieces of `text`, in order; they depend on the text before them only.
pub(super) fn chunks(text: &str) -> Vec<&str> {
    let mut pieces = Vec::with_capacity(text.len() / MIN_BYTES + 1);
    let mut rest = text;
    while rest.len() > MIN_BYTES {
        let (piece, tail) = rest.split_at(cut(rest));
        pieces.push(piece);
        rest = tail;
    }
    if !rest.is_empty() {
        pieces.push(rest);
    }
    pieces
}

/// The end of the first piece of `text`.
fn cut(text: &str) -> usize {
    let mut start = MIN_BYTES;
    while !text.is_char_boundary(start) {
        start += 1;
    }
    let mut previous = text[..start].chars().next_back().unwrap_or_default();
    for (offset, next) in text[start..].char_indices() {
        let at = start + offset;
        if is_safe(previous, next, &text[at..]) || at >= MAX_BYTES {
            return at;
        }
        previous = next;
    }
    text.len()
}

/// Whether the pre-tokeniser splits between `previous` and `next`, whatever stands around them; `rest` begins at `next`.
fn is_safe(previous: char, next: char, rest: &str) -> bool {
    let is_cjk = |letter: char| matches!(letter, '一'..='龥' | '\u{3040}'..='ヿ');
    let in_digits_out =
        next.is_ascii_digit() && (previous.is_ascii() || is_cjk(previous)) && !previous.is_ascii_digit();
    let line_ends = previous == '\n' && !next.is_whitespace();
    let cjk_ends = is_cjk(previous) && !is_cjk(next);
    let word_ends =
        previous.is_ascii_alphabetic() && next == ' ' && rest.as_bytes().get(1).is_some_and(u8::is_ascii_alphabetic);
    in_digits_out || line_ends || cjk_ends || word_ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_join_to_the_text_and_are_bounded() {
        let texts =
            ["a".repeat(300_000), " ".repeat(300_000), "word and 12 words\n".repeat(9000), "温泉。".repeat(40_000)];
        for text in texts {
            let pieces = chunks(&text);
            assert_eq!(pieces.concat(), text);
            assert!(pieces.iter().all(|piece| piece.len() <= MAX_BYTES + 4), "{}", &text[..12]);
        }
        assert!(chunks("").is_empty());
    }

    #[test]
    fn a_longer_text_keeps_the_pieces_of_a_shorter_one() {
        let text = "some words, 42 numbers\nand 温泉 lines\n".repeat(3000);
        let (short, long) = (chunks(&text[..40_000]), chunks(&text));
        assert_eq!(short[..short.len() - 1], long[..short.len() - 1]);
    }

    #[test]
    fn cuts_are_where_the_patterns_split() {
        let safe = |text: &str, at: usize| {
            is_safe(text[..at].chars().next_back().unwrap(), text[at..].chars().next().unwrap(), &text[at..])
        };
        assert!(safe("ab1", 2) && safe("a\nb", 2) && safe("泉。", 3) && safe("ab cd", 2));
        assert!(!safe("a12", 2) && !safe("a\n\nb", 2) && !safe("a\n b", 2) && !safe("ab", 1) && !safe("a  b", 1));
        assert!(!safe("٣1", 2), "another script's digit and an ASCII digit share a group");
    }
}
