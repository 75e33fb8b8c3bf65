"""Converts a drafter between folder layouts, atomically. `specrl drafter import` and `export` run it.

    python -m specrl.drafting.eagle3.convert import SOURCE --policy POLICY --out DIR
    python -m specrl.drafting.eagle3.convert export DRAFTER --format speculators --policy POLICY --out DIR
    python -m specrl.drafting.eagle3.convert export DRAFTER --format eagle3 --out DIR

It runs in a separate process, because the `specrl` command must start without torch. Success prints one line to
standard output. An error prints one line to standard error and ends with the error's exit code.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from specrl.drafting.eagle3.head import load_head, read_dtype
from specrl.drafting.eagle3.head_formats import (
    derive_policy_config,
    read_published_head,
    write_eagle3,
    write_speculators,
)
from specrl.errors import CheckpointInvalid, SpecrlError
from specrl.models.policy_config import read_policy_config

# Draft tokens that an exported speculators folder recommends: the run file's default of numDraftTokens.
RECOMMENDED_DRAFTS = 3


def import_head(source: Path, policy: Path, out: Path) -> str:
    """Convert a published head to our layout, and return a summary line. Raises CheckpointInvalid.

    The head must fit the policy: see `head_formats.read_published_head`.
    """
    head, dtype = read_published_head(source, read_policy_config(policy))
    head.write_folder(out, dtype)
    size = head.config.draft_vocab_size
    layers = ", ".join(map(str, head.config.aux_layers))
    return f"drafts {size} of {head.config.policy.vocab_size} vocabulary tokens, reads the policy's layers {layers}"


def export_head(drafter: Path, layout: str, out: Path, policy: Path | None) -> str:
    """Convert a head in our layout to `layout`, and return a summary line. Raises CheckpointInvalid.

    policy: required for speculators, whose folders contain the policy's embedding.
    """
    if layout == "speculators" and policy is None:
        raise CheckpointInvalid("--policy must be given with --format speculators, got none; name the policy's folder")
    head = load_head(drafter, read_policy_config(policy) if policy is not None else derive_policy_config(drafter))
    if layout == "speculators":
        write_speculators(out, head, read_dtype(drafter), RECOMMENDED_DRAFTS)
    else:
        write_eagle3(out, head, read_dtype(drafter))
    return f"{layout} layout"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    directions = parser.add_subparsers(dest="direction", required=True)
    for name in ("import", "export"):
        direction = directions.add_parser(name)
        direction.add_argument("source", type=Path)
        direction.add_argument("--out", type=Path, required=True)
        direction.add_argument("--policy", type=Path, required=name == "import")
    directions.choices["export"].add_argument("--format", choices=["speculators", "eagle3"], required=True)
    given = parser.parse_args(arguments)
    # Written beside the target and renamed at the end, so that --out never holds half a folder.
    scratch = given.out.absolute().with_name(f".{given.out.name}-unfinished")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        if given.direction == "import":
            summary = import_head(given.source, given.policy, scratch)
        else:
            summary = export_head(given.source, given.format, scratch, given.policy)
        scratch.rename(given.out)
    except SpecrlError as error:
        print(error, file=sys.stderr)  # noqa: T201 - command line output
        return error.exit_code
    except OSError as error:
        refusal = CheckpointInvalid(f"cannot write the drafter to {given.out}: {error}; name another folder")
        print(refusal, file=sys.stderr)  # noqa: T201 - command line output
        return refusal.exit_code
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"drafter written to {given.out}: {summary}")  # noqa: T201 - command line output
    return 0


if __name__ == "__main__":
    sys.exit(main())
