"""Makes Hugging Face folders of a trainer's checkpoint, whole or not at all. `specrl checkpoint export` runs it.

    python -m specrl.trainer.checkpoint_export RUN_FILE CHECKPOINT --out DIR

DIR gets policy/, and drafter/ where the run has one, in the run's own precision. Needs torch and no Megatron: a
checkpoint has whole tensors by their Hugging Face names. What is refused is one line on standard error, with the
error's exit code.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from specrl.drafting.head import Eagle3Head, head_config, load_head, save_head
from specrl.drafting.policy_config import read_policy_config
from specrl.errors import CheckpointInvalid, SpecrlError
from specrl.spec import RunSpec, load_spec
from specrl.spec.trainer import Lora
from specrl.trainer import checksums, lora
from specrl.trainer.checkpoints import DRAFTER, POLICY, WEIGHTS
from specrl.trainer.hf_folder import write_policy


def export(spec: RunSpec, checkpoint: Path, out: Path) -> None:
    """Write `out`, which must not exist. Raises CheckpointInvalid for a damaged checkpoint, or of another run."""
    damages = checksums.damages(checkpoint)
    if damages:
        raise CheckpointInvalid(
            f"a checkpoint must be as it was written, got {checkpoint}: {damages[0]}; export another one"
        )
    scratch = out.absolute().with_name(f".{out.name}-unfinished")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    dtype: torch.dtype = getattr(torch, spec.model.dtype.value)
    try:
        trained = _tensors(checkpoint / POLICY / WEIGHTS, dtype)
        if spec.trainer.lora is not None:
            trained = _merged(spec.trainer.lora, _tensors(Path(spec.model.path), dtype), dict(trained))
        write_policy(scratch / "policy", Path(spec.model.path), trained)
        if (checkpoint / DRAFTER).exists():
            save_head(scratch / "drafter", _drafter(spec, checkpoint / DRAFTER), dtype)
        scratch.rename(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointInvalid(f"the export must be written to {out}, got {error}; name another folder") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _tensors(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a folder, one at a time, rounded to the run's precision as the trainer does."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118 - no mapping
                yield name, content.get_tensor(name).to(dtype)


def _merged(
    settings: Lora, weights: Iterator[tuple[str, torch.Tensor]], factors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The policy that the run started from, each tensor with its low-rank update, as the trainer computes with it."""
    for name, weight in weights:
        down, up = (factors.get(factor) for factor in lora.names(name))
        if down is not None and up is not None:
            yield name, lora.merged(weight, lora.update(down, up, lora.scale(settings)))
        else:
            yield name, weight


def _drafter(spec: RunSpec, file: Path) -> Eagle3Head:
    eagle3 = spec.generation.speculation.eagle3
    if eagle3 is None:
        raise CheckpointInvalid(
            f"a checkpoint must be of its run, got a drafter in {file} but none in the run file; restore the run file"
        )
    policy = read_policy_config(Path(spec.model.path))
    head = load_head(Path(eagle3.path), policy) if eagle3.path else Eagle3Head(head_config(policy, eagle3))
    prefix = "head."
    head.load_tensors({n.removeprefix(prefix): t for n, t in load_file(file).items() if n.startswith(prefix)})
    return head


def main(arguments: Sequence[str] | None = None) -> int:
    """Export as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    try:
        export(load_spec(given.run_file), given.checkpoint, given.out)
    except SpecrlError as error:
        print(error, file=sys.stderr)  # noqa: T201 - for whoever started it
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
