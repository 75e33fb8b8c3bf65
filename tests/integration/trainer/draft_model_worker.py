"""One rank of trainers that train a draft model, one layout after another.

RANK=0 WORLD_SIZE=2 ... python -m tests.integration.trainer.draft_model_worker OUT POLICY DRAFT_MODEL LAYOUTS
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.integration.trainer.runs import a_batch, a_spec
from tests.integration.trainer.saved_state import gather_saved_state
from tests.integration.trainer.worker import is_first
from tests.integration.trainer.worker_group import sizes

from specrl.spec import RunSpec
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.megatron_backend import MegatronBackend

STEPS = 3


def a_draft_spec(policy: Path, draft_model: Path, **changes: Any) -> RunSpec:
    """Make a run in which each step trains the draft model on 60 of about 150 tokens."""
    drafter = {"tokenBudget": 60, "learningRate": "1e-3", **changes.pop("drafter", {})}
    speculation = {"draftModel": {"path": str(draft_model), "numDraftTokens": 2}}
    return a_spec(policy, speculation=speculation, drafter=drafter, **changes)


def collect_tensors(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    """Collect weights and moments of policy and drafter. A collective; those of the drafter have a prefix."""
    models = backend.models
    found = {
        f"{kind}.{name}": tensor
        for kind, tensors in gather_saved_state(backend).items()
        for name, tensor in tensors.items()
    }
    if models.drafter is not None:
        found |= {f"drafter.{name}": tensor.clone() for name, tensor in models.drafter.collect_state().items()}
    return found


def train(backend: MegatronBackend, out: Path, first: int, last: int) -> list[dict[str, Any]]:
    """Train some steps, with a checkpoint after the second. Returns the drafter's metrics of each."""
    seen = []
    for step in range(first, last + 1):
        metrics = backend.train_step(a_batch(step, backend.config.vocab_size)).drafter
        assert metrics is not None
        seen.append(asdict(metrics))
        if step == 2:
            backend.save_checkpoint(checkpoints.step_directory(out, step)).result()
    return seen


def main() -> None:
    out, policy, draft_model = (Path(argument) for argument in sys.argv[1:4])
    for layout in json.loads(sys.argv[4]):
        folder = out / layout
        folder.mkdir(parents=True, exist_ok=True)
        backend = MegatronBackend(a_draft_spec(policy, draft_model, **sizes(layout)))
        backend.load_model(None)
        seen = train(backend, folder, 1, STEPS)
        tensors = collect_tensors(backend)
        backend.close()
        if is_first():
            save_file(tensors, folder / "trained.safetensors")
            (folder / "seen.json").write_text(json.dumps(seen))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
