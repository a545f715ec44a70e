//! Fields that both OpenAI endpoints read, and the shapes they come in.

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};

use crate::http::error::ApiError;
use crate::http::shape::objects;
use crate::ids::TokenId;
use crate::sample::params::SamplingParams;

/// Stop strings a request may give.
pub const MAX_STOP_STRINGS: usize = 64;
/// Log-probabilities a position may return: OpenAI's limit.
pub const MAX_LOGPROBS: u32 = 20;

/// One string or a list of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum StringOrList {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// What a stream adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub struct StreamOptions {
    /// A last chunk with `choices: []` and the usage.
    #[serde(default)]
    pub include_usage: Option<bool>,
    /// The usage so far on every chunk (vLLM).
    #[serde(default)]
    pub continuous_usage_stats: Option<bool>,
}

/// `{"type": "text"}`; anything else asks for a grammar.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub struct ResponseFormat {
    /// Which format.
    #[serde(rename = "type")]
    #[schema(pattern = "^text$")]
    pub kind: String,
}

/// A field that would change the output and is not supported: only whether it asks for something matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unsupported {
    asked: bool,
}

/// Sampling and output fields, borrowed from a request of either endpoint.
#[derive(Clone, Copy, Debug)]
pub struct SamplingFields<'a> {
    /// See [`SamplingParams`].
    pub temperature: Option<f32>,
    /// See [`SamplingParams`].
    pub top_p: Option<f32>,
    /// -1 and 0 turn it off.
    pub top_k: Option<i64>,
    /// See [`SamplingParams`].
    pub min_p: Option<f32>,
    /// See [`SamplingParams`].
    pub presence_penalty: Option<f32>,
    /// See [`SamplingParams`].
    pub frequency_penalty: Option<f32>,
    /// See [`SamplingParams`].
    pub repetition_penalty: Option<f32>,
    /// Token id as text → bias.
    pub logit_bias: Option<&'a HashMap<String, f32>>,
    /// Any 64-bit integer.
    pub seed: Option<i64>,
}

objects!(StreamOptions, ResponseFormat);

impl StringOrList {
    /// The strings.
    #[must_use]
    pub fn as_slice(&self) -> &[String] {
        match self {
            Self::One(text) => std::slice::from_ref(text),
            Self::Many(texts) => texts,
        }
    }
}

impl<'de> Deserialize<'de> for StringOrList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_one_or_many(deserializer, "a string or a list of strings", Self::One, Self::Many)
    }
}

/// Reads a string, or a list whose elements parse as `T`; errors keep the path of the element.
///
/// # Errors
/// When the value is neither.
pub fn deserialize_one_or_many<'de, D, T, O>(
    deserializer: D,
    expecting: &'static str,
    one: fn(String) -> O,
    many: fn(Vec<T>) -> O,
) -> Result<O, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    deserializer.deserialize_any(OneOrMany { expecting, one, many, element: PhantomData })
}

struct OneOrMany<T, O> {
    expecting: &'static str,
    one: fn(String) -> O,
    many: fn(Vec<T>) -> O,
    element: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>, O> Visitor<'de> for OneOrMany<T, O> {
    type Value = O;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expecting)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<O, E> {
        Ok((self.one)(text.to_owned()))
    }

    fn visit_string<E: de::Error>(self, text: String) -> Result<O, E> {
        Ok((self.one)(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<O, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok((self.many)(items))
    }
}

impl Unsupported {
    /// A field whose value says by a rule of its own whether it asks for something.
    #[must_use]
    pub const fn asks(asked: bool) -> Self {
        Self { asked }
    }

    /// Refuses the field if it asks for something.
    ///
    /// # Errors
    /// 400 that names the field.
    pub fn refuse(self, field: &'static str) -> Result<(), ApiError> {
        if self.asked { Err(ApiError::unsupported(field, "is not supported by this server")) } else { Ok(()) }
    }
}

impl<'de> Deserialize<'de> for Unsupported {
    /// null, false, "", [] and {} ask for nothing.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AskedVisitor).map(|asked| Self { asked })
    }
}

struct AskedVisitor;

impl<'de> Visitor<'de> for AskedVisitor {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<bool, E> {
        Ok(value)
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<bool, E> {
        Ok(true)
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<bool, E> {
        Ok(true)
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<bool, E> {
        Ok(true)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<bool, E> {
        Ok(!text.is_empty())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<bool, A::Error> {
        let mut asked = false;
        while seq.next_element::<IgnoredAny>()?.is_some() {
            asked = true;
        }
        Ok(asked)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<bool, A::Error> {
        let mut asked = false;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            asked = true;
        }
        Ok(asked)
    }
}

impl ResponseFormat {
    /// Refuses everything but text.
    ///
    /// # Errors
    /// 400 that names the type.
    pub fn check(&self) -> Result<(), ApiError> {
        match self.kind.as_str() {
            "text" => Ok(()),
            other => Err(ApiError::unsupported("response_format.type", format!("{other:?} is not supported yet"))),
        }
    }
}

impl SamplingFields<'_> {
    /// The request's settings over the server's defaults; ranges are the engine's to check.
    ///
    /// # Errors
    /// 400 when a value does not fit its type at all.
    pub fn resolve(&self, defaults: &SamplingParams) -> Result<SamplingParams, ApiError> {
        Ok(SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.map_or(Ok(defaults.top_k), top_k)?,
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            logit_bias: self.logit_bias.map_or(Ok(Vec::new()), logit_bias)?,
            // Negative seeds are as good as others: the bits are the key.
            seed: self.seed.map(i64::cast_unsigned).or(defaults.seed),
        })
    }
}

/// The schema of logit_bias.
#[must_use]
pub fn logit_bias_schema() -> Object {
    let key = ObjectBuilder::new().schema_type(Type::String).pattern(Some("^[0-9]+$"));
    let bias = ObjectBuilder::new().schema_type(Type::Number).minimum(Some(-100)).maximum(Some(100));
    ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Object, Type::Null]))
        .property_names(Some(key))
        .additional_properties(Some(bias))
        .description(Some("Token id (as text) → bias."))
        .build()
}

/// A count that may not be negative; what is larger than a u32 means "as many as fit".
///
/// # Errors
/// 400 with field and value.
pub fn count(field: &'static str, value: i64) -> Result<u32, ApiError> {
    if value < 0 {
        return Err(ApiError::invalid(field, format!("must be at least 0, got {value}")));
    }
    Ok(u32::try_from(value).unwrap_or(u32::MAX))
}

/// The place in the queue.
///
/// # Errors
/// 400 with field, limits and value.
pub fn priority(value: Option<i64>) -> Result<i32, ApiError> {
    let value = value.unwrap_or(0);
    let range = format!("must be from {} to {}, got {value}", i32::MIN, i32::MAX);
    i32::try_from(value).map_err(|_| ApiError::invalid("priority", range))
}

/// How many choices to make. Checked before anything is made for each of them: the field is the client's.
///
/// # Errors
/// 400 with field, limit and value.
pub fn n_choices(value: Option<i64>, max_n: u32) -> Result<u32, ApiError> {
    let n = count("n", value.unwrap_or(1))?;
    if n == 0 || n > max_n {
        return Err(ApiError::invalid("n", format!("must be from 1 to {max_n}, got {n}")));
    }
    Ok(n)
}

/// A count of log-probabilities.
///
/// # Errors
/// 400 with field, limit and value.
pub fn n_logprobs(field: &'static str, value: i64) -> Result<u32, ApiError> {
    u32::try_from(value)
        .ok()
        .filter(|n| *n <= MAX_LOGPROBS)
        .ok_or_else(|| ApiError::invalid(field, format!("must be from 0 to {MAX_LOGPROBS}, got {value}")))
}

/// Checked stop strings.
///
/// # Errors
/// 400 for an empty string or too many.
pub fn stop_strings(stop: Option<&StringOrList>) -> Result<Vec<String>, ApiError> {
    let strings = stop.map_or(&[][..], StringOrList::as_slice);
    if strings.len() > MAX_STOP_STRINGS {
        let n = strings.len();
        return Err(ApiError::invalid("stop", format!("must hold at most {MAX_STOP_STRINGS} strings, got {n}")));
    }
    if let Some(at) = strings.iter().position(String::is_empty) {
        return Err(ApiError::invalid(format!("stop[{at}]"), "must not be empty"));
    }
    Ok(strings.to_vec())
}

/// Whether a usage chunk ends the stream, and whether each chunk carries one.
///
/// # Errors
/// 400 when there are options but no stream.
pub fn stream_usage(stream: bool, options: Option<StreamOptions>) -> Result<(bool, bool), ApiError> {
    let Some(options) = options else { return Ok((false, false)) };
    if !stream {
        return Err(ApiError::invalid("stream_options", "is only allowed when stream is true"));
    }
    let include = options.include_usage.unwrap_or(false);
    Ok((include, include && options.continuous_usage_stats.unwrap_or(false)))
}

fn top_k(value: i64) -> Result<u32, ApiError> {
    match value {
        -1 => Ok(0),
        _ => u32::try_from(value)
            .map_err(|_| ApiError::invalid("top_k", format!("must be -1, 0 or a positive number, got {value}"))),
    }
}

fn logit_bias(map: &HashMap<String, f32>) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let mut biases = Vec::with_capacity(map.len());
    for (key, bias) in map {
        let id = key
            .parse::<u32>()
            .map_err(|_| ApiError::invalid("logit_bias", format!("keys must be token ids, got {key:?}")))?;
        biases.push((TokenId(id), *bias));
    }
    biases.sort_by_key(|(id, _)| *id);
    biases.dedup_by_key(|(id, _)| *id);
    Ok(biases)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::extract::parse;

    #[derive(Debug, Deserialize)]
    struct Sample {
        #[serde(default)]
        stop: Option<StringOrList>,
        #[serde(default)]
        extra: Unsupported,
    }

    fn sample(text: &str) -> Result<Sample, ApiError> {
        parse(text.as_bytes())
    }

    #[test]
    fn stop_is_a_string_or_a_list() {
        let stop = |text: &str| stop_strings(sample(text).unwrap().stop.as_ref());
        assert_eq!(stop(r#"{"stop":null}"#).unwrap(), Vec::<String>::new());
        assert_eq!(stop(r#"{"stop":"a"}"#).unwrap(), ["a"]);
        assert_eq!(stop(r#"{"stop":["a","b"]}"#).unwrap(), ["a", "b"]);
        assert_eq!(stop(r#"{"stop":["a",""]}"#).unwrap_err().param.as_deref(), Some("stop[1]"));
        assert_eq!(sample(r#"{"stop":["a",1]}"#).unwrap_err().param.as_deref(), Some("stop[1]"));
        assert!(sample(r#"{"stop":7}"#).unwrap_err().message.contains("a string or a list of strings"));
    }

    #[test]
    fn empty_values_ask_for_nothing() {
        for text in ["{}", r#"{"extra":null}"#, r#"{"extra":[]}"#, r#"{"extra":{}}"#, r#"{"extra":false}"#] {
            assert!(sample(text).unwrap().extra.refuse("extra").is_ok(), "{text}");
        }
        for text in [r#"{"extra":[1]}"#, r#"{"extra":{"a":[{}]}}"#, r#"{"extra":0}"#, r#"{"extra":"x"}"#] {
            assert_eq!(sample(text).unwrap().extra.refuse("extra").unwrap_err().param.as_deref(), Some("extra"));
        }
    }

    #[test]
    fn the_request_wins_over_the_defaults() {
        let defaults = SamplingParams { temperature: 0.6, top_p: 0.95, ..SamplingParams::default() };
        let bias = HashMap::from([("7".to_owned(), 1.0), ("3".to_owned(), -2.0)]);
        let fields = SamplingFields {
            temperature: Some(0.0),
            top_p: None,
            top_k: Some(-1),
            min_p: None,
            presence_penalty: None,
            frequency_penalty: None,
            repetition_penalty: None,
            logit_bias: Some(&bias),
            seed: Some(-1),
        };
        let params = fields.resolve(&defaults).unwrap();
        assert_eq!((params.temperature, params.top_p, params.top_k), (0.0, 0.95, 0));
        assert_eq!(params.seed, Some(u64::MAX));
        assert_eq!(params.logit_bias, [(TokenId(3), -2.0), (TokenId(7), 1.0)]);
        assert!(SamplingFields { top_k: Some(-2), ..fields }.resolve(&defaults).is_err());
        let bias = HashMap::from([("x".to_owned(), 1.0)]);
        assert!(SamplingFields { logit_bias: Some(&bias), ..fields }.resolve(&defaults).is_err());
    }

    #[test]
    fn usage_needs_a_stream() {
        let options = |include| Some(StreamOptions { include_usage: include, continuous_usage_stats: None });
        assert_eq!(stream_usage(false, None).unwrap(), (false, false));
        assert_eq!(stream_usage(true, options(None)).unwrap(), (false, false));
        assert_eq!(stream_usage(true, options(Some(true))).unwrap(), (true, false));
        assert!(stream_usage(false, options(Some(true))).is_err());
    }
}
