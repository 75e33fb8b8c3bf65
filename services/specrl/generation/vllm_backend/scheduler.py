"""vLLM's scheduler with a live draft length: what `draft_length.DraftLengths` decides, vLLM's dynamic speculation does.

vLLM 0.32 looks up the length of each step in `Scheduler.dynamic_sd_lookup`, a list by batch size that it fills once
from `num_speculative_tokens_per_batch_size`; drafter, verification and graphs follow what the lookup says. So this
class changes the list while the engine runs, and measures what the controller needs to know: the duration of every step
of pure decoding, and how much of every draft was accepted. Runs in the engine core; the methods `drafting_*` are
reached from the front end through `EngineCore.specrl_drafting` (plugin.py).

A step's duration is the time between two calls of `schedule`, which in a busy engine is what a step really costs, host
work included. Of which steps it is known what they cost: `calibration.Step`.

A learned drafter that was left out for some steps has not read the requests that were in them. They are decoded without
it until `DraftLengths.catch_up_is_due`; then all live requests are computed anew, drafter included, as for new weights
with `weights.kvCache: Recompute`. What they have sampled so far stays; a step that is under way is dropped unseen.

In a calibration, look-up mechanisms find nothing in random prompts; `FORCED` asks the workers for drafts all the same.
It is added only after all workers have said that they take it out again (`drafting_set_abilities`). To any other worker
it would be a thousand drafts more, for which vLLM has no room.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from specrl.errors import EngineFailed
from specrl.generation.calibration import Calibration, Step
from specrl.generation.draft_length import OFF, DraftLengths, State
from specrl.generation.vllm_backend.draft_rest import FORCED, rests
from specrl.seams.versions import installed_version

SETTINGS = "specrl"  # of vLLM's additional_config
LACKS_SKIP_DRAFTS = installed_version("vllm") == "0.32.0"  # `_drafted_length`
MEASURED_AFTER = 2  # steps of its length: `calibration.Step`


class DraftLengthScheduler(Scheduler):
    """For n-gram look-up, which drafts from token ids on the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(self, "dynamic_sd_lookup"):
            raise EngineFailed(
                "vLLM's Scheduler must have dynamic_sd_lookup, from which it takes each step's draft length, got none; "
                "install a version that specrl was read with"
            )
        config: Any = self.vllm_config  # typed as something to hash, which is not what it is here
        settings: dict[str, Any] = config.additional_config[SETTINGS]
        self._drafting = DraftLengths(self.scheduler_config.max_num_seqs, tuple(settings["lengths"]))
        self._is_lookup = settings["is_lookup"]
        self._can_force = False  # until the workers have said that they can
        self._calibration: Calibration | None = None
        self._recent: deque[Step] = deque(maxlen=MEASURED_AFTER + 1)
        self._emitted = 0
        self._missed: set[str] = set()
        self.rests = False  # whether the last step that was scheduled neither verifies drafts nor makes any
        self._left_to_read = 0
        self.dynamic_sd_lookup = self._drafting.table

    # -- vLLM's own calls -----------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Note how long the last step took, then schedule the next one with the length of its batch."""
        now = time.perf_counter()
        self.dynamic_sd_lookup = self._next_lookup()
        output = super().schedule(*args, **kwargs)
        scheduled, drafted = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        batch, length = len(scheduled), output.num_spec_tokens_to_schedule
        self._missed -= output.finished_req_ids
        if length == OFF and not self._is_lookup and (self._missed or not self._drafting.is_probing):
            self._missed.update(scheduled)
        if self._recent:
            self._saw_step(now)
        self._emitted = 0
        read = output.total_num_scheduled_tokens - batch - sum(len(tokens) for tokens in drafted.values())
        is_catch_up = read > 0 and self._left_to_read > 0
        self._left_to_read -= min(read, self._left_to_read)
        self._recent.append(Step(now, batch, _drafted_length(output), read, is_catch_up))
        self.rests = rests(output)
        return output

    def _next_lookup(self) -> list[int]:
        """Length by batch size for the step that is about to be scheduled."""
        calibration = self._calibration
        if calibration is not None:
            length = calibration.length + (FORCED if self._can_force and calibration.length > 0 else 0)
            return [length] * len(self._drafting.table)
        lookup = self._drafting.lookup()
        if not self._missed or self._drafting.fixed is not None or self._drafting.state is State.TRIAL:
            return lookup
        batch = min(len(self.running) + len(self.waiting), self._drafting.max_batch)
        computed = (request.num_computed_tokens for request in self.running)
        left = (request.max_tokens - request.num_output_tokens for request in self.running)
        if not self._drafting.catch_up_is_due(batch, computed, left):
            return [OFF] * len(lookup)
        self._left_to_read = sum(request.num_computed_tokens for request in self.running)
        self.reset_prefix_cache(reset_running_requests=True)
        return lookup

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
            is_whole = kwargs["request_id"] not in self._missed
            self._drafting.saw_draft(kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"], is_whole)
        return super().make_spec_decoding_stats(*args, **kwargs)

    def add_request(self, request: Any) -> None:
        """A trial begins with a request that the drafter can read from its beginning."""
        self._drafting.saw_request()
        super().add_request(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """What is computed anew is read by the drafter, too, unless it is left out again."""
        if reset_running_requests:
            self._missed.clear()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

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
        elif last.read > 0:
            self._drafting.saw_reading(last.batch, last.length, last.read, seconds, last.is_catch_up)
        elif last.batch > 0:
            self._drafting.saw_other_step(last.batch, last.length, self._emitted, seconds)

    # -- commands of the front end, by name: EngineCore.specrl_drafting ---------------------------------------------

    def drafting_report(self) -> dict[str, Any]:
        """What `DraftLengths.report` says."""
        return self._drafting.report()

    def drafting_fix(self, length: int | None) -> None:
        """Always draft this many tokens; None: go on deciding."""
        self._drafting.fix(length)

    def drafting_set_abilities(self, abilities: dict[str, bool]) -> None:
        """What all workers can do, as in `draft_rest.Abilities`. Called once, before the first request."""
        self._can_force = abilities["can_force"]
        if not abilities["can_rest"]:
            allowed = tuple(k for k in self._drafting.lengths if k != OFF)
            self._drafting = DraftLengths(self._drafting.max_batch, allowed)
            self.dynamic_sd_lookup = self._drafting.table

    def drafting_weights_changed(self) -> None:
        """New weights serve."""
        self._drafting.weights_changed()

    def drafting_drafter_replaced(self) -> None:
        """Another drafter serves under the same policy."""
        self._drafting.drafter_replaced()

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
        self.dynamic_sd_lookup = self._drafting.table
        self._drafting.revise()


def _drafted_length(output: Any) -> int:
    """How many tokens each request of a step drafts, whatever the lookup said.

    vLLM 0.33's second model runner drafts nothing in a step whose drafts no request could use, since each is at its
    last token or has more of its prompt to read. `num_spec_tokens_to_schedule` names the lookup's length all the same.
    A learned drafter runs one pass then, as for length 0. vLLM 0.32 alone has no `skip_drafts`. From a later version it
    is read without a default, so that an output that lacks it is an error.
    """
    length: int = output.num_spec_tokens_to_schedule
    if length == OFF:
        return OFF
    skips = getattr(output, "skip_drafts", False) if LACKS_SKIP_DRAFTS else output.skip_drafts
    return 0 if skips else length % FORCED


class AsyncDraftLengthScheduler(DraftLengthScheduler, AsyncScheduler):
    """For learned drafters, whose next step is scheduled while the present one runs."""
