//! The bodies of POST /v1/chat/completions and /v1/completions, as they come off the wire.
//!
//! null means absent, unknown fields are ignored, and fields that would change the output but are not supported are kept
//! as [`Unsupported`] so that they can be refused.

use std::collections::HashMap;
use std::fmt;

use serde::de::{self, Deserializer, IntoDeserializer, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::fields::{ResponseFormat, SamplingFields, StreamOptions, StringOrList, Unsupported, logit_bias_schema};
use super::message::{ChatMessage, Tool, ToolChoice};
use crate::http::error::ApiError;
use crate::http::shape::{TokenNumber, Whole, objects, optional_token_ids, plain_ids, whole, words};

/// Declares a request struct with the fields that both endpoints share.
macro_rules! request {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, Deserialize, ToSchema)]
        #[serde(remote = "Self")]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
            /// The model's name; absent: the one that is served.
            #[serde(default)]
            pub model: Option<String>,
            /// Tokens to generate at most; cut to what the context leaves. 0 prefills and generates nothing.
            #[serde(default, deserialize_with = "whole")]
            #[schema(minimum = 0)]
            pub max_tokens: Option<i64>,
            /// 0 is greedy.
            #[serde(default)]
            #[schema(minimum = 0, maximum = 2)]
            pub temperature: Option<f32>,
            /// Keep the smallest set of tokens whose probability reaches this.
            #[serde(default)]
            #[schema(exclusive_minimum = 0, maximum = 1)]
            pub top_p: Option<f32>,
            /// Keep the k most likely tokens; 0 and -1 keep all.
            #[serde(default, deserialize_with = "whole")]
            #[schema(minimum = -1, maximum = 4294967295i64)]
            pub top_k: Option<i64>,
            /// Drop tokens less likely than this share of the most likely one.
            #[serde(default)]
            #[schema(minimum = 0, maximum = 1)]
            pub min_p: Option<f32>,
            /// Subtracted from the logit of every token already generated.
            #[serde(default)]
            #[schema(minimum = -2, maximum = 2)]
            pub presence_penalty: Option<f32>,
            /// Subtracted once per earlier occurrence.
            #[serde(default)]
            #[schema(minimum = -2, maximum = 2)]
            pub frequency_penalty: Option<f32>,
            /// Divides positive and multiplies negative logits of tokens seen before.
            #[serde(default)]
            #[schema(exclusive_minimum = 0, maximum = 2)]
            pub repetition_penalty: Option<f32>,
            /// Token id (as text) → bias from -100 to 100.
            #[serde(default)]
            #[schema(schema_with = logit_bias_schema)]
            pub logit_bias: Option<HashMap<String, f32>>,
            /// Equal seeds give equal text.
            #[serde(default, deserialize_with = "whole")]
            pub seed: Option<i64>,
            /// Independent choices.
            #[serde(default, deserialize_with = "whole")]
            #[schema(minimum = 1)]
            pub n: Option<i64>,
            /// Strings that end a choice; they are not part of the answer.
            #[serde(default)]
            pub stop: Option<StringOrList>,
            /// Ids that end a choice.
            #[serde(default, deserialize_with = "optional_token_ids")]
            pub stop_token_ids: Option<Vec<u32>>,
            /// Show the stop string.
            #[serde(default)]
            pub include_stop_str_in_output: Option<bool>,
            /// Go on past the end-of-sequence token.
            #[serde(default)]
            pub ignore_eos: Option<bool>,
            /// End-of-sequence and stop ids are banned before this many tokens.
            #[serde(default, deserialize_with = "whole")]
            #[schema(minimum = 0)]
            pub min_tokens: Option<i64>,
            /// Answer as server-sent events.
            #[serde(default)]
            pub stream: Option<bool>,
            /// Only with `stream`.
            #[serde(default)]
            pub stream_options: Option<StreamOptions>,
            /// Log-probabilities of the prompt's tokens: how many of the most likely.
            #[serde(default, deserialize_with = "whole")]
            #[schema(minimum = 0, maximum = 20)]
            pub prompt_logprobs: Option<i64>,
            /// Lower runs earlier.
            #[serde(default, deserialize_with = "whole")]
            #[schema(minimum = -2147483648i64, maximum = 2147483647i64)]
            pub priority: Option<i64>,
            /// Only requests with the same salt share a prefix cache.
            #[serde(default)]
            #[schema(min_length = 1, max_length = 128)]
            pub cache_salt: Option<String>,
            /// Add the token ids to the answer.
            #[serde(default)]
            pub return_token_ids: Option<bool>,
            /// Write tokens in log-probabilities as `token_id:N`.
            #[serde(default)]
            pub return_tokens_as_token_ids: Option<bool>,
            /// Only `{"type": "text"}` is supported yet.
            #[serde(default)]
            pub response_format: Option<ResponseFormat>,
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub structured_outputs: Unsupported,
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub guided_json: Unsupported,
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub guided_regex: Unsupported,
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub guided_choice: Unsupported,
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub guided_grammar: Unsupported,
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub allowed_token_ids: Unsupported,
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub bad_words: Unsupported,
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub use_beam_search: Unsupported,
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub truncate_prompt_tokens: Unsupported,
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub logits_processors: Unsupported,
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub logprob_token_ids: Unsupported,
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub repetition_detection: Unsupported,
            /// Of beam search; 1 is no penalty.
            #[serde(default)]
            #[schema(ignore)]
            #[doc(hidden)]
            pub length_penalty: Option<f32>,
        }

        impl $name {
            /// The sampling fields.
            #[must_use]
            pub const fn sampling(&self) -> SamplingFields<'_> {
                SamplingFields {
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    repetition_penalty: self.repetition_penalty,
                    logit_bias: self.logit_bias.as_ref(),
                    seed: self.seed,
                }
            }

            /// Refuses what would change the output and is not supported.
            ///
            /// # Errors
            /// 400 that names the field.
            pub fn refuse_unsupported(&self) -> Result<(), ApiError> {
                self.structured_outputs.refuse("structured_outputs")?;
                self.guided_json.refuse("guided_json")?;
                self.guided_regex.refuse("guided_regex")?;
                self.guided_choice.refuse("guided_choice")?;
                self.guided_grammar.refuse("guided_grammar")?;
                self.allowed_token_ids.refuse("allowed_token_ids")?;
                self.bad_words.refuse("bad_words")?;
                self.use_beam_search.refuse("use_beam_search")?;
                self.truncate_prompt_tokens.refuse("truncate_prompt_tokens")?;
                self.logits_processors.refuse("logits_processors")?;
                self.logprob_token_ids.refuse("logprob_token_ids")?;
                self.repetition_detection.refuse("repetition_detection")?;
                Unsupported::asks(self.length_penalty.is_some_and(|penalty| penalty != 1.0)).refuse("length_penalty")?;
                self.response_format.as_ref().map_or(Ok(()), ResponseFormat::check)
            }
        }
    };
}

request! {
    /// Body of POST /v1/chat/completions.
    ChatRequest {
        /// The conversation.
        #[schema(min_items = 1)]
        messages: Vec<ChatMessage>,
        /// As max_tokens, which it wins over.
        #[serde(default, deserialize_with = "whole")]
        #[schema(minimum = 0)]
        max_completion_tokens: Option<i64>,
        /// Log-probabilities of the answer's tokens.
        #[serde(default)]
        logprobs: Option<bool>,
        /// How many of the most likely tokens at each position; needs `logprobs`.
        #[serde(default, deserialize_with = "whole")]
        #[schema(minimum = 0, maximum = 20)]
        top_logprobs: Option<i64>,
        /// Functions the model may call.
        #[serde(default)]
        tools: Option<Vec<Tool>>,
        /// none, auto, required, or one function.
        #[serde(default)]
        tool_choice: Option<ToolChoice>,
        /// false keeps the first call only.
        #[serde(default)]
        parallel_tool_calls: Option<bool>,
        /// none, minimal, low, medium, high, xhigh, max or ultra.
        #[serde(default)]
        reasoning_effort: Option<ReasoningEffort>,
        /// DeepSeek's switch.
        #[serde(default)]
        thinking: Option<ThinkingSwitch>,
        /// The same as a truth value.
        #[serde(default)]
        think: Option<bool>,
        /// The same, and more, as vLLM's templates take it.
        #[serde(default)]
        chat_template_kwargs: Option<TemplateKwargs>,
        /// false leaves the reasoning out of the answer.
        #[serde(default)]
        include_reasoning: Option<bool>,
        /// Open a new assistant turn (the default unless continue_final_message).
        #[serde(default)]
        add_generation_prompt: Option<bool>,
        /// Go on with the last message, which must be the assistant's.
        #[serde(default)]
        continue_final_message: Option<bool>,
        #[serde(default)]
        #[schema(ignore)]
        #[doc(hidden)]
        echo: Unsupported,
        #[serde(default)]
        #[schema(ignore)]
        #[doc(hidden)]
        thinking_token_budget: Unsupported,
        #[serde(default)]
        #[schema(ignore)]
        #[doc(hidden)]
        functions: Unsupported,
        /// tool_choice of old; "none" without tools asks for nothing.
        #[serde(default)]
        #[schema(ignore)]
        #[doc(hidden)]
        function_call: Option<Value>,
        #[serde(default)]
        #[schema(ignore)]
        #[doc(hidden)]
        chat_template: Unsupported,
        #[serde(default)]
        #[schema(ignore)]
        #[doc(hidden)]
        documents: Unsupported,
        #[serde(default)]
        #[schema(ignore)]
        #[doc(hidden)]
        web_search_options: Unsupported,
        #[serde(default)]
        #[schema(ignore)]
        #[doc(hidden)]
        audio: Unsupported,
    }
}

request! {
    /// Body of POST /v1/completions.
    CompletionRequest {
        /// One prompt or several, as text or as token ids.
        prompt: Prompt,
        /// Log-probabilities: how many of the most likely tokens at each position.
        #[serde(default, deserialize_with = "whole")]
        #[schema(minimum = 0, maximum = 20)]
        logprobs: Option<i64>,
        /// Start each choice with the prompt.
        #[serde(default)]
        echo: Option<bool>,
        /// Start text prompts with the begin-of-sequence token (the default).
        #[serde(default)]
        add_special_tokens: Option<bool>,
        /// false shows control tokens in the text.
        #[serde(default)]
        skip_special_tokens: Option<bool>,
        /// Only as `n`.
        #[serde(default, deserialize_with = "whole")]
        #[schema(ignore)]
        best_of: Option<i64>,
        #[serde(default)]
        #[schema(ignore)]
        #[doc(hidden)]
        suffix: Unsupported,
        #[serde(default)]
        #[schema(ignore)]
        #[doc(hidden)]
        prompt_embeds: Unsupported,
    }
}

/// Prompts of /v1/completions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Prompt {
    /// One text.
    Text(String),
    /// Several texts.
    Texts(Vec<String>),
    /// One list of token ids.
    Ids(Vec<u32>),
    /// Several lists of token ids.
    IdLists(Vec<Vec<u32>>),
}

/// What a request asks the model to spend on reasoning: DeepSeek's hosted names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(remote = "Self", rename_all = "lowercase")]
pub enum ReasoningEffort {
    /// No thinking.
    None,
    /// As low.
    Minimal,
    /// Low.
    Low,
    /// As high.
    Medium,
    /// High.
    High,
    /// As high.
    Xhigh,
    /// Max.
    Max,
    /// As max.
    Ultra,
}

/// `{"type": "enabled"}` or `{"type": "disabled"}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub struct ThinkingSwitch {
    /// On or off.
    #[serde(rename = "type")]
    pub kind: ThinkingKind,
}

/// Values of `thinking.type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(remote = "Self", rename_all = "lowercase")]
pub enum ThinkingKind {
    /// On.
    Enabled,
    /// Off.
    Disabled,
    /// On: this model decides by itself how long it thinks.
    Adaptive,
}

/// Switches that vLLM's clients pass to the template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub struct TemplateKwargs {
    /// Think.
    #[serde(default)]
    pub thinking: Option<bool>,
    /// Think.
    #[serde(default)]
    pub enable_thinking: Option<bool>,
    /// Leave out the reasoning of earlier turns (the default).
    #[serde(default)]
    pub drop_thinking: Option<bool>,
    /// As the field of the request, which wins.
    #[serde(default)]
    pub reasoning_effort: Option<ReasoningEffort>,
}

objects!(ChatRequest, CompletionRequest, ThinkingSwitch, TemplateKwargs);
words!(
    ReasoningEffort: "none, minimal, low, medium, high, xhigh, max, ultra",
    ThinkingKind: "enabled, disabled, adaptive",
);

impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor)
    }
}

struct PromptVisitor;

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = Prompt;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of strings, a list of token ids, or a list of lists of token ids")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompt, E> {
        Ok(Prompt::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompt, A::Error> {
        match seq.next_element()? {
            None => Err(de::Error::custom("must not be empty")),
            Some(PromptItem::Text(first)) => Ok(Prompt::Texts(rest(first, seq)?)),
            Some(PromptItem::Id(first)) => Ok(Prompt::Ids(plain_ids(rest(first, seq)?))),
            Some(PromptItem::Ids(first)) => {
                let lists = rest(first, seq)?;
                Ok(Prompt::IdLists(lists.into_iter().map(plain_ids).collect()))
            }
        }
    }
}

/// The other elements must be of the first one's kind.
fn rest<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(first: T, mut seq: A) -> Result<Vec<T>, A::Error> {
    let mut items = vec![first];
    while let Some(item) = seq.next_element()? {
        items.push(item);
    }
    Ok(items)
}

enum PromptItem {
    Text(String),
    Id(TokenNumber),
    Ids(Vec<TokenNumber>),
}

impl<'de> Deserialize<'de> for PromptItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptItemVisitor)
    }
}

struct PromptItemVisitor;

impl<'de> Visitor<'de> for PromptItemVisitor {
    type Value = PromptItem;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a token id or a list of token ids")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<PromptItem, E> {
        Ok(PromptItem::Text(text.to_owned()))
    }

    fn visit_u64<E: de::Error>(self, id: u64) -> Result<PromptItem, E> {
        Whole::deserialize(id.into_deserializer()).and_then(|id| TokenNumber::new(id.0)).map(PromptItem::Id)
    }

    fn visit_i64<E: de::Error>(self, id: i64) -> Result<PromptItem, E> {
        TokenNumber::new(id).map(PromptItem::Id)
    }

    fn visit_f64<E: de::Error>(self, id: f64) -> Result<PromptItem, E> {
        Whole::deserialize(id.into_deserializer()).and_then(|id| TokenNumber::new(id.0)).map(PromptItem::Id)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptItem, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = seq.next_element()? {
            ids.push(id);
        }
        Ok(PromptItem::Ids(ids))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::extract::parse;

    fn prompt(json: &str) -> Result<Prompt, ApiError> {
        parse::<CompletionRequest>(format!(r#"{{"prompt":{json}}}"#).as_bytes()).map(|request| request.prompt)
    }

    #[test]
    fn prompts_come_in_four_shapes() {
        assert_eq!(prompt(r#""a""#).unwrap(), Prompt::Text("a".to_owned()));
        assert_eq!(prompt(r#"["a","b"]"#).unwrap(), Prompt::Texts(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(prompt("[1,2]").unwrap(), Prompt::Ids(vec![1, 2]));
        assert_eq!(prompt("[[1],[2,3]]").unwrap(), Prompt::IdLists(vec![vec![1], vec![2, 3]]));
    }

    #[test]
    fn mixed_prompts_name_the_element() {
        for (json, param) in [
            ("[]", "prompt"),
            ("null", "prompt"),
            ("{}", "prompt"),
            (r#"[1,"a"]"#, "prompt[1]"),
            (r#"["a",1]"#, "prompt[1]"),
            ("[-1]", "prompt[0]"),
            ("[1.5]", "prompt[0]"),
            ("[4294967296]", "prompt[0]"),
            ("[[1],[2,-3]]", "prompt[1][1]"),
        ] {
            assert_eq!(prompt(json).unwrap_err().param.as_deref(), Some(param), "{json}");
        }
    }

    #[test]
    fn null_is_absent() {
        let fields = "model max_tokens temperature top_p top_k min_p presence_penalty frequency_penalty \
            repetition_penalty logit_bias seed n stop stop_token_ids include_stop_str_in_output ignore_eos min_tokens \
            stream stream_options prompt_logprobs priority cache_salt return_token_ids response_format \
            structured_outputs guided_json bad_words max_completion_tokens logprobs top_logprobs tools tool_choice \
            parallel_tool_calls reasoning_effort thinking think chat_template_kwargs include_reasoning \
            add_generation_prompt continue_final_message functions user metadata store service_tier";
        let nulls: String = fields.split_whitespace().map(|name| format!(r#","{name}":null"#)).collect();
        let json = format!(r#"{{"messages":[]{nulls}}}"#);
        let request: ChatRequest = parse(json.as_bytes()).unwrap();
        request.refuse_unsupported().unwrap();
        assert!(request.stop.is_none() && request.tools.is_none() && request.reasoning_effort.is_none());
    }

    #[test]
    fn whole_numbers_with_a_point_are_token_ids() {
        assert_eq!(prompt("[13529.0,2]").unwrap(), Prompt::Ids(vec![13529, 2]));
        assert_eq!(prompt("[[1.0],[2,3e0]]").unwrap(), Prompt::IdLists(vec![vec![1], vec![2, 3]]));
        let json = br#"{"prompt":[1],"stop_token_ids":[7.0],"priority":-2.0}"#;
        let request: CompletionRequest = parse(json).unwrap();
        assert_eq!((request.stop_token_ids, request.priority), (Some(vec![7]), Some(-2)));
    }

    #[test]
    fn unsupported_fields_are_named() {
        let json = br#"{"messages":[],"guided_regex":"a+"}"#;
        let error = parse::<ChatRequest>(json).unwrap().refuse_unsupported().unwrap_err();
        assert_eq!(error.param.as_deref(), Some("guided_regex"));
        let json = br#"{"messages":[],"response_format":{"type":"json_object"}}"#;
        assert!(parse::<ChatRequest>(json).unwrap().refuse_unsupported().unwrap_err().message.contains("json_object"));
    }
}
