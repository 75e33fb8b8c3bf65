"""vLLM's errors as specrl's, at the one seam where they meet. Around every await on vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specrl.errors import EngineFailed, RecordInvalid, SpecrlError


@contextmanager
def translated(what: str) -> Iterator[None]:
    """vLLM's errors as ours: a bad request is RecordInvalid, all else EngineFailed."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except SpecrlError:
        raise
    except EngineDeadError as error:
        raise EngineFailed(f"the engine must {what}, got a dead one; the replica is started again") from error
    except VLLMClientError as error:
        raise RecordInvalid(f"the engine must be able to {what}, got: {error}; change the request") from error
    except Exception as error:  # failures in the engine core arrive as bare Exceptions
        raise EngineFailed(
            f"the engine must {what}, got {type(error).__name__}: {error}; the replica is started again"
        ) from error
