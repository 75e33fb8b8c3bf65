"""A rollout's log-probabilities are sent once, with its last output, and none is lost, doubled or reordered.

`tests/contract/test_engine_contract.py` and `test_losslessness.py` compare those of real engines with the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from specrl.generation.vllm_backend.extensions.late_logprobs import HeldLogprobs


def some_logprobs(tokens: Sequence[int]) -> Any:
    """LogprobsLists of one request's tokens in a step."""
    from vllm.v1.outputs import LogprobsLists

    ids = np.array(tokens, dtype=np.int32)
    return LogprobsLists(ids[:, None], -0.5 * ids[:, None].astype(np.float32), ids + 1)


def an_output(name: str, tokens: Sequence[int], *, is_last: bool = False) -> Any:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    logprobs = some_logprobs(tokens) if tokens else None
    return EngineCoreOutput(name, list(tokens), logprobs, finish_reason=FinishReason.LENGTH if is_last else None)


def a_request(**fields: Any) -> Any:
    """A scheduler's request with the sampling parameters of a rollout; `fields` changes some of them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    given = {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False, "logprobs": 0}
    return SimpleNamespace(sampling_params=SamplingParams(**(given | fields)))


def sent_tokens(output: Any) -> list[int] | None:
    """Return the tokens whose log-probabilities an output has; None without any. All three arrays must agree."""
    if output.new_logprobs is None:
        return None
    ids, logprobs, ranks, _ = output.new_logprobs
    tokens: list[int] = ids[:, 0].tolist()
    assert logprobs[:, 0].tolist() == [-0.5 * token for token in tokens]
    assert ranks.tolist() == [token + 1 for token in tokens]
    return tokens


def test_the_last_output_has_all_of_a_requests_log_probabilities_in_order() -> None:
    held = HeldLogprobs()
    unfinished = {"a": a_request(), "b": a_request()}
    steps = [
        [an_output("a", [1]), an_output("b", [10, 11])],
        [an_output("b", [12])],
        [an_output("a", [2, 3, 4]), an_output("b", [13], is_last=True)],
        [an_output("a", [], is_last=True)],
    ]
    sent = []
    for outputs in steps:
        for output in outputs:
            if output.finish_reason is not None:
                unfinished.pop(output.request_id)
        held.hold_or_release(outputs, unfinished)
        sent.append([sent_tokens(output) for output in outputs])
    assert sent == [[None, None], [None], [None, [10, 11, 12, 13]], [[1, 2, 3, 4]]]
    assert [output.new_token_ids for output in steps[2]] == [[2, 3, 4], [13]], "ids are sent with each step"


def test_log_probabilities_are_sent_at_once_if_the_front_end_may_need_them_before_the_end() -> None:
    """A stop string is found in the front end, and other programs may stream."""
    from vllm.sampling_params import RequestOutputKind

    for fields in ({"detokenize": True}, {"output_kind": RequestOutputKind.DELTA}):
        held = HeldLogprobs()
        first = an_output("a", [1])
        held.hold_or_release([first], {"a": a_request(**fields)})
        last = an_output("a", [2], is_last=True)
        held.hold_or_release([last], {})
        assert (sent_tokens(first), sent_tokens(last)) == ([1], [2])


def test_nothing_is_kept_of_an_aborted_request() -> None:
    held = HeldLogprobs()
    held.hold_or_release([an_output("a", [1]), an_output("b", [2])], {"a": a_request(), "b": a_request()})
    held.hold_or_release([an_output("b", [3])], {"b": a_request()})
    again = an_output("a", [7], is_last=True)  # ids are not used twice; one that is shows what was kept
    last = an_output("b", [4], is_last=True)
    held.hold_or_release([again, last], {})
    assert (sent_tokens(again), sent_tokens(last)) == ([7], [2, 3, 4])
