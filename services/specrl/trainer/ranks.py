"""Makes all ranks run the same call, and ends all ranks when one is lost.

    rank 0      IDLE --call--> send name and request -> run -> compare outcomes -> answer
                IDLE --IDLE_CHECK_S without a call--> CheckAlive: detects a rank that is gone
    rank 1..    WAITING --name and request--> run -> compare outcomes -> WAITING; the call `Close` ends it

Every rank runs the method of `calls.RankCalls` with that name. Requests travel as serialized protobuf messages over
their own Gloo group, never pickled. A request is broadcast. Rollouts, which are most bytes of a batch, go only to the
data parallel replica that trains on them: rank 0 sends them to the replica's first rank, and its ranks pass them on.

Invariant: after a call, all ranks have the same state. A SpecrlError keeps it: the backend promises that every rank
rejected the request alike. Any other exception may leave the ranks with different states, so it raises RankLost and
ends the process. The launcher then restarts all ranks. A rank that runs out of memory raises MemoryTooSmall instead,
without waiting for the others. Its process ends, too, and with it the run.

Waiting: rank 0's broadcast wakes the other ranks. When a rank dies, its sockets close, and every rank that waits for
it gets an error, at the latest with the next CheckAlive. CONTROL_TIMEOUT bounds every wait.

Called by `service.py` and `sft/` at rank 0, and by the main functions at the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_type_hints

import torch
import torch.distributed as dist
from google.protobuf.wrappers_pb2 import StringValue

from specrl.errors import MemoryTooSmall, RecordInvalid, SpecInvalid, SpecrlError, TrainerFailed, first_line
from specrl.trainer.calls import RANK_0_MAY_REFUSE, RankCalls, add_share, has_outlines
from specrl.trainer.memory import exhaustion

if TYPE_CHECKING:
    from google.protobuf.message import Message

IDLE_CHECK_S = 5.0  # how long a dead rank may go unnoticed while nobody calls

# The longest that one rank may take for a call more than another. Idle ranks never wait that long: CheckAlive wakes
# them.
CONTROL_TIMEOUT = timedelta(hours=1)

_DONE = 0
_REFUSED = 1

# What runs in a call, and what to change if its memory does not suffice.
_PHASES = {
    "Load": ("the loading of the models", exhaustion.OF_STATE),
    "TrainParts": ("a training step", exhaustion.OF_PASSES),
    "TrainSupervised": ("a training step", exhaustion.OF_PASSES),
    "TrainDrafter": ("the drafter's initialisation", exhaustion.OF_DRAFTER),
    "Score": ("a pass for log-probabilities", exhaustion.OF_PASSES),
}


_OF_ONE_RANK = (MemoryTooSmall, SpecInvalid)
"""Errors that one rank may have alone. SpecInvalid: its node has an incomplete copy of the model."""


class RankLost(TrainerFailed):
    """The ranks have different states, or one is gone. The process must end."""


class ControlGroup:
    """The Gloo group over which calls travel; nothing may be sent if there is one rank.

    Creating it is a collective, which needs an initialised torch.distributed.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT) if self.world_size > 1 else None

    def send_message(self, message: bytes) -> None:
        """Send `message` to all other ranks. Rank 0 only."""
        size = torch.tensor([len(message)], dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, group=self._group)

    def receive_message(self) -> bytes:
        """Wait for the next message from rank 0. For the other ranks."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(buffer, 0, group=self._group)
        return buffer.numpy().tobytes()

    def send_shares(self, encode_share: Callable[[int], bytes], replicas: Sequence[Sequence[int]]) -> None:
        """Send every replica its share. Rank 0 only. encode_share: makes the share of the replica of that number."""
        for number, ranks in enumerate(replicas):
            if ranks[0] != self.rank:
                self._send(encode_share(number), ranks[0])
            elif len(ranks) > 1:
                self._pass_on(encode_share(number), ranks)

    def receive_share(self, replicas: Sequence[Sequence[int]]) -> bytes:
        """Receive the share of this rank's replica, and pass it on to other ranks of it. For the other ranks."""
        (ranks,) = (ranks for ranks in replicas if self.rank in ranks)
        return self._pass_on(self._receive(0) if ranks[0] == self.rank else None, ranks)

    def _pass_on(self, message: bytes | None, ranks: Sequence[int]) -> bytes:
        """Give all of `ranks` the message of the first. In each round, every rank that has it sends it to another."""
        place = ranks.index(self.rank)
        reached = 1
        while reached < len(ranks):
            if place < reached and message is not None and place + reached < len(ranks):
                self._send(message, ranks[place + reached])
            elif reached <= place < 2 * reached:
                message = self._receive(ranks[place - reached])
            reached *= 2
        assert message is not None
        return message

    def _send(self, message: bytes, to: int) -> None:
        dist.send(torch.tensor([len(message)], dtype=torch.int64), to, group=self._group)
        if message:  # a batch may have fewer rollouts than there are replicas
            dist.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), to, group=self._group)

    def _receive(self, origin: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, origin, group=self._group)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if len(buffer) > 0:
            dist.recv(buffer, origin, group=self._group)
        return buffer.numpy().tobytes()

    def gather_outcomes(self, outcome: int) -> list[int]:
        """Exchange outcomes. Returns those of all ranks, in rank order, at every rank."""
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(found, torch.tensor([outcome]), group=self._group)
        return [int(item) for item in found]


class AllRanks:
    """Rank 0's handle on all ranks. control: None, or a group of one rank, if there are no other ranks."""

    def __init__(self, calls: RankCalls, control: ControlGroup | None) -> None:
        self._calls = calls
        self._control = control

    def load_checkpoint(self, checkpoint: Path | None) -> None:
        """Load a checkpoint on every rank; None loads the initial model. Raises what `run_call` raises."""
        self.run_call(RankCalls.Load, StringValue(value=str(checkpoint or "")))

    def run_call[Request: Message, Reply](self, call: Callable[[RankCalls, Request], Reply], request: Request) -> Reply:
        """Run a method of RankCalls on every rank. Returns rank 0's result.

        Raises the SpecrlError with which all ranks rejected the request; RankLost, MemoryTooSmall and SpecInvalid,
        after which the process must end.
        """
        if has_outlines(request):
            raise RecordInvalid(
                "rollouts must have tokens, got an outline, as only a trainer's ranks send; send them all"
            )
        control = self._control
        if control is None or control.world_size == 1:
            with _report_exhaustion(call.__name__):
                return call(self._calls, request)
        shared = self._calls.share_rollouts(request)

        def send_and_run() -> Reply:
            control.send_message(encode_call(call.__name__, request if shared is None else shared.outline))
            if shared is not None:
                control.send_shares(shared.encode_share, self._calls.replicas)
            return call(self._calls, request)

        return _run_and_compare(control, call.__name__, send_and_run)


def encode_call(name: str, request: Message) -> bytes:
    """Encode a call as its name, a line break, and the serialized request."""
    return name.encode() + b"\n" + request.SerializeToString()


def decode_call(message: bytes) -> tuple[str, Message]:
    """Decode what `encode_call` made. The request's type is the annotation of the method's argument."""
    name, _, content = message.partition(b"\n")
    hints = get_type_hints(getattr(RankCalls, name.decode()))
    return name.decode(), hints["request"].FromString(content)


def follow_rank_0(calls: RankCalls, control: ControlGroup) -> None:
    """Run rank 0's calls, at a rank other than 0, until `Close`. Raises RankLost, MemoryTooSmall and SpecInvalid."""
    name = ""
    while name != "Close":
        try:
            name, request = decode_call(control.receive_message())
            if has_outlines(request):
                add_share(request, control.receive_share(calls.replicas))
        except RuntimeError as error:
            raise _to_rank_lost(error) from error
        try:
            _run_and_compare(control, name, partial(getattr(calls, name), request))
        except (*_OF_ONE_RANK, RankLost):
            raise
        except SpecrlError:
            pass  # rank 0 has the same error, and answers the caller with it


def _run_and_compare[Reply](control: ControlGroup, name: str, run: Callable[[], Reply]) -> Reply:
    """Run a call on this rank, and compare its outcome with those of the other ranks.

    Raises this rank's SpecrlError if all ranks have one, and RankLost if outcomes differ or a rank is gone.
    MemoryTooSmall and SpecInvalid are raised at once.
    """
    refusal: SpecrlError | None = None
    result: Reply | None = None
    try:
        try:
            with _report_exhaustion(name):
                result = run()
        except _OF_ONE_RANK:
            raise
        except SpecrlError as error:
            refusal = error
        outcomes = control.gather_outcomes(_DONE if refusal is None else _REFUSED)
    except _OF_ONE_RANK:
        raise  # the other ranks may wait for this one in the middle of the call; they notice that its process ends
    except Exception as error:  # the edge of the call: after any unexpected error the ranks may have different states
        raise _to_rank_lost(error) from error
    # Rank 0 may fail alone where it alone has something to do.
    only_rank_0 = outcomes[0] == _REFUSED and _REFUSED not in outcomes[1:] and name in RANK_0_MAY_REFUSE
    if len(set(outcomes)) > 1 and not only_rank_0:
        raise RankLost(
            f"trainer ranks disagree on {name}: outcomes are {outcomes} (0 done, 1 rejected), error of this rank is "
            f"{refusal}; stopping this rank, restart all of them"
        )
    if refusal is not None:
        raise refusal
    return cast("Reply", result)  # a call may return None


def _report_exhaustion(name: str) -> AbstractContextManager[None]:
    phase, remedy = _PHASES.get(name, (f"the call {name}", exhaustion.OF_STATE))
    return exhaustion.report_exhaustion(phase, remedy)


def _to_rank_lost(error: Exception) -> RankLost:
    reason = first_line(error)
    return RankLost(f"lost a trainer rank ({type(error).__name__}: {reason}); stopping this one, restart all of them")
