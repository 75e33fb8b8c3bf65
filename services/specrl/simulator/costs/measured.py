"""Costs as a run measured them: its engine steps, fitted, and its phases, by tokens.

    step(B, k, s) = h(B) + c B s + [k > 0] d + e k + f k B        h is piecewise linear; all coefficients >= 0

The fit minimizes squared relative errors. h is not a single line, since few rollouts cost more than their share of
many. Beyond the measured batches, contexts and draft lengths, the fit extrapolates linearly; `list_extrapolations`
reports that. With drafts of only one length, the cost of any draft (d) cannot be told from the cost per drafted token
(e, f). Then a draft is assumed to add as much as one of its tokens (d = e + f B). This is close to what runs with
several lengths measured. Called by `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from pydantic import ValidationError
from scipy.optimize import nnls

from specrl.errors import SpecInvalid, SpecProblem
from specrl.files import JSON_BYTES, read_text
from specrl.formats.calibration import RunCalibration, TrainedPhases
from specrl.simulator.costs.interface import Floats, ProcessorSharing
from specrl.simulator.scenarios.scenario import Scenario

# A run's first step warms it up. Its phases are left out if there are other steps.
WARM_UP_STEPS = 1

# With fewer settled steps (see `_settled_steps`), all steps after the first are used.
MIN_SETTLED_STEPS = 3

# Ratio of the largest to the smallest step, in tokens, from which fixed and per-token costs can be told apart.
MIN_TOKEN_SPREAD = 2.0

# A batch, context or draft is reported as extrapolated beyond this multiple of the largest measured one.
EXTRAPOLATION_RATIO = 1.25


def read_calibrations(files: Sequence[Path]) -> RunCalibration:
    """Combine the calibrations of several runs.

    Engine steps and trained steps come from all of them, acceptance from the first run that drafted, the rest from the
    first. A run with drafts measures no step without drafts, and vice versa; two runs allow a comparison.
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


def read_calibration(file: Path) -> RunCalibration:
    """Read a calibration.json and leave out the steps that warmed the run up.

    Raises SpecInvalid when the file is missing or damaged, or holds too few steps.
    """
    try:
        found = RunCalibration.model_validate_json(read_text(file, JSON_BYTES))
    except FileNotFoundError as error:
        remedy = "pass a run's calibration.json; a run writes it after every step"
        raise SpecInvalid((SpecProblem("--calibration", f"must be a file, got {file}", remedy),)) from error
    except (OSError, ValidationError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SpecInvalid(
            (SpecProblem(str(file), f"must be a run's calibration.json, got {reason}", "run it again"),)
        ) from error
    if len(found.engine_steps) < 2 or not found.steps:
        rule = f"must hold engine steps and trained steps, got {len(found.engine_steps)} and {len(found.steps)}"
        raise SpecInvalid((SpecProblem(str(file), rule, "let the run train some more steps"),))
    return found.model_copy(update={"steps": tuple(_settled_steps(found.steps))})


class MeasuredCosts:
    """The costs of one calibration for one scenario."""

    def __init__(self, calibration: RunCalibration, scenario: Scenario) -> None:
        self._seen = calibration
        self._scenario = scenario
        steps = calibration.engine_steps
        batch = np.array([step.live for step in steps])
        lengths = np.array([float(step.draft_tokens) for step in steps])
        self._tells_drafts_apart = len(np.unique(lengths[lengths > 0])) > 1
        self._bends = _bend_batches(batch)
        context = np.array([step.context for step in steps])
        seconds = np.array([step.seconds for step in steps])
        # Relative errors (1 / seconds), weighted by the number of engine steps behind each mean.
        weight = np.sqrt(np.array([float(step.steps) for step in steps])) / seconds
        self._coefficients = _least_squares(self._feature_matrix(batch, lengths, context), seconds, weight)
        trained = calibration.steps
        self._logprob = _fit_per_token(trained, [step.phases.logprob for step in trained], calibration.prompt_tokens)
        self._train = _fit_per_token(trained, [step.phases.train for step in trained], calibration.prompt_tokens)
        self.data_s = median(step.phases.data for step in trained)
        self.prepare_s = median(step.phases.prepare for step in trained)
        self.load_s = median(step.load_seconds for step in trained)
        self.sharing = None if scenario.cluster.gpu is not None else _measured_sharing(calibration)
        is_drafting = scenario.speculation.draft_tokens > 0
        # Prefer the runs that draft, or do not draft, like this scenario.
        like = [one for one in calibration.alone if (one.draft_tokens > 0) == is_drafting]
        self._starting = [one.starting_seconds for one in like or calibration.alone]

    def step_s(self, batch_B: Floats, k: int, context: float) -> Floats:
        """Return the module's step(B, k, s), in seconds."""
        lengths = np.full_like(batch_B, float(k))
        return self._feature_matrix(batch_B, lengths, np.full_like(batch_B, context)) @ self._coefficients

    def start_s(self, rollouts: int, tokens: float) -> float:
        """Return the measured cost of a start, preferably from runs that draft, or do not draft, like this one.

        Where it was not measured, a token of a prompt is assumed to cost as much as one more live rollout.
        """
        if self._starting:
            return median(self._starting) * rollouts
        few, many = self.step_s(np.array([1.0, self._bends[-1]]), 0, 0.0)
        return float(many - few) / float(self._bends[-1]) * tokens

    def logprob_s(self, tokens: float) -> float:
        """Return a fixed cost plus a cost per token."""
        return self._logprob[0] + self._logprob[1] * tokens

    def train_s(self, tokens: float) -> float:
        """Return a fixed cost plus a cost per token."""
        return self._train[0] + self._train[1] * tokens

    def list_extrapolations(self, live: int) -> list[str]:
        """Return a sentence for each part of the scenario that lies beyond the measurements."""
        steps = self._seen.engine_steps
        k = self._scenario.speculation.draft_tokens
        work = self._scenario.workload
        asked = {
            "live rollouts of a replica": (float(live), max(step.live for step in steps)),
            "draft tokens": (float(k), float(max(step.draft_tokens for step in steps))),
            "tokens of context": (work.prompt_tokens + work.max_tokens / 2.0, max(step.context for step in steps)),
        }
        found = []
        if min(step.draft_tokens for step in steps) > 0:
            found.append(
                "extrapolated: no step without drafts was measured, so the gain of speculation is a guess; "
                "add --calibration of a run without speculation"
            )
        return found + [
            f"extrapolated: the scenario has {wanted:g} {what}, at most {seen:g} were measured"
            for what, (wanted, seen) in asked.items()
            if wanted > seen * EXTRAPOLATION_RATIO
        ]

    def _feature_matrix(self, batch: Floats, lengths: Floats, context: Floats) -> Floats:
        drafts = (lengths > 0).astype(np.float64)
        # d = e + f B, as the module says.
        if not self._tells_drafts_apart:
            lengths = lengths + drafts
            drafts = np.zeros_like(drafts)
        ends = [*self._bends[1:], np.inf]
        rises = [np.clip(batch, low, high) - low for low, high in zip(self._bends, ends, strict=True)]
        return np.stack([np.ones_like(batch), *rises, batch * context, drafts, lengths, lengths * batch], axis=-1)


def _measured_sharing(calibration: RunCalibration) -> ProcessorSharing | None:
    """Return the cores used, as measured without GPUs while generation and training took turns; else None."""
    alone = calibration.alone
    if not alone:
        return None
    return ProcessorSharing(
        cores=median(one.cores for one in alone),
        replica_cores=median(one.threads for one in alone),
        token_core_s=median(one.core_seconds for one in alone),
        trainer_cores=median(one.cores_training for one in alone),
    )


def _bend_batches(batch: Floats) -> Floats:
    """Return where h may bend: measured batches, each at least twice the previous, up to half of the largest."""
    found = [float(batch.min())]
    for value in np.unique(batch):
        if 2 * found[-1] <= value <= batch.max() / 2:
            found.append(float(value))
    return np.array(found)


def _settled_steps(steps: Sequence[TrainedPhases]) -> Sequence[TrainedPhases]:
    """Return the steps that are no larger than an earlier one.

    A trainer's largest step so far is the first to touch some of its memory, which makes it slower.
    """
    found = []
    most = 0
    for step in steps:
        if step.tokens <= most:
            found.append(step)
        most = max(most, step.tokens)
    return found if len(found) >= MIN_SETTLED_STEPS else steps[WARM_UP_STEPS:] or steps


def _least_squares(features: Floats, values: Floats, weight: Floats) -> Floats:
    """Return the non-negative coefficients that minimize the weighted squared errors."""
    # Columns of similar size keep the solver well conditioned.
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    found, _ = nnls(features / scale * weight[:, None], values * weight)
    return np.asarray(found / scale)


def _fit_per_token(
    trained: Sequence[TrainedPhases], seconds: Sequence[float], prompt_tokens: float
) -> tuple[float, float]:
    """Return (seconds per step, seconds per token), both >= 0.

    The first is 0 where steps are too similar in size to tell the two apart.
    """
    tokens = np.array([step.tokens + step.rollouts * prompt_tokens for step in trained])
    ones = np.ones_like(tokens) if tokens.max() >= MIN_TOKEN_SPREAD * tokens.min() else np.zeros_like(tokens)
    features = np.stack([ones, tokens], axis=-1)
    constant, slope = _least_squares(features, np.asarray(seconds), np.ones_like(tokens))
    return float(constant), float(slope)
