//! What the parser knows of the tools that a request declares.

use std::{collections::HashMap, collections::HashSet, sync::Arc};

use serde_json::{Map, Value};

/// A tool that the request declares.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolSpec {
    /// The function's name.
    pub name: String,
    /// Its JSON schema.
    pub parameters: Option<Value>,
}

/// A tool's schema as far as the parser uses it.
#[derive(Clone, Debug, Default)]
pub(super) struct Tool {
    /// None where the tool has no schema, or one without properties of its own.
    properties: Option<Map<String, Value>>,
    required: Vec<String>,
}

/// The tools of a request by name.
pub(super) type Tools = HashMap<String, Arc<Tool>>;

/// Reads the specifications.
pub(super) fn index(specs: Vec<ToolSpec>) -> Tools {
    specs.into_iter().map(|spec| (spec.name, Arc::new(Tool::new(spec.parameters)))).collect()
}

/// Whether a name that no tool has can be a function's name at all, and not an example such as `$TOOL_NAME`.
pub(super) fn is_plausible_name(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/".contains(&byte);
    !name.is_empty() && name.len() <= 128 && name.bytes().all(is_letter)
}

impl Tool {
    fn new(parameters: Option<Value>) -> Self {
        let Some(Value::Object(mut schema)) = parameters else { return Self::default() };
        let required = match schema.remove("required") {
            Some(Value::Array(names)) => names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect(),
            _ => Vec::new(),
        };
        let properties = match schema.remove("properties") {
            Some(Value::Object(properties)) => Some(properties),
            _ => None,
        };
        Self { properties, required }
    }

    pub(super) fn has_properties(&self) -> bool {
        self.properties.is_some()
    }

    pub(super) fn declares(&self, name: &str) -> bool {
        self.properties.as_ref().is_some_and(|properties| properties.contains_key(name))
    }

    /// The declared JSON type of a parameter.
    pub(super) fn type_of(&self, name: &str) -> Option<&str> {
        self.properties.as_ref()?.get(name)?.get("type")?.as_str()
    }

    pub(super) fn required(&self) -> impl Iterator<Item = &str> {
        self.required.iter().map(String::as_str)
    }

    /// The names in `text` if it is a JSON object of declared parameters only: then it is the arguments themselves.
    pub(super) fn unwrapped_names(&self, text: &str) -> Option<HashSet<String>> {
        let inner: Map<String, Value> = serde_json::from_str(text).ok()?;
        inner.keys().all(|name| self.declares(name)).then(|| inner.keys().cloned().collect())
    }
}
