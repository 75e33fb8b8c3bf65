"""The run file as pydantic models. `RunSpec` is the CLI's input, the file in the pods and the spec of an RLJob.

- `run` holds the whole model, `base` the base classes; each other module at this level has the sections of one topic.
- `rules`: cross-field rules. `load` and `yaml_input`: from a file to a RunSpec.
- `rljob`: the run as a Kubernetes object. `reference`: docs/run-file.md.

Every package may import this one. It imports `files` and `errors` alone.
"""

from specrl.spec.load import digest_spec, dump_spec, load_process_spec, load_spec, parse_rljob, parse_spec, read_spec
from specrl.spec.run import RunSpec

__all__ = [
    "RunSpec",
    "digest_spec",
    "dump_spec",
    "load_process_spec",
    "load_spec",
    "parse_rljob",
    "parse_spec",
    "read_spec",
]
