"""Configures logging: JSON lines in pods and files, readable text on a terminal. docs/logs.md lists all events.

Logs and warnings of libraries go through the same handlers, with their `logger`. Prompts and completions never appear
above DEBUG: no event has them, and tracebacks show no local variables. A line that cannot be written is dropped; it
never stops the program.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import StringIO
from typing import Any

import structlog

from specrl.version import describe_version

log = structlog.get_logger()

Tap = Callable[[str, str, Mapping[str, Any]], None]
"""Called with level, event and fields of every line."""

# Not passed to a tap: these fields are in every line.
_OF_EVERY_LINE = ("event", "level", "timestamp", "process", "run", "exc_info")
QUIET = ("httpx2", "httpcore2", "asyncio", "grpc", "urllib3", "uvicorn")
"""Libraries whose INFO messages do not concern the run; only their warnings are logged."""


class _LossyStderr(StringIO):
    """Standard error that drops what cannot be written, for example when it is a file on a full disk.

    A failing log must not stop the program. The handlers of the standard library drop such lines, too.
    """

    def write(self, text: str) -> int:
        with suppress(OSError):
            return sys.stderr.write(text)
        return 0

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def configure_logging(level: str, process: str, run: str, tap: Tap | None = None) -> None:
    """Set up logging of this process. Call it once, before anything logs.

    process, run: fields of every line, from any thread. tap: also called with each line of structlog's loggers.
    """

    # Not structlog's contextvars: a thread that starts later would not have them.
    def add_process_fields(_logger: Any, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {"process": process, "run": run} | dict(event)

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        add_process_fields,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # The last processors render a line. JSON needs tracebacks as text; a terminal renders them itself.
    last: list[structlog.typing.Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(default=str),  # a path or an exception must not lose the line
    ]
    if sys.stderr.isatty():
        # rich shows local variables in tracebacks by default. They may hold prompts.
        traceback = structlog.dev.RichTracebackFormatter(show_locals=False)
        last = [structlog.dev.ConsoleRenderer(exception_formatter=traceback)]
    output = _LossyStderr()
    structlog.configure(
        processors=[*shared, *([] if tap is None else [_make_tap(tap)]), *last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=output),
        cache_logger_on_first_use=False,  # module-level loggers exist before this call
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            # The lines of libraries get the same fields as ours.
            foreign_pre_chain=[structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    # `force` removes handlers that libraries have installed on import; their lines would appear twice.
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)  # Python's warnings become lines of the logger py.warnings
    for noisy in QUIET:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def log_process_start() -> None:
    """Log version and commit: the first line of every role of a run."""
    log.info("process_started", version=describe_version())


def _make_tap(tap: Tap) -> structlog.types.Processor:
    """Make a processor that passes each line to `tap` and leaves it unchanged."""

    def call_tap(_logger: Any, _method: str, line: structlog.types.EventDict) -> structlog.types.EventDict:
        fields = {name: value for name, value in line.items() if name not in _OF_EVERY_LINE}
        tap(str(line["level"]), str(line["event"]), fields)
        return line

    return call_tap
