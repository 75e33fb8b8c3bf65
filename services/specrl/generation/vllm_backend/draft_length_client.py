"""The front end's side of the adaptive draft length: configuration at the start, calibration, and reports.

The controller itself runs in the engine core (`extensions/scheduler.py`). This module calls it there; `engine` calls
this module.

    configure_scheduler -> (vLLM starts) -> allow_forced_lengths: if the workers support them
                        -> calibrate_costs: read step costs, or measure them and keep them
    fetch_report: the controller's decisions since the last report

Step costs are valid for one combination of device, driver, models, mechanism, versions, and use of CUDA graphs. A hash
of it names the file in the cache folder. The coordinator has tables by the same name in the run's folder, for pods of
the same kind, whose cache folder is empty. A table that cannot be read or kept only costs a new calibration, which
takes a few seconds.
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
from specrl.files import SMALL_BYTES, cache_folder, read_object, write_text
from specrl.generation.drafting_metrics import export_report
from specrl.generation.vllm_backend import arguments
from specrl.generation.vllm_backend.translation import translate_errors
from specrl.records import Drafting, Sampling
from specrl.rpc.shared_costs import SharedCosts
from specrl.seams.versions import installed_version
from specrl.spec import RunSpec
from specrl.telemetry import metrics

SCHEDULERS = "specrl.generation.vllm_backend.extensions.scheduler"
PROMPT_TOKENS = 16  # of a calibration request; short, since a step's cost is mostly reading the weights
NODE_PATIENCE_S = 60.0  # a batch size that takes longer ends the calibration
POLL_S = 0.02  # between two questions whether a batch size is measured
REPORT_S = 1.0  # between two reports
DRIVER_FILE = Path("/proc/driver/nvidia/version")

# Log event for each state that the controller enters.
_SWITCHED = {"off": "drafter_switched_off", "trial": "drafter_trial_started", "drafting": "drafter_switched_on"}

log = structlog.get_logger(__name__)


def configure_scheduler(config: Any, lengths: Sequence[int]) -> None:
    """Make a vLLM config use our scheduler. lengths: those that the controller may choose."""
    # Async scheduling needs a subclass of vLLM's AsyncScheduler.
    kind = "AsyncDraftLengthScheduler" if config.scheduler_config.async_scheduling else "DraftLengthScheduler"
    config.scheduler_config.scheduler_cls = f"{SCHEDULERS}.{kind}"
    is_lookup = config.speculative_config.method == "ngram"
    config.additional_config["specrl"] = {"lengths": list(lengths), "is_lookup": is_lookup}


async def calibrate_costs(llm: Any, file: Path, sampling: Sampling, shared: SharedCosts | None = None) -> None:
    """Give the controller its step costs: from the file, from another replica, or by measuring them.

    If a batch size is not reached in time, the controller runs without costs and always drafts at full length.

    sampling: the run's own, since sampling is a part of a step's cost, with max_tokens as long as the context allows.
    shared: costs of other replicas of the run.
    """
    began = time.monotonic()
    key = file.stem
    if (known := _read_costs(file)) is not None and await _take_costs(llm, known, str(file)):
        if shared is not None:
            await shared.keep_costs(key, known)
        return
    if shared is not None:
        known = await shared.find_costs(key)
        if known is not None and await _take_costs(llm, known, "coordinator"):
            _write_costs(file, known)
            return
    nodes = await _call_scheduler(llm, "nodes")
    for batch in nodes:
        if not await _measure_batch_size(llm, batch, sampling):
            log.warning("draft_costs_not_measured", batch=batch, reason="not measured in time; drafting at full length")
            await _call_scheduler(llm, "drop_calibration")
            return
    costs = await _call_scheduler(llm, "end_calibration")
    _write_costs(file, costs)
    if shared is not None:
        await shared.keep_costs(key, costs)
    log.info(
        "draft_costs_measured", seconds=round(time.monotonic() - began, 1), costs=_costs_in_ms(costs), file=str(file)
    )


async def _take_costs(llm: Any, costs: dict[str, Any], source: str) -> bool:
    """Give known costs to the controller. Returns False if they are of other batch sizes or lengths."""
    if await _call_scheduler(llm, "take_costs", costs):
        log.info("draft_costs_read", source=source)
        return True
    _ignore_costs(source, "must have the step costs of this engine by batch size and draft length")
    return False


async def _measure_batch_size(llm: Any, batch: int, sampling: Sampling) -> bool:
    """Keep `batch` requests decoding until every length is measured.

    After NODE_PATIENCE_S the passes so far are used. Returns False if they are too few.
    """
    from vllm.inputs.engine import tokens_input

    from specrl.generation.vllm_backend.completion import convert_sampling

    await _call_scheduler(llm, "calibrate", batch)
    names: list[str] = []
    deadline = time.monotonic() + NODE_PATIENCE_S
    try:
        while not await _call_scheduler(llm, "is_calibrated"):
            if time.monotonic() > deadline:
                return bool(await _call_scheduler(llm, "end_batch_early"))
            if not llm.output_processor.has_unfinished_requests():  # at first, and again when these have ended
                for place in range(batch):
                    names.append(f"calibration-{batch}-{len(names)}")
                    # Arbitrary ids, small enough for any vocabulary. The salt keeps requests from sharing a prefix.
                    ids = [(place * 7 + offset) % 97 + 1 for offset in range(PROMPT_TOKENS)]
                    # A seed, and so a random generator, for each request, as rollouts have.
                    params = convert_sampling(replace(sampling, seed=place), with_sets=sampling.is_truncated)
                    params.ignore_eos = True
                    await llm.add_request(names[-1], tokens_input(ids, cache_salt=names[-1]), params)
            await asyncio.sleep(POLL_S)
        return True
    finally:
        await llm.abort(names)


async def notify_new_weights(llm: Any, is_same_policy: bool) -> None:
    """Notify the controller of new weights. is_same_policy: only the drafter's weights are new."""
    await _call_scheduler(llm, "drafter_replaced" if is_same_policy else "weights_changed")


async def allow_forced_lengths(llm: Any, workers: Sequence[dict[str, Any]]) -> None:
    """Let a calibration force drafts if every worker supports that. workers: of `WorkerExtension.specrl_inspect`."""
    await _call_scheduler(llm, "allow_forced", all(found["can_force"] for found in workers))


async def fix_length(llm: Any, length: int | None) -> None:
    """Always draft `length` tokens; None returns to the controller's decisions. For measurements."""
    await _call_scheduler(llm, "fix", length)


async def fetch_report(llm: Any) -> dict[str, Any]:
    """Fetch the report of `DraftLengthController.build_report`."""
    found: dict[str, Any] = await _call_scheduler(llm, "report")
    return found


class ReportPoller:
    """Fetches a report every REPORT_S, logs the controller's changes of state, and keeps the last report.

    It runs in a task of its own: the engine core does not answer during a collective, and the replica's status must not
    wait for that. `close` ends the task.
    """

    def __init__(self, llm: Any, replica_id: str) -> None:
        self.last: Drafting | None = None
        self._replica_id = replica_id
        self._task = asyncio.create_task(self._poll_reports(llm), name="watch-drafting")

    async def _poll_reports(self, llm: Any) -> None:
        logged: dict[str, Any] = {}
        while not llm.errored:
            try:
                found = await fetch_report(llm)
            except EngineFailed:
                return  # the engine's own calls report its death
            export_report(found)
            self.last = Drafting(found["state"], found["predicted_gain"], found["measured_gain"])
            for event in found["events"]:
                log.info(_SWITCHED[event["after"]], replica=self._replica_id, **event)
            now = {"state": found["state"], "table": found["table"]}
            if now != logged:
                logged = now
                gains = {name: _round_gain(found[name]) for name in ("predicted_gain", "measured_gain")}
                log.debug("draft_lengths_changed", replica=self._replica_id, **now, **gains)
            await asyncio.sleep(REPORT_S)

    def close(self) -> None:
        """Cancel the task."""
        self._task.cancel()


def _round_gain(gain: float | None) -> float | None:
    return None if gain is None else round(gain, 3)


async def _call_scheduler(llm: Any, name: str, *args: Any) -> Any:
    """Call the scheduler's `drafting_<name>` in the engine core. args: at most one.

    vLLM allows a utility call at most as many arguments as its method has parameters, and `*args` counts as one.
    """
    with translate_errors(f"answer drafting_{name}"):
        return await llm.engine_core.call_utility_async("specrl_drafting", name, *args)


def calibration_file(spec: RunSpec, model_configs: Sequence[dict[str, Any]]) -> Path:
    """Return the path of the calibration file for this engine on this hardware."""
    from vllm.platforms import current_platform

    generation = spec.generation
    # Everything that a step's cost depends on.
    parts = {
        "hardware": describe_hardware(),
        "driver": _read_driver_version(),
        "versions": [importlib.metadata.version("specrl"), *map(installed_version, ("vllm", "torch"))],
        "graphs": not arguments.is_eager(spec, bool(current_platform.is_cpu())),
        "models": model_configs,
        "dtype": spec.model.dtype.value,
        "speculation": generation.speculation.model_dump(mode="json", exclude={"eagle3": {"path"}}),
        "engine": generation.model_dump(
            mode="json",
            include={
                "max_live_rollouts",
                "tensor_parallel",
                "threads",
                "sampling",
                "kv_cache_dtype",
                "attention_backend",
            },
            exclude={"sampling": {"max_tokens"}},
        ),
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_folder() / "draft-costs" / f"{digest}.json"


def _read_driver_version() -> str:
    """Return the line in which NVIDIA's kernel driver names its version; empty without a driver."""
    try:
        return DRIVER_FILE.read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return ""


def describe_hardware() -> str:
    """Return the GPU's name, or the processor's name and number of cores."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model} x {os.cpu_count()}"


def _costs_in_ms(costs: dict[str, Any]) -> dict[str, list[float]]:
    return {k: [round(1000 * value, 2) for value in row] for k, row in costs["seconds"].items()}


def _read_costs(file: Path) -> dict[str, Any] | None:
    try:
        return read_object(file, SMALL_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _ignore_costs(str(file), str(error))
        return None


def _ignore_costs(source: str, reason: str) -> None:
    metrics.FILES_SKIPPED.labels("draft_costs").inc()
    log.warning("draft_costs_ignored", source=source, reason=reason)


def _write_costs(file: Path, costs: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(costs))
    except OSError as error:
        log.warning("draft_costs_not_saved", file=str(file), reason=str(error))
