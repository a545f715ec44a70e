//! Logs and metrics: the only globals.
