"""The scale benchmark of the coordinator at a small size: it drives a whole run, and its counts are right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks.coordinator_scale import Load, has_ray, measure
from tests.redis_servers import needs_redis


@pytest.mark.parametrize("store", ["sqlite", pytest.param("redis", marks=needs_redis)])
def test_every_seat_that_is_freed_is_filled_while_steps_are_trained_and_published(store: str) -> None:
    load = Load(replicas=5, live=7, rollouts=400, tokens=64, prompts_per_step=2, outstanding=8)
    row = measure(load, store)  # which ends when 13 steps of 32 rollouts are trained, and half as many rollouts came
    assert row.rollouts == 13 * 32
    assert 0 < len(row.latencies_ms) <= 208 + load.outstanding, "less those that an update interrupted"
    assert all(latency > 0 for latency in row.latencies_ms)
    assert 0 < row.durable_s < row.cpu_s
    assert row.peak_bytes > 2**20


def test_an_interpreter_without_ray_is_told_from_one_with_it(tmp_path: Path) -> None:
    empty = tmp_path / "python"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    empty.chmod(0o755)
    assert not has_ray(empty)
