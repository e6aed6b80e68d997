"""OpenTelemetry: spans and metrics over OTLP, made from the engine's records in the caller."""
