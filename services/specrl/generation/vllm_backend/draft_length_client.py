"""The front end's side of the adaptive draft length: configuration, costs of other runs, and reports.

The controller itself runs in the engine core (`extensions/scheduler.py`). This module calls it there; `engine` calls
this module.

    configure_scheduler -> (vLLM starts) -> seed_costs: step costs that other runs have learnt, if there are any
    ReportPoller: logs the controller's decisions, and keeps its step costs for other runs

Step costs are valid for one combination of device, driver, models, mechanism, versions, and use of CUDA graphs. A hash
of it names the file in the cache folder. The coordinator has tables by the same name in the run's folder, for pods of
the same kind, whose cache folder is empty. An engine without a table learns the costs from its first steps.
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
from pathlib import Path
from typing import Any

import structlog

from specrl.errors import EngineFailed
from specrl.files import SMALL_BYTES, cache_folder, read_object, write_text
from specrl.generation.drafting_metrics import export_report
from specrl.generation.vllm_backend import arguments
from specrl.generation.vllm_backend.translation import translate_errors
from specrl.machine import read_driver_version
from specrl.records import Drafting
from specrl.rpc.shared_costs import SharedCosts
from specrl.seams.versions import installed_version
from specrl.spec import RunSpec
from specrl.telemetry import metrics

SCHEDULERS = "specrl.generation.vllm_backend.extensions.scheduler"
REPORT_S = 1.0  # between two reports
SAVE_S = 15.0  # from the start until the costs are saved for the first time; the wait doubles each time
LONGEST_SAVE_S = 600.0  # up to this

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


async def seed_costs(llm: Any, file: Path, shared: SharedCosts | None = None) -> None:
    """Give the controller the step costs that other runs have learnt: from the file, or else from another replica.

    Nothing is measured here: without costs, or with wrong ones, the controller learns them.
    """
    if (known := _read_costs(file)) is not None and await _take_costs(llm, known, str(file)):
        return
    known = await shared.find_costs(file.stem) if shared is not None else None
    if known is not None:
        await _take_costs(llm, known, "coordinator")


async def _take_costs(llm: Any, costs: dict[str, Any], source: str) -> bool:
    """Give known costs to the controller. Returns False if they are of other batch sizes or lengths."""
    if await _call_scheduler(llm, "take_costs", costs):
        log.info("draft_costs_read", source=source)
        return True
    _ignore_costs(source, "must have the step costs of this engine by batch size and draft length")
    return False


async def notify_new_weights(llm: Any, is_same_policy: bool) -> None:
    """Notify the controller of new weights. is_same_policy: only the drafter's weights are new."""
    await _call_scheduler(llm, "drafter_replaced" if is_same_policy else "weights_changed")


async def fix_length(llm: Any, length: int | None) -> None:
    """Always draft `length` tokens; None returns to the controller's decisions. For measurements."""
    await _call_scheduler(llm, "fix", length)


async def fetch_report(llm: Any) -> dict[str, Any]:
    """Fetch the report of `DraftLengthController.build_report`."""
    found: dict[str, Any] = await _call_scheduler(llm, "report")
    return found


class ReportPoller:
    """Fetches a report every REPORT_S, logs what has happened, keeps the last report, and saves costs now and then.

    It runs in a task of its own: the engine core does not answer during a collective, and the replica's status must not
    wait for that. `close` ends the task and saves the last costs in the file. file: see `costs_file`.
    """

    def __init__(self, llm: Any, replica_id: str, file: Path, shared: SharedCosts | None = None) -> None:
        self.last: Drafting | None = None
        self._replica_id = replica_id
        self._file = file
        self._shared = shared
        self._costs: dict[str, Any] | None = None
        self._task = asyncio.create_task(self._poll_reports(llm), name="watch-drafting")

    async def _poll_reports(self, llm: Any) -> None:
        logged: dict[str, Any] = {}
        wait_s = SAVE_S
        save_at = time.monotonic() + wait_s
        while not llm.errored:
            try:
                found = await fetch_report(llm)
            except EngineFailed:
                return  # the engine's own calls report its death
            export_report(found)
            self.last = Drafting(found["state"], found["predicted_gain"], found["measured_gain"])
            self._costs = found["costs"]
            for event in found["events"]:
                self._log_event(**event)
            now = {"state": found["state"], "table": found["table"]}
            if now != logged:
                logged = now
                gains = {name: _round_gain(found[name]) for name in ("predicted_gain", "measured_gain")}
                log.debug("draft_lengths_changed", replica=self._replica_id, **now, **gains)
            if time.monotonic() >= save_at:
                wait_s = min(2 * wait_s, LONGEST_SAVE_S)
                save_at = time.monotonic() + wait_s
                if self._save_costs() and self._shared is not None:
                    await self._shared.keep_costs(self._file.stem, self._costs)
            await asyncio.sleep(REPORT_S)

    def _log_event(self, kind: str, **fields: Any) -> None:
        if kind == "costs_contradicted":
            log.warning("draft_costs_contradicted", replica=self._replica_id, source=str(self._file), **fields)
        else:
            log.info(_SWITCHED[fields["after"]], replica=self._replica_id, **fields)

    def _save_costs(self) -> bool:
        """Write the last costs to the file. Returns whether there are any."""
        if self._costs is None or not any(seconds for row in self._costs["seconds"].values() for seconds in row):
            return False
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._file, json.dumps(self._costs))
        except OSError as error:
            log.warning("draft_costs_not_saved", file=str(self._file), reason=str(error))
        return True

    def close(self) -> None:
        """Cancel the task, and save the last costs."""
        self._task.cancel()
        self._save_costs()


def _round_gain(gain: float | None) -> float | None:
    return None if gain is None else round(gain, 3)


async def _call_scheduler(llm: Any, name: str, *args: Any) -> Any:
    """Call the scheduler's `drafting_<name>` in the engine core. args: at most one.

    vLLM allows a utility call at most as many arguments as its method has parameters, and `*args` counts as one.
    """
    with translate_errors(f"answer drafting_{name}"):
        return await llm.engine_core.call_utility_async("specrl_drafting", name, *args)


def costs_file(spec: RunSpec, model_configs: Sequence[dict[str, Any]]) -> Path:
    """Return the path of the step costs of this engine on this hardware."""
    from vllm.platforms import current_platform

    generation = spec.generation
    # Everything that a step's cost depends on.
    parts = {
        "hardware": describe_hardware(),
        "driver": read_driver_version(),
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
                "expert_parallel",
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
