"""Logs: JSON lines in pods and files, readable text on a terminal. Event names are in the past tense (docs/logs.md).

What libraries log and warn of takes the same way, with its `logger`. Prompts and completions are never logged above
DEBUG: no event has them, and a traceback shows no values. A line that cannot be written is lost, and nothing else.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import StringIO
from typing import Any

import structlog

Tap = Callable[[str, str, Mapping[str, Any]], None]
"""Is told of every line: level, event, fields."""

_OF_EVERY_LINE = ("event", "level", "timestamp", "process", "run", "exc_info")
QUIET = ("httpx2", "httpcore2", "asyncio", "grpc", "urllib3", "uvicorn")
"""Libraries whose INFO says nothing of a run."""


class _Diagnostics(StringIO):
    """Standard error, but for lines that it refuses, as a log file on a full disk does: those are lost.

    A program must not fail where it only tells what it does. The standard library's handlers drop such lines, too.
    """

    def write(self, text: str) -> int:
        with suppress(OSError):
            return sys.stderr.write(text)
        return 0

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def configure(level: str, process: str, run: str, tap: Tap | None = None) -> None:
    """Set up logging of this process; `process` and `run` are in every line, whichever thread writes it.

    Call once, first. tap: shows what structlog's loggers say somewhere else, too.
    """
    is_terminal = sys.stderr.isatty()

    def bound(_logger: Any, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {"process": process, "run": run} | dict(event)

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        bound,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last = _on_terminal() if is_terminal else [structlog.processors.format_exc_info, _as_json()]
    output = _Diagnostics()
    structlog.configure(
        processors=[*shared, *([] if tap is None else [_tapped(tap)]), *last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=output),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for noisy in QUIET:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _as_json() -> structlog.typing.Processor:
    return structlog.processors.JSONRenderer(default=str)


def _on_terminal() -> list[structlog.typing.Processor]:
    """Without local variables in tracebacks, which rich shows by default: they hold prompts."""
    traceback = structlog.dev.RichTracebackFormatter(show_locals=False)
    return [structlog.dev.ConsoleRenderer(exception_formatter=traceback)]


def _tapped(tap: Tap) -> structlog.types.Processor:
    """A processor that changes nothing and tells `tap`."""

    def tell(_logger: Any, _method: str, line: structlog.types.EventDict) -> structlog.types.EventDict:
        fields = {name: value for name, value in line.items() if name not in _OF_EVERY_LINE}
        tap(str(line["level"]), str(line["event"]), fields)
        return line

    return tell
