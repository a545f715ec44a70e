//! From a chat request to prompt ids: thinking, tools, the template, a forced call's opening, encoding.

use super::message::{ChatMessage, Tool, ToolChoice, ToolForce, ToolUse};
use super::thinking::{Thinking, ThinkingFields};
use crate::chat::parse::ParserOptions;
use crate::chat::prepare::{Conversation, prompt};
use crate::chat::template::TemplateError;
use crate::chat::{Mode, Segment};
use crate::http::choice::ChatText;
use crate::http::error::{ApiError, ErrorKind};
use crate::http::generate::off_thread;
use crate::http::settings::DefaultThinking;
use crate::http::state::AppState;
use crate::ids::TokenId;
use crate::tokenizer::{EncodeError, Tokenizer};

/// The token before each tag of a call.
const DSML: &str = "｜DSML｜";

/// The fields of a request that shape its prompt.
#[derive(Clone, Debug, Default)]
pub struct PromptFields {
    /// The conversation.
    pub messages: Vec<ChatMessage>,
    /// Functions.
    pub tools: Option<Vec<Tool>>,
    /// Which of them.
    pub tool_choice: Option<ToolChoice>,
    /// false: one call at most.
    pub parallel_tool_calls: Option<bool>,
    /// Switches of thinking.
    pub thinking: ThinkingFields,
    /// Open a new turn.
    pub add_generation_prompt: Option<bool>,
    /// Go on with the last message.
    pub continue_final_message: Option<bool>,
}

/// A prompt ready to run.
#[derive(Clone, Debug)]
pub struct ChatPrompt {
    /// Its ids.
    pub ids: Vec<TokenId>,
    /// How to read the answer.
    pub text: ChatText,
    /// Whether one function was named: the finish reason is then "stop", as OpenAI's.
    pub is_named: bool,
}

/// Renders and encodes a conversation, off the async threads.
///
/// # Errors
/// 400 for what cannot be rendered.
pub async fn build(state: &AppState, fields: PromptFields) -> Result<ChatPrompt, ApiError> {
    let plan = Plan::new(fields, state.config().default_thinking)?;
    off_thread(state.tokenizer(), move |tokenizer, cancelled| plan.run(tokenizer, cancelled)).await
}

/// A checked request for a prompt.
struct Plan {
    conversation: Conversation,
    tools: ToolUse,
    max_calls: usize,
}

impl Plan {
    fn new(fields: PromptFields, default: DefaultThinking) -> Result<Self, ApiError> {
        let tools = ToolUse::new(fields.tools, fields.tool_choice)?;
        let thinking = settle(fields.thinking.resolve(default), &tools.force)?;
        let continues = fields.continue_final_message.unwrap_or(false)
            || fields.messages.last().is_some_and(|message| message.prefix == Some(true));
        let messages = fields.messages.into_iter().enumerate();
        let messages = messages.map(|(index, message)| message.into_message(index)).collect::<Result<Vec<_>, _>>()?;
        let max_calls = match tools.force {
            ToolForce::None => 0,
            ToolForce::Named(_) => 1,
            _ if fields.parallel_tool_calls == Some(false) => 1,
            _ => usize::MAX,
        };
        let conversation = Conversation {
            messages,
            tools: if tools.force == ToolForce::None { Vec::new() } else { tools.functions.clone() },
            response_format: None,
            mode: thinking.mode,
            effort: thinking.effort,
            drop_thinking: fields.thinking.kwargs.and_then(|kwargs| kwargs.drop_thinking).unwrap_or(true),
            add_generation_prompt: fields.add_generation_prompt,
            continue_final_message: continues,
        };
        Ok(Self { conversation, tools, max_calls })
    }

    fn run(self, tokenizer: &Tokenizer, cancelled: &(dyn Fn() -> bool + Sync)) -> Result<ChatPrompt, ApiError> {
        let mut rendered = prompt(self.conversation).map_err(|error| template_error(&error))?;
        let opening = opening(&self.tools.force);
        if !opening.is_empty() && rendered.completion_mode == Mode::Thinking {
            return Err(forced_while_thinking());
        }
        let prefix = opening.iter().map(segment_text).collect();
        rendered.segments.extend(opening);
        let ids = tokenizer.encode_unless(&rendered.segments, cancelled).map_err(encode_error)?;
        let parser = ParserOptions { mode: rendered.completion_mode, tools: Some(self.tools.specs()) };
        let is_named = matches!(self.tools.force, ToolForce::Named(_));
        Ok(ChatPrompt { ids, text: ChatText { parser, prefix, max_calls: self.max_calls }, is_named })
    }
}

/// What could not be encoded.
#[must_use]
pub fn encode_error(error: EncodeError) -> ApiError {
    match error {
        // Nobody is left to read this.
        EncodeError::Cancelled => ApiError::new(ErrorKind::Internal, error.to_string()),
        EncodeError::UnknownControl(_) | EncodeError::Failed(_) => ApiError::internal(error),
    }
}

/// A forced call and thinking exclude each other: without a grammar, the call is forced by its opening, which must be
/// the first thing that the model answers. A server default of thinking gives way; a request's own wish is an error.
fn settle(thinking: Thinking, force: &ToolForce) -> Result<Thinking, ApiError> {
    match (thinking.mode, force) {
        (Mode::Thinking, ToolForce::Required | ToolForce::Named(_)) if thinking.asked => Err(forced_while_thinking()),
        (Mode::Thinking, ToolForce::Required | ToolForce::Named(_)) => {
            Ok(Thinking { mode: Mode::Chat, effort: None, ..thinking })
        }
        _ => Ok(thinking),
    }
}

fn forced_while_thinking() -> ApiError {
    ApiError::unsupported(
        "tool_choice",
        "\"required\" or a named function needs thinking off: send \"thinking\": {\"type\": \"disabled\"}",
    )
}

/// The beginning of a call, where the model must make one.
fn opening(force: &ToolForce) -> Vec<Segment> {
    let end = match force {
        ToolForce::None | ToolForce::Auto => return Vec::new(),
        // Ends at a word's edge, where the model's own tokens end too.
        ToolForce::Required => "invoke".to_owned(),
        ToolForce::Named(name) => format!("invoke name=\"{name}\">\n"),
    };
    vec![
        Segment::Text("\n\n<".to_owned()),
        Segment::Control(DSML),
        Segment::Text("tool_calls>\n<".to_owned()),
        Segment::Control(DSML),
        Segment::Text(end),
    ]
}

fn segment_text(segment: &Segment) -> &str {
    match segment {
        Segment::Control(text) => text,
        Segment::Text(text) => text,
    }
}

fn template_error(error: &TemplateError) -> ApiError {
    let param = match error {
        TemplateError::Arguments { index, call, .. } => {
            format!("messages[{index}].tool_calls[{call}].function.arguments")
        }
        TemplateError::UnknownToolCall { index, .. } => format!("messages[{index}].tool_call_id"),
        TemplateError::ContinueNotAssistant { .. } | TemplateError::ContinueAndGenerate => {
            "continue_final_message".to_owned()
        }
        TemplateError::Empty => "messages".to_owned(),
    };
    ApiError { param: Some(param), ..ApiError::new(ErrorKind::Invalid, error.to_string()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::Effort;

    fn thinking(mode: Mode, asked: bool) -> Thinking {
        Thinking { mode, effort: (mode == Mode::Thinking).then_some(Effort::High), asked }
    }

    #[test]
    fn a_forced_call_turns_the_default_thinking_off() {
        let named = ToolForce::Named("f".to_owned());
        for force in [&ToolForce::Required, &named] {
            assert_eq!(settle(thinking(Mode::Thinking, false), force).unwrap(), thinking(Mode::Chat, false));
            assert_eq!(settle(thinking(Mode::Chat, true), force).unwrap(), thinking(Mode::Chat, true));
            assert_eq!(
                settle(thinking(Mode::Thinking, true), force).unwrap_err().param.as_deref(),
                Some("tool_choice")
            );
        }
        let kept = thinking(Mode::Thinking, true);
        assert_eq!(settle(kept, &ToolForce::Auto).unwrap(), kept);
    }

    #[test]
    fn openings_are_the_encoders_own_text() {
        let text = |force: ToolForce| opening(&force).iter().map(segment_text).collect::<String>();
        assert_eq!(text(ToolForce::Auto), "");
        assert_eq!(text(ToolForce::Required), "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke");
        let named = text(ToolForce::Named("run".to_owned()));
        assert_eq!(named, "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"run\">\n");
    }
}
