"""The program of a worker that reads what a stranger may have written: chat templates and Parquet files.

`limited_process.LimitedProcess` starts it and talks to it. It limits its own memory and, for each part of its work, its
processor time. So a template without an end, or a file that grows a thousandfold, ends this process and no other one.
It is run as a file, so that it imports the standard library and one other library alone: jinja2 or pyarrow.

A request is a frame: 8 bytes with its length, then JSON. An answer is the same with one byte before it: J for JSON, A
for a stream of Arrow. {"fault": ...}: the input is wrong. {"memory": true}: the limit was reached. {"end": true}: the
last answer.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

MOST_DEPTH = 64
"""Most levels of a Parquet column's type. Data sets have up to five; Arrow reads types by recursion."""

BATCH_ROWS = 1024
"""Rows that are decoded at once."""

MIB = 1 << 20


def main() -> None:
    """Answer requests until the other side closes the pipe. Arguments: task, MiB of memory, processor seconds."""
    task = sys.argv[1]
    memory_mib = int(sys.argv[2])
    processor_s = int(sys.argv[3])
    serve: Callable[[Any], Iterator[object]] = Templates().render if task == "templates" else read_parquet
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - pathlib takes a tenth of the start
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_mib * MIB, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (request := _read_frame()) is not None:
        _answer(serve(request), processor_s)


def _answer(answers: Iterator[object], processor_s: int) -> None:
    try:
        while True:
            # From now on. The kernel counts whole seconds of this process and ends it by SIGXCPU.
            used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + processor_s, resource.RLIM_INFINITY))
            answer = next(answers, None)
            if answer is None:
                break
            _write_frame(answer)
        _write_frame({"end": True})
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # to say so
        _write_frame({"memory": True})
        raise SystemExit(0) from None


def _read_frame() -> Any:
    head = sys.stdin.buffer.read(8)
    if len(head) < 8:
        return None
    return json.loads(sys.stdin.buffer.read(int.from_bytes(head)))


def _write_frame(answer: object) -> None:
    kind, content = (b"A", answer) if isinstance(answer, bytes) else (b"J", json.dumps(answer).encode())
    sys.stdout.buffer.write(kind + len(content).to_bytes(8))
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


# -- chat templates ---------------------------------------------------------------------------------------------------


class Templates:
    """Renders one chat template. The first request has the template, each later one a list of conversations."""

    def __init__(self) -> None:
        self._template: Any = None
        self._variables: dict[str, Any] = {}
        self._most_letters = 0

    def render(self, request: Any) -> Iterator[object]:
        """Yield {"text": ...} or {"fault": ...} for each conversation."""
        if isinstance(request, dict):
            today = datetime.date.fromisoformat(request["today"])
            self._variables = request["variables"] | {"strftime_now": today.strftime}
            self._most_letters = request["most_letters"]
            try:
                self._template = compile_template(request["template"])
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - Jinja compiles to Python, which may raise what it wants
                yield {"fault": describe(error)}
            return
        for messages in request:
            try:
                text = self._template.render(
                    messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._variables
                )
                text.encode("utf-8")
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - as above
                yield {"fault": describe(error)}
                continue
            if len(text) > self._most_letters:
                yield {"fault": f"{len(text)} letters, of at most {self._most_letters}"}
            else:
                yield {"text": text}


def describe(error: Exception) -> str:
    """Return an error's first line; its class for one without words."""
    kind = type(error).__name__
    words = " ".join(str(error).split())[:500]
    if not words:
        return kind
    return words if kind in ("TemplateError", "ValueError") else f"{kind}: {words}"


def compile_template(source: str) -> Any:
    """Compile a chat template in the environment of transformers 5.17 (chat_template_utils.py).

    transformers itself takes two seconds to be imported. A test renders the same templates by both.
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The tag `generation`, which marks an assistant's tokens. Its content is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja wants it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_keep"), [], [], body).set_lineno(line)

        def _keep(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: Any) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


# -- Parquet ----------------------------------------------------------------------------------------------------------


def read_parquet(request: Any) -> Iterator[object]:
    """Yield {"names": ...}, and then the rows of the chosen columns as streams of Arrow.

    The request has path, columns (null: none, [] : all), and most_bytes of a stream.
    """
    import pyarrow
    import pyarrow.parquet

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # others reserve more address space than they use
    try:
        with pyarrow.parquet.ParquetFile(request["path"], pre_buffer=False, buffer_size=MIB) as file:
            schema = file.schema_arrow
            yield {"names": schema.names}
            columns = request["columns"]
            if columns is None:
                return
            chosen = [schema.field(name) for name in columns] if columns else list(schema)
            deep = next((field.name for field in chosen if _is_deep(field.type)), None)
            if deep is not None:
                yield {"fault": f"column {deep[:100]!r} nested more than {MOST_DEPTH} levels deep"}
                return
            number = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=columns or None, use_threads=False):
                for part in _split(batch, request["most_bytes"]):
                    if part.nbytes > request["most_bytes"]:
                        yield {"fault": f"more than {request['most_bytes']} bytes in row {number + 1}"}
                        return
                    yield _to_stream(part)
                    number += part.num_rows
    except MemoryError:  # Arrow's, too
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, RecursionError, KeyError) as error:
        yield {"fault": str(error).partition("\n")[0][:500]}


def _is_deep(kind: Any) -> bool:
    """Whether a type has more than MOST_DEPTH levels. Without recursion, which the type may be too deep for."""
    level = [kind]
    for _ in range(MOST_DEPTH):
        level = [it.field(i).type for it in level for i in range(it.num_fields)]
    return bool(level)


def _split(batch: Any, most_bytes: int) -> Iterator[Any]:
    """Halve a batch until each part has at most that many bytes, or one row."""
    if batch.num_rows <= 1 or batch.nbytes <= most_bytes:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _split(batch.slice(0, half), most_bytes)
    yield from _split(batch.slice(half), most_bytes)


def _to_stream(batch: Any) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    found: bytes = sink.getvalue().to_pybytes()
    return found


if __name__ == "__main__":
    main()
