"""The front end's side of the live draft length: scheduler and settings at start, calibration, reports.

    configure -> (vLLM starts) -> set_abilities: lengths that its workers can do
              -> calibrate: costs from a file, or measured in a few seconds and written to it
    report: what the controller in the engine core has decided since the last one

A calibration file belongs to hardware, models, mechanism and versions, all of which are in its name. One that cannot be
read or written costs a new calibration, nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from specrl.errors import EngineFailed
from specrl.files import SMALL_BYTES, read_object, write_text
from specrl.generation.draft_length import OFF
from specrl.generation.exported import show_drafting
from specrl.generation.vllm_backend.draft_rest import Abilities
from specrl.generation.vllm_backend.translation import translated
from specrl.records import Drafting, Sampling
from specrl.seams.versions import installed_version
from specrl.spec import RunSpec
from specrl.telemetry import metrics

SCHEDULERS = "specrl.generation.vllm_backend.scheduler"
PROMPT_TOKENS = 16  # of a request in a calibration; what a step costs is mostly the weights, not the context
NODE_PATIENCE_S = 60.0  # a batch size that takes longer is given up, and with it the calibration
POLL_S = 0.02
REPORT_S = 1.0
_SWITCHED = {"off": "drafter_switched_off", "trial": "drafter_tried", "drafting": "drafter_switched_on"}
_CANNOT_SWITCH_OFF = (
    "drafts cannot be switched off on this model runner of vLLM: every step drafts and verifies at least one token, "
    "even where that does not pay"
)
_CANNOT_LEAVE_OUT = (
    "the drafter cannot be left out on this model runner of vLLM: every step pays for one pass of it, even where "
    "drafts do not pay and none is made"
)

log = structlog.get_logger(__name__)


def configure(config: Any, lengths: Sequence[int]) -> None:
    """Have a vLLM config use the scheduler with a live draft length."""
    kind = "AsyncDraftLengthScheduler" if config.scheduler_config.async_scheduling else "DraftLengthScheduler"
    config.scheduler_config.scheduler_cls = f"{SCHEDULERS}.{kind}"
    is_lookup = config.speculative_config.method == "ngram"
    config.additional_config["specrl"] = {"lengths": list(lengths), "is_lookup": is_lookup}


async def calibrate(llm: Any, file: Path, sampling: Sampling) -> None:
    """Give the controller the costs of steps. Without them it drafts at full length, as a fixed one would.

    sampling: as the run samples, since what it asks for is part of a step's cost; maxTokens as long as requests can be.
    """
    began = time.monotonic()
    known = _read(file)
    if known is not None:
        if await _call(llm, "take_costs", known):
            log.info("draft_costs_read", file=str(file))
            return
        _pass_over(file, "must hold the seconds of this engine's steps by batch size and draft length")
    nodes = await _call(llm, "nodes")
    for batch in nodes:
        if not await _calibrate_at(llm, batch, sampling):
            log.warning("draft_costs_not_measured", batch=batch, reason="the batch size was never reached")
            await _call(llm, "drop_calibration")
            return
    costs = await _call(llm, "end_calibration")
    _write(file, costs)
    log.info("draft_costs_measured", seconds=round(time.monotonic() - began, 1), costs=_in_ms(costs), file=str(file))


async def _calibrate_at(llm: Any, batch: int, sampling: Sampling) -> bool:
    """Keep `batch` requests decoding until every length has been measured."""
    from vllm.inputs.engine import tokens_input

    from specrl.generation.vllm_backend.completion import sampling_params

    await _call(llm, "calibrate", batch)
    names: list[str] = []
    deadline = time.monotonic() + NODE_PATIENCE_S
    try:
        while not await _call(llm, "is_calibrated"):
            if time.monotonic() > deadline:
                return False
            if not llm.output_processor.has_unfinished_requests():  # at first, and when the last ones were too short
                for place in range(batch):
                    names.append(f"calibration-{batch}-{len(names)}")
                    ids = [(place * 7 + offset) % 97 + 1 for offset in range(PROMPT_TOKENS)]
                    params = sampling_params(replace(sampling, seed=place))  # each its own generator, as rollouts have
                    params.ignore_eos = True
                    await llm.add_request(names[-1], tokens_input(ids, cache_salt=names[-1]), params)
            await asyncio.sleep(POLL_S)
        return True
    finally:
        await llm.abort(names)


async def weights_changed(llm: Any, is_same_policy: bool) -> None:
    """Tell the controller that new weights serve; of the drafter alone, if the policy's version stays."""
    await _call(llm, "drafter_replaced" if is_same_policy else "weights_changed")


async def set_abilities(llm: Any, lengths: Sequence[int], workers: Sequence[dict[str, Any]], replica_id: str) -> None:
    """Use of `lengths` only what every worker can do; warn where the drafter cannot be left out.

    workers: what each said of its model runner (`worker.specrl_inspect`): `draft_rest.Abilities`, `model_runner`.
    """
    abilities = {name: all(found[name] for found in workers) for name in Abilities._fields}
    await _call(llm, "set_abilities", abilities)
    if not abilities["can_rest"]:
        smallest = min(k for k in lengths if k != OFF)
        log.warning(
            "drafter_rest_not_supported",
            replica=replica_id,
            model_runner=workers[0]["model_runner"],
            smallest_length=smallest,
            meaning=_CANNOT_SWITCH_OFF if smallest > 0 else _CANNOT_LEAVE_OUT,
        )


async def fix(llm: Any, length: int | None) -> None:
    """Always draft `length` tokens; None goes on with what was decided before. For measurements."""
    await _call(llm, "fix", length)


async def report(llm: Any) -> dict[str, Any]:
    """What `draft_length.DraftLengths.report` says."""
    found: dict[str, Any] = await _call(llm, "report")
    return found


class Watch:
    """Asks for a report now and then, logs what was switched, and keeps the last one.

    In a task of its own: an engine core that is in the middle of a collective does not answer, and whoever asks for
    the replica's status must not wait for it. Ended by `close`.
    """

    def __init__(self, llm: Any, replica_id: str) -> None:
        self.last: Drafting | None = None
        self._replica_id = replica_id
        self._task = asyncio.create_task(self._run(llm), name="watch-drafting")

    async def _run(self, llm: Any) -> None:
        told: dict[str, Any] = {}
        while not llm.errored:
            try:
                found = await report(llm)
            except EngineFailed:
                return  # the engine says so itself
            show_drafting(found)
            self.last = Drafting(found["state"], found["predicted_gain"], found["measured_gain"])
            for event in found["events"]:
                log.info(_SWITCHED[event["after"]], replica=self._replica_id, **event)
            now = {"state": found["state"], "table": found["table"]}
            if now != told:
                told = now
                gains = {name: _rounded(found[name]) for name in ("predicted_gain", "measured_gain")}
                log.debug("draft_lengths_changed", replica=self._replica_id, **now, **gains)
            await asyncio.sleep(REPORT_S)

    def close(self) -> None:
        """Stop asking."""
        self._task.cancel()


def _rounded(gain: float | None) -> float | None:
    return None if gain is None else round(gain, 3)


async def _call(llm: Any, name: str, *args: Any) -> Any:
    """Run `drafting_<name>` of the scheduler. args: one at most, since vLLM counts `*args` of a utility call as one."""
    with translated(f"answer drafting_{name}"):
        return await llm.engine_core.call_utility_async("specrl_drafting", name, *args)


def calibration_file(spec: RunSpec, model_configs: Sequence[dict[str, Any]]) -> Path:
    """Where costs of this engine on this hardware are kept."""
    generation = spec.generation
    parts = {
        "hardware": hardware(),
        "versions": [importlib.metadata.version("specrl"), installed_version("vllm")],
        "models": model_configs,
        "dtype": spec.model.dtype.value,
        "speculation": generation.speculation.model_dump(mode="json", exclude={"eagle3": {"path"}}),
        "engine": generation.model_dump(
            mode="json", include={"max_live_rollouts", "tensor_parallel", "eager", "threads", "sampling"}
        ),
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "specrl" / "draft-costs" / f"{digest}.json"


def hardware() -> str:
    """What the computation runs on: the GPU's name, or the processor's and how many cores there are."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model} x {os.cpu_count()}"


def _in_ms(costs: dict[str, Any]) -> dict[str, list[float]]:
    return {k: [round(1000 * value, 2) for value in row] for k, row in costs["seconds"].items()}


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return read_object(file, SMALL_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _pass_over(file, str(error))
        return None


def _pass_over(file: Path, reason: str) -> None:
    metrics.FILES_PASSED_OVER.labels("draft_costs").inc()
    log.warning("draft_costs_passed_over", file=str(file), reason=reason)


def _write(file: Path, costs: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(costs))
    except OSError as error:
        log.warning("draft_costs_unsaved", file=str(file), reason=str(error))
