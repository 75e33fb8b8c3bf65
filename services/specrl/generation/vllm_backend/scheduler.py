"""vLLM's scheduler with a live draft length: what `draft_length.DraftLengths` decides, vLLM's dynamic speculation does.

vLLM 0.32 looks up the length of each step in `Scheduler.dynamic_sd_lookup`, a list by batch size that it fills once
from `num_speculative_tokens_per_batch_size`; drafter, verification and graphs follow what the lookup says. So this
class changes the list while the engine runs, and measures what the controller needs to know: the duration of every step
of pure decoding, and how much of every draft was accepted. Runs in the engine core; the methods `drafting_*` are
reached from the front end through `EngineCore.specrl_drafting` (plugin.py).

A step's duration is the time between two calls of `schedule`, which in a busy engine is what a step really costs, host
work included. Of which steps it is known what they cost: `calibration.Step`.

In a calibration, look-up mechanisms find nothing in random prompts; `FORCED` asks the worker for drafts all the same.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from specrl.generation.calibration import Calibration, Step
from specrl.generation.draft_length import OFF, DraftLengths
from specrl.generation.vllm_backend.draft_rest import FORCED

SETTINGS = "specrl"  # of vLLM's additional_config
MEASURED_AFTER = 2  # steps of its length: `calibration.Step`


class DraftLengthScheduler(Scheduler):
    """For n-gram look-up, which drafts from token ids on the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config: Any = self.vllm_config  # typed as something to hash, which is not what it is here
        settings: dict[str, Any] = config.additional_config[SETTINGS]
        self._drafting = DraftLengths(self.scheduler_config.max_num_seqs, tuple(settings["lengths"]))
        self._must_force = settings["must_force"]
        self._calibration: Calibration | None = None
        self._recent: deque[Step] = deque(maxlen=MEASURED_AFTER + 1)
        self._emitted = 0
        self._fresh: set[str] = set()
        self._known_state = self._drafting.state
        self.dynamic_sd_lookup = self._drafting.table

    # -- vLLM's own calls -----------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Note how long the last step took, then schedule the next one with the length of its batch."""
        now = time.perf_counter()
        calibration = self._calibration
        if calibration is not None:
            length = calibration.length + (FORCED if self._must_force and calibration.length > 0 else 0)
            self.dynamic_sd_lookup = [length] * len(self._drafting.table)
        else:
            self.dynamic_sd_lookup = self._drafting.lookup()
        output = super().schedule(*args, **kwargs)
        batch, length = len(output.num_scheduled_tokens), output.num_spec_tokens_to_schedule % FORCED
        if output.num_spec_tokens_to_schedule < 0:
            length = output.num_spec_tokens_to_schedule
        decodes = batch > 0 and not output.scheduled_new_reqs and not output.scheduled_cached_reqs.resumed_req_ids
        if self._recent:
            self._saw_step(now)
        self._emitted = 0
        self._recent.append(Step(now, batch, length, decodes))
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Count what was emitted; an engine without work has no steps to measure."""
        outputs = super().update_from_output(*args, **kwargs)
        self._emitted += sum(len(item.new_token_ids) for core in outputs.values() for item in core.outputs)
        if not self.running:
            self._recent.clear()
        return outputs

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM calls this for every draft that was verified."""
        if self._calibration is None:
            is_fresh = kwargs["request_id"] in self._fresh
            self._drafting.saw_draft(kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"], is_fresh)
        return super().make_spec_decoding_stats(*args, **kwargs)

    def add_request(self, request: Any) -> None:
        """Remember the requests that a trial judges by; nobody asks for others."""
        if self._drafting.saw_request():
            self._note_state()
            self._fresh.add(request.request_id)
        super().add_request(request)

    def set_pause_state(self, *args: Any, **kwargs: Any) -> None:
        """No step lasts from before a pause until after it."""
        self._recent.clear()
        super().set_pause_state(*args, **kwargs)

    def _saw_step(self, now: float) -> None:
        """The last step has ended."""
        *before, last = self._recent
        seconds = now - last.at_s
        is_measured = len(before) == MEASURED_AFTER and last.is_measured(*before)
        if self._calibration is not None:
            if is_measured:
                self._calibration.saw_step(last.batch, last.length, seconds)
            return
        if is_measured:
            self._drafting.saw_step(last.batch, last.length, self._emitted, seconds)
        elif last.batch > 0:
            self._drafting.saw_other_step(last.batch, last.length, self._emitted, seconds, begins=not last.decodes)
        self._note_state()

    def _note_state(self) -> None:
        if self._drafting.state is not self._known_state:
            self._known_state = self._drafting.state
            self._fresh.clear()

    # -- commands of the front end, by name: EngineCore.specrl_drafting ---------------------------------------------

    def drafting_report(self) -> dict[str, Any]:
        """What `DraftLengths.report` says."""
        return self._drafting.report()

    def drafting_fix(self, length: int | None) -> None:
        """Always draft this many tokens; None: go on deciding."""
        self._drafting.fix(length)

    def drafting_begin_anew(self) -> None:
        """Decide by the loads that are seen from now on."""
        self._drafting.begin_anew()

    def drafting_forbid_rest(self) -> None:
        """The workers cannot leave the drafter out."""
        allowed = tuple(k for k in self._drafting.lengths if k != OFF)
        self._drafting = DraftLengths(self._drafting.max_batch, allowed)
        self.dynamic_sd_lookup = self._drafting.table

    def drafting_weights_changed(self) -> None:
        """New weights serve."""
        self._drafting.weights_changed()

    def drafting_drafter_replaced(self) -> None:
        """Another drafter serves under the same policy."""
        self._drafting.drafter_replaced()
        self._note_state()

    def drafting_calibrate(self, batch: int) -> None:
        """Measure steps of this batch size from now on; the front end provides the requests."""
        if self._calibration is None:
            self._calibration = Calibration(self._drafting.lengths)
        self._calibration.begin(batch)

    def drafting_is_calibrated(self) -> bool:
        """Whether the batch size of the last `drafting_calibrate` has been measured."""
        return self._calibration is not None and self._calibration.is_done

    def drafting_nodes(self) -> list[int]:
        """Batch sizes to calibrate, ascending."""
        return list(self._drafting.costs.nodes)

    def drafting_end_calibration(self) -> dict[str, Any]:
        """Use what was measured; returns it for a file."""
        assert self._calibration is not None
        self._drafting.costs.fill(self._calibration.rows)
        self._calibration = None
        self._begin()
        return self._drafting.costs.as_json()

    def drafting_drop_calibration(self) -> None:
        """Give up measuring: without costs drafts have full length."""
        self._calibration = None
        self._begin()

    def drafting_take_costs(self, costs: dict[str, Any]) -> bool:
        """Use costs of a file. False when they do not fit."""
        is_taken = self._drafting.costs.take_json(costs)
        if is_taken:
            self._begin()
        return is_taken

    def _begin(self) -> None:
        self._recent.clear()
        self._fresh.clear()
        self.dynamic_sd_lookup = self._drafting.table
        self._drafting.revise()


class AsyncDraftLengthScheduler(DraftLengthScheduler, AsyncScheduler):
    """For learned drafters, whose next step is scheduled while the present one runs."""
