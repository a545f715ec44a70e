//! OpenAI's endpoints: chat completions and completions.

pub mod answer;
pub mod chat;
pub mod completions;
pub mod echo;
pub mod fields;
pub mod logprobs;
pub mod message;
pub mod prompt;
pub mod request;
pub mod response;
pub mod text_answer;
pub mod thinking;
