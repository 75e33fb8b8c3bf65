"""The token of a run on one machine. Whoever can read the run's folder can read it, and may act on the run.

The launcher draws a token at each launch and writes it into the run's folder, in a file that only its owner can read.
HTTP requests carry the token itself. gRPC calls carry a proof of it, in the metadata PROOF_KEY:

    SECONDS HMAC-SHA256(token, "specrl grpc PORT SECONDS")

SECONDS is the clock's time, PORT the port that is called. A process that takes the port of one that has crashed learns
a proof for that port alone, which soon expires, and never the token. Every process reads the file again when it
changes, so that a coordinator that was started alone may draw another token.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from specrl.errors import TokenRefused
from specrl.files import PRIVATE_UMASK, SMALL_BYTES, read_text, write_text

TOKEN_FILE = "token"  # noqa: S105 - a file's name
"""File in the run's folder, with mode 0600."""

PROOF_KEY = "specrl-proof"
"""Metadata of a gRPC call: the caller's proof that it can read the run's token."""

PROOF_VALID_S = 60.0
"""Seconds for which a proof is valid, before and after its time. Both processes have the clock of one machine."""

LONGEST_PROOF = 100
"""Characters of the longest proof: a time, a space and 64 hexadecimal digits."""

SHORTEST_TOKEN = 32
"""Characters of the shortest token that is used. `write_token` draws 43."""


def write_token(directory: Path) -> str:
    """Draw a token, write it into `directory` atomically, readable by the owner only, and return it."""
    token = secrets.token_urlsafe(32)  # 256 random bits
    write_text(directory / TOKEN_FILE, token, mode=0o600)
    return token


def ensure_token(directory: Path) -> str:
    """Return the token of the launch. Draws one if there is none that only the owner can read, as without a launcher.

    Raises OSError.
    """
    try:
        is_private = not (directory / TOKEN_FILE).stat().st_mode & PRIVATE_UMASK
        token = read_token(directory)
    except (OSError, ValueError):
        return write_token(directory)
    return token if is_private and len(token) >= SHORTEST_TOKEN else write_token(directory)


def read_token(directory: Path) -> str:
    """Read the token of the run's coordinator. Raises OSError or ValueError when it cannot be read."""
    return read_text(directory / TOKEN_FILE, SMALL_BYTES).strip()


def find_token(directory: Path) -> str | None:
    """Return the token of the run; None if there is none that this user can read."""
    try:
        return read_token(directory)
    except (OSError, ValueError):
        return None


def add_token_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option of a process whose run may have a token."""
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="the token of a run on this machine; its calls must prove it"
    )


def load_token(file: Path | None) -> RunToken | None:
    """Return the token in the file that the option names; None without one."""
    return None if file is None else RunToken(file)


class RunToken:
    """The token in a file, read again when the file changes. Makes proofs for callers and checks those of callers."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.time) -> None:
        """clock: seconds since the epoch."""
        self._file = file
        self._clock = clock
        self._stamp: tuple[int, ...] = ()
        self._token = b""

    def make_proof(self, port: int) -> str:
        """Make the proof for a call to `port`. Without a token it is one that every server refuses."""
        seconds = str(int(self._clock()))
        return f"{seconds} {self._sign(port, seconds)}"

    def check_proof(self, port: int, proof: str | bytes | None) -> None:
        """Raise TokenRefused unless `proof` was made for a call to `port` within the last PROOF_VALID_S seconds."""
        if not isinstance(proof, str) or len(proof) > LONGEST_PROOF:
            raise TokenRefused(self._describe_refusal("none" if proof is None else "another value"))
        seconds, _, signature = proof.partition(" ")
        expected = self._sign(port, seconds)
        # Without a token nothing is right. compare_digest takes constant time, so that response times do not reveal how
        # much of a guess was right.
        if not self._token or not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace")):
            raise TokenRefused(self._describe_refusal("the proof of another token or port"))
        # The signature is right, so `seconds` is a number of ours.
        if abs(self._clock() - int(seconds)) > PROOF_VALID_S:
            raise TokenRefused(self._describe_refusal(f"one of another time than the last {PROOF_VALID_S:.0f} s"))

    def _describe_refusal(self, got: str) -> str:
        return (
            f"a call must carry a proof of the run's token in the metadata {PROOF_KEY}, got {got}; start the process "
            f"with --token-file RUN/{TOKEN_FILE}, as the user who started the run"
        )

    def _sign(self, port: int, seconds: str) -> str:
        said = f"specrl grpc {port} {seconds}"
        return hmac.new(self._read_current(), said.encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def _read_current(self) -> bytes:
        """Return the token in the file, empty without one. Reads it only if the file has changed."""
        try:
            found = self._file.stat()
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
            if stamp != self._stamp:
                token = read_text(self._file, SMALL_BYTES).strip()
                self._token = token.encode() if len(token) >= SHORTEST_TOKEN else b""
                self._stamp = stamp
        except (OSError, ValueError):  # not written yet, or being replaced
            self._token = b""
            self._stamp = ()
        return self._token
