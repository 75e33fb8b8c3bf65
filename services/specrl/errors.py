"""All errors that specrl raises on purpose: one tree with `SpecrlError` as its root.

Each class fixes a gRPC status, whether the same call may be repeated, and the exit code of a process that ends with it.
Each also derives from the builtin exception that fits, so that code outside specrl can catch it. `rpc/server.py` sends
the class name with the status, and `rpc/clients.py` raises the same class at the caller. Errors of other libraries are
translated where specrl calls them.

Messages about input read `<field> must be <rule>, got <value>; <what to do>`. Messages about events say what happened,
to what, and what happens next. Instances can be pickled, because worker processes return them.

docs/errors.md is generated from this module (`make gen`). A class's docstring is its row: the first paragraph is the
meaning, the paragraph after `Remedy:` says what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
    "UNAUTHENTICATED",
    "INTERNAL",
]


class SpecrlError(Exception):
    """Root of the tree.

    grpc_status: what a server answers. retryable: the same call may be repeated. exit_code: of a process that ends with
    the error. 1: a restart may help. 2: the user must act first.
    """

    grpc_status: ClassVar[GrpcStatus] = "INTERNAL"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1


@dataclass(frozen=True)
class SpecProblem:
    """One broken rule of a run: where it is, what the rule is, what to do.

    path: the field's path in the run file; empty if `rule` is a whole message.
    """

    path: str
    rule: str
    remedy: str

    def __str__(self) -> str:
        text = f"{self.path}: {self.rule}" if self.path else self.rule
        return f"{text}; {self.remedy}" if self.remedy else text


class SpecInvalid(SpecrlError, ValueError):
    """The run file, the RLJob or a command's options break one or more rules. Lists every broken rule.

    Remedy: change the fields that the message names. docs/run-file.md lists all fields with their rules.
    """

    grpc_status = "INVALID_ARGUMENT"
    exit_code = 2

    def __init__(self, problems: tuple[SpecProblem, ...]) -> None:
        super().__init__(problems)  # the arguments, not the text: pickle calls the class with them
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        return f"the run file has {len(self.problems)} problems:\n{lines}"


def raise_problems(problems: Iterable[SpecProblem]) -> None:
    """Raise SpecInvalid with these problems, or return if there are none."""
    found = tuple(dict.fromkeys(problems))  # two checks may find the same problem; the order stays
    if found:
        raise SpecInvalid(found)


def list_problems(error: SpecrlError) -> tuple[SpecProblem, ...]:
    """List the problems of a SpecInvalid. Any other error is one problem, with its message as the rule."""
    return error.problems if isinstance(error, SpecInvalid) else (SpecProblem("", str(error), ""),)


@contextmanager
def collect_problems(problems: list[SpecProblem]) -> Iterator[None]:
    """Append the problems of a SpecrlError raised in the block to `problems`, and continue after the block."""
    try:
        yield
    except SpecrlError as error:
        problems.extend(list_problems(error))


class DatasetInvalid(SpecrlError, ValueError):
    """A prompt source is missing or unreadable, or has a malformed record. Names the file and the line.

    Remedy: correct that line, or point `prompts` to the right file.
    """

    grpc_status = "INVALID_ARGUMENT"
    exit_code = 2


class CheckpointInvalid(SpecrlError, ValueError):
    """A model, a drafter or a trainer checkpoint is missing, incomplete, or does not fit the run.

    Remedy: fetch the model again, or use a checkpoint of this run; see docs/checkpoints.md.
    """

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 2


class FetchFailed(SpecrlError, OSError):
    """A model or a data set on the Hugging Face Hub does not exist, may not be read, or did not arrive.

    Remedy: follow the message. Files that have arrived whole stay in the cache; docs/hub.md has more.
    """

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 2
    silence: str = ""
    """Why the hub did not answer, so that what is in the cache may be used. Empty if it has answered."""


class FetchInterrupted(FetchFailed):
    """The hub or an object store did not answer, or the connection broke while a file was fetched.

    Remedy: run the command again. Files that have arrived whole stay. Pods of an RLJob try again by themselves.
    """

    retryable = True
    exit_code = 1


class RecordInvalid(SpecrlError, ValueError):
    """A rollout, a request or another record of the wire or the store breaks its own rules.

    Examples: an empty or over-long rollout, NaN, missing log-probabilities, versions that do not cover all tokens.

    Remedy: nothing for a malformed rollout, which is sampled again. For tokens or experts that the policy does not
    have, give the replica that the log names the policy's folder. Otherwise run the same version of specrl everywhere.
    """

    grpc_status = "INVALID_ARGUMENT"


class ChecksumMismatch(SpecrlError, ValueError):
    """The weights that arrived at a replica differ from those that the trainer sent. Nothing was loaded.

    Remedy: nothing; the transfer is repeated. If it recurs, check the network and the memory of that node.
    """

    grpc_status = "DATA_LOSS"
    retryable = True


class MessageTooLarge(SpecrlError, ValueError):
    """A message is larger than the largest one that the run file allows. It was not sent, or not read.

    Remedy: use the same run file in all processes, or lower the sizes that the message names.
    """

    grpc_status = "RESOURCE_EXHAUSTED"
    exit_code = 2


class VersionConflict(SpecrlError, ValueError):
    """A call names a step, a policy version, a weight group or a replica that the callee does not have.

    Remedy: nothing; the coordinator reads the callee's status and replays from there.
    """

    grpc_status = "FAILED_PRECONDITION"


class PortTaken(SpecrlError, OSError):
    """Another process listens on the address that this process should serve.

    Remedy: stop the other process, choose another port, or use port 0 for any free one.
    """

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 2


class MemoryTooSmall(SpecrlError, MemoryError):
    """The machine, or the container's limit, has less memory than the run needs.

    Remedy: lower the sizes that the message names, or use a machine with more memory.
    """

    grpc_status = "RESOURCE_EXHAUSTED"
    exit_code = 2


class TlsInvalid(SpecrlError, ValueError):
    """The files of a certificate are missing, unreadable, or do not belong together.

    Remedy: check the folder given with `--tls`, or the Secret that it is mounted from.
    """

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 2


class CallerRefused(SpecrlError, PermissionError):
    """A caller's certificate does not name a role that may call this server.

    Remedy: give every process the certificate of its role.
    """

    grpc_status = "PERMISSION_DENIED"
    exit_code = 2


class TokenRefused(SpecrlError, PermissionError):
    """A caller does not show that it can read the token of a run on this machine.

    Remedy: start the process as the user who started the run, with `--token-file`.
    """

    grpc_status = "UNAUTHENTICATED"


class PeerUnavailable(SpecrlError, ConnectionError):
    """A peer does not answer: it has not started yet, has ended, or the connection broke.

    Remedy: nothing; the call is retried, or the work is given to another peer. If it lasts, read the peer's log.
    """

    grpc_status = "UNAVAILABLE"
    retryable = True


class CollectiveFailed(SpecrlError, ConnectionError):
    """A process group broke because a member ended or closed its connection.

    Remedy: nothing; the group is formed again. If it recurs, read the logs of its members.
    """

    grpc_status = "ABORTED"
    retryable = True


class DeadlineExceeded(SpecrlError, TimeoutError):
    """A call or a collective did not finish within its time limit.

    Remedy: nothing; it is retried, or its peer is treated as lost. If it recurs, read the peer's log. For a transfer of
    weights, raise `weights.timeoutS`.
    """

    grpc_status = "DEADLINE_EXCEEDED"
    retryable = True


class EngineFailed(SpecrlError, RuntimeError):
    """The generation engine (vLLM) stopped, or refused a call.

    Remedy: read the replica's log. The launcher or the operator restarts the replica.
    """


class TrainerFailed(SpecrlError, RuntimeError):
    """The trainer (Megatron-Core) stopped, or refused a call.

    Remedy: read the trainer's log. The launcher or the operator restarts the trainer, which resumes.
    """


class SamplerDisagrees(SpecrlError, RuntimeError):
    """A replica's log-probabilities, tokens or experts are not the policy's, though the weights arrived intact, twice.

    The run ends: a restart would repeat it, and training would continue on wrong data.

    Remedy: check that sampler and trainer load the same model with the same dtype, then resume.
    """

    exit_code = 2


class ReplicasRefused(SpecrlError, RuntimeError):
    """Every replica of the run refuses the weights that it is sent, several times for the same reason.

    The run ends: a restart would repeat it.

    Remedy: remove the cause that the message names, such as another model's files in the policy's folder, and resume.
    """

    exit_code = 2


class StoreFailed(SpecrlError, RuntimeError):
    """The run's store, a checkpoint, or files with weights could not be read or written.

    The run waits for its store. After a periodic checkpoint that failed, it continues with the one before.

    Remedy: make room on the disk, or restore the connection to Redis or to the mirror.
    """

    grpc_status = "UNAVAILABLE"
    retryable = True


class StoreInvalid(SpecrlError, ValueError):
    """The store answers, but this coordinator must not use it.

    It belongs to another coordinator, run or version, is damaged, or may lose acknowledged writes.

    Remedy: follow the message; docs/store.md explains each case.
    """

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 2


class VerifierFailed(SpecrlError, RuntimeError):
    """A reference answer cannot be compared with any answer, or no verifier can start.

    Remedy: correct the data set's reference, or the verifier. An answer of the policy never causes this.
    """


class ToolFailed(SpecrlError, RuntimeError):
    """A tool raised or returned no text, which the policy reads. Or no worker of it can start, which ends the run.

    Remedy: correct the tool. For failures that no call can cause it should raise `specrl.rewards.Ungraded`; the rollout
    is then sampled again.
    """


class NothingGraded(SpecrlError, RuntimeError):
    """No rollout of a step was graded, or no answer for a drafter is well-formed, so there is nothing to train on.

    The run ends, because a restart would repeat it.

    Remedy: correct the verifier; `specrl rewards grade` tries it on stored rollouts. Or see in the log why replicas
    return malformed rollouts. Then resume.
    """

    exit_code = 2


class TransitionForbidden(SpecrlError, RuntimeError):
    """A state machine was asked for a transition that its table does not have. This is a bug in specrl.

    The run ends, because it would otherwise continue in an unknown state.

    Remedy: report it with the log; a restart resumes the run.
    """


class RunInvalid(SpecrlError, ValueError):
    """A run directory cannot be started, resumed or read as the command asks.

    Remedy: follow the message; it names the directory and what is wrong.
    """

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 2


class RunFailed(SpecrlError, RuntimeError):
    """A run ended before its last step, and resuming it may help.

    `specrl.run` raises it where the command exits with 1.

    Remedy: read the logs that the message names, and resume the run.
    """


class RunRefused(SpecrlError, RuntimeError):
    """A run ended before its last step, and would end so again until its user repairs something.

    `specrl.run` raises it where the command exits with 2.

    Remedy: repair what the message names, then resume the run.
    """

    exit_code = 2


class RunInterrupted(SpecrlError, RuntimeError):
    """A run was stopped by Ctrl-C or a signal, or interrupted before it had begun.

    The first Ctrl-C saves it. A second one kills it, and it resumes from its last checkpoint.

    `specrl.run` raises it where the command exits with 130.

    Remedy: resume the run when it should go on.
    """

    exit_code = 130


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that is not blank; its type's name if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# `rpc/clients.py` raises these classes by the name that a server sent. SpecInvalid is left out: it is built from
# problems, not from a message, and no call answers with it.
ERRORS_BY_NAME: dict[str, type[SpecrlError]] = {
    cls.__name__: cls
    for cls in (
        DatasetInvalid,
        CheckpointInvalid,
        FetchFailed,
        FetchInterrupted,
        RecordInvalid,
        ChecksumMismatch,
        MessageTooLarge,
        VersionConflict,
        PortTaken,
        MemoryTooSmall,
        TlsInvalid,
        CallerRefused,
        TokenRefused,
        PeerUnavailable,
        CollectiveFailed,
        DeadlineExceeded,
        EngineFailed,
        TrainerFailed,
        SamplerDisagrees,
        ReplicasRefused,
        StoreFailed,
        StoreInvalid,
        VerifierFailed,
        ToolFailed,
        NothingGraded,
        TransitionForbidden,
        RunInvalid,
        RunFailed,
        RunRefused,
        RunInterrupted,
    )
}
