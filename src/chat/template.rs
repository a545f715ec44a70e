//! Messages to the prompt's segments, byte for byte as the published encoder of DeepSeek-V4 (revision 0731).

use std::collections::HashMap;

use super::{
    Effort, Mode, Segment, json,
    message::{Message, Role, Task, ToolCall},
};

/// How a conversation is rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RenderOptions {
    /// Chat or thinking.
    pub mode: Mode,
    /// Leave reasoning out before the last user message. Tools in any message turn it off.
    pub drop_thinking: bool,
    /// The effort prefix, in thinking mode only; none is low.
    pub effort: Option<Effort>,
    /// Open a turn at the end even after an assistant or system message. The encoder alone does not.
    pub add_generation_prompt: bool,
    /// Open the turn of an assistant message that a system message parts from its user message. The encoder alone
    /// does not.
    pub bridge_system: bool,
    /// Keep text from closing the frame it stands in: `</tool_result>` in a tool result loses its bracket, and a call
    /// argument that holds a DSML closer is written as escaped JSON. The encoder alone writes both as they are.
    pub guard_framing: bool,
}

impl RenderOptions {
    /// What the published encoder does, and no more.
    #[must_use]
    pub const fn official(mode: Mode, drop_thinking: bool, effort: Option<Effort>) -> Self {
        Self { mode, drop_thinking, effort, add_generation_prompt: false, bridge_system: false, guard_framing: false }
    }
}

/// Why a conversation can't be rendered. Each names the message by its index in the client's list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// Call arguments that are not a JSON object.
    #[error("messages[{index}].tool_calls[{call}].function.arguments must be a JSON object: {reason}")]
    Arguments {
        /// The message.
        index: usize,
        /// The call in the message.
        call: usize,
        /// What is wrong with them.
        reason: String,
    },
    /// A tool result whose id no earlier assistant message has.
    #[error("messages[{index}].tool_call_id {id:?} is not the id of a call in an earlier assistant message")]
    UnknownToolCall {
        /// The message.
        index: usize,
        /// The id.
        id: String,
    },
    /// `continue_final_message` needs a last assistant message.
    #[error("continue_final_message needs an assistant message last, but messages[{index}] is not one")]
    ContinueNotAssistant {
        /// The last message.
        index: usize,
    },
    /// `continue_final_message` and `add_generation_prompt` exclude each other.
    #[error("continue_final_message and add_generation_prompt can't both be true")]
    ContinueAndGenerate,
    /// There is no message.
    #[error("messages must hold at least one message")]
    Empty,
}

const BOS: &str = "<｜begin▁of▁sentence｜>";
const EOS: &str = "<｜end▁of▁sentence｜>";
const USER: &str = "<｜User｜>";
const ASSISTANT: &str = "<｜Assistant｜>";
const LATEST_REMINDER: &str = "<｜latest_reminder｜>";
const THINK: &str = "<think>";
const END_THINK: &str = "</think>";
const DSML: &str = "｜DSML｜";

/// The beginning of every DSML closer.
const DSML_CLOSER: &str = "</｜DSML｜";
const TOOL_RESULT_CLOSER: &str = "</tool_result>";

const EFFORT_HIGH: &str = include_str!("effort_high.txt");
const EFFORT_MAX: &str = include_str!("effort_max.txt");
const TOOLS_BEFORE_SCHEMAS: &str = include_str!("tools_before_schemas.txt");
const TOOLS_AFTER_SCHEMAS: &str = include_str!("tools_after_schemas.txt");
const RESPONSE_FORMAT: &str = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n";

/// The prompt of `messages`.
///
/// # Errors
/// See [`TemplateError`].
pub fn render(messages: &[Message], options: &RenderOptions) -> Result<Vec<Segment>, TemplateError> {
    let has_tools = messages.iter().any(|message| !message.tools.is_empty());
    let drops = options.drop_thinking && !has_tools;
    let mut turns = merge(messages);
    sort_tool_results(&mut turns);
    if drops && options.mode == Mode::Thinking {
        drop_thinking(&mut turns);
    }
    let last_user = last_user(&turns);
    let mut renderer = Renderer { options, drops, last_user, out: Builder::default(), waiting: None, is_open: false };
    renderer.out.control(BOS);
    for at in 0..turns.len() {
        renderer.turn(&turns, at)?;
    }
    renderer.end();
    Ok(renderer.out.finish())
}

/// The text of segments, control tokens spelt out.
#[must_use]
pub fn to_text(segments: &[Segment]) -> String {
    let texts = segments.iter().map(|segment| match segment {
        Segment::Control(text) => text,
        Segment::Text(text) => text.as_str(),
    });
    texts.collect()
}

/// A message, or the run of user and tool messages that share one user turn.
struct Turn<'a> {
    role: Role,
    /// The message, of a run the first.
    message: &'a Message,
    /// Where the message stands in the caller's list.
    index: usize,
    /// The parts of a user turn.
    blocks: Vec<Block<'a>>,
    reasoning: &'a str,
    task: Option<Task>,
}

#[derive(Clone, Copy)]
enum Block<'a> {
    Text(&'a str),
    ToolResult(&'a Message),
}

/// Joins tool messages, and user messages that follow a user turn, into one user turn. A user text after a turn with a
/// task starts a new one; the task of a later message of a run is lost, as in the published encoder.
fn merge(messages: &[Message]) -> Vec<Turn<'_>> {
    let mut turns: Vec<Turn> = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        let block = match message.role {
            Role::Tool => Some(Block::ToolResult(message)),
            Role::User => Some(Block::Text(message.content.as_deref().unwrap_or_default())),
            _ => None,
        };
        let joins = |turn: &&mut Turn| turn.role == Role::User && (turn.task.is_none() || message.role == Role::Tool);
        if let (Some(block), Some(turn)) = (block, turns.last_mut().filter(joins)) {
            turn.blocks.push(block);
            continue;
        }
        turns.push(Turn {
            role: if block.is_some() { Role::User } else { message.role },
            message,
            index,
            blocks: block.into_iter().collect(),
            reasoning: message.reasoning.as_deref().unwrap_or_default(),
            task: message.task.filter(|_| message.role != Role::Tool),
        });
    }
    turns
}

/// Puts the results of each user turn in the order of the calls of the last assistant message that made any. Texts keep
/// their places; an unknown id counts as the first call's.
fn sort_tool_results(turns: &mut [Turn]) {
    let mut order: HashMap<&str, usize> = HashMap::new();
    for turn in turns {
        if turn.role == Role::Assistant && !turn.message.tool_calls.is_empty() {
            let ids = turn.message.tool_calls.iter().enumerate();
            order = ids.filter_map(|(at, call)| Some((call.id.as_deref()?, at))).collect();
            order.remove("");
        }
        let is_result = |block: &Block| matches!(block, Block::ToolResult(_));
        let mut results: Vec<Block> = turn.blocks.iter().copied().filter(is_result).collect();
        if results.len() < 2 || order.is_empty() {
            continue;
        }
        results.sort_by_key(|block| match block {
            Block::ToolResult(message) => {
                message.tool_call_id.as_deref().and_then(|id| order.get(id)).copied().unwrap_or_default()
            }
            Block::Text(_) => 0,
        });
        let places = turn.blocks.iter_mut().filter(|block| is_result(block));
        for (place, result) in places.zip(results) {
            *place = result;
        }
    }
}

/// Before the last user turn: reasoning goes, and developer messages go entirely.
fn drop_thinking(turns: &mut Vec<Turn>) {
    let Some(last_user) = last_user(turns) else { return };
    let mut at = 0;
    turns.retain_mut(|turn| {
        let is_old = at < last_user;
        at += 1;
        if is_old {
            turn.reasoning = "";
        }
        !(is_old && turn.role == Role::Developer)
    });
}

fn last_user(turns: &[Turn]) -> Option<usize> {
    turns.iter().rposition(|turn| matches!(turn.role, Role::User | Role::Developer))
}

/// Writes turns one after the other.
struct Renderer<'a> {
    options: &'a RenderOptions,
    /// Whether old reasoning is left out.
    drops: bool,
    last_user: Option<usize>,
    out: Builder,
    /// The place of a user turn whose assistant's turn has not been opened yet.
    waiting: Option<usize>,
    /// Whether the prompt so far ends in a turn for the model to fill.
    is_open: bool,
}

impl Renderer<'_> {
    fn turn(&mut self, turns: &[Turn], at: usize) -> Result<(), TemplateError> {
        let turn = &turns[at];
        if at == 0 && self.options.mode == Mode::Thinking {
            self.out.text(match self.options.effort {
                Some(Effort::High) => EFFORT_HIGH,
                Some(Effort::Max) => EFFORT_MAX,
                Some(Effort::Low) | None => "",
            });
        }
        match turn.role {
            Role::System => self.instructions(turn.message),
            Role::Developer => {
                self.out.control(USER);
                self.instructions(turn.message);
            }
            Role::User | Role::Tool => self.user(turn),
            Role::LatestReminder => {
                self.out.control(LATEST_REMINDER);
                self.out.text(turn.message.content.as_deref().unwrap_or("None"));
            }
            Role::Assistant => {
                if let Some(user) = self.waiting.take()
                    && self.options.bridge_system
                {
                    self.open_turn(user);
                }
                self.is_open = false;
                let follows_task = at > 0 && turns[at - 1].task.is_some();
                self.assistant(turn, at, follows_task)?;
            }
        }
        self.after(turns, at);
        Ok(())
    }

    /// What follows a turn: a task's token, or the opening of the assistant's turn. Neither is written in front of
    /// another user or system message.
    fn after(&mut self, turns: &[Turn], at: usize) {
        let turn = &turns[at];
        let is_user = matches!(turn.role, Role::User | Role::Developer);
        let next = turns.get(at + 1).map(|next| next.role);
        if !matches!(next, None | Some(Role::Assistant | Role::LatestReminder)) {
            if is_user {
                self.waiting = turn.task.is_none().then_some(at);
            }
            return;
        }
        match turn.task {
            Some(Task::Action) => {
                self.out.control(ASSISTANT);
                self.out.control(if self.options.mode == Mode::Thinking { THINK } else { END_THINK });
                self.out.control(task_token(Task::Action));
                self.is_open = true;
            }
            Some(task) => {
                self.out.control(task_token(task));
                self.is_open = true;
            }
            None if is_user => self.open_turn(at),
            None => {}
        }
    }

    /// Opens a turn at the end where the last message did not.
    fn end(&mut self) {
        if self.options.add_generation_prompt && !self.is_open {
            self.open_turn(usize::MAX);
        }
    }

    /// Opens the assistant's turn that answers the user turn `user`.
    fn open_turn(&mut self, user: usize) {
        let is_current = self.last_user.is_none_or(|last| user >= last);
        let thinks = self.options.mode == Mode::Thinking && (!self.drops || is_current);
        (self.is_open, self.waiting) = (true, None);
        self.out.control(ASSISTANT);
        self.out.control(if thinks { THINK } else { END_THINK });
    }

    fn instructions(&mut self, message: &Message) {
        self.out.text(message.content.as_deref().unwrap_or_default());
        if !message.tools.is_empty() {
            let schemas: Vec<String> = message.tools.iter().map(json::dumps).collect();
            self.out.fixed(TOOLS_BEFORE_SCHEMAS);
            self.out.text(&schemas.join("\n"));
            self.out.fixed(TOOLS_AFTER_SCHEMAS);
        }
        if let Some(schema) = &message.response_format {
            self.out.text(RESPONSE_FORMAT);
            self.out.text(&json::dumps(schema));
        }
    }

    fn user(&mut self, turn: &Turn) {
        self.out.control(USER);
        for (at, block) in turn.blocks.iter().enumerate() {
            self.out.text(if at > 0 { "\n\n" } else { "" });
            match block {
                Block::Text(text) => self.out.text(text),
                Block::ToolResult(message) => {
                    let result = message.content.as_deref().unwrap_or("None");
                    self.out.text("<tool_result>");
                    if self.options.guard_framing {
                        self.out.text(&result.replace(TOOL_RESULT_CLOSER, "&lt;/tool_result>"));
                    } else {
                        self.out.text(result);
                    }
                    self.out.text(TOOL_RESULT_CLOSER);
                }
            }
        }
    }

    fn assistant(&mut self, turn: &Turn, at: usize, follows_task: bool) -> Result<(), TemplateError> {
        let is_current = self.last_user.is_none_or(|last| at > last);
        let thinks = self.options.mode == Mode::Thinking && !follows_task && (!self.drops || is_current);
        if thinks {
            self.out.text(turn.reasoning);
            if turn.message.open_reasoning {
                return Ok(());
            }
            self.out.control(END_THINK);
        }
        self.out.text(turn.message.content.as_deref().unwrap_or_default());
        if !turn.message.tool_calls.is_empty() {
            self.out.fixed("\n\n<｜DSML｜tool_calls>\n");
            for (call_at, call) in turn.message.tool_calls.iter().enumerate() {
                self.call(call).map_err(|reason| TemplateError::Arguments {
                    index: turn.index,
                    call: call_at,
                    reason,
                })?;
            }
            self.out.fixed("</｜DSML｜tool_calls>");
        }
        if !turn.message.wo_eos {
            self.out.control(EOS);
        }
        Ok(())
    }

    /// One call. Arguments that are not JSON become one parameter, as in the published encoder (`prepare` refuses them).
    fn call(&mut self, call: &ToolCall) -> Result<(), String> {
        self.out.fixed("<｜DSML｜invoke name=\"");
        self.out.text(&call.name);
        self.out.text("\">\n");
        if serde_json::from_str::<serde::de::IgnoredAny>(&call.arguments).is_err() {
            self.parameter("arguments", true, &call.arguments);
            self.out.text("\n");
        } else {
            let members = json::members(&call.arguments)?;
            for (name, value) in &members {
                if !value.starts_with('"') {
                    self.parameter(name, false, &json::respell(value));
                } else {
                    let text = json::unquote(value);
                    let guarded = self.options.guard_framing && text.contains(DSML_CLOSER);
                    self.parameter(name, !guarded, if guarded { value } else { &text });
                }
                self.out.text("\n");
            }
            self.out.text(if members.is_empty() { "\n" } else { "" });
        }
        self.out.fixed("</｜DSML｜invoke>\n");
        Ok(())
    }

    fn parameter(&mut self, name: &str, is_string: bool, value: &str) {
        self.out.fixed("<｜DSML｜parameter name=\"");
        self.out.text(name);
        self.out.text(if is_string { "\" string=\"true\">" } else { "\" string=\"false\">" });
        if self.options.guard_framing && !is_string {
            self.out.text(&value.replace(DSML_CLOSER, "\\u003c/｜DSML｜"));
        } else {
            self.out.text(value);
        }
        self.out.fixed("</｜DSML｜parameter>");
    }
}

const fn task_token(task: Task) -> &'static str {
    match task {
        Task::Action => "<｜action｜>",
        Task::Query => "<｜query｜>",
        Task::Authority => "<｜authority｜>",
        Task::Domain => "<｜domain｜>",
        Task::Title => "<｜title｜>",
        Task::ReadUrl => "<｜read_url｜>",
    }
}

/// Segments under construction: text is joined to maximal runs.
#[derive(Default)]
struct Builder {
    segments: Vec<Segment>,
    text: String,
}

impl Builder {
    fn text(&mut self, text: &str) {
        self.text.push_str(text);
    }

    fn control(&mut self, text: &'static str) {
        self.flush();
        self.segments.push(Segment::Control(text));
    }

    /// The encoder's own text, in which the marks of thinking and tool calls are control tokens.
    fn fixed(&mut self, text: &str) {
        let mut rest = text;
        while let Some((start, mark)) =
            [DSML, THINK, END_THINK].iter().filter_map(|mark| Some((rest.find(mark)?, *mark))).min()
        {
            self.text(&rest[..start]);
            self.control(mark);
            rest = &rest[start + mark.len()..];
        }
        self.text(rest);
    }

    fn flush(&mut self) {
        if !self.text.is_empty() {
            self.segments.push(Segment::Text(std::mem::take(&mut self.text)));
        }
    }

    fn finish(mut self) -> Vec<Segment> {
        self.flush();
        self.segments
    }
}
