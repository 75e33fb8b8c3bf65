"""Answers `specrl run FILE --dry-run` for several files in one process, whose hub and cache come from the environment.

It reads one call per line of JSON, {"file": FILE, "gpus": IDS}, and answers with one line: exit code and output.
The disk seems to have 1 TiB free, since the runs of some examples would write 45 GiB.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from types import SimpleNamespace

from typer.testing import CliRunner

from specrl.cli import app


def main() -> None:
    """Answer calls until the input ends."""
    shutil.disk_usage = lambda _: SimpleNamespace(total=1 << 40, used=0, free=1 << 40)  # type: ignore[assignment]
    for line in sys.stdin:
        given = json.loads(line)
        os.environ["CUDA_VISIBLE_DEVICES"] = given["gpus"]
        result = CliRunner().invoke(app, ["run", given["file"], "--dry-run"])
        answer = {"exitCode": result.exit_code, "output": result.output}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
