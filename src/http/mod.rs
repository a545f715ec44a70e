//! HTTP: OpenAI-compatible routes over the engine, server-sent events, health, metrics and errors.
