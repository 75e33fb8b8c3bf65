"""Translates vLLM's errors to SpecrlErrors. `engine` and `draft_length_client` wrap every await on vLLM in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specrl.errors import EngineFailed, RecordInvalid, SpecrlError


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Translate vLLM's errors: RecordInvalid for a bad request, EngineFailed for anything else.

    what: the operation as a verb phrase, for the message.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except SpecrlError:
        raise
    except EngineDeadError as error:
        raise EngineFailed(f"the engine died and cannot {what}; the replica is restarted") from error
    except VLLMClientError as error:
        raise RecordInvalid(f"vLLM refused to {what}: {error}; change the request") from error
    except Exception as error:  # failures in the engine core arrive as bare Exceptions
        raise EngineFailed(
            f"the engine failed to {what}: {type(error).__name__}: {error}; the replica is restarted"
        ) from error
