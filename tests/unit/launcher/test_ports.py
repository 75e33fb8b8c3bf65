"""Ports that are free at the moment of the choice, whoever else takes ports then."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator

import pytest

from specrl.errors import PortTaken
from specrl.launcher import ports


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind((ports.HOST, 0))
        listener.listen(1)
        yield int(listener.getsockname()[1])


def test_free_ports_are_none_that_linux_takes_for_outgoing_connections() -> None:
    """One was taken by somebody's connection before the coordinator listened on it."""
    assert 1024 <= ports.free_port() < 32768  # Linux's Documentation/networking/ip-sysctl, ip_local_port_range


def test_a_port_that_is_taken_is_passed_over(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    free = ports.free_port()
    monkeypatch.setattr(random, "sample", lambda *_: [taken, free])
    assert ports.free_port() == free


def test_a_port_that_is_taken_between_bind_and_listen_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tries shared one socket, which stayed bound to the first port: each later one failed with EINVAL."""
    choices = [ports.free_port(), ports.free_port()]

    class LosesTheFirstRace(socket.socket):
        def listen(self, *backlog: int) -> None:
            if self.getsockname()[1] == choices[0]:
                raise OSError(errno.EADDRINUSE, "Address already in use")
            super().listen(*backlog)

    monkeypatch.setattr(random, "sample", lambda *_: choices)
    monkeypatch.setattr(socket, "socket", LosesTheFirstRace)
    assert ports.free_port() == choices[1]


def test_a_port_of_the_run_file_that_is_taken_is_refused_with_the_systems_words(taken: int) -> None:
    with (
        pytest.raises(PortTaken, match=f"telemetry.grpcPort={taken}: Address already in use"),
        ports._held("telemetry.grpcPort", taken),
    ):
        pass


def test_the_two_ports_of_a_launch_differ() -> None:
    with ports._held("a", 0) as first, ports._held("b", 0) as second:
        assert first != second
