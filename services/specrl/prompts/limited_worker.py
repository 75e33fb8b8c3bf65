"""The program of a worker that reads what a stranger may have written: chat templates, Parquet and CSV files.

`limited_process.LimitedProcess` starts it and talks to it. It limits its own memory and, for each part of its work, its
processor time. So a template without an end, or a file that grows a thousandfold, ends this process and no other one.
It is run as a file, so that it imports the standard library and one other library alone: jinja2 or pyarrow.

A request is a frame: 8 bytes with its length, then JSON. An answer is the same with one byte before it: J for JSON, A
for a stream of Arrow. {"fault": ...}: the input is wrong. {"memory": true}: the limit was reached. {"end": true}: the
last answer.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import resource
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

MOST_DEPTH = 64
"""Most levels of a Parquet column's type. Data sets have up to five; Arrow reads types by recursion."""

MOST_COLUMNS = 10_000
"""Most columns of a CSV file."""

BATCH_ROWS = 1024
"""Rows that are decoded, or sent, at once."""

BATCH_VALUES = 1 << 20
"""Values that are sent at once: as Python's they take about 100 bytes each, also where the file has none."""

MIB = 1 << 20


def main() -> None:
    """Answer requests until the other side closes the pipe. Arguments: task, MiB of memory, processor seconds."""
    task = sys.argv[1]
    memory_mib = int(sys.argv[2])
    processor_s = int(sys.argv[3])
    tasks: dict[str, Callable[[Any], Iterator[object]]] = {
        "templates": Templates().render,
        "parquet": read_parquet,
        "csv": read_csv,
    }
    serve = tasks[task]
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
    """Yield {"names": ...}, or the rows of the chosen columns as streams of Arrow.

    The request has path, columns (null: none, [] : all), and most_bytes of a stream.
    """
    import pyarrow
    import pyarrow.parquet

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # others reserve more address space than they use
    try:
        with pyarrow.parquet.ParquetFile(request["path"], pre_buffer=False, buffer_size=MIB) as file:
            schema = file.schema_arrow
            columns = request["columns"]
            if columns is None:
                yield {"names": schema.names}
                return
            chosen = [schema.field(name) for name in columns] if columns else list(schema)
            deep = next((field.name for field in chosen if _is_deep(field.type)), None)
            if deep is not None:
                yield {"fault": f"column {deep[:100]!r} nested more than {MOST_DEPTH} levels deep"}
                return
            batches = file.iter_batches(BATCH_ROWS, columns=columns or None, use_threads=False)
            yield from _send_batches(batches, request["most_bytes"])
    except MemoryError:  # Arrow's, too
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, RecursionError, KeyError) as error:
        yield {"fault": str(error).partition("\n")[0][:500]}


def read_csv(request: Any) -> Iterator[object]:
    """Yield {"names": ...}, or the rows of the chosen columns as streams of Arrow. The request is as for Parquet.

    Of several columns with one name the last counts, as in JSON.
    """
    import pyarrow
    import pyarrow.csv

    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    path = request["path"]
    # A block has a whole record. Without threads, blocks are not read ahead.
    reading = pyarrow.csv.ReadOptions(use_threads=False, block_size=request["most_bytes"])
    tab = path.lower().removesuffix(".gz").endswith(".tsv")
    parsing = pyarrow.csv.ParseOptions(delimiter="\t" if tab else ",", newlines_in_values=True)
    try:
        # Counted first: Arrow takes 8 GB for the head line of a million columns, and may stop for ever without memory.
        count = _count_columns(path, parsing.delimiter)
        if count > MOST_COLUMNS:
            yield {"fault": f"{count} columns, of at most {MOST_COLUMNS}"}
            return
        # Opened twice, since the types are asked for by name.
        with pyarrow.csv.open_csv(path, reading, parsing) as file:
            names = file.schema.names
        if request["columns"] is None:
            yield {"names": names}
            return
        texts = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False
        )
        places = {name: place for place, name in enumerate(names)}
        chosen = [places[name] for name in request["columns"] or places]
        with pyarrow.csv.open_csv(path, reading, parsing, texts) as file:
            yield from _send_batches((batch.select(chosen) for batch in file), request["most_bytes"])
    except MemoryError:
        raise
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, EOFError, zlib.error, csv.Error) as error:
        words = str(error).partition("\n")[0]
        if "block" in words:  # "straddling object straddles two block boundaries", for example
            words = f"a head line or a record of more than {request['most_bytes']} bytes"
        yield {"fault": words[:500]}


def _count_columns(path: str, delimiter: str) -> int:
    """Count the columns in the head line, as far as it is in the first MiB of a CSV file."""
    open_text: Callable[..., Any] = gzip.open if path.lower().endswith(".gz") else open
    with open_text(path, "rt", encoding="utf-8", errors="replace", newline="") as file:
        head = io.StringIO(file.read(MIB), newline="")
    csv.field_size_limit(MIB)
    return len(next(csv.reader(head, delimiter=delimiter), []))


def _send_batches(batches: Iterator[Any], most_bytes: int) -> Iterator[object]:
    """Yield streams of Arrow of at most that many bytes, or the fault of a row that has more."""
    number = 0
    for batch in batches:
        for part in _split(batch, most_bytes):
            if part.nbytes > most_bytes:
                yield {"fault": f"more than {most_bytes} bytes in row {number + 1}"}
                return
            yield _to_stream(part)
            number += part.num_rows


def _is_deep(kind: Any) -> bool:
    """Whether a type has more than MOST_DEPTH levels. Without recursion, which the type may be too deep for."""
    level = [kind]
    for _ in range(MOST_DEPTH):
        level = [it.field(i).type for it in level for i in range(it.num_fields)]
    return bool(level)


def _split(batch: Any, most_bytes: int) -> Iterator[Any]:
    """Halve a batch until each part has at most that many bytes, BATCH_ROWS and BATCH_VALUES; or one row."""
    most_rows = max(1, min(BATCH_ROWS, BATCH_VALUES // max(1, batch.num_columns)))
    if batch.num_rows <= 1 or (batch.num_rows <= most_rows and batch.nbytes <= most_bytes):
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
