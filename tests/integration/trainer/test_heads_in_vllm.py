"""Native heads that the trainer trained draft in vLLM exactly as the trainer computed: pass by pass, token by token.

vLLM loads the exported policy folder as any other, without specrl's plugin. Greedy drafts of greedy completions leave
nothing to chance: every accepted token is predicted.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.integration.trainer import reference
from tests.integration.trainer.runs import a_spec, plan_epochs
from tests.integration.trainer.test_drafter_in_vllm import sampled
from tests.plain_engine import DraftOrder, Drafts, draft_greedily
from tests.tiny_models import Shape, make_mtp_policy

from specrl.drafting.mtp.head import load_heads
from specrl.drafting.packing import LessonBatch, pack_rows
from specrl.drafting.vocabulary import WHOLE, PolicyOutput
from specrl.models.policy_config import read_policy_config

DRAFTS = 3
LENGTH = 40
PROMPTS = 12
SHAPE = Shape(vocab=264)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose next token depends mostly on the last one, with a head that is noise."""
    return make_mtp_policy(tmp_path_factory.mktemp("mimo") / "policy", seed=1, sharpness=30, bigram=20, noise=0.3)


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy as the trainer exports it after the initialisation of its head."""
    from specrl.trainer.megatron_backend import MegatronBackend

    folder = tmp_path_factory.mktemp("trained")
    backend = MegatronBackend(a_spec(source, speculation={"mtp": {"numDraftTokens": DRAFTS}}))
    backend.load_model(None)
    rollouts = sampled(source)
    epochs = backend.train_drafter(rollouts, (), plan_epochs(len(rollouts), 6), folder / "progress")
    policy, drafter = backend.export_model(folder, drafter_only=True)
    backend.close()
    assert policy is not None
    assert drafter is None, "the heads are in the policy's folder"
    print([item.trained.acceptance_per_position for item in epochs])  # noqa: T201
    assert epochs[-1].trained.acceptance_length > epochs[0].trained.acceptance_length
    return policy


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng(9).integers(4, 260, (PROMPTS, 6)).tolist()
    return found


@pytest.fixture(scope="module")
def served(exported: Path, prompts: list[list[int]]) -> Drafts:
    """Greedy completions of vLLM, and how many draft tokens it accepted in each place."""
    speculation = {"method": "mtp", "num_speculative_tokens": DRAFTS}
    (found,) = draft_greedily([DraftOrder(str(exported), speculation, prompts, LENGTH)], exported.parent)
    return found


def test_export_keeps_the_config_and_changes_only_the_first_head(source: Path, exported: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (source, exported))
    assert before.keys() == after.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if name.startswith("model.mtp_layers.0.")}
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, exported)]
    assert configs[0] == configs[1]


def test_vllm_accepts_in_every_pass_what_the_trainer_predicts(
    exported: Path, served: Drafts, prompts: list[list[int]]
) -> None:
    policy = reference.load(exported)
    heads = load_heads(a_spec(exported), read_policy_config(exported))
    heads.connect_output(lambda: PolicyOutput(WHOLE, policy.lm_head.weight))
    states: list[torch.Tensor] = []
    policy.model.norm.register_forward_pre_hook(lambda _module, inputs: states.append(inputs[0]))
    expected = [0] * DRAFTS
    with torch.no_grad():
        for prompt, tokens in zip(prompts, served.tokens, strict=True):
            ids = torch.tensor([prompt])
            for _ in range(LENGTH + DRAFTS + 2):  # beyond the end, where vLLM's last draft reaches
                ids = torch.cat([ids, policy(ids).logits[:, -1:].argmax(-1)], 1)
            assert ids[0, len(prompt) : len(prompt) + LENGTH].tolist() == tokens
            states.clear()
            policy(ids)
            embedded = policy.model.embed_tokens(ids)
            lengths = torch.tensor([ids.shape[1]])
            starts = torch.tensor([len(prompt)])
            nothing = embedded[..., :0]
            batch = LessonBatch(ids, states[0], embedded, nothing, nothing[0], nothing[0], starts, lengths)
            drafted = [logits.argmax(-1).tolist() for logits in heads.draft_logits(pack_rows(batch), DRAFTS)]
            sampled_tokens = ids[0, len(prompt) :].tolist()
            place = 0  # of the last token that is known; the draft guesses those after it
            while place + 1 < LENGTH:
                right = [drafted[j][place] == sampled_tokens[place + 1 + j] for j in range(DRAFTS)]
                accepted = next((j for j, is_right in enumerate(right) if not is_right), DRAFTS)
                for j in range(accepted):
                    expected[j] += 1
                place += accepted + 1
    print(expected, served.accepted)  # noqa: T201
    assert served.accepted == expected
    assert expected[0] > expected[-1] > 0, "some drafts are accepted whole, and some are not"
