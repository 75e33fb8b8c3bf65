"""Logs and metrics. Every metric is declared in `metrics`; every process calls `logs.configure` once."""
