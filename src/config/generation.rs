//! Defaults of sampling that a checkpoint brings along: generation_config.json.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::sample::params::SamplingParams;

/// A generation_config.json that can't be used.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {reason} (--generation-config vllm leaves the file out)")]
pub struct GenerationConfigError {
    /// The file.
    pub path: PathBuf,
    /// Which field, its limit and its value; or why it can't be read.
    pub reason: String,
}

/// What the file may say about sampling; the rest of it is not for a server.
#[derive(Debug, Default, Deserialize)]
struct GenerationConfig {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

/// OpenAI's defaults, and over them what the checkpoint's generation_config.json says; a checkpoint may have none.
///
/// # Errors
/// When the file can't be read or a value is outside the range that requests have.
pub fn defaults(dir: &Path) -> Result<SamplingParams, GenerationConfigError> {
    let path = dir.join("generation_config.json");
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(SamplingParams::default()),
        Err(error) => return Err(GenerationConfigError { path, reason: error.to_string() }),
    };
    parse(&text).map_err(|reason| GenerationConfigError { path, reason })
}

fn parse(text: &str) -> Result<SamplingParams, String> {
    let file: GenerationConfig = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let base = SamplingParams::default();
    let greedy = file.do_sample == Some(false);
    Ok(SamplingParams {
        temperature: if greedy { 0.0 } else { in_range("temperature", file.temperature, 0.0, 2.0, base.temperature)? },
        top_p: above_zero("top_p", file.top_p, 1.0, base.top_p)?,
        top_k: file.top_k.unwrap_or(base.top_k),
        min_p: in_range("min_p", file.min_p, 0.0, 1.0, base.min_p)?,
        repetition_penalty: above_zero("repetition_penalty", file.repetition_penalty, 2.0, base.repetition_penalty)?,
        ..base
    })
}

fn in_range(field: &str, value: Option<f32>, min: f32, max: f32, default: f32) -> Result<f32, String> {
    let value = value.unwrap_or(default);
    if (min..=max).contains(&value) {
        Ok(value)
    } else {
        Err(format!("{field} must be from {min} to {max}, got {value}"))
    }
}

fn above_zero(field: &str, value: Option<f32>, max: f32, default: f32) -> Result<f32, String> {
    let value = value.unwrap_or(default);
    if value > 0.0 && value <= max {
        return Ok(value);
    }
    Err(format!("{field} must be above 0 and at most {max}, got {value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_fields_stand_over_the_defaults() {
        let text = r#"{"eos_token_id": 1, "do_sample": true, "temperature": 0.6, "top_p": 0.95, "max_length": 7}"#;
        let want = SamplingParams { temperature: 0.6, top_p: 0.95, ..SamplingParams::default() };
        assert_eq!(parse(text), Ok(want));
        assert_eq!(parse("{}"), Ok(SamplingParams::default()));
        assert_eq!(parse(r#"{"do_sample": false, "temperature": 0.6}"#).unwrap().temperature, 0.0);
    }

    #[test]
    fn values_outside_their_range_are_refused_by_name() {
        for (text, field) in [
            (r#"{"temperature": 3}"#, "temperature"),
            (r#"{"top_p": 0}"#, "top_p"),
            (r#"{"min_p": -1}"#, "min_p"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
            (r#"{"top_k": -1}"#, "u32"),
            ("[", "EOF"),
        ] {
            let reason = parse(text).unwrap_err();
            assert!(reason.contains(field), "{text}: {reason}");
        }
    }

    #[test]
    fn a_checkpoint_may_have_none() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(defaults(dir.path()).unwrap(), SamplingParams::default());
        std::fs::write(dir.path().join("generation_config.json"), r#"{"top_p": 2}"#).unwrap();
        let text = defaults(dir.path()).unwrap_err().to_string();
        assert!(text.contains("generation_config.json") && text.contains("top_p"), "{text}");
    }
}
