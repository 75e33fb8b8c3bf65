"""The error tree: what its classes fix, and the page that lists them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from tools import errors_page

from specrl.errors import ERRORS_BY_NAME, SpecInvalid, SpecProblem, SpecrlError

REPOSITORY = Path(__file__).parents[2]


def test_the_page_of_errors_lists_every_class_as_the_code_has_it() -> None:
    page = errors_page.render_page()
    assert [error.__name__ for error in errors_page.list_errors() if f"| `{error.__name__}` |" not in page] == []
    assert page == (REPOSITORY / "docs" / "errors.md").read_text(encoding="utf-8"), "run `make gen`"


def test_clients_can_raise_every_class_but_the_one_with_problems() -> None:
    assert set(errors_page.list_errors()) == {SpecInvalid, *ERRORS_BY_NAME.values()}


def test_a_docstring_without_meaning_or_remedy_is_refused() -> None:
    class WithoutRemedy(SpecrlError):
        """It stopped."""

    class WithoutMeaning(SpecrlError):
        """Remedy: start it again."""

    for error in (WithoutRemedy, WithoutMeaning):
        with pytest.raises(ValueError, match=error.__name__):
            errors_page.read_docstring(error)


@pytest.mark.parametrize(
    "error", [cls("text") for cls in ERRORS_BY_NAME.values()], ids=lambda error: type(error).__name__
)
def test_an_error_survives_a_process_boundary(error: SpecrlError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - bytes of our own
    assert type(copy) is type(error)
    assert str(copy) == str(error)


def test_the_problems_of_a_run_file_survive_a_process_boundary() -> None:
    error = SpecInvalid((SpecProblem("schedule.groupSize", "must be >= 1, got 0", "raise it"),))
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - bytes of our own
    assert copy.problems == error.problems
