"""Measures how well `specrl simulate` predicts published results. It predicts first, and scores later.

    python -m benchmarks.simulator_accuracy predict     # writes benchmarks/simulator_predictions.json
    python -m benchmarks.simulator_accuracy score       # compares that file with what is published
    python -m benchmarks.simulator_accuracy scenarios   # compares the scenarios of examples/plan with it

arXiv:2604.26779 publishes speed-ups (Qwen3-8B on 32 GB200), but not batch size, length limit, spread of lengths and
parallelism. So each member of an ensemble of plausible values is calibrated by itself on RL-Zero: the median length on
the column without speculation, and the processor's time of drafting on the column at k = 3. k = 5 needs more, because
no CUDA graph covers its steps; a second ensemble calibrates that on RL-Zero at k = 5, and the first one has the
default. RL-Think's lengths are calibrated on its column without speculation.

A prediction is the median over members, with a band from p10 to p90. Members whose calibration needs impossible values
(drafting below 0 or above 24 ms) are dropped and counted. "extrapolated" marks a k or a mechanism that nothing was
calibrated on. For NeMo-RL's own rows see simulator_nemo_rl.py, and for runs of this machine simulator_runs.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from benchmarks import simulator_nemo_rl as nemo_rl
from benchmarks.drain import drain_s
from benchmarks.paper_rows import PHASES, PROJECTED, PUBLISHED_PHASES, relative_error
from benchmarks.paper_rows import PUBLISHED as PAPER
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.optimize import brentq

from specrl.errors import SpecInvalid
from specrl.simulator.scenarios.scenario import Mechanism, Scenario
from specrl.simulator.scenarios.scenario_file import find_scenario, parse_scenario, read_mapping
from specrl.simulator.simulate import prepare_scenario, simulate_scenario

STORED = Path(__file__).with_name("simulator_predictions.json")

ZERO_PLAIN_S = 100.0
ZERO_K3_S = 56.6
ZERO_K5_SPEEDUP = 1.44
THINK_PLAIN_S = 133.6

WORKLOADS = {"base": "zero", "reasoning": "think"}
"""Names of the paper's workloads here, by those of paper_rows.py."""

DRAFTS = {
    "eagle3:3": ("k=3", "eagle3", 3),
    "online": ("k=3, online", "eagle3", 3),
    "weak": ("k=3, weak drafter", "eagle3", 3),
    "weak-online": ("k=3, weak drafter, online", "eagle3", 3),
    "eagle3:5": ("k=5", "eagle3", 5),
    "eagle3:7": ("k=7", "eagle3", 7),
    "ngram": ("n-gram", "ngram", 3),
}
"""row of paper_rows.py: name, mechanism, k."""


@dataclass(frozen=True)
class PublishedRow:
    """A published row, and the scenario of examples/plan that predicts it.

    published: by figure: rollout and step (speed-ups), step_s and exposed_s (seconds of a step, and of its exposed
    generation). is_fitted: efficiencies, workload or acceptance length were chosen for this row, so its prediction
    proves nothing.
    """

    name: str
    scenario: str
    mechanism: str
    k: int
    acceptance_length: float | None
    published: dict[str, float]
    is_fitted: bool = False

    def predict_figures(self) -> dict[str, float]:
        """Simulate the scenario, and return the figures that are published."""
        base = parse_scenario(read_mapping(find_scenario(self.scenario)))
        outcome = simulate_scenario(drafting(base, self.mechanism, self.k, self.acceptance_length))
        found = {
            "rollout": outcome.rollout_speedup,
            "step": outcome.step_speedup,
            "step_s": outcome.speculative.step_s,
            "exposed_s": outcome.speculative.exposed_generation_s,
        }
        return {figure: found[figure] for figure in self.published}


FITTED = {"zero k=3", "zero k=5", "235b on 512, k=3, acceptance 3", "235b on 512, k=7, acceptance 8"}
"""RL-Zero at k = 3 and 5 gave the efficiencies. The workload of 235B was chosen for its speed-up at k = 3. The
acceptance length of 8 is not published; it was chosen for the best published speed-up, at k = 7."""

FITTED_PHASES = {
    "zero": ({"data", "prepare", "generation", "logprob", "train"}, {"generation"}),
    "think": ({"generation"}, set[str]()),
}
"""Phases without and with speculation whose published seconds were used."""


def list_published_rows() -> list[PublishedRow]:
    """List every published row: of the paper's tables, of its asynchronous run, and of its authors' simulations."""
    rows = []
    for (workload, row), published in PAPER.items():
        figures = {"rollout": published.generation, "step": published.step}
        figures |= {"step_s": published.step_s, "exposed_s": published.exposed_s}
        known = {figure: value for figure, value in figures.items() if value is not None}
        which = WORKLOADS[workload]
        if row.endswith("-lag1"):
            plain, k, length = row == "none-lag1", 3, PAPER[workload, "eagle3:3"].acceptance_length
            name = f"{which}, lag 1, {'none' if plain else 'k=3'}"
            mechanism = "none" if plain else "eagle3"
            rows.append(PublishedRow(name, f"paper-8b-{which}-async", mechanism, k, None if plain else length, known))
            continue
        says, mechanism, k = DRAFTS[row]
        name = f"{which} {says}"
        length = published.acceptance_length
        rows.append(PublishedRow(name, f"paper-8b-{which}-sync", mechanism, k, length, known, name in FITTED))
    for it in PROJECTED:
        name = f"235b on {it.gpus}, k={it.k}, acceptance {it.acceptance_length:g}"
        scenario = f"paper-235b-{f'async-{it.gpus}' if it.lag else f'sync-{it.gpus}'}"
        known = {"rollout": it.generation, "step": it.step}
        rows.append(PublishedRow(name, scenario, "eagle3", it.k, it.acceptance_length, known, name in FITTED))
    return rows


SPLIT_SEED = 260426779
"""The digits of the paper's number. Chosen, and drawn once, before any value was fitted to the drawn rows."""


def draw_calibrated() -> list[str]:
    """Draw the half of the published rows that the planner is calibrated on; the others are predicted.

    Rows of a kind (RL-Zero, RL-Think, policy lag 1, 235B) are shuffled, and every second one is taken.
    """
    random = Random(SPLIT_SEED)  # noqa: S311 - which rows is no secret
    kinds: dict[str, list[str]] = {}
    for row in list_published_rows():
        kinds.setdefault("lag" if "lag" in row.name else row.name.split()[0], []).append(row.name)
    for names in kinds.values():
        random.shuffle(names)
    return [name for names in kinds.values() for name in names][::2]


SYNCHRONOUS = {
    row.name: row for row in list_published_rows() if row.scenario.startswith("paper-8b-") and "lag" not in row.name
}
"""Rows whose rollout speed-up the ensemble predicts."""

CALIBRATED = ("zero k=3",)


@dataclass(frozen=True)
class Member:
    """A calibrated workload that the publication may have had."""

    zero: Scenario
    think: Scenario


def members(*, calibrates_cliff: bool) -> tuple[list[Member], int]:
    """Make the ensemble. Returns also the number of dropped members."""
    found = []
    dropped = 0
    choices = list(itertools.product((128, 256), (6144, 8192), (0.4, 0.8), (1, 2)))
    for prompts, cap, sigma, width in track(choices, "calibrating", transient=True):
        try:
            found += list(_calibrated((prompts, cap, sigma, width), calibrates_cliff=calibrates_cliff))
        except (ValueError, SpecInvalid):  # no root, or not enough memory: the publication did not have this workload
            dropped += 1
    return found, dropped


def _calibrated(choice: tuple[int, int, float, int], *, calibrates_cliff: bool) -> Iterator[Member]:
    prompts, cap, sigma, width = choice
    base = parse_scenario(read_mapping(find_scenario("paper-8b-zero-sync")))
    base = base.with_fields(
        workload={"sigma": sigma, "max_tokens": cap},
        schedule={"prompts_per_step": prompts},
        layout={"tensor_parallel": width},
    )

    def median_of(target_s: float, scenario: Scenario) -> Scenario:
        plain = drafting(scenario, "none", 3, None)
        root = brentq(
            lambda tokens: batch_s(lengths(plain, tokens)) - target_s, 200, 0.98 * scenario.workload.max_tokens
        )
        return lengths(scenario, root)

    zero = median_of(ZERO_PLAIN_S, base)
    k3 = drafting(zero, "eagle3", 3, 3.32)
    total_ms = brentq(lambda ms: batch_s(k3.with_fields(efficiency=_halves(ms))) - ZERO_K3_S, 0, 24)
    how = _halves(total_ms)
    if calibrates_cliff:
        k5 = drafting(zero, "eagle3", 5, 4.35).with_fields(efficiency=how)
        target_s = ZERO_PLAIN_S / ZERO_K5_SPEEDUP
        how["eager_us_per_layer"] = brentq(
            lambda us: batch_s(k5.with_fields(efficiency={"eager_us_per_layer": us})) - target_s, 0, 1500
        )
        if abs(batch_s(k3.with_fields(efficiency=how)) / ZERO_K3_S - 1) > 0.01:
            raise ValueError("steps at k = 3 are not covered either: no cliff between 3 and 5")
    for think_cap in (cap, round(cap * 1.25)):
        try:
            think = median_of(THINK_PLAIN_S, base.with_fields(workload={"max_tokens": think_cap}))
        except (ValueError, SpecInvalid):
            continue
        yield Member(zero.with_fields(efficiency=how), think.with_fields(efficiency=how))


def _halves(total_ms: float) -> dict[str, float]:
    """Split the time of a speculative step at k = 3 beyond its GPU time: half to the step, half to its passes."""
    return {"speculation_step_ms": total_ms / 2, "draft_pass_ms": total_ms / 6}


def lengths(scenario: Scenario, median_tokens: float) -> Scenario:
    return scenario.with_fields(workload={"median_tokens": median_tokens})


def drafting(scenario: Scenario, mechanism: str, k: int, acceptance_length: float | None) -> Scenario:
    how = {"mechanism": Mechanism(mechanism), "k": k, "acceptance_length": acceptance_length, "chances": None}
    return scenario.with_fields(speculation=how)


def batch_s(scenario: Scenario, batches: int = 2) -> float:
    """Seconds to generate the rollouts of a step."""
    prepared = prepare_scenario(scenario)
    schedule = scenario.schedule
    drawn = prepared.lengths.draw_lengths(
        batches * schedule.prompts_per_step, schedule.group_size, np.random.default_rng(0)
    )
    parts = np.split(drawn, batches)
    prompt_tokens = scenario.workload.prompt_tokens
    pace = prepared.pace_table
    return float(np.mean([drain_s(part, scenario.layout.replica_count, pace, prompt_tokens) for part in parts]))


def speedup(scenario: Scenario, row: PublishedRow) -> float:
    plain = batch_s(drafting(scenario, "none", 3, None))
    return plain / batch_s(drafting(scenario, row.mechanism, row.k, row.acceptance_length))


def predict() -> dict[str, Any]:
    """Make all predictions with their bands."""
    found: dict[str, Any] = {"rollout_speedup": {}, "scenarios": {}}
    for ensemble, calibrates_cliff in (("calibrated on k=3", False), ("calibrated on k=3 and k=5", True)):
        workloads, dropped = members(calibrates_cliff=calibrates_cliff)
        found["rollout_speedup"][ensemble] = {"members": len(workloads), "dropped": dropped}
        calibrated = (*CALIBRATED, "zero k=5") if calibrates_cliff else CALIBRATED
        for name, row in track(SYNCHRONOUS.items(), "predicting", transient=True):
            values = []
            for member in workloads:
                try:
                    values.append(speedup(getattr(member, name.split()[0]), row))
                except (ValueError, SpecInvalid):  # a rollout has no seat
                    continue
            low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
            found["rollout_speedup"][ensemble][name] = {
                "p10": round(float(low), 3),
                "median": round(float(middle), 3),
                "p90": round(float(high), 3),
                "kind": "calibrated"
                if name in calibrated
                else "predicted"
                if (row.mechanism, row.k) == ("eagle3", 3)
                else "extrapolated",
            }
    for name, variants in scenarios(members(calibrates_cliff=True)[0]):
        found["scenarios"][name] = _bands(variants)
    found["nemo_rl_step_s"] = nemo_rl.predict()
    return found


def scenarios(calibrated: list[Member]) -> Iterator[tuple[str, list[Scenario]]]:
    """Predict what nothing was calibrated on, for each workload that it may have had.

    The asynchronous 8B layout uses RL-Think's ensemble. 235B varies the spread of lengths, the efficiency of kernels
    and, where training has its own GPUs, their share, which is not published.
    """
    asynchronous = parse_scenario(read_mapping(find_scenario("paper-8b-think-async")))
    for mechanism, length in (("none", None), ("eagle3", 2.77)):
        given = [drafting(member.think, mechanism, 3, length) for member in calibrated]
        yield (
            f"paper-8b-think-async, {mechanism}",
            [
                one.with_fields(
                    cluster=dict(asynchronous.cluster),
                    layout=dict(asynchronous.layout) | {"tensor_parallel": one.layout.tensor_parallel},
                    schedule={"max_policy_lag": 1, "steps": 8},
                )
                for one in given
            ],
        )
    for k, length in itertools.product((3, 5, 7), (3, 4, 5, 8)):
        if length <= k + 1:
            base = drafting(parse_scenario(read_mapping(find_scenario("paper-235b-sync-512"))), "eagle3", k, length)
            yield f"paper-235b-sync-512, k={k}, acceptance {length}", list(_plausible(base))
    base = parse_scenario(read_mapping(find_scenario("paper-235b-sync-512"))).with_fields(
        engine={"has_host_costs": True}
    )
    yield "paper-235b-sync-512, k=3, acceptance 3, with processors' costs", list(_plausible(base))
    for lag in (0, 1, 2):
        base = parse_scenario(read_mapping(find_scenario("paper-235b-async-2048"))).with_fields(
            schedule={"max_policy_lag": lag}
        )
        splits = [
            base.with_fields(layout={"generation_gpus": gpus, "training_gpus": 2048 - gpus})
            for gpus in (640, 832, 1024)
        ]
        yield f"paper-235b-async-2048, lag {lag}", [one for split in splits for one in _plausible(split)]


def _plausible(base: Scenario) -> Iterator[Scenario]:
    """Vary the spread of lengths at the same mean, and the efficiency of kernels."""
    mean = prepare_scenario(base).lengths.mean_tokens
    for sigma, (flops, bandwidth) in itertools.product((0.6, 0.8, 1.0), ((0.6, 0.75), (0.8, 0.9))):
        other = base.with_fields(workload={"sigma": sigma}, efficiency={"flops": flops, "memory_bandwidth": bandwidth})
        cap = base.workload.max_tokens
        yield lengths(other, brentq(partial(_mean_off, other, mean), 0.2 * mean, cap))


def _mean_off(scenario: Scenario, mean: float, median_tokens: float) -> float:
    return prepare_scenario(lengths(scenario, median_tokens)).lengths.mean_tokens - mean


def _bands(variants: list[Scenario]) -> dict[str, Any]:
    """Summarise the members that can be simulated: median, p10 and p90 of every number, and the last error of the
    others.
    """
    outcomes = []
    dropped = ""
    for scenario in track(variants, variants[0].name, transient=True):
        try:
            outcomes.append(simulate_scenario(scenario))
        except SpecInvalid as error:
            dropped = str(error)
    values: dict[str, list[float]] = {
        "rollout_speedup": [one.rollout_speedup for one in outcomes],
        "step_speedup": [one.step_speedup for one in outcomes],
        "step_s": [one.speculative.step_s for one in outcomes],
        "exposed_generation_s": [one.speculative.exposed_generation_s for one in outcomes],
    }
    return {
        "members": len(outcomes),
        "dropped": dropped,
        **{name: nemo_rl.band(found) for name, found in values.items() if found},
    }


def score() -> None:
    """Compare the predictions with what is published."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    score_nemo_rl(stored["nemo_rl_step_s"])
    for ensemble, predictions in stored["rollout_speedup"].items():
        table = Table(
            "rollout speed-up", "p10", "median", "p90", "published", "median is off by", "kind", title=ensemble
        )
        for name, found in predictions.items():
            if not isinstance(found, dict):
                continue
            published = SYNCHRONOUS[name].published["rollout"]
            inside = found["p10"] <= published <= found["p90"]
            table.add_row(
                name,
                f"{found['p10']:.2f}",
                f"{found['median']:.2f}",
                f"{found['p90']:.2f}",
                f"{published:.2f}{'' if inside else ' outside'}",
                f"{relative_error(found['median'], published):+.0%}",
                found["kind"],
            )
        Console(width=110).print(table)


def compare_scenarios() -> None:
    """Simulate the scenarios of examples/plan for every published row and phase; print published, ours and error."""
    console = Console(width=120)
    table = Table("published row", "figure", "published", "ours", "off by", "role", title="scenarios of examples/plan")
    for row in track(list_published_rows(), "simulating", transient=True):
        for figure, ours in row.predict_figures().items():
            role = "fitted" if row.is_fitted else "predicted"
            table.add_row(row.name, figure, *_compare_figures(figure, ours, row.published[figure]), role)
    console.print(table)
    table = Table("workload", "phase", "published", "ours", "off by", "role", title="seconds of a step, by phase")
    for workload, which in WORKLOADS.items():
        outcome = simulate_scenario(parse_scenario(read_mapping(find_scenario(f"paper-8b-{which}-sync"))))
        sides = zip(
            ("none", "k=3"),
            PUBLISHED_PHASES[workload],
            (outcome.plain, outcome.speculative),
            FITTED_PHASES[which],
            strict=True,
        )
        for side, published, ours, fitted in sides:
            for phase in PHASES:
                pair = ours.phases_s[phase], getattr(published, phase)
                role = "fitted" if phase in fitted else "predicted"
                table.add_row(f"{which} {side}", phase, *_compare_figures(phase, *pair), role)
            table.add_row(f"{which} {side}", "step", *_compare_figures("step", ours.step_s, published.wall_seconds), "")
    console.print(table)


def _compare_figures(figure: str, ours: float, published: float) -> tuple[str, str, str]:
    """Format published, ours and error. Exposed generation may be 0, so its error is in seconds."""
    error = f"{ours - published:+.1f} s" if figure == "exposed_s" else f"{relative_error(ours, published):+.0%}"
    return f"{published:.4g}", f"{ours:.3g}", error


def score_nemo_rl(stored: dict[str, Any]) -> None:
    """Compare the predictions with NeMo-RL's published figures."""
    table = Table("NeMo-RL row", "p10, s", "median, s", "p90, s", "published, s", "off by", title="seconds of a step")
    errors = []
    for row, found in nemo_rl.scored(stored):
        if "stepS" not in found:
            table.add_row(row.name, "", "", "", f"{row.step_s:g}", found["dropped"])
            continue
        band = found["stepS"]
        errors.append(band["median"] / row.step_s - 1)
        table.add_row(row.name, *(f"{band[name]:.3g}" for name in band), f"{row.step_s:g}", f"{errors[-1]:+.0%}")
    Console(width=120).print(table)
    distances = np.abs(errors)
    within = int(np.sum(distances <= 0.2))
    print(f"median error {np.median(distances):.0%}, {within} of {len(errors)} within 20 %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("predict")
    commands.add_parser("score")
    commands.add_parser("scenarios")
    asked = parser.parse_args()
    actions: dict[str, Callable[[], None]] = {
        "predict": lambda: print(STORED.write_text(json.dumps(predict(), indent=1) + "\n"), "bytes stored"),
        "score": score,
        "scenarios": compare_scenarios,
    }
    actions[asked.command]()


if __name__ == "__main__":
    main()
