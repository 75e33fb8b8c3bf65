"""What a run is. `RunSpec` is the file in the pod, the CLI's input and, on Kubernetes, the RLJob's spec."""

from specrl.spec.load import digest, dump, load_spec, parse_rljob, parse_spec
from specrl.spec.run import RunSpec

__all__ = ["RunSpec", "digest", "dump", "load_spec", "parse_rljob", "parse_spec"]
