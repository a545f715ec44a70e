//! The settings file: YAML with the flags' names as keys.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_path_to_error::Track;

use super::args::Settings;

/// A settings file that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It can't be read.
    #[error("{path}: {error}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// It says something wrong.
    #[error("{path}: {reason}")]
    Content {
        /// Which file.
        path: PathBuf,
        /// What and where: line and column.
        reason: String,
    },
}

/// Reads a settings file. An empty file is a file that says nothing.
///
/// # Errors
/// When it can't be read, is not YAML, holds an unknown key, a key twice, or a value of the wrong type.
pub fn read(path: &Path) -> Result<Settings, FileError> {
    let text = std::fs::read_to_string(path).map_err(|error| FileError::Read { path: path.to_owned(), error })?;
    parse(&text).map_err(|reason| FileError::Content { path: path.to_owned(), reason })
}

fn parse(text: &str) -> Result<Settings, String> {
    let mut track = Track::new();
    let settings = serde_yaml::with_deserializer_from_str(text, |deserializer| {
        Option::<Settings>::deserialize(serde_path_to_error::Deserializer::new(deserializer, &mut track))
    });
    match settings {
        Ok(settings) => Ok(settings.unwrap_or_default()),
        Err(error) => match track.path().to_string() {
            // Not inside the value of a key; the message says what it is about.
            path if path == "." => Err(error.to_string()),
            path => Err(format!("{path}: {error}")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::args::{Count, DeviceChoice, LogFormatChoice, ThinkingChoice};

    #[test]
    fn keys_are_the_flags_names() {
        let text = "
            # production
            model: /models/flash
            served-model-name: [a, b]
            api-key: secret
            max-model-len: 512K
            kv-cache-memory-bytes: 26000000000
            device: cpu
            default-thinking: 'off'
            port: 9000
            shutdown-timeout: 3
            log-format: json
            trust-remote-code: true
        ";
        let settings = parse(text).unwrap();
        assert_eq!(settings.served_model_name.unwrap(), ["a", "b"]);
        assert_eq!(settings.api_key.unwrap(), ["secret"]);
        assert_eq!(settings.max_model_len, Some(Count(512 << 10)));
        assert_eq!(settings.kv_cache_memory_bytes, Some(Count(26_000_000_000)));
        assert_eq!(settings.device, Some(DeviceChoice::Cpu));
        assert_eq!(settings.default_thinking, Some(ThinkingChoice::Off));
        assert_eq!(settings.log_format, Some(LogFormatChoice::Json));
        assert_eq!((settings.port, settings.shutdown_timeout), (Some(9000), Some(3.0)));
        assert_eq!(settings.trust_remote_code, Some(true));
        assert_eq!(settings.host, None);
    }

    #[test]
    fn an_unquoted_off_is_the_word() {
        assert_eq!(parse("default-thinking: off").unwrap().default_thinking, Some(ThinkingChoice::Off));
    }

    #[test]
    fn an_empty_file_says_nothing() {
        for text in ["", "\n", "# only a comment\n", "{}"] {
            assert_eq!(parse(text).unwrap(), Settings::default(), "{text:?}");
        }
    }

    #[test]
    fn faults_name_the_key_and_the_line() {
        let cases = [
            ("port: 8000\nmax-model-length: 5\n", "max-model-length", "line 2"),
            ("host: a\n\nport: none\n", "port", "line 3"),
            ("host: a\n\nport: none\n", "none", "line 3"),
            ("max-model-len: 4Q\n", "max-model-len", "line 1"),
            ("max-model-len: -4\n", "-4", "line 1"),
            ("max-model-len: [4]\n", "max-model-len", "line 1"),
            ("host: a\nmax-body-bytes: 1.5\n", "such as 8192, 8K", "line 2"),
            ("host: a\nmax-body-bytes: true\n", "such as 8192, 8K", "line 2"),
            ("served-model-name: {a: b}\n", "served-model-name", "line 1"),
            ("served-model-name: [a, {b: c}]\n", "served-model-name[1]", "line 1"),
            ("allowed-origins: 5\n", "a text or a list of texts", "line 1"),
            ("device: tpu\n", "device", "line 1"),
            ("port: 1\nport: 2\n", "port", "line 2"),
            ("device: tpu\n", "tpu", "line 1"),
            ("max-model-len: 4Q\n", "4Q", "line 1"),
        ];
        for (text, word, line) in cases {
            let reason = parse(text).unwrap_err();
            assert!(reason.contains(word) && reason.contains(line), "{text:?}: {reason}");
            assert!(!reason.contains("enum") && !reason.contains("Form"), "{reason}");
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = read(Path::new("/nowhere/flashd.yaml")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/flashd.yaml"), "{error}");
    }
}
