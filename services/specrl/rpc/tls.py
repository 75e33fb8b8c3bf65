"""Mutual TLS between the processes of a run: each certificate names the role of its owner.

    tls.crt  tls.key  ca.crt        in one folder, as Kubernetes mounts a Secret, of cert-manager or of a user

A certificate names its owner `<role>.<domain>`, in the domain of the run; it may have several names. A client verifies
that name, and not the address, so that it knows the server's role. A server admits callers of certain roles.

Certificates are renewed during a run. A server reads them for every new connection. A client opens a new channel for
its next call when the files have changed. Calls in progress continue. Files that do not belong together are not used:
the last valid ones stay in use.
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
from specrl.files import check_regular, read_bytes, resolve_path
from specrl.records import Role

COORDINATOR = "coordinator"
GENERATION = Role.GENERATION.value
TRAINER = Role.TRAINER.value
TLS_FILES = ("tls.crt", "tls.key", "ca.crt")
CERTIFICATE_BYTES = 1 << 20  # limit of each file
RENEWAL_CHECK_S = 10.0
"""Seconds between a web server's checks for renewed certificates, which come days before the old ones expire."""
RENEWAL_PAUSE_S = 0.1
"""Seconds that new connections of a gRPC server wait once, after a renewal; see `CallerGuard.server_credentials`."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Certificates:
    """Content of the three files, PEM."""

    chain: bytes
    key: bytes
    authorities: bytes


class Identity:
    """The certificate of this process, read again when its files change, and the domain of the run.

    Raises TlsInvalid if the files cannot be used at the start.
    """

    def __init__(self, folder: Path, domain: str) -> None:
        self.folder = folder
        self.domain = domain
        # The stamp first: files that change while they are read are read again by the next call.
        self._stamp = self.read_file_stamp()
        self._certificates = read_certificates(folder)

    def read_file_stamp(self) -> tuple[int, ...]:
        """Return inodes and times of the files, which change when the files do. Cheap enough for every call."""
        try:
            found = [(self.folder / name).stat() for name in TLS_FILES]
        except OSError:  # being replaced; `read_certificates` reports files that stay missing
            return ()
        return tuple(number for it in found for number in (it.st_ino, it.st_mtime_ns))

    def current_certificates(self) -> Certificates:
        """Return the certificates in the files, or the last valid ones if the files do not belong together."""
        stamp = self.read_file_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._certificates = read_certificates(self.folder)
                log.info("certificates_renewed", folder=str(self.folder))
            except TlsInvalid as error:
                log.error("certificates_not_renewed", reason=str(error))
        return self._certificates

    def make_channel_credentials(self) -> grpc.ChannelCredentials:
        """Return client credentials for one channel, with the current certificates."""
        now = self.current_certificates()
        return grpc.ssl_channel_credentials(now.authorities, now.key, now.chain)

    def name_for_role(self, role: str) -> str:
        """Return the name in certificates of a role."""
        return f"{role}.{self.domain}"

    async def keep_context_current(self, context: ssl.SSLContext) -> None:
        """Load renewed certificates into a web server's context, for its new connections, until cancelled.

        Checks every RENEWAL_CHECK_S seconds.
        """
        shown = self.current_certificates()
        while True:
            await asyncio.sleep(RENEWAL_CHECK_S)
            if (now := self.current_certificates()) is not shown:
                try:
                    _load_into_context(context, self.folder)
                    shown = now
                except TlsInvalid as error:  # the files changed again since then; the next check loads them
                    log.error("certificates_not_renewed", reason=str(error))


@dataclass(frozen=True)
class CallerGuard:
    """Admits callers whose certificate names one of these roles."""

    identity: Identity
    callers: frozenset[str]

    @cached_property
    def _caller_names(self) -> frozenset[bytes]:
        return frozenset(self.identity.name_for_role(role).encode() for role in self.callers)

    def restrict_to(self, role: str) -> CallerGuard:
        """Return a guard that admits only callers of `role`, if this one does."""
        return CallerGuard(self.identity, self.callers & {role})

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return server credentials that use renewed certificates for new connections, and require one of the client.

        Works around a use after free (grpc issue 36693). At every connection gRPC takes a lock and asks for new
        certificates. If it gets some, it frees the old ones at once, though a connection that has just released the
        lock may still use them. So this returns certificates only when they have changed, and pauses first. During the
        pause, new connections wait for the lock, and earlier ones finish with the old certificates.
        """
        shown = self.identity.current_certificates()

        def fetch_newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            if (now := self.identity.current_certificates()) is shown:
                return None
            time.sleep(RENEWAL_PAUSE_S)
            shown = now
            return _make_configuration(now)

        # None means "unchanged", which types-grpcio does not know. True: a client certificate is required.
        return grpc.dynamic_ssl_server_credentials(_make_configuration(shown), fetch_newer, True)  # type: ignore[arg-type]

    def check_caller(self, method: str, caller: Mapping[str, Iterable[bytes]]) -> None:
        """Raise CallerRefused unless the caller's certificate names a role that may call `method`.

        caller: the call's auth context. gRPC has verified the certificate's signature already.
        """
        names = tuple(caller.get("x509_subject_alternative_name", ()))
        if self._caller_names.isdisjoint(names):
            shown = ", ".join(name.decode("utf-8", "replace") for name in names) or "no name"
            raise CallerRefused(
                f"a caller of {method} must have a certificate of {' or '.join(sorted(self.callers))} in "
                f"{self.identity.domain}, got {shown}; give every process the certificate of its own role"
            )


def _make_configuration(now: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(now.key, now.chain)], now.authorities)


def make_guard(identity: Identity | None, *callers: str) -> CallerGuard | None:
    """Make the guard of a server that only these roles may call; None without TLS."""
    return None if identity is None else CallerGuard(identity, frozenset(callers))


def read_certificates(folder: Path) -> Certificates:
    """Read the three files of one version. Raises TlsInvalid if they cannot be read or do not belong together."""
    try:
        # Kubernetes replaces a mounted Secret by switching one symbolic link. Resolving it once reads one version, even
        # if the link is switched in between.
        moment = resolve_path(folder / TLS_FILES[0]).parent
        for name in TLS_FILES:
            check_regular(moment / name, CERTIFICATE_BYTES)  # OpenSSL would wait for what a FIFO may bring
        _load_into_context(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), moment)
        chain, key, authorities = (read_bytes(moment / name, CERTIFICATE_BYTES) for name in TLS_FILES)
    except OSError as error:
        raise _make_files_error(folder, error) from error
    return Certificates(chain, key, authorities)


def _load_into_context(context: ssl.SSLContext, folder: Path) -> None:
    try:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key", password="")  # else OpenSSL prompts for one
        context.load_verify_locations(folder / "ca.crt")
    except OSError as error:  # SSLError is a subclass
        raise _make_files_error(folder, error) from error


def _make_files_error(folder: Path, error: OSError) -> TlsInvalid:
    return TlsInvalid(
        f"--tls must be a folder with {', '.join(TLS_FILES)} (certificate, its key, and authorities of the peers' "
        f"certificates, all PEM), got {folder}: {error}; check the Secret that it is mounted from"
    )


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a process that may use TLS."""
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="FOLDER",
        help=f"use mutual TLS with {', '.join(TLS_FILES)} of this folder; default: no TLS",
    )
    parser.add_argument(
        "--tls-domain", metavar="NAME", help="domain of the run: certificates name their owners <role>.NAME"
    )


def load_identity(folder: Path | None, domain: str | None) -> Identity | None:
    """Load the certificate that the options name; None without TLS. Raises TlsInvalid."""
    if folder is None and domain is None:
        return None
    if folder is None or domain is None:
        raise TlsInvalid(
            f"--tls and --tls-domain must be given together, got --tls={folder} --tls-domain={domain}; give both"
        )
    return Identity(folder, domain)
