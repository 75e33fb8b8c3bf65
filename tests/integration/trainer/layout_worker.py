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
from tests.integration.trainer.runs import (
    LEARNING_RATE,
    MUON_RATIO,
    STEPS,
    a_batch,
    a_poisoned_batch,
    a_spec,
    as_sampled,
    as_shared,
)
from tests.integration.trainer.saved_state import gather_saved_state
from tests.integration.trainer.worker import is_first, send
from tests.integration.trainer.worker_group import sizes

from specrl.records import Batch
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.megatron_backend import MegatronBackend

KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "lora": {"lora": {"rank": 4, "alpha": "8"}},
    "muon": {"optimizer": {"kind": "Muon", "muon": {"learningRate": str(MUON_RATIO * LEARNING_RATE)}}},
    "truncated": {"sampling": {"topP": "0.9", "topK": 20}},
    "heads": {"speculation": {"mtp": {"numDraftTokens": 2}}, "drafter": {"tokenBudget": 60}},
    "replayed": {"routing": "Replay", "recompute": "Layers"},
}


@dataclass(frozen=True)
class Job:
    """layout: fields of `trainer.parallelism`. kind: what is trained and how, of `KINDS`. resume: the folder of another
    job whose checkpoint is resumed."""

    name: str
    policy: str
    layout: str
    kind: str = "whole"
    resume: str | None = None


def run(job: Job, out: Path) -> None:
    """Score, train STEPS with a checkpoint before the last, skip a step, send weights, resume a checkpoint."""
    out.mkdir(parents=True, exist_ok=True)  # every rank does
    spec = a_spec(Path(job.policy), **{"speculation": {"none": {}}} | KINDS[job.kind], **sizes(job.layout))
    backend = MegatronBackend(spec)
    backend.load_model(None)
    vocab = backend.config.vocab_size

    def complete(batch: Batch) -> Batch:
        """Add what rollouts of this kind carry, and leave out what this rank does not train on."""
        return as_shared(as_sampled(batch, job.kind, vocab), spec, torch.distributed.get_rank())

    scores = backend.score_rollouts(complete(a_batch(1, vocab)).rollouts)
    keep(out / "initial.safetensors", backend)
    keep_trained(out / "first.safetensors", backend)
    seen: dict[str, Any] = {"metrics": []}
    for step in range(1, STEPS + 1):
        metrics = backend.train_step(complete(a_batch(step, vocab)))
        seen["metrics"].append([metrics.loss, metrics.grad_norm])
        if metrics.drafter is not None:
            seen.setdefault("drafter", []).append([metrics.drafter.loss, *metrics.drafter.acceptance_per_position])
        if step == STEPS - 1:
            saved = backend.save_checkpoint(checkpoints.step_directory(out, step))
    saved.result()
    keep(out / "weights.safetensors", backend)
    keep_trained(out / "trained.safetensors", backend)
    seen["is_skipped"] = backend.train_step(complete(a_poisoned_batch(STEPS + 1, vocab))).is_skipped
    keep(out / "skipped.safetensors", backend)
    send(backend, out)
    backend.export_model(out / "export")
    backend.close()
    if job.resume is not None:
        resumed = MegatronBackend(spec)
        resumed.load_model(checkpoints.find_newest(Path(job.resume)))
        resumed.train_step(complete(a_batch(STEPS, vocab)))
        keep_trained(out / "resumed.safetensors", resumed)
        keep(out / "resumed-weights.safetensors", resumed)
        resumed.close()
    if is_first():
        save_file({str(i): torch.from_numpy(item) for i, item in enumerate(scores)}, out / "scores.safetensors")
        (out / "seen.json").write_text(json.dumps(seen))


def keep(file: Path, backend: MegatronBackend) -> None:
    """Save the policy as replicas get it, native heads included."""
    tensors = {name: tensor.clone().contiguous() for name, tensor in backend.models.policy.gather_tensors()}
    if backend.models.drafter is not None:
        tensors |= {name: x.clone() for name, x in backend.models.drafter.model.collect_tensors(torch.float32).items()}
    if is_first():
        save_file(tensors, file)


def keep_trained(file: Path, backend: MegatronBackend) -> None:
    """Save the trained parameters: all weights, or the factors of low-rank updates."""
    tensors = gather_saved_state(backend)["weights"]
    if is_first():
        save_file(tensors, file)


def main() -> None:
    for item in json.loads(sys.argv[2]):
        job = Job(**item)
        run(job, Path(sys.argv[1]) / job.name)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
