//! The log: one subscriber for the process, text or JSON lines on standard error. What clients send and get is never in it
//! unless the operator asked for that.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// Form of the log's lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// What to log and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogConfig {
    /// Form of the lines.
    pub format: LogFormat,
    /// Filter directives, such as `info` or `flashd::http=debug,warn`.
    pub filter: String,
}

/// A log that can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// Not a filter.
    #[error("{filter:?} is not a log filter such as info or flashd=debug,warn: {reason}")]
    Filter {
        /// The text.
        filter: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The process has a log already.
    #[error("the log is set up already: {0}")]
    Twice(String),
}

/// Sets the log up for the life of the process.
///
/// # Errors
/// When the filter is wrong or the log was set up before.
pub fn init(config: &LogConfig) -> Result<(), LogError> {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(parse(&config.filter)?)
        .with_writer(std::io::stderr)
        .with_span_events(FmtSpan::NONE);
    let result = match config.format {
        LogFormat::Text => builder.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    result.map_err(|error| LogError::Twice(error.to_string()))
}

/// Whether the filter can be used.
///
/// # Errors
/// `Filter` when not.
pub fn check_filter(filter: &str) -> Result<(), LogError> {
    parse(filter).map(|_| ())
}

fn parse(filter: &str) -> Result<EnvFilter, LogError> {
    EnvFilter::builder()
        .parse(filter)
        .map_err(|error| LogError::Filter { filter: filter.to_owned(), reason: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_checked() {
        for good in ["info", "flashd=debug,warn", "off", ""] {
            assert!(check_filter(good).is_ok(), "{good}");
        }
        for wrong in ["flashd=loud", "a=b=c"] {
            let error = check_filter(wrong).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
