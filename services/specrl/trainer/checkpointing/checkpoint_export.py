"""Exports a trainer's checkpoint as Hugging Face folders, atomically. `specrl checkpoint export` runs it.

    python -m specrl.trainer.checkpointing.checkpoint_export RUN_FILE CHECKPOINT --out DIR

Writes DIR/policy/ and, if the run has a drafter, DIR/drafter/, in the run's precision. Needs torch but no Megatron,
because a checkpoint stores whole tensors by their Hugging Face names. An error is one line on standard error, and its
exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError

from specrl.drafting.drafter import Drafter
from specrl.drafting.registry import KINDS, find_kind
from specrl.errors import CheckpointInvalid, SpecrlError
from specrl.files import write_folder
from specrl.models.native_heads import is_head_tensor
from specrl.models.policy_config import read_policy_config
from specrl.records import WeightOwner
from specrl.spec import RunSpec, load_spec
from specrl.spec.trainer import Lora
from specrl.tensor_files import FolderReader, load_tensors, open_tensors
from specrl.trainer import lora
from specrl.trainer.checkpointing import checksums
from specrl.trainer.checkpointing.checkpoints import DRAFTER, POLICY, WEIGHTS
from specrl.trainer.checkpointing.hf_folder import write_policy_folder


def export_checkpoint(spec: RunSpec, checkpoint: Path, out: Path) -> None:
    """Export `checkpoint` into `out`, which must not exist.

    Raises CheckpointInvalid when the checkpoint is damaged or of another run, or when `out` cannot be written.
    """
    damages = checksums.list_damages(checkpoint)
    if damages:
        raise CheckpointInvalid(f"checkpoint {checkpoint} is damaged: {damages[0]}; export another one")
    dtype: torch.dtype = getattr(torch, spec.model.dtype.value)
    try:
        with write_folder(out.absolute()) as scratch:
            trained = _read_tensors(checkpoint / POLICY / WEIGHTS, dtype)
            if spec.trainer.lora is not None:
                trained = _merge_updates(spec.trainer.lora, _read_base(spec, dtype), dict(trained))
            drafter = _read_drafter(spec, checkpoint / DRAFTER) if (checkpoint / DRAFTER).exists() else None
            if drafter is not None and drafter.owner is WeightOwner.POLICY:
                trained = chain(trained, drafter.collect_tensors(dtype).items())
            write_policy_folder(scratch / "policy", Path(spec.model.path), trained)
            if drafter is not None and drafter.owner is WeightOwner.DRAFTER:
                drafter.write_folder(scratch / "drafter", dtype)
    except (OSError, SafetensorError) as error:
        raise CheckpointInvalid(f"could not write the export to {out}: {error}; choose another folder") from error


def _read_tensors(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a checkpoint's folder, rounded from float32 to the run's precision as the trainer does."""
    for file in sorted(folder.glob("*.safetensors")):
        with open_tensors(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118 - no mapping
                yield name, content.get_tensor(name).to(dtype)


def _read_base(spec: RunSpec, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the policy that the run started from, without heads for multi-token prediction."""
    layers = read_policy_config(Path(spec.model.path)).num_layers
    reader = FolderReader(Path(spec.model.path))
    for name in reader.list_names():
        if not is_head_tensor(name, layers):
            yield name, reader.read_tensor(name).to(dtype)


def _merge_updates(
    settings: Lora, weights: Iterator[tuple[str, torch.Tensor]], factors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the policy that the run started from, with their low-rank updates added."""
    for name, weight in weights:
        down, up = (factors.get(factor) for factor in lora.factor_names(name))
        if down is not None and up is not None:
            yield name, lora.merge_update(weight, lora.compute_update(down, up, lora.compute_scale(settings)))
        else:
            yield name, weight


def _read_drafter(spec: RunSpec, file: Path) -> Drafter:
    kind = find_kind(spec)
    if kind is None:
        raise CheckpointInvalid(
            f"generation.speculation must be {' or '.join(KINDS)} for a checkpoint with a drafter, got "
            f"{spec.generation.speculation.kind}, but {file} exists; restore the run file"
        )
    drafter = kind.load_drafter(spec, read_policy_config(Path(spec.model.path)))
    # The file also has the drafter's optimizer state, which an export leaves out.
    prefix = "head."
    drafter.load_tensors({n.removeprefix(prefix): t for n, t in load_tensors(file).items() if n.startswith(prefix)})
    return drafter


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path, help="the run file of the checkpoint's run")
    parser.add_argument("checkpoint", type=Path, help="a folder step-NNNNNN")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    given = parser.parse_args(arguments)
    try:
        export_checkpoint(load_spec(given.run_file), given.checkpoint, given.out)
    except SpecrlError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the one message to the user
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
