"""Small scenarios that tests change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrl.simulator.pipeline import Trace
from specrl.simulator.scenario import Scenario
from specrl.simulator.scenario_file import parse
from specrl.simulator.simulate import prepare, run


def a_mapping(**sections: dict[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "name": "small",
        "model": {"name": "qwen3-8b"},
        "cluster": {"gpu": "H100", "gpus": 16},
        "layout": {"generationGpus": 8, "trainingGpus": 8},
        "workload": {"medianTokens": 300, "sigma": 0.7, "maxTokens": 2000},
        "schedule": {"steps": 6, "promptsPerStep": 8, "groupSize": 4, "maxPolicyLag": 1},
        "speculation": {"mechanism": "eagle3", "k": 3, "acceptanceLength": 2.8},
    }
    for name, fields in sections.items():
        raw[name] = raw.get(name, {}) | fields
    return raw


def a_scenario(*overrides: str, **sections: dict[str, Any]) -> Scenario:
    return parse(a_mapping(**sections), overrides)


def a_trace(*overrides: str, failures: Sequence[dict[str, Any]] = ()) -> Trace:
    raw = a_mapping()
    raw["failures"] = list(failures)
    return run(prepare(parse(raw, overrides)))
