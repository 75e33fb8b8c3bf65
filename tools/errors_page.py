"""Writes docs/errors.md from the classes of services/specrl/errors.py: `make gen`.

    python -m tools.errors_page docs/errors.md

A class's docstring is its row: the first paragraph is the meaning, and the paragraph after `Remedy:` says what to do.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from specrl import errors
from specrl.errors import SpecrlError

REMEDY = "Remedy: "

HEAD = """\
# Errors

<!-- Written by `python -m tools.errors_page docs/errors.md` from services/specrl/errors.py. Never edited by hand. -->

Every error that specrl raises on purpose has one of these classes. A message about input reads
`<field> must be <rule>, got <value>; <what to do>`. Any other exception is a bug in specrl: please report its
traceback.

- **gRPC status** is what a server answers with. It sends the class name in the trailing metadata `specrl-error`.
- **retryable** means that the same call may be repeated. `services/specrl/rpc/clients.py` repeats the calls for which
  that is safe.
- **exit code** is that of a coordinator, trainer or replica which ends with the error. After 1 the launcher or the
  operator starts the process again. After 2 a restart would fail in the same way, so the run waits for its user.
  Commands that refuse something end with 2 ([scripting.md](scripting.md#exit-codes)).

| error | gRPC status | retryable | exit code | meaning | what to do |
|---|---|---|--:|---|---|"""


def list_errors() -> Iterator[type[SpecrlError]]:
    """Yield the classes of the module in the order of their definition, without the root."""
    for found in vars(errors).values():
        if inspect.isclass(found) and issubclass(found, SpecrlError) and found is not SpecrlError:
            yield found


def read_docstring(error: type[SpecrlError]) -> tuple[str, str]:
    """Return meaning and remedy. Raises ValueError if one of them is missing."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in inspect.cleandoc(error.__doc__ or "").split("\n\n")]
    remedies = [paragraph for paragraph in paragraphs if paragraph.startswith(REMEDY)]
    if not paragraphs[0] or paragraphs[0] in remedies or len(remedies) != 1:
        raise ValueError(
            f"the docstring of {error.__name__} must have a meaning and one paragraph that starts with {REMEDY!r}, "
            f"got {error.__doc__!r}; write both"
        )
    remedy = remedies[0].removeprefix(REMEDY)
    return paragraphs[0], remedy[0].upper() + remedy[1:]


def render_page() -> str:
    rows = []
    for error in list_errors():
        meaning, remedy = read_docstring(error)
        retryable = "yes" if error.retryable else "no"
        rows.append(
            f"| `{error.__name__}` | `{error.grpc_status}` | {retryable} | {error.exit_code} | {meaning} | {remedy} |"
        )
    return "\n".join([HEAD, *rows]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_page(), encoding="utf-8")
