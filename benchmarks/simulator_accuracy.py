"""Measures how well `specrl simulate` predicts published results. It predicts first, and scores later.

    python -m benchmarks.simulator_accuracy scenarios   # compares the scenarios of examples/plan with what is published
    python -m benchmarks.simulator_accuracy predict     # writes benchmarks/simulator_predictions.json
    python -m benchmarks.simulator_accuracy score       # compares that file with what is published

Half of the rows of arXiv:2604.26779 are calibrated on, the others are predicted; `draw_calibrated` drew which. Three
efficiencies (`CALIBRATED_FIELDS`) are fitted to the calibrated synchronous rows of Qwen3-8B. A row's band is its
prediction plus and minus `BAND`.

The paper does not publish batch size, length limit and spread of lengths. So `predict` repeats the calibration for each
member of an ensemble of plausible workloads: the median length on the column without speculation, and the three
efficiencies. Members that leave an error above `MAX_ERROR` are dropped and counted. For NeMo-RL's own rows see
simulator_nemo_rl.py, and for runs of this machine simulator_runs.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
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
from scipy.optimize import brentq, minimize

from specrl.errors import SpecInvalid
from specrl.simulator.costs.interface import Floats
from specrl.simulator.scenarios.scenario import Mechanism, Scenario
from specrl.simulator.scenarios.scenario_file import find_scenario, parse_scenario, read_mapping
from specrl.simulator.simulate import prepare_scenario, simulate_scenario

STORED = Path(__file__).with_name("simulator_predictions.json")

NGRAM_K = 5
"""Tokens that n-gram drafting proposes, which is not published. Of 3, 5 and 7, this fits the calibrated row best."""

WORKLOADS = {"base": "zero", "reasoning": "think"}
"""Names of the paper's workloads here, by those of paper_rows.py."""

DRAFTS = {
    "eagle3:3": ("k=3", "eagle3", 3),
    "online": ("k=3, online", "eagle3", 3),
    "weak": ("k=3, weak drafter", "eagle3", 3),
    "weak-online": ("k=3, weak drafter, online", "eagle3", 3),
    "eagle3:5": ("k=5", "eagle3", 5),
    "eagle3:7": ("k=7", "eagle3", 7),
    "ngram": ("n-gram", "ngram", NGRAM_K),
}
"""row of paper_rows.py: name, mechanism, k."""


@dataclass(frozen=True)
class PublishedRow:
    """A published row, and the scenario of examples/plan that predicts it.

    published: by figure: rollout and step (speed-ups), step_s and exposed_s (seconds of a step, and of its exposed
    generation).
    """

    name: str
    scenario: str
    mechanism: str
    k: int
    acceptance_length: float | None
    published: dict[str, float]

    @property
    def role(self) -> str:
        return "calibrated" if self.name in CALIBRATED else "predicted"

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


FITTED_PHASES = {
    "zero": ({"data", "prepare", "generation", "logprob", "train"}, {"generation"}),
    "think": ({"generation"}, {"generation"}),
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
        rows.append(PublishedRow(name, f"paper-8b-{which}-sync", mechanism, k, length, known))
    for it in PROJECTED:
        name = f"235b on {it.gpus}, k={it.k}, acceptance {it.acceptance_length:g}"
        scenario = f"paper-235b-{f'async-{it.gpus}' if it.lag else f'sync-{it.gpus}'}"
        known = {"rollout": it.generation, "step": it.step}
        rows.append(PublishedRow(name, scenario, "eagle3", it.k, it.acceptance_length, known))
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

CALIBRATED = frozenset(draw_calibrated())

CALIBRATED_FIELDS = {"host_sequence_us": 112.0, "kv_reread_share": 0.55, "eager_us_per_layer": 440.0}
"""Fields of `efficiency` that the calibration finds, and where it starts."""

BAND = 0.16
"""Half of a band's width, relative to the prediction: twice the error of the calibrated synchronous rows (root mean
square, 7.9 %), rounded up."""

MAX_ERROR = 0.10
"""Largest such error of a member of the ensemble. The publication did not have a workload that leaves more."""

# Prompts of 16 rollouts; longest completion of RL-Zero in tokens; sigma of lengths; RL-Think's longest by RL-Zero's.
WORKLOAD_CHOICES = tuple(itertools.product((128, 256), (6144, 8192), (0.4, 0.6, 0.8), (1.0, 1.25)))


@dataclass(frozen=True)
class Member:
    """A calibrated workload that the publication may have had. error: root mean square over the calibrated rows."""

    zero: Scenario
    think: Scenario
    error: float

    def predict_speedup(self, row: PublishedRow) -> float:
        """Return the speed-up of generation. Raises ValueError if a rollout has no seat."""
        scenario = self.zero if row.name.startswith("zero") else self.think
        plain_s = batch_s(drafting(scenario, "none", 3, None))
        return plain_s / batch_s(drafting(scenario, row.mechanism, row.k, row.acceptance_length))


def list_members() -> tuple[list[Member], int]:
    """Calibrate every workload. Returns also the number of dropped members."""
    found = [_calibrate_member(*choice) for choice in track(WORKLOAD_CHOICES, "calibrating", transient=True)]
    kept = [member for member in found if member is not None and member.error <= MAX_ERROR]
    return kept, len(found) - len(kept)


def _calibrate_member(prompts: int, longest: int, sigma: float, think_by_zero: float) -> Member | None:
    """Fit `CALIBRATED_FIELDS` to the calibrated synchronous rows. None: this workload does not fit the GPUs."""
    base = parse_scenario(read_mapping(find_scenario("paper-8b-zero-sync"))).with_fields(
        workload={"sigma": sigma, "max_tokens": longest}, schedule={"prompts_per_step": prompts}
    )
    rows = [row for row in SYNCHRONOUS.values() if row.name in CALIBRATED]

    def build_member(factors: Floats) -> Member | None:
        how = {field: start * abs(f) for (field, start), f in zip(CALIBRATED_FIELDS.items(), factors, strict=True)}
        if how["kv_reread_share"] > 1:
            return None
        start = base.with_fields(efficiency=how)
        think = start.with_fields(workload={"max_tokens": round(longest * think_by_zero)})
        try:
            member = Member(
                with_plain_s(start, PUBLISHED_PHASES["base"][0].generation),
                with_plain_s(think, PUBLISHED_PHASES["reasoning"][0].generation),
                error=0.0,
            )
            errors = [relative_error(member.predict_speedup(row), row.published["rollout"]) for row in rows]
        except (ValueError, SpecInvalid):  # no such length, or not enough memory
            return None
        return replace(member, error=float(np.sqrt(np.mean(np.square(errors)))))

    def find_error(factors: Floats) -> float:
        member = build_member(factors)
        return 9.0 if member is None else member.error

    best = minimize(find_error, np.ones(len(CALIBRATED_FIELDS)), method="Nelder-Mead", options={"maxfev": 150})
    return build_member(best.x)


def with_plain_s(scenario: Scenario, target_s: float) -> Scenario:
    """Choose the median length with which generation takes `target_s` without speculation.

    Raises ValueError if there is none.
    """
    plain = drafting(scenario, "none", 3, None)

    def off_s(median_tokens: float) -> float:
        try:
            return batch_s(lengths(plain, median_tokens)) - target_s
        except (ValueError, SpecInvalid):  # so long that the KV cache does not hold all rollouts
            return target_s

    return lengths(scenario, brentq(off_s, 200, 0.98 * scenario.workload.max_tokens, xtol=5))


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


def predict() -> dict[str, Any]:
    """Make all predictions of the ensembles."""
    workloads, dropped = list_members()
    speedups: dict[str, Any] = {"members": len(workloads), "dropped": dropped}
    speedups["error"] = nemo_rl.band([member.error for member in workloads])
    for field in CALIBRATED_FIELDS:
        speedups[field] = nemo_rl.band([getattr(member.zero.efficiency, field) for member in workloads])
    for name, row in SYNCHRONOUS.items():
        values = []
        for member in workloads:
            with suppress(ValueError):  # a rollout has no seat
                values.append(member.predict_speedup(row))
        speedups[name] = nemo_rl.band(values)
    return {
        "rollout_speedup": speedups,
        "scenarios": {name: _bands(variants) for name, variants in scenarios(workloads)},
        "nemo_rl_step_s": nemo_rl.predict(),
    }


def scenarios(calibrated: list[Member]) -> Iterator[tuple[str, list[Scenario]]]:
    """Predict other layouts and models, for each workload that they may have had.

    The asynchronous 8B layout trains half of a member's batch, like its scenario. 235B varies the spread of lengths,
    the efficiency of kernels and, where training has its own GPUs, their share, which is not published.
    """
    asynchronous = parse_scenario(read_mapping(find_scenario("paper-8b-think-async")))
    for mechanism, length in (("none", None), ("eagle3", 2.77)):
        given = [drafting(member.think, mechanism, 3, length) for member in calibrated]
        yield (
            f"paper-8b-think-async, {mechanism}",
            [
                one.with_fields(
                    cluster=dict(asynchronous.cluster),
                    layout=dict(asynchronous.layout),
                    schedule={
                        "max_policy_lag": 1,
                        "steps": 8,
                        "prompts_per_step": one.schedule.prompts_per_step // 2,
                    },
                )
                for one in given
            ],
        )
    for k, length in itertools.product((3, 5, 7), (3, 4, 5, 8)):
        if length <= k + 1:
            base = drafting(parse_scenario(read_mapping(find_scenario("paper-235b-sync-512"))), "eagle3", k, length)
            yield f"paper-235b-sync-512, k={k}, acceptance {length}", list(_plausible(base))
    for lag in (0, 1, 2):
        base = parse_scenario(read_mapping(find_scenario("paper-235b-async-2048"))).with_fields(
            schedule={"max_policy_lag": lag}
        )
        splits = [
            base.with_fields(layout={"generation_gpus": gpus, "training_gpus": 2048 - gpus}) for gpus in (416, 512, 640)
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
    speedups = stored["rollout_speedup"]
    table = Table("rollout speed-up", "p10", "median", "p90", "published", "median is off by", "role")
    for name, row in SYNCHRONOUS.items():
        found = speedups[name]
        published = row.published["rollout"]
        figures = [f"{found[quantile]:.2f}" for quantile in ("p10", "median", "p90")]
        error = f"{relative_error(found['median'], published):+.0%}"
        table.add_row(name, *figures, f"{published:.2f}", error, row.role)
    console = Console(width=110)
    console.print(table)
    console.print({name: found for name, found in speedups.items() if name not in SYNCHRONOUS})


def compare_scenarios() -> None:
    """Simulate the scenarios of examples/plan for every published row and phase; print published, ours and error."""
    console = Console(width=120)
    table = Table("published row", "figure", "published", "ours", "off by", "band", "role", title="examples/plan")
    for row in track(list_published_rows(), "simulating", transient=True):
        for figure, ours in row.predict_figures().items():
            band = f"{ours * (1 - BAND):.2f}-{ours * (1 + BAND):.2f}"
            table.add_row(row.name, figure, *_compare_figures(figure, ours, row.published[figure]), band, row.role)
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
                role = "calibrated" if phase in fitted else "predicted"
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
