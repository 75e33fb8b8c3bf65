"""Stage 1 of the loop: from a data set or a problem family to an endless, seekable stream of prompts."""

from specrl.prompts.columns import Problem
from specrl.prompts.sources import ProblemSource, open_source
from specrl.prompts.stream import PromptStream, Sources, load_prompts, load_validation, open_sources
from specrl.prompts.templates import PromptTemplate

__all__ = [
    "Problem",
    "ProblemSource",
    "PromptStream",
    "PromptTemplate",
    "Sources",
    "load_prompts",
    "load_validation",
    "open_source",
    "open_sources",
]
