//! The bytes of every token: byte-level BPE writes each byte as one printable character, and this reverses it.

use std::collections::HashMap;

/// The byte of each character of the byte-level alphabet, as GPT-2 fixed it: printable Latin-1 stands for itself, the
/// 68 other bytes take the characters from U+0100 on, in order.
fn alphabet() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = 0x100..;
    (0..=u8::MAX)
        .map(|byte| {
            let code = if printable(byte) { u32::from(byte) } else { others.next().unwrap_or(0) };
            (char::from_u32(code).unwrap_or_default(), byte)
        })
        .collect()
}

/// The bytes of every token of a vocabulary, in one buffer.
#[derive(Debug)]
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    /// Where each id's bytes lie; empty for an id without a token.
    ranges: Vec<std::ops::Range<usize>>,
}

impl TokenBytes {
    /// Collects `vocab` (text in the byte-level alphabet) and `added` (plain text, which wins). Fails on a character
    /// outside the alphabet.
    pub(super) fn new(vocab: &HashMap<String, u32>, added: &HashMap<String, u32>) -> Result<Self, String> {
        let n_ids = vocab.values().chain(added.values()).max().map_or(0, |max| *max as usize + 1);
        let mut table = Self { bytes: Vec::new(), ranges: vec![0..0; n_ids] };
        for (text, id) in added {
            table.set(*id, text.as_bytes());
        }
        let alphabet = alphabet();
        let mut buffer = Vec::new();
        for (text, id) in vocab.iter().filter(|(text, _)| !added.contains_key(*text)) {
            buffer.clear();
            for letter in text.chars() {
                let byte = alphabet.get(&letter);
                buffer.push(*byte.ok_or_else(|| format!("token {id} holds {letter:?}, which stands for no byte"))?);
            }
            table.set(*id, &buffer);
        }
        Ok(table)
    }

    /// The bytes of `id`; none for an id without a token.
    pub(super) fn get(&self, id: usize) -> Option<&[u8]> {
        let range = self.ranges.get(id)?.clone();
        if range.is_empty() { None } else { self.bytes.get(range) }
    }

    /// One more than the largest id.
    pub(super) fn len(&self) -> usize {
        self.ranges.len()
    }

    fn set(&mut self, id: u32, bytes: &[u8]) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        self.ranges[id as usize] = start..self.bytes.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let alphabet = alphabet();
        assert_eq!(alphabet.len(), 256);
        let mut bytes: Vec<u8> = alphabet.values().copied().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!((alphabet[&'Ġ'], alphabet[&'Ċ'], alphabet[&'A'], alphabet[&'é']), (b' ', b'\n', b'A', 0xE9));
    }

    #[test]
    fn added_text_is_plain_and_holes_have_no_bytes() {
        let vocab = HashMap::from([("Ġa".to_owned(), 0), ("<think>".to_owned(), 3)]);
        let added = HashMap::from([("<think>".to_owned(), 3), ("｜DSML｜".to_owned(), 4)]);
        let table = TokenBytes::new(&vocab, &added).unwrap();
        assert_eq!(table.len(), 5);
        assert_eq!(table.get(0), Some(&b" a"[..]));
        assert_eq!(table.get(1), None);
        assert_eq!(table.get(4), Some("｜DSML｜".as_bytes()));
        assert!(TokenBytes::new(&HashMap::from([("\n".to_owned(), 0)]), &HashMap::new()).is_err());
    }
}
