"""One rank of trainers under test, one job after another: a policy in a layout, all of it or low-rank updates trained.

    RANK=0 WORLD_SIZE=2 ... python -m tests.integration.trainer.layout_worker OUT JOBS      JOBS: JSON of `Job`s

What a layout could change of a mixture of experts or of low-rank updates, and no more; `worker.py` does the rest, on a
dense policy. One start of the processes, which costs most of the time, serves all jobs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.integration.trainer.runs import a_batch, a_poisoned_batch, a_spec, with_experts
from tests.integration.trainer.worker import STEPS, is_first, send
from tests.integration.trainer.worker_group import sizes

from specrl.trainer import checkpoints
from specrl.trainer.megatron_backend import MegatronBackend

KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "lora": {"lora": {"rank": 4, "alpha": "8"}},
    "replayed": {"routing": "Replay", "recompute": "Layers"},
}


@dataclass(frozen=True)
class Job:
    """layout: fields of `trainer.parallelism`. kind: what is trained and how, of `KINDS`. resume: the folder of another
    job whose checkpoint is gone on with."""

    name: str
    policy: str
    layout: str
    kind: str = "whole"
    resume: str | None = None


def run(job: Job, out: Path) -> None:
    """Score, three steps with a checkpoint after the second, a step that is skipped, weights out; then resume."""
    out.mkdir(parents=True, exist_ok=True)  # every rank does
    spec = a_spec(Path(job.policy), speculation={"none": {}}, **KINDS[job.kind], **sizes(job.layout))
    routed = with_experts if job.kind == "replayed" else lambda batch: batch
    backend = MegatronBackend(spec)
    backend.load(None)
    vocab = backend.config.vocab_size
    scores = backend.score(routed(a_batch(1, vocab)).rollouts)
    keep(out / "initial.safetensors", backend)
    keep_trained(out / "first.safetensors", backend)
    seen: dict[str, Any] = {"metrics": []}
    for step in range(1, STEPS + 1):
        metrics = backend.train_step(routed(a_batch(step, vocab)))
        seen["metrics"].append([metrics.loss, metrics.grad_norm])
        if step == STEPS - 1:
            saved = backend.save(checkpoints.directory(out, step))
    saved.result()
    keep(out / "weights.safetensors", backend)
    keep_trained(out / "trained.safetensors", backend)
    seen["is_skipped"] = backend.train_step(routed(a_poisoned_batch(STEPS + 1, vocab))).is_skipped
    keep(out / "skipped.safetensors", backend)
    send(backend, out)
    backend.export(out / "export")
    backend.close()
    if job.resume is not None:
        resumed = MegatronBackend(spec)
        resumed.load(checkpoints.newest(Path(job.resume)))
        resumed.train_step(routed(a_batch(STEPS, vocab)))
        keep_trained(out / "resumed.safetensors", resumed)
        resumed.close()
    if is_first():
        save_file({str(i): torch.from_numpy(item) for i, item in enumerate(scores)}, out / "scores.safetensors")
        (out / "seen.json").write_text(json.dumps(seen))


def keep(file: Path, backend: MegatronBackend) -> None:
    """The policy as it is sent."""
    tensors = {name: tensor.clone().contiguous() for name, tensor in backend.policy.tensors()}
    if is_first():
        save_file(tensors, file)


def keep_trained(file: Path, backend: MegatronBackend) -> None:
    """What is trained: all weights, or the factors of low-rank updates."""
    tensors = {name: tensor.clone().contiguous() for name, tensor in backend.policy.state()["weights"]}
    if is_first():
        save_file(tensors, file)


def main() -> None:
    for item in json.loads(sys.argv[2]):
        job = Job(**item)
        run(job, Path(sys.argv[1]) / job.name)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
