"""Stage 1 of the loop: from a data set or a problem family to an endless, seekable stream of prompts."""

from specrl.prompts.sources import Problem, ProblemSource, open_source
from specrl.prompts.stream import PromptStream, load_prompts, load_validation
from specrl.prompts.templates import PromptTemplate

__all__ = [
    "Problem",
    "ProblemSource",
    "PromptStream",
    "PromptTemplate",
    "load_prompts",
    "load_validation",
    "open_source",
]
