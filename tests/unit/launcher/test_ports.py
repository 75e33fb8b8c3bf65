"""Chosen ports are free at the moment of the choice, whatever other processes do meanwhile."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator

import pytest

from specrl.errors import PortTaken
from specrl.launcher.processes import ports


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another socket listens on."""
    with socket.socket() as listener:
        listener.bind((ports.HOST, 0))
        listener.listen(1)
        yield int(listener.getsockname()[1])


def test_free_ports_are_outside_the_range_for_outgoing_connections() -> None:
    """Another process's connection once took the chosen port before the coordinator listened on it."""
    assert 1024 <= ports.find_free_port() < 32768  # Linux's Documentation/networking/ip-sysctl, ip_local_port_range


def test_a_taken_port_is_skipped(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    free = ports.find_free_port()
    monkeypatch.setattr(random, "sample", lambda *_: [taken, free])
    assert ports.find_free_port() == free


def test_a_port_taken_between_bind_and_listen_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """All attempts once shared one socket. It stayed bound to the first port, so each later one failed with EINVAL."""
    choices = [ports.find_free_port(), ports.find_free_port()]

    class LosesTheFirstRace(socket.socket):
        def listen(self, *backlog: int) -> None:
            if self.getsockname()[1] == choices[0]:
                raise OSError(errno.EADDRINUSE, "Address already in use")
            super().listen(*backlog)

    monkeypatch.setattr(random, "sample", lambda *_: choices)
    monkeypatch.setattr(socket, "socket", LosesTheFirstRace)
    assert ports.find_free_port() == choices[1]


def test_a_taken_port_from_the_run_file_is_refused_with_the_systems_error(taken: int) -> None:
    with (
        pytest.raises(PortTaken, match=f"telemetry.grpcPort={taken}: Address already in use"),
        ports._hold_port("telemetry.grpcPort", taken),
    ):
        pass


def test_the_two_ports_of_a_launch_differ() -> None:
    with ports._hold_port("a", 0) as first, ports._hold_port("b", 0) as second:
        assert first != second
