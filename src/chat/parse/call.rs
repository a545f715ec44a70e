//! One tool call while it is read: its parameters become the text of a JSON object as they arrive.

use std::{collections::HashSet, sync::Arc};

use serde_json::Value as Json;

use super::{
    tags::{self, Look},
    tools::Tool,
};
use crate::chat::json;

/// A call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    /// What the request declares of the tool.
    tool: Option<Arc<Tool>>,
    /// Names seen so far.
    names: HashSet<String>,
    /// Whether the object's brace is written.
    is_open: bool,
    value: Option<Value>,
    /// A first parameter that may be a wrapper around the arguments, kept until the next tag decides.
    wrapper: Option<Value>,
}

/// A parameter's value.
#[derive(Clone, Debug)]
struct Value {
    name: String,
    kind: Kind,
    /// The text so far, of the kinds that are written when they end.
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Written as it arrives.
    String,
    /// Written at its end: JSON as it is, anything else as a string.
    JsonOrString,
    /// As `String`, or `JsonOrString`, unless it turns out to wrap the arguments.
    MaybeWrapper { is_string: bool },
    /// A name that the call already has: the first value counts.
    Repeated,
}

/// What a step of a value did.
pub(super) enum ValueStep {
    /// The value goes on; so many bytes were read.
    Read(usize),
    /// The value ended; so many bytes were read.
    Ended(usize),
}

impl Call {
    /// A call of `tool`, which is none where the request does not say.
    pub(super) fn new(tool: Option<Arc<Tool>>) -> Self {
        Self { tool, names: HashSet::new(), is_open: false, value: None, wrapper: None }
    }

    /// Whether a value is being read.
    pub(super) fn is_in_value(&self) -> bool {
        self.value.is_some()
    }

    /// Begins a parameter with its string flag as written. Returns JSON text.
    pub(super) fn begin_value(&mut self, name: &str, flag: Option<&str>) -> String {
        let mut out = self.wrapper.take().map(|wrapper| self.write_whole(wrapper)).unwrap_or_default();
        let schema_type = self.tool.as_ref().and_then(|tool| tool.type_of(name));
        let is_string = match flag {
            Some("true") => true,
            Some("false") => false,
            // Neither: the schema decides.
            _ => schema_type == Some("string"),
        };
        let undeclared = self.tool.as_ref().is_some_and(|tool| tool.has_properties() && !tool.declares(name));
        let kind = if self.names.contains(name) {
            Kind::Repeated
        } else if self.names.is_empty() && undeclared && matches!(name, "arguments" | "input") {
            Kind::MaybeWrapper { is_string }
        } else if is_string {
            Kind::String
        } else {
            Kind::JsonOrString
        };
        if kind == Kind::String {
            out.push_str(&self.write_name(name));
            out.push('"');
        }
        self.names.insert(name.to_owned());
        self.value = Some(Value { name: name.to_owned(), kind, text: String::new() });
        out
    }

    /// Reads on in the value at the start of `text` and appends JSON text to `out`. `is_last` says that no more text
    /// follows.
    pub(super) fn read_value(&mut self, text: &str, is_last: bool, out: &mut String) -> ValueStep {
        let mut from = 0;
        while let Some(offset) = text[from..].find(['\n', '<']) {
            let at = from + offset;
            let rest = &text[at..];
            let end = tags::literal(rest, tags::PARAMETER_END).or(|| tags::value_end(rest, is_last));
            match end {
                Look::No => from = at + 1,
                Look::Maybe => {
                    self.take_text(&text[..at], out);
                    return ValueStep::Read(at);
                }
                Look::Yes((), length) => {
                    self.take_text(&text[..at], out);
                    self.end_value(out);
                    return ValueStep::Ended(at + length);
                }
            }
        }
        self.take_text(text, out);
        ValueStep::Read(text.len())
    }

    /// Ends the value that is being read.
    pub(super) fn end_value(&mut self, out: &mut String) {
        let Some(value) = self.value.take() else { return };
        match value.kind {
            Kind::String => out.push('"'),
            Kind::JsonOrString => out.push_str(&self.write_whole(value)),
            Kind::MaybeWrapper { .. } => self.wrapper = Some(value),
            Kind::Repeated => {}
        }
    }

    /// Ends the call. Returns the rest of its JSON text.
    pub(super) fn end(&mut self) -> String {
        let mut out = String::new();
        self.end_value(&mut out);
        if let Some(wrapper) = self.wrapper.take() {
            if let Some(names) = self.tool.as_ref().and_then(|tool| tool.unwrapped_names(&wrapper.text)) {
                self.names = names;
                return wrapper.text.trim().to_owned();
            }
            out.push_str(&self.write_whole(wrapper));
        }
        out.push_str(if self.is_open { "}" } else { "{}" });
        out
    }

    /// Whether the ended call has every argument that its tool requires.
    pub(super) fn has_required(&self) -> bool {
        self.tool.as_ref().is_none_or(|tool| tool.required().all(|name| self.names.contains(name)))
    }

    fn take_text(&mut self, text: &str, out: &mut String) {
        let text = &*tags::spelt(text);
        match &mut self.value {
            Some(Value { kind: Kind::String, .. }) => {
                let quoted = json::quote(text);
                out.push_str(&quoted[1..quoted.len() - 1]);
            }
            Some(Value { kind: Kind::JsonOrString | Kind::MaybeWrapper { .. }, text: taken, .. }) => {
                taken.push_str(text)
            }
            Some(Value { kind: Kind::Repeated, .. }) | None => {}
        }
    }

    fn write_name(&mut self, name: &str) -> String {
        let before = if self.is_open { ", " } else { "{" };
        self.is_open = true;
        format!("{before}{}: ", json::quote(name))
    }

    /// A parameter whose value is known: JSON stays as the model wrote it.
    fn write_whole(&mut self, value: Value) -> String {
        let is_json =
            value.kind != Kind::MaybeWrapper { is_string: true } && serde_json::from_str::<Json>(&value.text).is_ok();
        let text = if is_json { value.text } else { json::quote(&value.text) };
        self.write_name(&value.name) + &text
    }
}
