"""Small scenarios for tests to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrl.simulator.pipeline import SimulationTrace
from specrl.simulator.scenarios.scenario import Scenario
from specrl.simulator.scenarios.scenario_file import parse_scenario
from specrl.simulator.simulate import prepare_scenario, simulate_events


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
    return parse_scenario(a_mapping(**sections), overrides)


def a_trace(*overrides: str, failures: Sequence[dict[str, Any]] = ()) -> SimulationTrace:
    raw = a_mapping()
    raw["failures"] = list(failures)
    return simulate_events(prepare_scenario(parse_scenario(raw, overrides)))
