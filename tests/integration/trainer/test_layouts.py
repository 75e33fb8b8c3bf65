"""Mixtures of experts, with the sampler's experts or the router's own, low-rank updates of them and of dense policies,
and sampling sets, in layouts of two and four ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fork_server import ForkServer
from tests.integration.trainer import reference
from tests.integration.trainer.conftest import VOCAB, Launch
from tests.integration.trainer.runs import STEPS, a_batch, a_spec, as_sampled
from tests.tiny_models import Shape, make_mtp_policy, make_policy

from specrl.trainer.checkpointing import checkpoints

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]
SHAPES = {
    "mixture": Shape(heads=4, groups=2, vocab=VOCAB, family="qwen3_moe"),
    "dense": Shape(heads=4, groups=2, head_dim=16, vocab=VOCAB, family="qwen2", is_tied=True),  # has biases
    "native": Shape(heads=4, groups=2, head_dim=16, vocab=VOCAB),  # a MiMo with a head
}
Case = tuple[str, str, str]  # policy, layout, kind of job
TWO_RANKS = (
    ("mixture", "tensor=2", "whole"),
    ("mixture", "data=2", "whole"),
    ("mixture", "tensor=2,expert=2", "whole"),
    ("mixture", "data=2,expert=2", "whole"),
    ("mixture", "pipeline=2", "whole"),
    ("mixture", "context=2,expert=2", "whole"),
    ("mixture", "pipeline=2", "replayed"),
    ("mixture", "tensor=2,expert=2", "lora"),
    ("dense", "tensor=2", "whole"),
    ("dense", "tensor=2", "lora"),
    ("dense", "pipeline=2", "lora"),
    ("dense", "context=2", "lora"),
    ("dense", "tensor=2", "truncated"),
    ("dense", "context=2", "truncated"),
    ("dense", "tensor=2", "muon"),
    ("dense", "data=2", "muon"),
    ("dense", "pipeline=2", "muon"),
    ("dense", "context=2", "muon"),
    ("mixture", "tensor=2,expert=2", "muon"),
    ("native", "tensor=2", "heads"),
    ("native", "data=2", "heads"),
    ("native", "pipeline=2", "heads"),
    ("native", "context=2", "heads"),
)
FOUR_RANKS = (
    ("mixture", "tensor=2,data=2,expert=4", "whole"),
    ("mixture", "tensor=2,context=2,expert=2", "replayed"),
    ("mixture", "tensor=2,pipeline=2,virtualStages=2,expert=2", "whole"),
    ("mixture", "pipeline=2,data=2,expert=2", "lora"),
    ("mixture", "tensor=2,data=2,expert=4", "muon"),
    ("native", "tensor=2,pipeline=2,virtualStages=2", "heads"),
)


DEEP = {
    ("mixture", "data=2", "whole"),
    ("mixture", "tensor=2,expert=2", "whole"),
    ("mixture", "data=2,expert=2", "whole"),
    ("mixture", "pipeline=2", "whole"),
    ("mixture", "context=2,expert=2", "whole"),
}
"""Deep tests alone form these. What each cuts, some other case cuts, too: of four ranks, replayed or with updates."""


def name(case: Case) -> str:
    policy, layout, kind = case
    return f"{policy}-{kind}-{layout}"


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("policies")
    found = {key: make_policy(folder / key, seed=5, sharpness=4.0, shape=SHAPES[key]) for key in ("mixture", "dense")}
    native = make_mtp_policy(folder / "native", seed=5, sharpness=4.0, shape=SHAPES["native"], noise=0.1)
    return {**found, "native": native}


@pytest.fixture(scope="module")
def on_one_rank(policies: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a mixture that one rank has trained for all steps but the last, with its checkpoint."""
    from specrl.trainer.megatron_backend import MegatronBackend

    out = tmp_path_factory.mktemp("one")
    backend = MegatronBackend(a_spec(policies["mixture"], speculation={"none": {}}))
    backend.load_model(None)
    for step in range(1, STEPS):
        backend.train_step(a_batch(step, VOCAB))
    backend.save_checkpoint(checkpoints.step_directory(out, STEPS - 1)).result()
    backend.close()
    return out


def launch(ranks: ForkServer, cases: Sequence[Case], policies: dict[str, Path], first: Path, out: Path) -> Path:
    """Start all cases. Each resumes the checkpoint of the previous case with the same training, or of one rank."""
    from tests.integration.trainer.layout_worker import Job

    jobs: list[Job] = []
    for case in cases:
        policy, layout, kind = case
        like = [job for job in jobs if (job.policy, job.kind) == (str(policies[policy]), kind)]
        before = str(out / like[-1].name) if like else str(first) if case == cases[0] else None
        jobs.append(Job(name(case), str(policies[policy]), layout, kind, before))
    program = ["layout_worker", str(out), json.dumps([asdict(job) for job in jobs])]
    found = Launch(ranks, out, jobs[0].layout, program, [job.name for job in jobs])
    return found.finish([0] * len(found.processes))


@pytest.fixture(scope="module")
def heads_on_one_rank(policies: dict[str, Path]) -> tuple[Tensors, list[list[float]]]:
    """The policy with its native head after all steps on one rank, and the head's loss and acceptance in each."""
    from tests.integration.trainer.layout_worker import KINDS

    from specrl.trainer.megatron_backend import MegatronBackend

    backend = MegatronBackend(a_spec(policies["native"], **KINDS["heads"]))
    backend.load_model(None)
    found = [backend.train_step(a_batch(step, VOCAB)).drafter for step in range(1, STEPS + 1)]
    heads = backend.models.drafter.model.collect_tensors(torch.float32)
    tensors = {name: tensor.clone() for name, tensor in (*backend.models.policy.gather_tensors(), *heads.items())}
    backend.close()
    return tensors, [[item.loss, *item.acceptance_per_position] for item in found]


@pytest.fixture(scope="module")
def is_deep(request: pytest.FixtureRequest) -> bool:
    found: bool = request.config.getoption("--deep")
    return found


@pytest.fixture(scope="module")
def two_ranks(
    ranks: ForkServer,
    policies: dict[str, Path],
    on_one_rank: Path,
    is_deep: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    cases = [case for case in TWO_RANKS if is_deep or case not in DEEP]
    return launch(ranks, cases, policies, on_one_rank, tmp_path_factory.mktemp("two") / "out")


@pytest.fixture(scope="module")
def four_ranks(
    ranks: ForkServer, policies: dict[str, Path], two_ranks: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folders of the cases with four ranks. The first resumes a checkpoint of two ranks."""
    first = two_ranks / name(TWO_RANKS[0])
    return launch(ranks, FOUR_RANKS, policies, first, tmp_path_factory.mktemp("four") / "out")


CASES = [
    pytest.param(case, id=name(case), marks=[pytest.mark.deep] if case in DEEP else [])
    for case in (*TWO_RANKS, *FOUR_RANKS)
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture
def out(case: Case, request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue("two_ranks" if case in TWO_RANKS else "four_ranks")
    return folder / name(case)


@pytest.fixture
def policy(case: Case, policies: dict[str, Path]) -> Path:
    return policies[case[0]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The reference: trained parameters, and loss and gradient norm of each step, after these steps of plain torch."""
    found: dict[tuple[Path, str], tuple[Tensors, list[tuple[float, float]]]] = {}

    def train(policy: Path, first: Tensors, kind: str) -> tuple[Tensors, list[tuple[float, float]]]:
        if (policy, kind) not in found:
            model = reference.load(policy)
            layers = {}
            batches = [a_batch(step, VOCAB) for step in range(1, STEPS + 1)]
            if kind == "lora":
                model, layers = reference.adapted(policy, first, 2.0)
            batches = [as_sampled(batch, kind, VOCAB) for batch in batches]
            if kind == "replayed":
                reference.replay(model, [item for batch in batches for item in batch.rollouts])
            seen = reference.train(model, batches, is_muon=kind == "muon")
            weights = {} if kind == "lora" else reference.as_stored(model, tmp_path_factory.mktemp("plain"))
            for stem, layer in layers.items():
                weights |= {f"{stem}.lora_A.weight": layer.down.data, f"{stem}.lora_B.weight": layer.up.data}
            found[policy, kind] = weights, seen
        return found[policy, kind]

    return train


def furthest(one: Tensors, other: Tensors) -> float:
    assert one.keys() == other.keys()
    return max(float((one[key].double() - other[key].double()).abs().max()) for key in one)


def test_log_probabilities_equal_transformers(out: Path, policy: Path, case: Case) -> None:
    model = reference.load(policy)
    scores = load_file(out / "scores.safetensors")
    batch = as_sampled(a_batch(1, VOCAB), case[2], VOCAB)
    if case[2] == "replayed":
        reference.replay(model, batch.rollouts)
    with torch.no_grad():
        for i, item in enumerate(batch.rollouts):
            assert (scores[str(i)] - reference.logprobs(model, item)).abs().max() <= 1e-5


def test_loaded_weights_are_exported_bit_for_bit_in_their_order(out: Path, policy: Path) -> None:
    initial = load_file(out / "initial.safetensors")
    stored = load_file(policy / "model.safetensors")
    assert furthest(initial, stored) == 0


def test_every_step_equals_a_plain_training(out: Path, policy: Path, case: Case, plain: Any) -> None:
    first = load_file(out / "first.safetensors")
    weights, expected = plain(policy, first, case[2])
    metrics = json.loads((out / "seen.json").read_text())["metrics"]
    for found, wanted in zip(metrics, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    found = load_file(out / "trained.safetensors")
    assert furthest(found, weights) <= 2e-6
    assert furthest(found, first) > 1e-4


@pytest.mark.parametrize(
    "case", [case for case in (*TWO_RANKS, *FOUR_RANKS) if case[2] == "heads"], ids=name, indirect=True
)
def test_native_heads_learn_the_same_in_every_layout(
    out: Path, policy: Path, heads_on_one_rank: tuple[Tensors, list[list[float]]]
) -> None:
    """The output layer is cut by vocabulary, lessons are shared by context, and other stages have neither."""
    tensors, metrics = heads_on_one_rank
    for found, expected in zip(json.loads((out / "seen.json").read_text())["drafter"], metrics, strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    trained = load_file(out / "weights.safetensors")
    assert furthest(trained, tensors) <= 2e-6
    first = load_file(policy / "model.safetensors")
    heads = {key for key in first if ".mtp_layers." in key}
    assert min(float((trained[key] - first[key]).abs().max()) for key in heads) > 1e-4, "every tensor moves"
    if (out / "resumed-weights.safetensors").exists():  # all layouts but the first resume the checkpoint of another
        assert furthest(load_file(out / "resumed-weights.safetensors"), trained) <= 2e-6


def test_checkpoint_of_another_layout_is_resumed(out: Path) -> None:
    if (out / "resumed.safetensors").exists():
        assert furthest(load_file(out / "resumed.safetensors"), load_file(out / "trained.safetensors")) <= 2e-6


def test_one_rank_resumes_the_checkpoint_of_expert_ranks(four_ranks: Path, policies: dict[str, Path]) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend

    out = four_ranks / name(FOUR_RANKS[2])
    backend = MegatronBackend(a_spec(policies["mixture"], speculation={"none": {}}))
    backend.load_model(checkpoints.find_newest(out))
    backend.train_step(a_batch(STEPS, VOCAB))
    found = {key: tensor.clone() for key, tensor in backend.models.policy.gather_tensors()}
    backend.close()
    assert furthest(found, load_file(out / "weights.safetensors")) <= 2e-6


def test_step_with_non_finite_gradients_does_not_change_the_policy(out: Path) -> None:
    """Native heads learn from the step's hidden states, which are finite, as every drafter does."""
    assert json.loads((out / "seen.json").read_text())["is_skipped"]
    skipped, trained = (
        {key: tensor for key, tensor in load_file(out / f"{file}.safetensors").items() if ".mtp_layers." not in key}
        for file in ("skipped", "weights")
    )
    assert furthest(skipped, trained) == 0


def test_replicas_and_folders_get_the_weights_that_were_trained(out: Path) -> None:
    expected = load_file(out / "skipped.safetensors")
    sent, received = (json.loads((out / file).read_text()) for file in ("sent.json", "received.json"))
    assert sent == received
    assert furthest(load_file(out / "received.safetensors"), expected) == 0
    assert furthest(load_file(out / "export" / "policy" / "model.safetensors"), expected) == 0
