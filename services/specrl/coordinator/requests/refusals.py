"""Describes error responses in the OpenAPI schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class RefusalBody(BaseModel):
    """Body of an error response: why the request was refused."""

    detail: str


def describe_refusals(**words: str) -> dict[int | str, dict[str, Any]]:
    """Describe the error responses of a route for FastAPI, by status: s409="the run is over"."""
    return {int(status[1:]): {"description": text, "model": RefusalBody} for status, text in words.items()}
