"""One rank of a trainer under test: runs the whole backend once and writes the results into a folder.

    RANK=0 WORLD_SIZE=2 ... python -m tests.integration.trainer.worker POLICY OUT LAYOUTS LONG [CHECKPOINT]

LAYOUTS is JSON, as in '["tensor=2", "data=2"]', and so is LONG: those of them that go on after too many skipped steps.
Written so that one start of the processes, which costs most of the time, serves all tests of all parallel layouts with
as many ranks: it forms one after another.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.integration.trainer import probe_drafter, whole_logits
from tests.integration.trainer.runs import GSPO, STEPS, TWO_UPDATES, a_batch, a_poisoned_batch, a_spec, as_shared
from tests.integration.trainer.saved_state import gather_saved_state
from tests.integration.trainer.worker_group import ALONE, GROUP, sizes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specrl.drafting import budget, criteria
from specrl.drafting.criteria import DraftCriterion
from specrl.drafting.vocabulary import WHOLE, VocabularyShard
from specrl.errors import RecordInvalid, SpecrlError, TrainerFailed, VersionConflict
from specrl.records import Batch, TrainRollout, WeightGroup
from specrl.spec import RunSpec
from specrl.spec.trainer import DrafterLoss
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.layout import list_replicas
from specrl.trainer.megatron_backend import MegatronBackend, checkpoint
from specrl.trainer.megatron_backend.policy.lessons import TaughtLessons

DIED = 9  # exit code of the planned crash


def main() -> None:
    policy, out, layouts, long, *rest = sys.argv[1:]
    for layout in json.loads(layouts):
        spec = a_spec(Path(policy), **sizes(layout))
        folder = Path(out) / layout
        seen = run(spec, folder, Path(rest[0]) if rest else None)
        seen["probe"] = probe(spec, folder)
        seen["gspo"] = gspo(spec, folder, is_long=layout in json.loads(long))
        if is_first():
            (folder / "seen.json").write_text(json.dumps(seen))
    if torch.distributed.get_world_size() == 1:
        alone(a_spec(Path(policy)), Path(out) / ALONE)
    torch.distributed.destroy_process_group()


def run(spec: RunSpec, out: Path, checkpoint_path: Path | None) -> dict[str, Any]:
    """Run what every layout runs, and at the end resume another layout's checkpoint. Returns the results."""
    seen: dict[str, Any] = {}
    out.mkdir(parents=True, exist_ok=True)
    backend = MegatronBackend(spec)
    backend.load_model(None)
    seen["ways_to_refuse"] = refusals(backend)
    assert backend.groups.rank in list_replicas(spec.trainer.parallelism)[backend.groups.data.rank]
    rollouts = a_batch(1, backend.config.vocab_size).rollouts
    scores = backend.score_rollouts(as_shared(Batch(1, rollouts), spec, backend.groups.rank).rollouts)
    seen["packing"] = packing(backend, rollouts, scores)
    keep(out / "initial.safetensors", backend)
    seen["metrics"] = train(backend, out)
    keep(out / "trained.safetensors", backend)
    broadcast(backend, out)
    backend.export_model(out / "export")
    seen["chunks"] = whole_logits.compare_chunks(backend.groups, backend.config, 3)
    backend.close()
    if spec.trainer.parallelism.tensor == spec.trainer.parallelism.world_size == 2:
        record_shapes(spec, out)
        compare_divided_columns(out)
    if spec.trainer.parallelism.data == spec.trainer.parallelism.world_size == 2:
        move_lessons(spec, out)
    if is_first():
        save_file({str(i): torch.from_numpy(item) for i, item in enumerate(scores)}, out / "scores.safetensors")
    if checkpoint_path is not None:
        resumed = MegatronBackend(spec)
        resumed.load_model(checkpoint_path)
        seen["resumed_at"] = resumed.get_status().step
        resumed.train_step(a_batch(STEPS, resumed.config.vocab_size))
        keep(out / "resumed.safetensors", resumed)
        resumed.close()
    return seen


def packing(backend: MegatronBackend, rollouts: Sequence[TrainRollout], scores: Sequence[Any]) -> float:
    """Return the largest difference between log-probabilities of packed rollouts and of single ones."""
    alone = [backend.score_rollouts([item])[0] for item in rollouts]
    return max(float(abs(one - other).max()) for one, other in zip(alone, scores, strict=True))


def is_first() -> bool:
    return torch.distributed.get_rank() == 0


def refusals(backend: MegatronBackend) -> list[str]:
    """Send batches that every rank must reject, leaving the backend usable. Returns the errors."""
    good, foreign = (a_batch(1, times * backend.config.vocab_size) for times in (1, 100))
    found = []
    for batch, expected in ((Batch(2, good.rollouts), VersionConflict), (foreign, RecordInvalid)):
        try:
            backend.train_step(batch)
        except expected as error:
            found.append(type(error).__name__)
    return found


def train(backend: MegatronBackend, out: Path) -> list[dict[str, Any]]:
    """Train STEPS, with a checkpoint before the last. Saves what the drafter learnt from in the first."""
    out.mkdir(parents=True, exist_ok=True)
    metrics = []
    taught = record_lessons(backend)
    for step in range(1, STEPS + 1):
        batch = a_batch(step, backend.config.vocab_size)
        metrics.append(backend.train_step(as_shared(batch, backend.spec, backend.groups.rank)).model_dump())
        if step == 1:
            save_lessons(out, taught)
        if step == STEPS - 1:
            saved = backend.save_checkpoint(checkpoints.step_directory(out, step))
            keep(out / "saved.safetensors", backend)
    saved.result()  # of the step before, though the last has been trained
    return metrics


def gspo(spec: RunSpec, out: Path, *, is_long: bool) -> dict[str, Any]:
    """Train with GSPO and two updates per step. The third step has non-finite gradients; then `too_many`."""
    layout = spec.trainer.parallelism.model_dump(by_alias=True)
    spec = a_spec(Path(spec.model.path), speculation={"none": {}}, loss=GSPO, optimizer=TWO_UPDATES, **layout)
    backend = MegatronBackend(spec)
    backend.load_model(None)
    vocab = backend.config.vocab_size
    metrics = [backend.train_step(a_batch(step, vocab)) for step in (1, 2)]
    keep(out / "gspo.safetensors", backend)
    seen: dict[str, Any] = {"metrics": [item.model_dump() for item in metrics]}
    skipped = backend.train_step(a_poisoned_batch(3, vocab))
    seen["skipped"] = [skipped.is_skipped, skipped.updates, skipped.loss, skipped.grad_norm, backend.get_status().step]
    keep(out / "skipped.safetensors", backend)
    if is_long:
        backend.save_checkpoint(checkpoints.step_directory(out / "skips", 3)).result()
        seen["too many"] = too_many(backend, out / "goes-on-False.safetensors")
        backend.close()
        backend = MegatronBackend(spec)
        backend.load_model(checkpoints.find_newest(out / "skips"))
        seen["too many after a restart"] = too_many(backend, out / "goes-on-True.safetensors")
    backend.close()
    return seen


def too_many(backend: MegatronBackend, file: Path) -> str:
    """Skip a second step in a row, which must fail; continue with a good batch. Returns the error's message."""
    vocab = backend.config.vocab_size
    found = ""
    try:
        backend.train_step(a_poisoned_batch(4, vocab))
    except TrainerFailed as error:
        found = str(error)
    assert backend.get_status().step == 3, "a step that ends the run is not trained"
    backend.train_step(a_batch(4, vocab))
    keep(file, backend)
    return found


def keep(file: Path, backend: MegatronBackend) -> None:
    """Save all weights by name: the policy's as they are, the drafter's with the prefix `drafter.`."""
    tensors = {name: tensor.clone().contiguous() for name, tensor in backend.models.policy.gather_tensors()}
    if backend.models.drafter is not None:
        tensors |= {
            f"drafter.{n}": t.clone() for n, t in backend.models.drafter.model.collect_tensors(torch.float32).items()
        }
    if is_first():
        save_file(tensors, file)


def record_lessons(backend: MegatronBackend) -> TaughtLessons:
    """Return a list that gets all lessons that this rank learns from in steps."""
    found: TaughtLessons = []
    exchange_lessons = backend.models.policy.exchange_lessons

    def exchange_and_record(*arguments: Any) -> TaughtLessons:
        taught = exchange_lessons(*arguments)
        found.extend(taught)
        return taught

    backend.models.policy.exchange_lessons = exchange_and_record  # type: ignore[method-assign]
    return found


def save_lessons(out: Path, taught: TaughtLessons, name: str = "lessons") -> None:
    """Save this rank's lessons, one file for each pass."""
    rank = torch.distributed.get_rank()
    for number, (_, batch) in enumerate(taught):
        tensors = {name: tensor.contiguous() for name, tensor in batch._asdict().items()}
        save_file(tensors, out / f"{name}-{rank}-{number}.safetensors")


def probe(spec: RunSpec, out: Path) -> list[dict[str, Any]]:
    """Train two steps, and measure, with a drafter by the policy's output layer. Returns the drafter's metrics."""
    probe_drafter.install()
    layout = spec.trainer.parallelism.model_dump(by_alias=True)
    spec = a_spec(Path(spec.model.path), speculation=probe_drafter.SPECULATION, **layout)
    backend = MegatronBackend(spec)
    backend.load_model(None)
    batches = [a_batch(step, backend.config.vocab_size) for step in (1, 2)]
    metrics = [backend.train_step(batch).drafter for batch in batches]
    metrics.append(backend.evaluate_drafter(batches[0].rollouts))
    assert backend.models.drafter is not None
    state = {name: tensor.detach().clone() for name, tensor in backend.models.drafter.collect_state().items()}
    save_file(state, out / f"probe-{torch.distributed.get_rank()}.safetensors")
    backend.close()
    return [asdict(item) for item in metrics if item is not None]


class ShapeRecorder(TorchDispatchMode):
    """Records the shape of every tensor that an operation returns, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(x.shape) for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return result


def record_shapes(spec: RunSpec, out: Path) -> None:
    """Train one step with a drafter of 64 tokens, some of each rank. Saves lessons, and the shapes of all tensors."""
    layout = spec.trainer.parallelism.model_dump(by_alias=True)
    spec = a_spec(Path(spec.model.path), speculation={"eagle3": {"draftVocabSize": 64}}, **layout)
    backend = MegatronBackend(spec)
    backend.load_model(None)
    drafter = backend.models.drafter
    assert drafter is not None
    drafter.model.draft_ids_K = 4 * torch.arange(64)
    taught = record_lessons(backend)
    with ShapeRecorder() as seen:
        backend.train_step(a_batch(1, backend.config.vocab_size))
        save_lessons(out, taught, "reduced")
        backend.evaluate_drafter(a_batch(1, backend.config.vocab_size).rollouts)
    backend.close()
    (out / f"shapes-{torch.distributed.get_rank()}.json").write_text(json.dumps(sorted(seen.shapes)))


def move_lessons(spec: RunSpec, out: Path) -> None:
    """Train one step in which each of two data ranks learns from all lessons of the other. Saves the lessons."""
    rank = torch.distributed.get_rank()
    deal_update = budget.deal_update
    budget.deal_update = lambda _costs, homes, *_, **__: [(1 - home, 0) for home in homes]
    backend = MegatronBackend(spec)
    backend.load_model(None)
    taught = record_lessons(backend)
    backend.train_step(a_batch(1, backend.config.vocab_size))
    backend.close()
    budget.deal_update = deal_update
    assert all(lesson.home != rank for lessons, _ in taught for lesson in lessons)
    save_lessons(out, taught, "moved")


def compare_divided_columns(out: Path) -> None:
    """Compute losses, gradients and acceptance with the columns divided over the ranks, and with whole rows.

    9 columns of 5 + 5: the last is padding. Saves the largest difference of each, over criteria.
    """
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(3)
    hidden_EH, weight_VH, policy_EV = (torch.randn(size, generator=generator) for size in ((6, 4), (9, 4), (6, 9)))
    policy_EV[0] = weight_VH[:, 0]
    next_E1 = torch.tensor([[0], [4], [5], [8], [2], [7]])
    shard = VocabularyShard(5 * rank, 9, torch.distributed.group.WORLD)
    columns = slice(5 * rank, 5 * rank + 5)

    def pad_columns(x_EW: torch.Tensor) -> torch.Tensor:
        return shard.mask_padding(torch.nn.functional.pad(x_EW, (0, 5 - x_EW.shape[1])))

    found: dict[str, float] = {}
    for loss in DrafterLoss:
        for is_probabilistic in (False, True):
            criterion = DraftCriterion(loss, 0.7, is_probabilistic)
            results = []
            for is_whole in (True, False):
                input_EH = hidden_EH.clone().requires_grad_()
                if is_whole:
                    draft_EW, now = input_EH @ weight_VH.T, WHOLE
                    wanted = criteria.compute_targets(policy_EV, 0.7)
                else:
                    draft_EW, now = pad_columns(shard.share_input(input_EH) @ weight_VH[columns].T), shard
                    wanted = criteria.compute_targets(pad_columns(policy_EV[:, columns]), 0.7, None, shard)
                loss_E = criteria.compute_loss(criterion, draft_EW, wanted, now)
                torch.autograd.backward(loss_E.sum())
                acceptance = criteria.estimate_acceptance(criterion, draft_EW.detach(), wanted, next_E1, now)
                results.append([loss_E.detach(), input_EH.grad, *acceptance])
            for name, one, other in zip(("loss", "gradient", "accepted", "stays"), *results, strict=True):
                found[name] = max(found.get(name, 0.0), float((one - other).abs().max()))
    (out / f"columns-{rank}.json").write_text(json.dumps(found))


def broadcast(backend: MegatronBackend, out: Path) -> None:
    """Send the weights to the receiver. Then a broadcast without any receiver must fail, and training continue."""
    send(backend, out)
    lonely = WeightGroup("epoch-2", "127.0.0.1", 0, 0, 2, 1.0, "gloo")
    backend.open_weight_group(lonely)
    try:
        backend.broadcast_weights(lonely.group_id)
    except SpecrlError as error:
        if is_first():
            (out / "lonely").write_text(type(error).__name__)


def send(backend: MegatronBackend, out: Path) -> None:
    """Send the weights twice to the receiver."""
    manifest = backend.describe_weights()
    port = backend.open_weight_group(GROUP)
    if is_first():
        (out / "manifest.json").write_text(json.dumps([asdict(item) for item in manifest.tensors]))
        (out / "port.tmp").write_text(str(port))
        (out / "port.tmp").rename(out / "port")
    sent = [backend.broadcast_weights(GROUP.group_id) for _ in range(2)]
    if is_first():
        (out / "sent.json").write_text(json.dumps([list(item.checksums) for item in sent]))


def alone(spec: RunSpec, out: Path) -> None:
    """Run what one rank shows for all: a repetition, a run without drafter, a crash during a checkpoint."""
    again = MegatronBackend(spec)
    again.load_model(None)
    train(again, out / "again")
    keep(out / "repeated.safetensors", again)
    again.close()
    resumed = MegatronBackend(spec)
    resumed.load_model(checkpoints.find_newest(out))
    resumed.train_step(a_batch(STEPS, resumed.config.vocab_size))
    keep(out / "same-layout.safetensors", resumed)
    resumed.close()
    policy = Path(spec.model.path)
    others = {
        "without-drafter": a_spec(policy, speculation={"none": {}}),
        "not-adapted": a_spec(policy, drafter={"online": False}),
        "share-of-operations": a_spec(policy, drafter={}),
        "total-variation": a_spec(policy, drafter={"tokenBudget": 1000, "loss": "TotalVariation"}),
        "recomputed": a_spec(policy, recompute="Layers"),
    }
    for name, other in others.items():
        plain = MegatronBackend(other)
        plain.load_model(None)
        train(plain, out / name)
        keep(out / f"{name}.safetensors", plain)
        plain.close()
    in_bf16(a_spec(policy, dtype="bfloat16"), out)
    die_while_saving(spec, out)


def in_bf16(spec: RunSpec, out: Path) -> None:
    """Train STEPS, and the last again from the checkpoint before it, which keeps the float32 masters."""
    for name, checkpoint_path in (("bf16", None), ("bf16-resumed", out / "bf16")):
        backend = MegatronBackend(spec)
        backend.load_model(checkpoints.find_newest(checkpoint_path) if checkpoint_path else None)
        if checkpoint_path is None:
            train(backend, out / name)
        else:
            backend.train_step(a_batch(STEPS, backend.config.vocab_size))
        save_file(gather_saved_state(backend)["weights"], out / f"{name}.safetensors")
        backend.close()


def die_while_saving(spec: RunSpec, out: Path) -> None:
    """Crash while writing the checkpoint of the last step, before the rename. Ends this process."""
    dying = MegatronBackend(spec)
    dying.load_model(checkpoints.find_newest(out))
    dying.train_step(a_batch(STEPS, dying.config.vocab_size))
    checkpoint.sync_to_disk = lambda _path: os._exit(DIED)
    dying.save_checkpoint(checkpoints.step_directory(out, STEPS)).result()


if __name__ == "__main__":
    main()
