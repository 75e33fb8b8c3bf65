"""Provides names that answers assume: those of an interactive Python, and those that public judges import.

Called by the scripts beside it, before the answer's first line. The judges of APPS, TACO and LiveCodeBench import a
list of modules and names in front of every answer, and raise Python's limit of recursion.
"""

from __future__ import annotations

import builtins
import sys
import types

_RECURSION = 50_000
"""LiveCodeBench's; Python's own 1000 is too low for a search of a graph of 10^4 nodes."""

_MODULES = (
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "io", "itertools",
    "json", "math", "operator", "os", "random", "re", "statistics", "string", "sys", "time", "typing",
)  # fmt: skip
_NAMES = {
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "copy": "copy deepcopy",
    "datetime": "date datetime time timedelta",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering wraps",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "itertools": (
        "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile groupby islice "
        "pairwise permutations product repeat starmap takewhile tee zip_longest"
    ),
    "math": (
        "acos asin atan atan2 ceil comb cos degrees dist e exp fabs factorial floor fmod gcd hypot inf isclose isqrt "
        "lcm log log10 log2 modf nan perm pi prod radians sin sqrt tan tau trunc"
    ),
    "random": "choice randint sample shuffle",
    "re": "findall finditer fullmatch match search sub",
    "statistics": "mean median",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "typing": (
        "Any Callable DefaultDict Deque Dict FrozenSet Generator Iterable Iterator List Mapping NamedTuple Optional "
        "Sequence Set Tuple Type TypeVar Union"
    ),
}
_PLACES = {name: (module, name) for module, names in _NAMES.items() for name in names.split()}
_PLACES |= {module: (module, "") for module in _MODULES if module not in _PLACES}
_PLACES |= {"np": ("numpy", ""), "numpy": ("numpy", "")}


def compile_answer(source: bytes | str, name: str) -> types.CodeType:
    """Compile an answer, and import those of the judges' names that it uses, so that a small program starts fast.

    The names become builtins. So an assignment of the answer replaces them, and they do not count as definitions of
    the answer. Raises what `compile` raises.
    """
    _add_site_names()
    sys.setrecursionlimit(_RECURSION)
    sys.set_int_max_str_digits(0)  # converting long integers only uses the answer's own time
    code = compile(source, name, "exec")
    for used in _used_names(code):
        if used in _PLACES and not hasattr(builtins, used):
            module, attribute = _PLACES[used]
            try:
                found = __import__(module)
            except ImportError:  # numpy, where no folder of packages has it
                continue
            setattr(builtins, used, getattr(found, attribute) if attribute else found)
    return code


def _add_site_names() -> None:
    """`exit`, `quit`, `help`, `copyright`, `credits`, `license`: Python's `site` adds them, which is left out here."""
    import _sitebuiltins

    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
    builtins.help = _sitebuiltins._Helper()
    for name in ("copyright", "credits", "license"):
        setattr(builtins, name, _sitebuiltins._Printer(name, "See https://www.python.org/psf/license/"))


def _used_names(code: types.CodeType) -> set[str]:
    found = set()
    codes = [code]
    while codes:
        each = codes.pop()
        found |= {*each.co_names}
        codes += [constant for constant in each.co_consts if isinstance(constant, types.CodeType)]
    return found
