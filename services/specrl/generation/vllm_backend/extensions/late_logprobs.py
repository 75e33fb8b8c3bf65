"""Makes vLLM's engine core send a rollout's log-probabilities once, with its last output.

vLLM 0.32 and 0.33 send those of each step: three arrays of one number for each live request. To encode and decode them
takes about 10 us a token, and nothing reads them before the end (docs/measured.md, "The path around vLLM").

They are held for requests whose output is returned once and whose end the engine core finds. Other programs may stream
outputs, and a stop string is found in the front end, which then has to have all log-probabilities. Ids of tokens,
counters and weight versions are sent with each step as before.

Called by `plugin.register` in each vLLM process; the engine core's scheduler does the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def hold_logprobs() -> None:
    """Make vLLM's scheduler hold log-probabilities. Idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    update = Scheduler.update_from_output
    if getattr(update, "holds_logprobs", False):
        return

    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = update(self, *args, **kwargs)
        held = self.__dict__.setdefault("specrl_held_logprobs", HeldLogprobs())
        for core in outputs.values():
            held.hold_or_release(core.outputs, self.requests)
        return outputs

    update_from_output.holds_logprobs = True  # type: ignore[attr-defined]
    Scheduler.update_from_output = update_from_output  # type: ignore[method-assign]  # replaces a method


class HeldLogprobs:
    """The log-probabilities of unfinished requests, as vLLM's LogprobsLists of each step, by request id."""

    def __init__(self) -> None:
        self._held: dict[str, list[Any]] = {}

    def hold_or_release(self, outputs: Iterable[Any], unfinished: Mapping[str, Any]) -> None:
        """Take the log-probabilities out of a step's outputs, and put all of them into a request's last output.

        outputs: vLLM's EngineCoreOutputs of single requests. unfinished: the scheduler's requests by id.
        """
        for output in outputs:
            name = output.request_id
            if output.finish_reason is not None:
                parts = self._held.pop(name, None)
                if parts is not None:
                    output.new_logprobs = _join_parts(parts, output.new_logprobs)
            elif output.new_logprobs is not None and _is_read_at_end(unfinished[name].sampling_params):
                self._held.setdefault(name, []).append(output.new_logprobs)
                output.new_logprobs = None
        if len(self._held) > len(unfinished):  # some requests were aborted, and have no last output
            for name in self._held.keys() - unfinished.keys():
                del self._held[name]


def _is_read_at_end(params: Any) -> bool:
    from vllm.sampling_params import RequestOutputKind

    return params.output_kind is RequestOutputKind.FINAL_ONLY and not params.detokenize


def _join_parts(parts: list[Any], last: Any) -> Any:
    """Join LogprobsLists of one request, in order. last: None if the last step sampled no token."""
    whole = parts if last is None else [*parts, last]
    ids, logprobs, ranks = (np.concatenate([part[column] for part in whole]) for column in range(3))
    return parts[0]._replace(logprob_token_ids=ids, logprobs=logprobs, sampled_token_ranks=ranks)
