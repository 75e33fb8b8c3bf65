"""Lists functions, methods and classes that nothing names, by vulture, and code that cannot be reached: `make lint`.

Tests count as users, and are not searched. vulture goes by names alone: what a library calls by its name, and what a
decorator registers, is listed below with who calls it. Attributes and variables are left out, since most are fields of
formats that others read.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).parents[1]
SEARCHED = ("services", "operators", "tools", "benchmarks", "examples")
USERS = ("tests",)
KINDS = {"class", "function", "import", "method", "property", "unreachable_code"}

DECORATORS = [
    "@*.command",  # typer
    "@*.callback",
    "@router.*",  # FastAPI
    "@*.get",
    "@*.put",
    "@*.post",
    "@*.middleware",
    "@*.exception_handler",
    "@model_validator",  # pydantic
    "@field_validator",
    "@model_serializer",
    "@field_serializer",
]

CALLED_BY_NAME = {
    "__getattr__": "Python, of a module",
    "__dir__": "the same",
    "AsyncDraftLengthScheduler": "vllm, named in its configuration",
    "drafting_*": "vllm's call of a scheduler's method in another process",
    "log_engine_initialized": "vllm's statistics",
    "get_replay_topk": "megatron's router",
    "get_credentials": "redis",
    "capture_signals": "uvicorn",
    "update_transfer": "huggingface_hub's progress",
    "intercept_service": "gRPC's server",
    "on_log": "transformers' trainer",
    "log_message": "http.server",
    "log_error": "the same",
    "service_actions": "socketserver",
    "handle_error": "the same",
    "readinto": "io.BufferedReader",
    "do_*": "http.server",
    "handle_*tag": "html.parser",
    "handle_data": "the same",
    "_keep": "Jinja, named in a tag's parser",
    "CommitHook": "hatchling",
    "discard_weights": "the peers of a benchmark, by gRPC",
    "compose_node": "PyYAML",
    "duplicate_for_child": "multiprocessing, of a Popen",
}


def list_unused() -> list[str]:
    """Return a line for each place."""
    found = Vulture(ignore_names=list(CALLED_BY_NAME), ignore_decorators=DECORATORS)
    found.scavenge([str(ROOT / folder) for folder in (*SEARCHED, *USERS)], exclude=["*/specrl/api/*"])
    searched = tuple(str(ROOT / folder) for folder in SEARCHED)
    return [
        f"{item.filename.relative_to(ROOT)}:{item.first_lineno}: {item.message}"
        for item in found.get_unused_code(min_confidence=60)
        if item.typ in KINDS and str(item.filename).startswith(searched)
    ]


def main() -> int:
    unused = list_unused()
    for line in unused:
        print(line)
    if unused:
        print("delete it, or name who calls it in tools/unused_code.py")
    return bool(unused)


if __name__ == "__main__":
    sys.exit(main())
