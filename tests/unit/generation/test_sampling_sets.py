"""The recorder takes the ids that top-k and top-p left from the samplers of vLLM's first model runner.

`tests/integration/generation/test_sampling_sets.py` tests real engines.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specrl.generation.vllm_backend.extensions.sampling_sets import SetRecorder, install_recorder

VOCAB = 6
SETS = [[0, 3], [1], [0, 1, 2, 3, 4, 5], [2, 5], [4]]
"""Sets of the five rows of logits of a step."""


def masked(*rows: int) -> torch.Tensor:
    """Return logits [rows, V] with -inf outside of the rows' sets."""
    logits = torch.full((len(rows), VOCAB), -torch.inf)
    for place, row in enumerate(rows):
        logits[place, SETS[row]] = -1.5
    return logits


def a_runner(*, returns_masks: bool = True, is_second: bool = False) -> Any:
    """The attributes of a model runner that the recorder uses. A step samples what `step` says.

    step: None, or the sampled ids by request; drafts: the numbers of drafts by request, in a step with drafts.
    """
    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(return_sampling_mask=returns_masks),
            use_v2_model_runner=is_second,
            speculative_config=object(),
        ),
        sampler=SimpleNamespace(sample=lambda rows: (torch.zeros(len(rows)), masked(*rows))),
        rejection_sampler=SimpleNamespace(_get_logprobs_tensors=lambda *_: "logprobs"),
        drafts=None,
        step=None,
    )

    def sample_tokens() -> Any:
        output = SimpleNamespace(sampled_token_ids=runner.step or [], sampling_masks=None)
        if runner.step is None:  # a step that only prefills
            return output
        if runner.drafts is None:
            runner.sampler.sample(range(len(runner.step)))
            return output
        ends = np.cumsum(np.asarray(runner.drafts) + 1)
        bonus = [int(end) - 1 for end in ends]
        target = [row for row in range(ends[-1]) if row not in bonus]
        runner.sampler.sample(bonus)
        metadata = SimpleNamespace(
            target_logits_indices=torch.tensor(target),
            bonus_logits_indices=torch.tensor(bonus),
            cu_num_sampled_tokens=torch.tensor(ends),
        )
        logits = torch.zeros(int(ends[-1]), VOCAB, dtype=torch.bfloat16)
        arguments = (0, metadata, logits, masked(*target), masked(*bonus), torch.zeros(1))
        assert runner.rejection_sampler._get_logprobs_tensors(*arguments) == "logprobs"
        return output

    runner.sample_tokens = sample_tokens
    install_recorder(runner)
    return runner


def sets_of(output: Any, lengths: list[int]) -> list[list[list[int]]]:
    """Cut the masks by request, as vLLM's scheduler does."""
    masks = output.sampling_masks
    return [
        masks.slice_request(place, length).to_nested_list() if length else [] for place, length in enumerate(lengths)
    ]


def test_without_drafts_each_request_has_the_set_of_its_row(vllm_imported: None) -> None:
    """The second request computes a part of its prompt, and samples nothing."""
    runner = a_runner()
    runner.step = [[3], [], [5]]
    assert sets_of(runner.sample_tokens(), [1, 0, 1]) == [[SETS[0]], [], [SETS[2]]]


def test_with_drafts_each_token_has_the_set_of_its_place(vllm_imported: None) -> None:
    """Three requests: a draft that was replaced, no draft, and a draft that was accepted, with a bonus token."""
    runner = a_runner()
    runner.drafts = [1, 0, 1]
    runner.step = [[3], [2], [5, 4]]
    assert sets_of(runner.sample_tokens(), [1, 1, 2]) == [[SETS[0]], [SETS[2]], [SETS[3], SETS[4]]]
    # A stop string may end the last request before its last token.
    runner.step = [[3], [2], [5, 4]]
    assert sets_of(runner.sample_tokens(), [1, 1, 1])[2] == [SETS[3]]


def test_a_step_that_samples_nothing_has_no_sets_of_the_step_before(vllm_imported: None) -> None:
    runner = a_runner()
    runner.step = [[3]]
    assert runner.sample_tokens().sampling_masks is not None
    runner.step = None
    assert runner.sample_tokens().sampling_masks is None


@pytest.mark.parametrize("options", [{"returns_masks": False}, {"is_second": True}])
def test_other_engines_are_not_patched(options: dict[str, bool]) -> None:
    runner = a_runner(**options)
    runner.step = [[3]]
    assert runner.sample_tokens().sampling_masks is None


def test_the_rows_of_a_step_are_not_kept(vllm_imported: None) -> None:
    """They are as large as the logits."""
    recorder = SetRecorder()
    recorder.watch_sampler(lambda: (None, masked(0)))()
    assert recorder.has_rows
    recorder.take_masks([[3]])
    assert not recorder.has_rows
