"""One rank of a trainer under test: runs the whole backend once and leaves what it saw in a folder.

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
from tests.integration.trainer.runs import GSPO, TWO_UPDATES, a_batch, a_poisoned_batch, a_spec
from tests.integration.trainer.worker_group import ALONE, GROUP, sizes

from specrl.errors import RecordInvalid, SpecrlError, TrainerFailed, VersionConflict
from specrl.records import Batch, TrainRollout, WeightGroup
from specrl.spec import RunSpec
from specrl.trainer import checkpoints
from specrl.trainer.megatron_backend import MegatronBackend, checkpoint

STEPS = 3
DIED = 9  # exit code of a death that was planned


def main() -> None:
    policy, out, layouts, long, *rest = sys.argv[1:]
    for layout in json.loads(layouts):
        spec, folder = a_spec(Path(policy), **sizes(layout)), Path(out) / layout
        seen = run(spec, folder, Path(rest[0]) if rest else None)
        seen["gspo"] = gspo(spec, folder, is_long=layout in json.loads(long))
        if is_first():
            (folder / "seen.json").write_text(json.dumps(seen))
    if torch.distributed.get_world_size() == 1:
        alone(a_spec(Path(policy)), Path(out) / ALONE)
    torch.distributed.destroy_process_group()


def run(spec: RunSpec, out: Path, checkpoint_path: Path | None) -> dict[str, Any]:
    """What is done in every layout; a checkpoint of another one is resumed at the end. Returns what was seen."""
    seen: dict[str, Any] = {}
    out.mkdir(parents=True, exist_ok=True)
    backend = MegatronBackend(spec)
    backend.load(None)
    seen["ways_to_refuse"] = refusals(backend)
    rollouts = a_batch(1, backend.config.vocab_size).rollouts
    scores = backend.score(rollouts)
    seen["packing"] = packing(backend, rollouts, scores)
    keep(out / "initial.safetensors", backend)
    states = backend.hidden_states(rollouts)
    seen["metrics"] = train(backend, out)
    keep(out / "trained.safetensors", backend)
    broadcast(backend, out)
    backend.export(out / "export")
    backend.close()
    if is_first():
        save_file({str(i): torch.from_numpy(item) for i, item in enumerate(scores)}, out / "scores.safetensors")
        save_states(out, states)
    if checkpoint_path is not None:
        resumed = MegatronBackend(spec)
        resumed.load(checkpoint_path)
        seen["resumed_at"] = resumed.status().step
        resumed.train_step(a_batch(STEPS, resumed.config.vocab_size))
        keep(out / "resumed.safetensors", resumed)
        resumed.close()
    return seen


def packing(backend: MegatronBackend, rollouts: Sequence[TrainRollout], scores: Sequence[Any]) -> float:
    """Largest difference between log-probabilities of packed rollouts and of each in a pass of its own."""
    alone = [backend.score([item])[0] for item in rollouts]
    return max(float(abs(one - other).max()) for one, other in zip(alone, scores, strict=True))


def is_first() -> bool:
    return torch.distributed.get_rank() == 0


def refusals(backend: MegatronBackend) -> list[str]:
    """Batches that must be refused at every rank, leaving the backend usable."""
    good, foreign = (a_batch(1, times * backend.config.vocab_size) for times in (1, 100))
    found = []
    for batch, expected in ((Batch(2, good.rollouts), VersionConflict), (foreign, RecordInvalid)):
        try:
            backend.train_step(batch)
        except expected as error:
            found.append(type(error).__name__)
    return found


def train(backend: MegatronBackend, out: Path) -> list[dict[str, Any]]:
    """Three steps, with a checkpoint after the second."""
    out.mkdir(parents=True, exist_ok=True)
    metrics = []
    for step in range(1, STEPS + 1):
        metrics.append(asdict(backend.train_step(a_batch(step, backend.config.vocab_size))))
        if step == STEPS - 1:
            saved = backend.save(checkpoints.directory(out, step))
            keep(out / "saved.safetensors", backend)
    saved.result()  # of step 2, though step 3 has been trained
    return metrics


def gspo(spec: RunSpec, out: Path, *, is_long: bool) -> dict[str, Any]:
    """Another loss and two updates a step, of which the third has gradients that are not finite; `too_many` follows."""
    layout = spec.trainer.parallelism.model_dump(by_alias=True)
    spec = a_spec(Path(spec.model.path), speculation={"none": {}}, loss=GSPO, optimizer=TWO_UPDATES, **layout)
    backend = MegatronBackend(spec)
    backend.load(None)
    vocab = backend.config.vocab_size
    metrics = [backend.train_step(a_batch(step, vocab)) for step in (1, 2)]
    keep(out / "gspo.safetensors", backend)
    seen: dict[str, Any] = {"metrics": [asdict(item) for item in metrics]}
    skipped = backend.train_step(a_poisoned_batch(3, vocab))
    seen["skipped"] = [skipped.is_skipped, skipped.updates, skipped.loss, skipped.grad_norm, backend.status().step]
    keep(out / "skipped.safetensors", backend)
    if is_long:
        backend.save(checkpoints.directory(out / "skips", 3)).result()
        seen["too many"] = too_many(backend, out / "goes-on-False.safetensors")
        backend.close()
        backend = MegatronBackend(spec)
        backend.load(checkpoints.newest(out / "skips"))
        seen["too many after a restart"] = too_many(backend, out / "goes-on-True.safetensors")
    backend.close()
    return seen


def too_many(backend: MegatronBackend, file: Path) -> str:
    """Skip a second step in a row, which is refused; go on with a good batch. Returns the error's words."""
    vocab = backend.config.vocab_size
    found = ""
    try:
        backend.train_step(a_poisoned_batch(4, vocab))
    except TrainerFailed as error:
        found = str(error)
    assert backend.status().step == 3, "a step that ends the run is not trained"
    backend.train_step(a_batch(4, vocab))
    keep(file, backend)
    return found


def keep(file: Path, backend: MegatronBackend) -> None:
    """All weights by name: the policy's as they are, the drafter's behind `drafter.`."""
    tensors = {name: tensor.clone().contiguous() for name, tensor in backend.policy.tensors()}
    if backend.drafter is not None:
        tensors |= {f"drafter.{n}": t.clone() for n, t in backend.drafter.head.tensors(torch.float32).items()}
    if is_first():
        save_file(tensors, file)


def save_states(out: Path, states: list[Any]) -> None:
    """Hidden states that were captured, one file for each forward pass."""
    for number, item in enumerate(states):
        save_file({name: getattr(item, name).contiguous() for name in vars(item)}, out / f"states-{number}.safetensors")


def broadcast(backend: MegatronBackend, out: Path) -> None:
    """Send the weights to whoever reads the port; then fail to find anyone, and go on."""
    send(backend, out)
    lonely = WeightGroup("epoch-2", "127.0.0.1", 0, 0, 2, 1.0, "gloo")
    backend.open_weight_group(lonely)
    try:
        backend.broadcast_weights(lonely.group_id)
    except SpecrlError as error:
        if is_first():
            (out / "lonely").write_text(type(error).__name__)


def send(backend: MegatronBackend, out: Path) -> None:
    """Send the weights twice to whoever reads the port."""
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
    """What one rank shows for all: a repeat, a run without a drafter, and a death in the middle of a checkpoint."""
    again = MegatronBackend(spec)
    again.load(None)
    train(again, out / "again")
    keep(out / "repeated.safetensors", again)
    again.close()
    resumed = MegatronBackend(spec)
    resumed.load(checkpoints.newest(out))
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
        plain.load(None)
        train(plain, out / name)
        keep(out / f"{name}.safetensors", plain)
        plain.close()
    in_bf16(a_spec(policy, dtype="bfloat16"), out)
    die_while_saving(spec, out)


def in_bf16(spec: RunSpec, out: Path) -> None:
    """Three steps, and the last of them once more from the checkpoint before it; the float32 masters are kept."""
    for name, checkpoint_path in (("bf16", None), ("bf16-resumed", out / "bf16")):
        backend = MegatronBackend(spec)
        backend.load(checkpoints.newest(checkpoint_path) if checkpoint_path else None)
        if checkpoint_path is None:
            train(backend, out / name)
        else:
            backend.train_step(a_batch(STEPS, backend.config.vocab_size))
        save_file(
            {key: tensor.clone() for key, tensor in backend.policy.state()["weights"]}, out / f"{name}.safetensors"
        )
        backend.close()


def die_while_saving(spec: RunSpec, out: Path) -> None:
    """Write a checkpoint of step 3, and die in it before the rename: the last act of this process."""
    dying = MegatronBackend(spec)
    dying.load(checkpoints.newest(out))
    dying.train_step(a_batch(STEPS, dying.config.vocab_size))
    checkpoint.sync = lambda _path: os._exit(DIED)
    dying.save(checkpoints.directory(out, STEPS)).result()


if __name__ == "__main__":
    main()
