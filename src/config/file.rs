//! The settings file: YAML with the flags' names as keys.

use std::path::{Path, PathBuf};

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
    let settings: Option<Settings> = serde_yaml::from_str(text).map_err(|error| error.to_string())?;
    Ok(settings.unwrap_or_default())
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
            ("host: a\n\nport: none\n", "none", "line 3"),
            ("port: 1\nport: 2\n", "port", "line 2"),
            ("device: tpu\n", "tpu", "line 1"),
            ("max-model-len: 4Q\n", "4Q", "line 1"),
        ];
        for (text, word, line) in cases {
            let reason = parse(text).unwrap_err();
            assert!(reason.contains(word) && reason.contains(line), "{text:?}: {reason}");
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = read(Path::new("/nowhere/flashd.yaml")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/flashd.yaml"), "{error}");
    }
}
