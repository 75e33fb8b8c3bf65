"""How refusals are described in OpenAPI."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Refusal(BaseModel):
    """Why a request was not answered as it was meant."""

    detail: str


def refusals(**words: str) -> dict[int | str, dict[str, Any]]:
    """What a route may answer beside its result, by status: s409="when the run is over"."""
    return {int(status[1:]): {"description": text, "model": Refusal} for status, text in words.items()}
