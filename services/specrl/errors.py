"""Every error that specrl raises on purpose, as one tree.

    SpecrlError
    ├── SpecInvalid          (ValueError)       a run file breaks rules; lists all of them
    ├── DatasetInvalid       (ValueError)       a prompt source cannot be read
    ├── CheckpointInvalid    (ValueError)       a model, drafter or trainer checkpoint is missing or does not fit
    ├── RecordInvalid        (ValueError)       a rollout, group or batch breaks its own rules (poisoned)
    ├── ChecksumMismatch     (ValueError)       weights that arrived are not the weights that were sent
    ├── MessageTooLarge      (ValueError)       a message is larger than any of its run needs to be
    ├── VersionConflict      (ValueError)       a call names a step, version or group that is not the current one
    ├── PortTaken            (OSError)          another process listens there
    ├── MemoryTooSmall       (MemoryError)      the machine cannot hold what the run asks for
    ├── TlsInvalid           (ValueError)       certificates are missing or do not fit together
    ├── CallerRefused        (PermissionError)  a caller's certificate does not name a role that may call
    ├── PeerUnavailable      (ConnectionError)  a peer is gone or not there yet
    ├── CollectiveFailed     (ConnectionError)  a process group broke: one of its members is gone
    ├── DeadlineExceeded     (TimeoutError)     a call or a collective took longer than it may
    ├── EngineFailed         (RuntimeError)     vLLM stopped or refused
    ├── TrainerFailed        (RuntimeError)     Megatron stopped or refused
    ├── SamplerDisagrees     (RuntimeError)     a replica samples from another policy than the trainer's
    ├── StoreFailed          (RuntimeError)     the run's state could not be read or written
    ├── StoreInvalid         (ValueError)       what holds the run's state is not what this coordinator may write to
    ├── VerifierFailed       (RuntimeError)     a reference cannot be read, or no verifier works
    ├── ToolFailed           (RuntimeError)     a tool crashed, hung or answered nonsense; its rollout is sampled again
    ├── NothingGraded        (RuntimeError)     a step has no verdict to learn from: the reward has to be repaired
    ├── TransitionForbidden  (RuntimeError)     a state machine was led where its table has no way: our bug
    └── RunInvalid           (ValueError)       a run directory cannot be started or resumed

Each class fixes its gRPC status and whether the same call may be tried again. Messages follow one form:
`<what> must be <rule>, got <name>=<value>; <what to do>`. Instances pickle, since they cross process pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

GrpcStatus = Literal[
    "INVALID_ARGUMENT",
    "FAILED_PRECONDITION",
    "NOT_FOUND",
    "DATA_LOSS",
    "ABORTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "PERMISSION_DENIED",
    "INTERNAL",
]


class SpecrlError(Exception):
    """Root of the tree. `grpc_status` is what a server answers; `retryable`: the same call may be repeated."""

    grpc_status: ClassVar[GrpcStatus] = "INTERNAL"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1
    """Of a process that ends with it: 1 may be started again, 2 needs its user first."""


@dataclass(frozen=True)
class Problem:
    """One broken rule of a run file: where, what the rule is, what to do."""

    path: str
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.rule}; {self.remedy}"


class SpecInvalid(SpecrlError, ValueError):
    """A run file breaks one or more rules. Carries every problem found, not just the first."""

    grpc_status = "INVALID_ARGUMENT"
    exit_code = 2

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        count = len(self.problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        return f"the run file has {count} problem{'s' if count != 1 else ''}:\n{lines}"


class DatasetInvalid(SpecrlError, ValueError):
    """A prompt source is missing, unreadable or has a malformed record; the message names file and line."""

    grpc_status = "INVALID_ARGUMENT"
    exit_code = 2


class CheckpointInvalid(SpecrlError, ValueError):
    """A model, drafter or trainer checkpoint is missing, incomplete or does not fit the run."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 2


class RecordInvalid(SpecrlError, ValueError):
    """A record breaks its own rules: empty, over-long, NaN, log-probabilities missing, versions not covering it."""

    grpc_status = "INVALID_ARGUMENT"


class ChecksumMismatch(SpecrlError, ValueError):
    """Weights that arrived differ from those that were sent. Nothing was loaded; the transfer may be repeated."""

    grpc_status = "DATA_LOSS"
    retryable = True


class MessageTooLarge(SpecrlError, ValueError):
    """A message is larger than the largest legal one of the run. It was not sent, or not read."""

    grpc_status = "RESOURCE_EXHAUSTED"
    exit_code = 2


class VersionConflict(SpecrlError, ValueError):
    """A call names a step, policy version or weight group that the callee does not have."""

    grpc_status = "FAILED_PRECONDITION"


class PortTaken(SpecrlError, OSError):
    """Another process listens on the address that this one was told to serve."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 2


class MemoryTooSmall(SpecrlError, MemoryError):
    """The machine has less memory than the run needs."""

    grpc_status = "RESOURCE_EXHAUSTED"
    exit_code = 2


class TlsInvalid(SpecrlError, ValueError):
    """The files of a certificate are missing, cannot be read, or do not fit together."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 2


class CallerRefused(SpecrlError, PermissionError):
    """A caller has shown a certificate, and it is not one of a role that this server is for."""

    grpc_status = "PERMISSION_DENIED"
    exit_code = 2


class PeerUnavailable(SpecrlError, ConnectionError):
    """A peer does not answer: not started yet, gone, or its stream broke."""

    grpc_status = "UNAVAILABLE"
    retryable = True


class CollectiveFailed(SpecrlError, ConnectionError):
    """A process group broke because a member is gone or hung up. The group must be formed again."""

    grpc_status = "ABORTED"
    retryable = True


class DeadlineExceeded(SpecrlError, TimeoutError):
    """A call or a collective did not finish in the time it was given."""

    grpc_status = "DEADLINE_EXCEEDED"
    retryable = True


class EngineFailed(SpecrlError, RuntimeError):
    """The generation engine stopped, or refused what it was asked."""


class TrainerFailed(SpecrlError, RuntimeError):
    """The trainer stopped, or refused what it was asked."""


class SamplerDisagrees(SpecrlError, RuntimeError):
    """A replica's log-probabilities are not the trainer's, although it was sent the weights twice and they arrived.

    A restart would repeat it, and training on would teach the policy from wrong data: the user comes first.
    """

    exit_code = 2


class StoreFailed(SpecrlError, RuntimeError):
    """The run's state could not be read or written; nothing advances until it can."""

    grpc_status = "UNAVAILABLE"
    retryable = True


class StoreInvalid(SpecrlError, ValueError):
    """The store answers and must not be used: another coordinator's, another run's or version's, damaged, lossy."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 2


class VerifierFailed(SpecrlError, RuntimeError):
    """A reference cannot be compared with any answer, or no verifier can be started. No answer causes it."""


class ToolFailed(SpecrlError, RuntimeError):
    """A tool crashed, hung or answered nonsense. What the policy did wrong is no such failure but the tool's output."""


class NothingGraded(SpecrlError, RuntimeError):
    """No rollout of a step has a verdict of the verifier's own, so that the step cannot teach anything.

    A restart would repeat it until the verifier is repaired: the user comes first.
    """

    exit_code = 2


class TransitionForbidden(SpecrlError, RuntimeError):
    """A state machine was led where its table has no way. A bug; the run ends rather than go on in an unknown state."""


class RunInvalid(SpecrlError, ValueError):
    """A run directory cannot be started or resumed as asked."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 2


BY_NAME: dict[str, type[SpecrlError]] = {
    cls.__name__: cls
    for cls in (
        DatasetInvalid,
        CheckpointInvalid,
        RecordInvalid,
        ChecksumMismatch,
        MessageTooLarge,
        VersionConflict,
        PortTaken,
        MemoryTooSmall,
        TlsInvalid,
        CallerRefused,
        PeerUnavailable,
        CollectiveFailed,
        DeadlineExceeded,
        EngineFailed,
        TrainerFailed,
        SamplerDisagrees,
        StoreFailed,
        StoreInvalid,
        VerifierFailed,
        ToolFailed,
        NothingGraded,
        TransitionForbidden,
        RunInvalid,
    )
}
