"""Logs, metrics and traces. `metrics` declares every metric; every process calls `configure_logging` once."""
