"""vLLM's scheduler with an adaptive draft length. `DraftLengthController` decides, vLLM's dynamic speculation acts.

vLLM 0.32 looks up the draft length of each step in `Scheduler.dynamic_sd_lookup`, a list by batch size. It fills the
list once, from `num_speculative_tokens_per_batch_size`; drafter, verification and CUDA graphs follow it. This class
changes the list while the engine runs. It also measures what the controller needs: the duration of pure decoding steps,
and the accepted tokens of every draft.

Runs in the engine core. The front end calls the methods `drafting_*` through `EngineCore.specrl_drafting` (plugin.py).

Durations. A step's duration is the time between two calls of `schedule`. In a busy engine this is the step's real cost,
including host work. `decoding_step.Step` says which durations can be compared.

Catch-up. A learned drafter has not read the tokens of steps for which it was off. Requests of such steps are decoded
without it until `DraftLengthController.is_catch_up_due`. Then all live requests are computed again, with the drafter,
as after a weight update with `weights.kvCache: Recompute`. Their sampled tokens are kept; the output of the step in
progress is discarded.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from specrl.errors import EngineFailed
from specrl.generation.draft_lengths.controller import DraftingState, DraftLengthController
from specrl.generation.draft_lengths.decoding_step import COMPARED_AFTER, OFF, Step
from specrl.generation.vllm_backend.extensions.draft_rest import is_draft_free
from specrl.seams.versions import installed_version

SETTINGS = "specrl"  # our key in vLLM's additional_config
LACKS_SKIP_DRAFTS = installed_version("vllm") == "0.32.0"  # see `_drafted_length`


class DraftLengthScheduler(Scheduler):
    """The scheduler for mechanisms without async scheduling: n-gram look-up drafts from token ids on the host."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(self, "dynamic_sd_lookup"):
            raise EngineFailed(
                "vLLM's Scheduler must have dynamic_sd_lookup, from which it takes each step's draft length, got none; "
                "install a version that specrl supports"
            )
        config: Any = self.vllm_config  # vLLM types additional_config as hashable; ours is a dict
        settings: dict[str, Any] = config.additional_config[SETTINGS]
        self._drafting = DraftLengthController(self.scheduler_config.max_num_seqs, tuple(settings["lengths"]))
        self._is_lookup = settings["is_lookup"]
        self._recent: deque[Step] = deque(maxlen=COMPARED_AFTER + 1)
        self._emitted = 0  # tokens since the last call of `schedule`
        self._missed: set[str] = set()  # requests with tokens that a learned drafter has not read
        self.rests = False  # whether the last scheduled step neither verifies nor makes drafts; read by plugin.py
        self._left_to_read = 0  # tokens of a catch-up that are still to be computed
        self.dynamic_sd_lookup = self._drafting.table

    # -- calls of vLLM --------------------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule the next step with the draft length of its batch size, and record the last step's duration."""
        now = time.perf_counter()
        self.dynamic_sd_lookup = self._next_lookup()
        output = super().schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        drafted = output.scheduled_spec_decode_tokens
        batch = len(scheduled)
        length = output.num_spec_tokens_to_schedule
        self._missed -= output.finished_req_ids
        # A try's few steps without the drafter are not worth a catch-up: the drafter then has a gap in its context.
        if length == OFF and not self._is_lookup and (self._missed or not self._drafting.is_trying):
            self._missed.update(scheduled)
        if self._recent:  # the last step ends with this call
            self._drafting.record_step(self._recent, self._emitted, now - self._recent[-1].at_s)
        self._emitted = 0
        # Each request computes one token of its own and its drafts; the rest are prompts.
        read = output.total_num_scheduled_tokens - batch - sum(len(tokens) for tokens in drafted.values())
        is_catch_up = read > 0 and self._left_to_read > 0
        self._left_to_read -= min(read, self._left_to_read)
        self._recent.append(Step(now, batch, _drafted_length(output), read, is_catch_up))
        self.rests = is_draft_free(output)
        return output

    def _next_lookup(self) -> list[int]:
        """Choose the lengths by batch size for the next step, and start a catch-up if one is due."""
        lookup = self._drafting.next_table()
        # A trial drafts for new requests, and does not wait for older ones that the drafter has missed. A try measures
        # the time of a step, whatever is accepted.
        is_free = self._drafting.state is DraftingState.TRIAL or self._drafting.is_trying
        if not self._missed or self._drafting.fixed is not None or is_free:
            return lookup
        batch = min(len(self.running) + len(self.waiting), self._drafting.max_batch)
        computed = (request.num_computed_tokens for request in self.running)
        left = (request.max_tokens - request.num_output_tokens for request in self.running)
        if not self._drafting.is_catch_up_due(batch, computed, left):
            return [OFF] * len(lookup)
        self._left_to_read = sum(request.num_computed_tokens for request in self.running)
        self.reset_prefix_cache(reset_running_requests=True)
        return lookup

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Count emitted tokens. When the engine runs idle, the next step's duration cannot be measured."""
        outputs = super().update_from_output(*args, **kwargs)
        self._emitted += sum(len(item.new_token_ids) for core in outputs.values() for item in core.outputs)
        if not self.running:
            self._recent.clear()
        return outputs

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Record the acceptance. vLLM calls this for every verified draft."""
        is_whole = kwargs["request_id"] not in self._missed
        self._drafting.record_verified_draft(kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"], is_whole)
        return super().make_spec_decoding_stats(*args, **kwargs)

    def add_request(self, request: Any) -> None:
        """Add a request. A trial may start with it, since the drafter reads it from its first token."""
        self._drafting.record_request()
        super().add_request(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Reset the cache. Requests that are computed again are read by the drafter, too, so nothing is missed."""
        if reset_running_requests:
            self._missed.clear()
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def set_pause_state(self, *args: Any, **kwargs: Any) -> None:
        """Pause or resume. The time across a pause is no step's duration."""
        self._recent.clear()
        super().set_pause_state(*args, **kwargs)

    # -- calls of the front end, by name through EngineCore.specrl_drafting -----------------------------------------

    def drafting_report(self) -> dict[str, Any]:
        """Return the report of `DraftLengthController.build_report`."""
        return self._drafting.build_report()

    def drafting_fix(self, length: int | None) -> None:
        """Always draft this many tokens; None returns to the controller's decisions. For tests and benchmarks."""
        self._drafting.fix_length(length)

    def drafting_weights_changed(self) -> None:
        """Notify the controller of new weights of policy and drafter."""
        self._drafting.handle_new_weights()

    def drafting_drafter_replaced(self) -> None:
        """Notify the controller of a new drafter under the same policy version."""
        self._drafting.reset_drafter()

    def drafting_take_costs(self, costs: dict[str, Any]) -> bool:
        """Begin with the costs of other runs. Returns False if they are of other batch sizes or lengths."""
        return self._drafting.costs.load_json(costs)


def _drafted_length(output: Any) -> int:
    """Return the number of tokens that each request of a step really drafts.

    vLLM 0.33's second model runner drafts nothing if each request is at its last token or still has prompt to read.
    `num_spec_tokens_to_schedule` has the lookup's length even so. A learned drafter then runs one pass, as for
    length 0.

    Only vLLM 0.32 lacks `skip_drafts`. With later versions it is read without a default, so that its absence is an
    error.
    """
    length: int = output.num_spec_tokens_to_schedule
    if length == OFF:
        return OFF
    skips = getattr(output, "skip_drafts", False) if LACKS_SKIP_DRAFTS else output.skip_drafts
    return 0 if skips else length


class AsyncDraftLengthScheduler(DraftLengthScheduler, AsyncScheduler):
    """The scheduler for learned drafters, whose next step is scheduled while the current one runs."""
