//! One decision for renderer and parser: does the model think, and how hard.
//!
//! The first of these that a request gives decides whether it thinks: `thinking.type`, `think`,
//! `chat_template_kwargs.thinking`, `chat_template_kwargs.enable_thinking`, `reasoning_effort` (none: no; else yes),
//! `chat_template_kwargs.reasoning_effort`, then the server's default. How hard: `reasoning_effort`, then the keyword
//! argument's, then the server's default, then high.

use super::request::{ReasoningEffort, TemplateKwargs, ThinkingKind, ThinkingSwitch};
use crate::chat::{Effort, Mode};
use crate::http::settings::DefaultThinking;

/// Every field that speaks about thinking.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThinkingFields {
    /// `thinking`.
    pub thinking: Option<ThinkingSwitch>,
    /// `think`.
    pub think: Option<bool>,
    /// `chat_template_kwargs`.
    pub kwargs: Option<TemplateKwargs>,
    /// `reasoning_effort`.
    pub effort: Option<ReasoningEffort>,
}

/// The decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thinking {
    /// Mode of the new turn.
    pub mode: Mode,
    /// Level, in thinking mode.
    pub effort: Option<Effort>,
    /// Whether the request asked, rather than the server's default.
    pub asked: bool,
}

impl ThinkingFields {
    /// Resolves the fields over the server's default.
    #[must_use]
    pub fn resolve(&self, default: DefaultThinking) -> Thinking {
        let kwargs = self.kwargs.unwrap_or_default();
        let effort = self.effort.or(kwargs.reasoning_effort);
        let asked = self
            .thinking
            .map(|switch| switch.kind != ThinkingKind::Disabled)
            .or(self.think)
            .or(kwargs.thinking)
            .or(kwargs.enable_thinking)
            .or(effort.map(|effort| effort != ReasoningEffort::None));
        if !asked.unwrap_or(default.effort().is_some()) {
            return Thinking { mode: Mode::Chat, effort: None, asked: asked.is_some() };
        }
        let level = effort.and_then(level).or(default.effort()).unwrap_or(Effort::High);
        Thinking { mode: Mode::Thinking, effort: Some(level), asked: asked.is_some() }
    }
}

/// DeepSeek's hosted mapping onto the encoder's three levels.
const fn level(effort: ReasoningEffort) -> Option<Effort> {
    match effort {
        ReasoningEffort::None => None,
        ReasoningEffort::Minimal | ReasoningEffort::Low => Some(Effort::Low),
        ReasoningEffort::Medium | ReasoningEffort::High | ReasoningEffort::Xhigh => Some(Effort::High),
        ReasoningEffort::Max | ReasoningEffort::Ultra => Some(Effort::Max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(json: &str, default: DefaultThinking) -> (Option<Effort>, bool) {
        let json = format!(r#"{{"messages":[],{json}"x":0}}"#);
        let request: super::super::request::ChatRequest = crate::http::extract::parse(json.as_bytes()).unwrap();
        let thinking = ThinkingFields {
            thinking: request.thinking,
            think: request.think,
            kwargs: request.chat_template_kwargs,
            effort: request.reasoning_effort,
        }
        .resolve(default);
        assert_eq!(thinking.effort.is_some(), thinking.mode == Mode::Thinking);
        (thinking.effort, thinking.asked)
    }

    #[test]
    fn efforts_follow_the_hosted_table() {
        use Effort::{High, Low, Max};
        for (name, level) in [
            ("none", None),
            ("minimal", Some(Low)),
            ("low", Some(Low)),
            ("medium", Some(High)),
            ("high", Some(High)),
            ("xhigh", Some(High)),
            ("max", Some(Max)),
            ("ultra", Some(Max)),
        ] {
            let json = format!(r#""reasoning_effort":"{name}","#);
            assert_eq!(resolve(&json, DefaultThinking::Off), (level, true), "{name}");
            assert_eq!(resolve(&json, DefaultThinking::Max), (level, true), "{name}");
        }
        assert_eq!(resolve("", DefaultThinking::High), (Some(High), false));
        assert_eq!(resolve("", DefaultThinking::Off), (None, false));
    }

    #[test]
    fn the_request_wins_and_switches_have_an_order() {
        use Effort::{High, Low, Max};
        let off = DefaultThinking::Off;
        let high = DefaultThinking::High;
        assert_eq!(resolve(r#""thinking":{"type":"disabled"},"#, high), (None, true));
        assert_eq!(resolve(r#""chat_template_kwargs":{"thinking":false},"#, high), (None, true));
        assert_eq!(resolve(r#""chat_template_kwargs":{"enable_thinking":true},"#, off), (Some(High), true));
        assert_eq!(resolve(r#""think":true,"reasoning_effort":"none","#, off), (Some(High), true));
        assert_eq!(resolve(r#""thinking":{"type":"enabled"},"reasoning_effort":"max","#, off), (Some(Max), true));
        assert_eq!(
            resolve(r#""thinking":{"type":"disabled"},"think":true,"reasoning_effort":"max","#, off),
            (None, true)
        );
        assert_eq!(resolve(r#""thinking":{"type":"enabled"},"#, DefaultThinking::Low), (Some(Low), true));
        assert_eq!(resolve(r#""thinking":null,"think":null,"#, off), (None, false));
    }

    #[test]
    fn unknown_efforts_are_named() {
        let json = br#"{"messages":[],"reasoning_effort":"foo"}"#;
        let error = crate::http::extract::parse::<super::super::request::ChatRequest>(json).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("reasoning_effort"));
        for name in ["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"] {
            assert!(error.message.contains(name), "{}", error.message);
        }
    }
}
