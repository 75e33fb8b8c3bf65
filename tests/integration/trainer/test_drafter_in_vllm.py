"""A drafter that the trainer trained drafts well in vLLM: hidden states, shifts and names agree.

An off-by-one in any of them trains happily and accepts nothing; only the engine can tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integration.trainer.runs import a_spec, plan_epochs
from tests.plain_engine import DraftOrder, draft_greedily
from tests.tiny_models import Shape, make_draft_model, make_policy
from transformers import AutoModelForCausalLM

from specrl.drafting.eagle3.head import build_folder_config, fresh_head_config
from specrl.drafting.layers import apply_rotary
from specrl.models.policy_config import read_policy_config
from specrl.records import DrafterMetrics, FinishReason, Rollout, TrainRollout, VersionSpan
from specrl.spec.generation import Eagle3

PROMPTS = 16
TRAINED = 192
LENGTH = 32
DRAFT = 3
DRAFT_MODEL = "draft model"
CASES = ("whole", "reduced", "YaRN", DRAFT_MODEL)
"""Drafters: a head with the policy's vocabulary; with one of 160 tokens; of a policy whose positions are stretched from
8; and a model of its own."""
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8}


def a_learnable_policy(path: Path, case: str) -> Path:
    """Make a policy whose next token depends mostly on the last one."""
    shape = Shape(heads=4, groups=2, max_length=256, rope=YARN) if case == "YaRN" else Shape(heads=4, groups=2)
    return make_policy(path, seed=1, sharpness=30, bigram=20, shape=shape)


def sampled(policy: Path) -> list[TrainRollout]:
    """Rollouts of the policy at temperature 1, drawn by transformers."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    torch.manual_seed(0)
    tokens_BS = torch.randint(4, 260, (TRAINED, 4))
    with torch.no_grad():
        cache = None
        inputs_BS = tokens_BS
        for _ in range(LENGTH):
            out = model(inputs_BS, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            inputs_BS = torch.multinomial(out.logits[:, -1].softmax(-1), 1)
            tokens_BS = torch.cat([tokens_BS, inputs_BS], 1)
    return [
        TrainRollout(
            tuple(row[:4]),
            Rollout(
                rollout_id=f"r{number}",
                group_id=f"g{number}",
                sample_index=0,
                token_ids_T=np.array(row[4:], dtype=np.int32),
                sampler_logprobs_T=np.full(LENGTH, -1.0, dtype=np.float32),
                versions=(VersionSpan(0, 0, LENGTH),),
                finish_reason=FinishReason.LENGTH,
                replica_id="",
                text="",
                seconds=0.0,
            ),
            0.0,
        )
        for number, row in enumerate(tokens_BS.tolist())
    ]


@dataclass(frozen=True)
class Drafted:
    """A trained drafter. epochs: what the trainer measured; drafts, accepted: what the engine counted."""

    epochs: list[DrafterMetrics]
    drafts: int
    accepted: int


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Drafted]:
    """Drafters by case: trained here, then used by vLLM for greedy completions."""
    folder = tmp_path_factory.mktemp("drafted")
    prompts = np.random.default_rng(9).integers(4, 260, (PROMPTS, 6)).tolist()
    epochs = []
    orders = []
    for case in CASES:
        learnable = a_learnable_policy(folder / "policies" / case, case)
        epochs_of_case, policy, drafter = train(learnable, sampled(learnable), case, folder / case)
        epochs.append(epochs_of_case)
        method = "draft_model" if case == DRAFT_MODEL else "eagle3"
        speculation = {"method": method, "model": str(drafter), "num_speculative_tokens": DRAFT}
        orders.append(DraftOrder(str(policy), speculation, prompts, length=48))
    found = zip(epochs, draft_greedily(orders, folder), strict=True)
    drafters = [Drafted(of_case, drafts.drafts, sum(drafts.accepted)) for of_case, drafts in found]
    return dict(zip(CASES, drafters, strict=True))


def train(policy: Path, rollouts: list[TrainRollout], case: str, out: Path) -> tuple[list[DrafterMetrics], Path, Path]:
    """Train a new drafter for four epochs. Returns its metrics, and the folders of policy and drafter."""
    from specrl.trainer.megatron_backend import MegatronBackend

    speculation: dict[str, Any] = {"eagle3": {"draftVocabSize": 160} if case == "reduced" else {}}
    if case == DRAFT_MODEL:
        draft_model = make_draft_model(out / "untrained", policy, noise=1.0)
        speculation = {"draftModel": {"path": str(draft_model), "numDraftTokens": DRAFT}}
    spec = a_spec(policy, speculation=speculation, drafter={"learningRate": "1e-3"})
    sampling = spec.generation.sampling.model_copy(update={"temperature": 1})
    spec = spec.model_copy(update={"generation": spec.generation.model_copy(update={"sampling": sampling})})
    backend = MegatronBackend(spec)
    backend.load_model(None)
    epochs = backend.train_drafter(rollouts, (), plan_epochs(len(rollouts), 4), out / "progress")
    exported, drafter = backend.export_model(out)
    backend.close()
    assert exported is not None
    assert drafter is not None
    return [item.trained for item in epochs], exported, drafter


@pytest.mark.parametrize("case", CASES)
def test_trained_drafter_is_accepted_by_the_engine(case: str, drafted: dict[str, Drafted]) -> None:
    found = drafted[case]
    length = 1 + found.accepted / found.drafts
    last = found.epochs[-1]
    print(f"acceptance length {length:.2f}, trained {last.acceptance_per_position}, {last.seconds:.1f} s")  # noqa: T201
    assert length > 1.5
    # The trainer's estimate roughly predicts the engine's acceptance, although prompts differ and vLLM is greedy.
    estimate = 1 + sum(np.cumprod(last.acceptance_per_position))
    assert length > 0.7 * estimate


@pytest.mark.usefixtures("vllm_imported")
@pytest.mark.parametrize(
    "fields", [None, {}, {"truncate": False, "beta_fast": 16.0}, {"attention_factor": 1.5}], ids=str
)
def test_a_head_rotates_as_vllm_does_for_its_folder(fields: dict[str, Any] | None, tmp_path: Path) -> None:
    """At positions within the original context and beyond it. Its keys were rotated without the policy's scaling."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = {} if fields is None else YARN | fields
    policy = read_policy_config(make_policy(tmp_path / "policy", shape=Shape(max_length=256, rope=rope)))
    config = fresh_head_config(policy, Eagle3())
    written = build_folder_config(config, torch.float32)
    with set_current_vllm_config(VllmConfig()):
        theirs = get_rope(written["head_dim"], written["max_position_embeddings"], True, written["rope_parameters"])
    positions_S = torch.arange(256)
    torch.manual_seed(0)
    query_SND, key_SND = torch.randn(2, 256, 2, written["head_dim"])
    mine = [
        apply_rotary(x.transpose(0, 1)[None], positions_S[None], config.decoder_shape)[0].transpose(0, 1)
        for x in (query_SND, key_SND)
    ]
    rotated = theirs.forward_native(positions_S, query_SND.flatten(1), key_SND.flatten(1))
    for one, other in zip(mine, rotated, strict=True):
        torch.testing.assert_close(one.flatten(1), other, rtol=0, atol=2e-6)
