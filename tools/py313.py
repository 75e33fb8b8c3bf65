"""Whether Python 3.13 was tested with what is installed today: `make test-py313` writes it down, `make check` reads it.

python tools/py313.py           says whether tests/py313.json is current; exit status 1 where it is not
python tools/py313.py --write   writes it, after the tests have passed
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "py313.json"


def inputs() -> list[Path]:
    """What decides which packages the tests run with."""
    setup = [ROOT / "tools" / name for name in ("setup.py", "interpreters.py")]
    return [*sorted((ROOT / "requirements").glob("*.lock")), ROOT / "pyproject.toml", *setup]


def digest() -> str:
    """Hash of names and contents of all inputs."""
    total = hashlib.sha256()
    for path in inputs():
        total.update(f"{path.relative_to(ROOT)}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description="Whether Python 3.13 was tested with the locks of today.")
    parser.add_argument("--write", action="store_true", help="the tests have passed: write the hash down")
    if parser.parse_args().write:
        RECORD.write_text(json.dumps({"tested": digest()}, indent=2) + "\n", encoding="utf-8")
        return 0
    if RECORD.is_file() and json.loads(RECORD.read_text(encoding="utf-8")).get("tested") == digest():
        return 0
    print(f"{RECORD.relative_to(ROOT)} is old: locks or setup have changed since; run `make test-py313` and commit it")
    return 1


if __name__ == "__main__":
    sys.exit(main())
