"""Costs as a run measured them: its engines' steps, fitted; its stages, by tokens.

    step(B, k, s) = h(B) + c B s + [k > 0] d + e k + f k B        h rising by pieces of lines; all >= 0

by least squares of relative errors. h is no line, since few rollouts cost more than their share of many. What drafts
add lies on a line, and so does a batch or context beyond what was seen: `extrapolations` says so. Drafts of one length
alone cannot tell what any draft adds (d) from what each of its tokens does; then any draft is taken to add as much as
one token of it (d = e + f B), which is near to where more lengths were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from pydantic import ValidationError

from specrl.coordinator.calibration import Calibration, TrainedStages
from specrl.errors import Problem, SpecInvalid
from specrl.files import JSON_BYTES, read_text
from specrl.simulator.costs import Floats, Sharing
from specrl.simulator.scenario import Mechanism, Scenario

WARM_UP_STEPS = 1
"""The first step of a run warms it up; its stages are left out where there are others."""

ENOUGH_SETTLED = 3
"""Steps no larger than one before; of fewer, all after the first are taken."""

ENOUGH_SPREAD = 2.0
"""Between the smallest step and the largest, in tokens, for what any step takes to be told from what a token takes."""

BEYOND = 1.25
"""A batch, context or draft this much larger than the largest that was measured is called extrapolated."""


def read_calibrations(files: Sequence[Path]) -> Calibration:
    """One of several runs: what was measured in all, acceptance of the first that has any, the rest of the first.

    A run that drafts measures no step without drafts, and the other way round; two of them make a comparison.
    """
    found = [read_calibration(file) for file in files]
    drafting = next((one for one in found if one.acceptance), found[0])
    return found[0].model_copy(
        update={
            "engine_steps": tuple(step for one in found for step in one.engine_steps),
            "steps": tuple(step for one in found for step in one.steps),
            "alone": tuple(alone for one in found for alone in one.alone),
            "acceptance": drafting.acceptance,
            "draft_tokens": drafting.draft_tokens,
        }
    )


def read_calibration(file: Path) -> Calibration:
    """Read calibration.json, less the steps that warmed the run up.

    Raises SpecInvalid when it is missing, damaged, or holds no engine step.
    """
    try:
        found = Calibration.model_validate_json(read_text(file, JSON_BYTES))
    except FileNotFoundError as error:
        remedy = "name a run's calibration.json; a run writes it after every step"
        raise SpecInvalid((Problem("--calibration", f"must be a file, got {file}", remedy),)) from error
    except (OSError, ValidationError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SpecInvalid(
            (Problem(str(file), f"must be a run's calibration.json, got {reason}", "run it again"),)
        ) from error
    if len(found.engine_steps) < 2 or not found.steps:
        rule = f"must hold engine steps and trained steps, got {len(found.engine_steps)} and {len(found.steps)}"
        raise SpecInvalid((Problem(str(file), rule, "let the run go on for some steps"),))
    return found.model_copy(update={"steps": tuple(_settled(found.steps))})


class MeasuredCosts:
    """Costs of one calibration for one scenario."""

    def __init__(self, calibration: Calibration, scenario: Scenario) -> None:
        self._seen = calibration
        self._scenario = scenario
        steps = calibration.engine_steps
        batch = np.array([step.live for step in steps])
        lengths = np.array([float(step.draft_tokens) for step in steps])
        self._tells_drafts_apart = len(np.unique(lengths[lengths > 0])) > 1
        self._bends = _bends(batch)
        context = np.array([step.context for step in steps])
        seconds = np.array([step.seconds for step in steps])
        weight = np.sqrt(np.array([float(step.steps) for step in steps])) / seconds
        self._coefficients = _least_squares(self._features(batch, lengths, context), seconds, weight)
        stages = calibration.steps
        self._logprob = _per_token(stages, [step.stages.logprob for step in stages], calibration.prompt_tokens)
        self._train = _per_token(stages, [step.stages.train for step in stages], calibration.prompt_tokens)
        self._data = median(step.stages.data for step in stages)
        self._prepare = median(step.stages.prepare for step in stages)
        self._load = median(step.load_seconds for step in stages)
        k = 0 if scenario.speculation.mechanism is Mechanism.NONE else scenario.speculation.k
        like = [one for one in calibration.alone if (one.draft_tokens > 0) == (k > 0)]
        self._starting = [one.starting_seconds for one in like or calibration.alone]

    def step_s(self, batch_B: Floats, k: int, context: float) -> Floats:
        """See the module."""
        lengths = np.full_like(batch_B, float(k))
        return self._features(batch_B, lengths, np.full_like(batch_B, context)) @ self._coefficients

    def start_s(self, rollouts: int, tokens: float) -> float:
        """As measured, in runs that draft or do not, like this one; else in the others.

        Where it was not measured, a prompt's token costs what one more live rollout does.
        """
        if self._starting:
            return median(self._starting) * rollouts
        few, many = self.step_s(np.array([1.0, self._bends[-1]]), 0, 0.0)
        return float(many - few) / float(self._bends[-1]) * tokens

    def data_s(self) -> float:
        """Median of the run."""
        return self._data

    def logprob_s(self, tokens: float) -> float:
        """By tokens."""
        return self._logprob[0] + self._logprob[1] * tokens

    def train_s(self, tokens: float) -> float:
        """By tokens."""
        return self._train[0] + self._train[1] * tokens

    def prepare_s(self) -> float:
        """Median of the run."""
        return self._prepare

    def load_s(self) -> float:
        """Median of the run."""
        return self._load

    def sharing(self) -> Sharing | None:
        """As measured without GPUs, where generation and training took turns."""
        alone = self._seen.alone
        if self._scenario.cluster.gpu is not None or not alone:
            return None
        return Sharing(
            cores=median(one.cores for one in alone),
            replica=median(one.threads for one in alone),
            token=median(one.core_seconds for one in alone),
            trainer=median(one.cores_training for one in alone),
        )

    def extrapolations(self, live: int) -> list[str]:
        """What of the scenario lies beyond what was measured."""
        steps, speculation = self._seen.engine_steps, self._scenario.speculation
        k = 0 if speculation.mechanism is Mechanism.NONE else speculation.k
        work = self._scenario.workload
        asked = {
            "live rollouts of a replica": (float(live), max(step.live for step in steps)),
            "draft tokens": (float(k), float(max(step.draft_tokens for step in steps))),
            "tokens of context": (work.prompt_tokens + work.max_tokens / 2.0, max(step.context for step in steps)),
        }
        found = []
        if min(step.draft_tokens for step in steps) > 0:
            found.append(
                "extrapolated: no step without drafts was measured, so what speculation gains is a guess; "
                "add --calibration of a run without"
            )
        return found + [
            f"extrapolated: {wanted:g} {what} are asked for, at most {seen:g} were measured"
            for what, (wanted, seen) in asked.items()
            if wanted > seen * BEYOND
        ]

    def _features(self, batch: Floats, lengths: Floats, context: Floats) -> Floats:
        drafts = (lengths > 0).astype(np.float64)
        if not self._tells_drafts_apart:
            lengths, drafts = lengths + drafts, np.zeros_like(drafts)
        ends = [*self._bends[1:], np.inf]
        rises = [np.clip(batch, low, high) - low for low, high in zip(self._bends, ends, strict=True)]
        return np.stack([np.ones_like(batch), *rises, batch * context, drafts, lengths, lengths * batch], axis=-1)


def _bends(batch: Floats) -> Floats:
    """Where h may bend: at measured batches, each at least twice the one before, up to half of the largest."""
    found = [float(batch.min())]
    for value in np.unique(batch):
        if 2 * found[-1] <= value <= batch.max() / 2:
            found.append(float(value))
    return np.array(found)


def _settled(steps: Sequence[TrainedStages]) -> Sequence[TrainedStages]:
    """Those no larger than one before. A trainer's largest step so far is the first to touch some of its memory."""
    found, most = [], 0
    for step in steps:
        if step.tokens <= most:
            found.append(step)
        most = max(most, step.tokens)
    return found if len(found) >= ENOUGH_SETTLED else steps[WARM_UP_STEPS:] or steps


def _least_squares(features: Floats, values: Floats, weight: Floats) -> Floats:
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    found, _ = nnls(features / scale * weight[:, None], values * weight)
    return np.asarray(found / scale)


def _per_token(stages: Sequence[TrainedStages], seconds: Sequence[float], prompt_tokens: float) -> tuple[float, float]:
    """(seconds of any step, seconds of a token), neither below 0; the first 0 where steps are too much alike."""
    tokens = np.array([step.tokens + step.rollouts * prompt_tokens for step in stages])
    ones = np.ones_like(tokens) if tokens.max() >= ENOUGH_SPREAD * tokens.min() else np.zeros_like(tokens)
    features = np.stack([ones, tokens], axis=-1)
    constant, slope = _least_squares(features, np.asarray(seconds), np.ones_like(tokens))
    return float(constant), float(slope)
