//! JSON text in the spelling of the published encoder (Python's `json.dumps`, non-ASCII kept), so prompts match its bytes.
//!
//! It works on text and not on parsed values, so that numbers of any length keep their digits.

use std::collections::HashMap;

use serde_json::Value;

/// A piece of valid JSON text.
enum Token<'a> {
    /// A bracket, comma or colon.
    Mark(u8),
    /// A string with its quotes.
    Text(&'a str),
    /// A number, true, false or null.
    Scalar(&'a str),
}

/// `value` with `, ` and `: ` between its parts.
#[must_use]
pub(super) fn dumps(value: &Value) -> String {
    respell(&value.to_string())
}

/// Valid JSON text with `, ` and `: ` between its parts, strings and numbers as Python writes them.
#[must_use]
pub(super) fn respell(json: &str) -> String {
    let mut out = String::with_capacity(json.len() + json.len() / 8);
    let mut at = 0;
    while let Some((token, end)) = next_token(json, at) {
        match token {
            Token::Mark(b',') => out.push_str(", "),
            Token::Mark(b':') => out.push_str(": "),
            Token::Mark(mark) => out.push(char::from(mark)),
            Token::Text(text) => out.push_str(&quote(&unquote(text))),
            Token::Scalar(scalar) => out.push_str(&respell_scalar(scalar)),
        }
        at = end;
    }
    out
}

/// The members of a JSON object in order, each value as its text; a repeated key keeps its place and takes the last
/// value, as in Python. The error says what is wrong when `json` is not a JSON object.
pub(super) fn members(json: &str) -> Result<Vec<(String, &str)>, String> {
    match serde_json::from_str::<Value>(json) {
        Ok(Value::Object(_)) => {}
        Ok(_) => return Err("it is JSON but not an object".to_owned()),
        Err(error) => return Err(error.to_string()),
    }
    let mut members: Vec<(String, &str)> = Vec::new();
    let mut places = HashMap::new();
    let (mut depth, mut at) = (0_usize, 0);
    let mut key: Option<String> = None;
    let mut value_start = None;
    while let Some((token, end)) = next_token(json, at) {
        let closes = depth == 1 && matches!(token, Token::Mark(b',' | b'}'));
        match token {
            Token::Mark(b'{' | b'[') => depth += 1,
            Token::Mark(b'}' | b']') => depth -= 1,
            Token::Mark(b':') if depth == 1 => value_start = Some(end),
            Token::Text(text) if depth == 1 && key.is_none() => key = Some(unquote(text)),
            _ => {}
        }
        if closes && let (Some(name), Some(start)) = (key.take(), value_start.take()) {
            let value = json[start..end - 1].trim();
            match places.get(&name) {
                Some(place) => members[*place] = (name, value),
                None => {
                    places.insert(name.clone(), members.len());
                    members.push((name, value));
                }
            }
        }
        at = end;
    }
    Ok(members)
}

/// `text` as a JSON string.
#[must_use]
pub(super) fn quote(text: &str) -> String {
    Value::from(text).to_string()
}

/// The text of a JSON string with its quotes.
#[must_use]
pub(super) fn unquote(json: &str) -> String {
    serde_json::from_str(json).unwrap_or_else(|_| json.to_owned())
}

/// The token that begins at or after byte `at`, and its end.
fn next_token(json: &str, at: usize) -> Option<(Token<'_>, usize)> {
    let bytes = json.as_bytes();
    let start = at + bytes.get(at..)?.iter().position(|byte| !byte.is_ascii_whitespace())?;
    match bytes[start] {
        b'"' => {
            let mut end = start + 1;
            while *bytes.get(end)? != b'"' {
                end += if bytes[end] == b'\\' { 2 } else { 1 };
            }
            Some((Token::Text(&json[start..=end]), end + 1))
        }
        mark @ (b'{' | b'}' | b'[' | b']' | b',' | b':') => Some((Token::Mark(mark), start + 1)),
        _ => {
            let is_end = |byte: &u8| byte.is_ascii_whitespace() || b",]}:".contains(byte);
            let end = bytes[start..].iter().position(is_end).map_or(bytes.len(), |length| start + length);
            Some((Token::Scalar(&json[start..end]), end))
        }
    }
}

/// A number as Python reads and writes it again: whole numbers digit for digit, others as the shortest decimal that
/// reads back the same, with an exponent from 1e16 up and below 1e-4.
fn respell_scalar(scalar: &str) -> String {
    let is_float =
        scalar.bytes().any(|byte| b".eE".contains(&byte)) && scalar.ends_with(|last: char| last.is_ascii_digit());
    let Some(number) = is_float.then(|| scalar.parse::<f64>().ok()).flatten() else {
        return if scalar == "-0" { "0".to_owned() } else { scalar.to_owned() };
    };
    let scientific = format!("{number:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else { return scalar.to_owned() };
    let exponent: i32 = exponent.parse().unwrap_or_default();
    if !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    let plain = number.to_string();
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spelling_is_pythons() {
        // Each pair was made with Python's json.dumps(json.loads(x), ensure_ascii=False).
        for (json, want) in [
            (r#"{"a":1,"b":[1,2.50,{"c":null}],"d":{}}"#, r#"{"a": 1, "b": [1, 2.5, {"c": null}], "d": {}}"#),
            (
                "[1e5, 1e16, 1.5e-7, 0.0001, 0.00001, -0, -0.0, 1E2]",
                "[100000.0, 1e+16, 1.5e-07, 0.0001, 1e-05, 0, -0.0, 100.0]",
            ),
            (
                "[123456789012345678901234567890, 9007199254740993]",
                "[123456789012345678901234567890, 9007199254740993]",
            ),
            ("[1e22, 1e23, 5e-324, 1.7976931348623157e308]", "[1e+22, 1e+23, 5e-324, 1.7976931348623157e+308]"),
            (r#"["\u00e9\/\u0001\t\"\\", "서울 🎉\u007f"]"#, "[\"é/\\u0001\\t\\\"\\\\\", \"서울 🎉\u{7f}\"]"),
            (" [ ] ", "[]"),
            (r#""a,b:{}""#, r#""a,b:{}""#),
        ] {
            assert_eq!(respell(json), want);
        }
    }

    #[test]
    fn members_keep_order_and_text() {
        let json = r#" { "b" : [1, {"x": "}"}] , "a":"q\"," , "b": 1.50, "":{} } "#;
        let want = vec![("b".to_owned(), "1.50"), ("a".to_owned(), r#""q\",""#), (String::new(), "{}")];
        assert_eq!(members(json).unwrap(), want);
        assert_eq!(members("{}").unwrap(), vec![]);
        for bad in ["", "[]", "{", "null", "{\"a\":01}", "{} x"] {
            assert!(members(bad).is_err(), "{bad}");
        }
    }
}
