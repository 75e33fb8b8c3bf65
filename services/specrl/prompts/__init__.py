"""Turn a data set or a problem family into an endless, seekable stream of prompts.

`sources` reads problems, `columns` and `questions` read a record, `templates` formats and tokenizes, `stream` shuffles
and serves, `mixing` distributes positions over several sources. The coordinator asks for prompts by position; `specrl
rewards grade` and `specrl sft` read the same sources. Of this package only `families` is for users' code
(docs/python-api.md).
"""

from specrl.prompts.columns import DatasetProblem
from specrl.prompts.sources import ProblemSource, open_problem_source
from specrl.prompts.stream import (
    NamedProblems,
    ProblemSources,
    PromptStream,
    SourceIdentity,
    load_prompts,
    load_validation,
    log_left_out,
    open_sources,
)
from specrl.prompts.templates import PromptTemplate, check

__all__ = [
    "DatasetProblem",
    "NamedProblems",
    "ProblemSource",
    "ProblemSources",
    "PromptStream",
    "PromptTemplate",
    "SourceIdentity",
    "check",
    "load_prompts",
    "load_validation",
    "log_left_out",
    "open_problem_source",
    "open_sources",
]
