"""Mutual TLS between a run's processes: certificates that name the role of their owner.

    tls.crt  tls.key  ca.crt        in one folder, as Kubernetes mounts a Secret of cert-manager's or of a user's

In the domain of a run a certificate names its owner `<role>.<domain>`, or several of them. A client takes a server for
the role that it means to call by that name, whatever address it is at; a server admits the roles that it is for.

Certificates are renewed while a run goes on. A server reads them for every new connection; a client opens another
channel for its next call once the files have changed; what is under way goes on. Files that do not fit together are not
taken over: the last ones that did are used further.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import grpc
import structlog

from specrl.errors import CallerRefused, TlsInvalid
from specrl.files import read_bytes
from specrl.records import Role

COORDINATOR, GENERATION, TRAINER = "coordinator", Role.GENERATION.value, Role.TRAINER.value
FILES = ("tls.crt", "tls.key", "ca.crt")
LOOK_S = 10.0
"""How often a web server looks for newer certificates, which come days before the old ones end."""
PAUSE_S = 0.1
"""How long a gRPC server's new connections wait once when its certificates are renewed, see Guard.credentials."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Certificates:
    """What the files hold, PEM."""

    chain: bytes
    key: bytes
    authorities: bytes


class Identity:
    """The certificate of this process, and the domain of its run. Raises TlsInvalid unless the files can be used."""

    def __init__(self, folder: Path, domain: str) -> None:
        self.folder, self.domain = folder, domain
        self._stamp = self.stamp()
        self._certificates = read(folder)

    def stamp(self) -> tuple[int, ...]:
        """Changes with the files; cheap enough for every call."""
        try:
            found = [(self.folder / name).stat() for name in FILES]
        except OSError:  # on its way; said when it is read
            return ()
        return tuple(number for it in found for number in (it.st_ino, it.st_mtime_ns))

    def present(self) -> Certificates:
        """The certificates as they are now; those before while the files do not fit together."""
        stamp = self.stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._certificates = read(self.folder)
                log.info("certificates_renewed", folder=str(self.folder))
            except TlsInvalid as error:
                log.error("certificates_not_renewed", reason=str(error))
        return self._certificates

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For one channel."""
        now = self.present()
        return grpc.ssl_channel_credentials(now.authorities, now.key, now.chain)

    def name(self, role: str) -> str:
        """The name by which a process of this role is known."""
        return f"{role}.{self.domain}"

    async def keep_current(self, context: ssl.SSLContext) -> None:
        """Have a web server's context show the present certificate to new connections, until cancelled."""
        shown = self.present()
        while True:
            await asyncio.sleep(LOOK_S)
            if (now := self.present()) is not shown:
                try:
                    _load(context, self.folder)
                    shown = now
                except TlsInvalid as error:  # changed once more in between: looked at again
                    log.error("certificates_not_renewed", reason=str(error))


@dataclass(frozen=True)
class Guard:
    """What a server asks of its callers: a certificate of one of these roles."""

    identity: Identity
    callers: frozenset[str]

    @cached_property
    def _names(self) -> frozenset[bytes]:
        return frozenset(self.identity.name(role).encode() for role in self.callers)

    def only(self, role: str) -> Guard:
        """The same for callers of one role."""
        return Guard(self.identity, self.callers & {role})

    def credentials(self) -> grpc.ServerCredentials:
        """Of a server that shows the present certificate to every new connection, and asks for one.

        gRPC asks for newer certificates under a lock, at every connection, and frees the older ones at once when it
        gets some, although a connection that has just left the lock may be about to use them (grpc issue 36693). So it
        gets some only when they are newer, and after a pause in which nobody can take the lock but those before are
        served.
        """
        shown = self.identity.present()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            if (now := self.identity.present()) is shown:
                return None
            time.sleep(PAUSE_S)
            shown = now
            return _configuration(now)

        # None is "unchanged", which types-grpcio does not know
        return grpc.dynamic_ssl_server_credentials(_configuration(shown), newer, True)  # type: ignore[arg-type]

    def check(self, method: str, caller: Mapping[str, Iterable[bytes]]) -> None:
        """Raise CallerRefused unless the caller's certificate, as gRPC has checked it, names a role that may call."""
        names = tuple(caller.get("x509_subject_alternative_name", ()))
        if self._names.isdisjoint(names):
            shown = ", ".join(name.decode("utf-8", "replace") for name in names) or "no name"
            raise CallerRefused(
                f"a caller of {method} must have a certificate of {' or '.join(sorted(self.callers))} in "
                f"{self.identity.domain}, got {shown}; give every role the certificate that is its own"
            )


def _configuration(now: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(now.key, now.chain)], now.authorities)


def guard_of(identity: Identity | None, *callers: str) -> Guard | None:
    """What a server asks of others that wants to be called by these roles alone; None without TLS."""
    return None if identity is None else Guard(identity, frozenset(callers))


def read(folder: Path) -> Certificates:
    """The files of one moment: Kubernetes changes all of them at once, by one link. Raises TlsInvalid."""
    try:
        moment = (folder / FILES[0]).resolve(strict=True).parent
        _load(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), moment)
        chain, key, authorities = (read_bytes(moment / name, 1 << 20) for name in FILES)
    except OSError as error:
        raise _unreadable(folder, error) from error
    return Certificates(chain, key, authorities)


def _load(context: ssl.SSLContext, folder: Path) -> None:
    try:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key", password="")  # else OpenSSL asks a terminal
        context.load_verify_locations(folder / "ca.crt")
    except OSError as error:  # SSLError is one
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: OSError) -> TlsInvalid:
    return TlsInvalid(
        f"--tls must be a folder with {', '.join(FILES)}: a certificate, its key and the authorities that sign the "
        f"others', all PEM, got {folder}: {error}; check the Secret that it comes from"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every process of a run that may use TLS."""
    parser.add_argument(
        "--tls", type=Path, metavar="FOLDER", help=f"mutual TLS with {', '.join(FILES)} of this folder; left out: none"
    )
    parser.add_argument("--tls-domain", metavar="NAME", help="certificates name their owners <role>.NAME")


def identity_of(folder: Path | None, domain: str | None) -> Identity | None:
    """What the options say; None without TLS. Raises TlsInvalid."""
    if folder is None and domain is None:
        return None
    if folder is None or domain is None:
        raise TlsInvalid(
            f"--tls and --tls-domain must be given together, got --tls={folder} --tls-domain={domain}; add the other"
        )
    return Identity(folder, domain)
