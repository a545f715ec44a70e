//! One streamed completion, timed at the client.

use std::time::Instant;

use anyhow::{Context, bail};
use serde::Deserialize;
use serde_json::json;

use super::stats::Sample;
use crate::cli::event_stream::{EventStream, error_message};

/// The server and what every request says.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub client: reqwest::Client,
    /// Without `/v1`.
    pub base_url: String,
    pub api_key: Option<String>,
    pub model: String,
    pub temperature: f32,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    finish_reason: Option<String>,
}

#[derive(Clone, Copy, Default, Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: usize,
    #[serde(default)]
    completion_tokens: usize,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Default, Deserialize)]
struct PromptDetails {
    cached_tokens: Option<usize>,
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
}

/// What a stream has told so far.
struct Progress {
    /// When the tokens counted so far were there, and how many.
    arrivals: Vec<(Instant, usize)>,
    usage: Option<Usage>,
    finish_reason: Option<String>,
}

impl Target {
    /// The first model the server lists.
    pub async fn first_model(&self) -> anyhow::Result<String> {
        let response = self.with_key(self.client.get(format!("{}/v1/models", self.base_url))).send().await?;
        let status = response.status();
        let body = response.text().await?;
        if !status.is_success() {
            bail!("{status}: {}", error_message(&body));
        }
        let models: Models = serde_json::from_str(&body).context("/v1/models")?;
        models.data.into_iter().next().map(|model| model.id).context("/v1/models lists no model")
    }

    /// Sends one prompt and reads the answer to its end; an answer shorter than asked for is an error.
    pub async fn complete(&self, prompt: &[u32], n_output: usize) -> anyhow::Result<Sample> {
        let body = json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": n_output,
            "temperature": self.temperature,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        });
        let started = Instant::now();
        let request = self.with_key(self.client.post(format!("{}/v1/completions", self.base_url)));
        let mut events = EventStream::new(request.json(&body).send().await?).await?;
        let mut progress = Progress { arrivals: Vec::with_capacity(n_output), usage: None, finish_reason: None };
        loop {
            match events.next().await? {
                None => bail!("the stream ended without [DONE]"),
                Some(data) if data == "[DONE]" => break,
                Some(data) => progress.take(Instant::now(), &data)?,
            }
        }
        progress.into_sample(started, prompt.len(), n_output)
    }

    fn with_key(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.api_key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }
}

impl Progress {
    fn take(&mut self, now: Instant, data: &str) -> anyhow::Result<()> {
        let chunk: Chunk = serde_json::from_str(data).with_context(|| format!("not a chunk: {data:.200}"))?;
        if chunk.error.is_some() {
            bail!("{}", error_message(data));
        }
        self.finish_reason =
            chunk.choices.iter().find_map(|choice| choice.finish_reason.clone()).or(self.finish_reason.take());
        // Without a running count every chunk that has a choice stands for one token.
        let n_before = self.arrivals.last().map_or(0, |&(_, n_tokens)| n_tokens);
        let n_tokens = match chunk.usage {
            Some(usage) => usage.completion_tokens,
            None => n_before + chunk.choices.len().min(1),
        };
        self.usage = chunk.usage.or(self.usage);
        if n_tokens > n_before && !chunk.choices.is_empty() {
            self.arrivals.push((now, n_tokens));
        }
        Ok(())
    }

    fn into_sample(self, started: Instant, n_prompt: usize, n_output: usize) -> anyhow::Result<Sample> {
        let n_counted = self.arrivals.last().map_or(0, |&(_, n_tokens)| n_tokens);
        let n_tokens = self.usage.map_or(n_counted, |usage| usage.completion_tokens);
        let (Some(&(first, n_first)), Some(&(last, _))) = (self.arrivals.first(), self.arrivals.last()) else {
            bail!("no token came");
        };
        if n_tokens != n_output {
            let reason = self.finish_reason.unwrap_or_else(|| "none".to_owned());
            bail!("{n_tokens} tokens instead of {n_output} (finish_reason {reason})");
        }
        let gaps = self.arrivals.windows(2).flat_map(|pair| {
            // Tokens that came in one chunk share its gap.
            let n_new = pair[1].1 - pair[0].1;
            std::iter::repeat_n((pair[1].0 - pair[0].0).as_secs_f64() / n_new as f64, n_new)
        });
        Ok(Sample {
            started,
            first,
            last,
            gaps_s: gaps.collect(),
            n_prompt: self.usage.map_or(n_prompt, |usage| usage.prompt_tokens),
            n_cached: self.usage.and_then(|usage| usage.prompt_tokens_details?.cached_tokens).unwrap_or(0),
            n_output: n_tokens,
            n_after_first: n_tokens - n_first,
        })
    }
}
