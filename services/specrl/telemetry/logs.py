"""Logs: JSON lines in pods and files, readable text on a terminal. Event names are in the past tense.

Prompts and completions are never logged above DEBUG. A line that cannot be written is lost, and nothing else.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from io import StringIO

import structlog


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


def configure(level: str, process: str, run: str) -> None:
    """Set up logging of this process; `process` and `run` are bound to every line. Call once, first."""
    logging.basicConfig(level=level.upper(), stream=sys.stderr, format="%(message)s", force=True)
    for noisy in ("httpx", "httpcore", "asyncio", "grpc"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    is_terminal = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if is_terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if is_terminal else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=_Diagnostics()),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(process=process, run=run)
