//! Shapes of JSON values that serde's derives take too widely or too narrowly: objects, words, whole numbers.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

/// Reads structs from JSON objects only: serde's derive takes an array of the fields too. The structs derive
/// `Deserialize` with `#[serde(remote = "Self")]`, which makes the derived function an inherent one.
macro_rules! objects {
    ($($name:ty),+ $(,)?) => {$(
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Shape;

                impl<'de> serde::de::Visitor<'de> for Shape {
                    type Value = $name;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str("an object")
                    }

                    fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<$name, A::Error> {
                        <$name>::deserialize(serde::de::value::MapAccessDeserializer::new(map))
                    }
                }

                deserializer.deserialize_map(Shape)
            }
        }
    )+};
}

/// Reads enums without data from strings only, so that any other value is refused with the words that are allowed. They
/// derive `Deserialize` with `#[serde(remote = "Self")]`.
macro_rules! words {
    ($($name:ty: $allowed:literal),+ $(,)?) => {$(
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Shape;

                impl serde::de::Visitor<'_> for Shape {
                    type Value = $name;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str(concat!("one of ", $allowed))
                    }

                    fn visit_str<E: serde::de::Error>(self, word: &str) -> Result<$name, E> {
                        <$name>::deserialize(serde::de::value::StrDeserializer::new(word))
                    }
                }

                deserializer.deserialize_str(Shape)
            }
        }
    )+};
}

pub(super) use {objects, words};

/// A whole number of 64 bits; 16.0 is one, as JSON schema has it and some clients write it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whole(pub i64);

/// A token's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenNumber(pub u32);

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_i64(WholeVisitor).map(Self)
    }
}

struct WholeVisitor;

impl Visitor<'_> for WholeVisitor {
    type Value = i64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number")
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<i64, E> {
        Ok(value)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<i64, E> {
        i64::try_from(value).map_err(|_| E::custom(format_args!("must be a whole number of 64 bits, got {value}")))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<i64, E> {
        const END: f64 = 9_223_372_036_854_775_808.0;
        if value.fract() == 0.0 && (-END..END).contains(&value) {
            return Ok(value as i64);
        }
        Err(E::custom(format_args!("must be a whole number of 64 bits, got {value}")))
    }
}

impl TokenNumber {
    /// A whole number as a token's id.
    ///
    /// # Errors
    /// When it can be no id.
    pub fn new<E: de::Error>(value: i64) -> Result<Self, E> {
        let id = u32::try_from(value);
        id.map(Self).map_err(|_| E::custom(format_args!("must be a token id from 0 to {}, got {value}", u32::MAX)))
    }
}

impl<'de> Deserialize<'de> for TokenNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(Whole::deserialize(deserializer)?.0)
    }
}

/// Reads a whole number or null.
///
/// # Errors
/// When the value is no number, has a fraction or does not fit 64 bits.
pub fn whole<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    Ok(Option::<Whole>::deserialize(deserializer)?.map(|value| value.0))
}

/// Reads a list of token ids.
///
/// # Errors
/// When the value is no list, or an element is no token id.
pub fn token_ids<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
    Vec::<TokenNumber>::deserialize(deserializer).map(plain_ids)
}

/// Reads a list of token ids or null.
///
/// # Errors
/// As [`token_ids`].
pub fn optional_token_ids<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<u32>>, D::Error> {
    Ok(Option::<Vec<TokenNumber>>::deserialize(deserializer)?.map(plain_ids))
}

/// The ids without their wrapper; the list's memory is used again.
#[must_use]
pub fn plain_ids(ids: Vec<TokenNumber>) -> Vec<u32> {
    ids.into_iter().map(|id| id.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::extract::parse;

    #[derive(Debug, Deserialize)]
    #[serde(remote = "Self")]
    struct Sample {
        #[serde(default, deserialize_with = "whole")]
        n: Option<i64>,
        #[serde(default, deserialize_with = "optional_token_ids")]
        ids: Option<Vec<u32>>,
        #[serde(default)]
        inner: Vec<Inner>,
        #[serde(default)]
        word: Option<Word>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(remote = "Self")]
    struct Inner {
        a: u8,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(remote = "Self", rename_all = "lowercase")]
    enum Word {
        Yes,
        No,
    }

    objects!(Sample, Inner);
    words!(Word: "yes, no");

    fn sample(json: &str) -> Result<Sample, (Option<String>, String)> {
        parse::<Sample>(json.as_bytes()).map_err(|error| (error.param, error.message))
    }

    #[test]
    fn whole_numbers_may_have_a_point() {
        let n = |json: &str| sample(&format!(r#"{{"n":{json}}}"#)).map(|sample| sample.n);
        assert_eq!(n("16").unwrap(), Some(16));
        assert_eq!(n("16.0").unwrap(), Some(16));
        assert_eq!(n("-2e3").unwrap(), Some(-2000));
        assert_eq!(n("-9223372036854775808").unwrap(), Some(i64::MIN));
        assert_eq!(n("null").unwrap(), None);
        assert_eq!(sample("{}").unwrap().n, None);
        for wrong in ["1.5", "\"5\"", "true", "[]", "9223372036854775808", "1e30"] {
            assert_eq!(n(wrong).unwrap_err().0.as_deref(), Some("n"), "{wrong}");
        }
        assert_eq!(sample(r#"{"ids":[5.0,6]}"#).unwrap().ids, Some(vec![5, 6]));
        let (param, message) = sample(r#"{"ids":[5,-1.0]}"#).unwrap_err();
        assert_eq!(param.as_deref(), Some("ids[1]"));
        assert_eq!(message, "ids[1]: must be a token id from 0 to 4294967295, got -1");
    }

    #[test]
    fn an_array_is_no_object() {
        assert_eq!(sample(r#"{"inner":[{"a":1}]}"#).unwrap().inner[0].a, 1);
        assert_eq!(sample("[5]").unwrap_err(), (None, "the body must be an object, got an array".to_owned()));
        let (param, message) = sample(r#"{"inner":[{"a":1},[1]]}"#).unwrap_err();
        assert_eq!(param.as_deref(), Some("inner[1]"));
        assert_eq!(message, "inner[1]: must be an object, got an array");
        assert_eq!(sample(r#"{"inner":[{}]}"#).unwrap_err().0.as_deref(), Some("inner[0].a"));
    }

    #[test]
    fn words_are_named() {
        assert_eq!(sample(r#"{"word":"no"}"#).unwrap().word, Some(Word::No));
        for (json, got) in [("5", "5"), ("\"maybe\"", "\"maybe\""), ("{\"yes\":null}", "an object")] {
            let (param, message) = sample(&format!(r#"{{"word":{json}}}"#)).unwrap_err();
            assert_eq!(param.as_deref(), Some("word"));
            assert!(message.contains("yes") && message.contains("no") && message.ends_with(got), "{message}");
        }
    }
}
