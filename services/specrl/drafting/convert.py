"""Converts a drafter between layouts, whole or not at all. `specrl drafter import` and `export` run it.

    python -m specrl.drafting.convert import SOURCE --policy POLICY --out DIR
    python -m specrl.drafting.convert export DRAFTER --format speculators --policy POLICY --out DIR
    python -m specrl.drafting.convert export DRAFTER --format eagle3 --out DIR

A process of its own, since the command line must start without torch. One line on standard output says what was
written; what is refused is one line on standard error, with the error's exit code.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from specrl.drafting.formats import named_policy, read_published, write_eagle3, write_speculators
from specrl.drafting.head import load_head, policy_dtype, save_head
from specrl.drafting.policy_config import read_policy_config
from specrl.errors import CheckpointInvalid, SpecrlError

DRAFTS = 3  # what a speculators folder recommends, as the run file's own default


def bring_in(source: Path, policy: Path, out: Path) -> str:
    """Read a published head, check it against the policy, write our folder. Raises CheckpointInvalid."""
    head, dtype = read_published(source, read_policy_config(policy))
    save_head(out, head, dtype)
    size, layers = head.config.draft_vocab_size, ", ".join(map(str, head.config.aux_layers))
    return f"drafts {size} of {head.config.policy.vocab_size} tokens from the policy's layers {layers}"


def take_out(drafter: Path, layout: str, out: Path, policy: Path | None) -> str:
    """Read our folder, write it in another layout. Raises CheckpointInvalid."""
    if layout == "speculators" and policy is None:
        raise CheckpointInvalid(
            "--policy must be given for the layout of speculators, got none; name the policy's folder"
        )
    head = load_head(drafter, read_policy_config(policy) if policy is not None else named_policy(drafter))
    if layout == "speculators":
        write_speculators(out, head, policy_dtype(drafter), DRAFTS)
    else:
        write_eagle3(out, head, policy_dtype(drafter))
    return f"layout of {layout}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    directions = parser.add_subparsers(dest="direction", required=True)
    for name in ("import", "export"):
        direction = directions.add_parser(name)
        direction.add_argument("source", type=Path)
        direction.add_argument("--out", type=Path, required=True)
        direction.add_argument("--policy", type=Path, required=name == "import")
    directions.choices["export"].add_argument("--format", choices=["speculators", "eagle3"], required=True)
    given = parser.parse_args(arguments)
    scratch = given.out.absolute().with_name(f".{given.out.name}-unfinished")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        if given.direction == "import":
            said = bring_in(given.source, given.policy, scratch)
        else:
            said = take_out(given.source, given.format, scratch, given.policy)
        scratch.rename(given.out)
    except SpecrlError as error:
        print(error, file=sys.stderr)  # noqa: T201 - for whoever started it
        return error.exit_code
    except OSError as error:
        refusal = CheckpointInvalid(f"the drafter must be written to {given.out}, got {error}; name another folder")
        print(refusal, file=sys.stderr)  # noqa: T201 - the same
        return refusal.exit_code
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"drafter written to {given.out}: {said}")  # noqa: T201 - the same
    return 0


if __name__ == "__main__":
    sys.exit(main())
