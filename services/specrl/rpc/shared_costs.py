"""Shares learnt draft costs with the other replicas of a run, through the coordinator.

A new pod has no files of earlier ones. Without this, each would learn in its first hundred steps at a batch size what a
replica of the same kind has learnt before. Called by `vllm_backend.draft_length_client` when an engine starts, and now
and then.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import structlog

from specrl.errors import SpecrlError
from specrl.files import parse_object
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.run_token import RunToken
from specrl.rpc.tls import Identity

log = structlog.get_logger(__name__)


class SharedCosts(Protocol):
    """Tables of draft costs that outlive a replica. key: names a kind of machine, model and version."""

    async def find_costs(self, key: str) -> dict[str, Any] | None:
        """Return the table of this kind; None if there is none. Never raises."""

    async def keep_costs(self, key: str, costs: dict[str, Any]) -> None:
        """Keep a table for later replicas. Never raises."""


class CoordinatorCosts:
    """Keeps tables at the coordinator. Without its answer the replica learns the costs itself."""

    def __init__(self, address: str, identity: Identity | None = None, token: RunToken | None = None) -> None:
        self._address = address
        self._identity = identity
        self._token = token

    async def find_costs(self, key: str) -> dict[str, Any] | None:
        """Return the table of this kind; None if there is none, or it cannot be fetched."""
        try:
            async with self._connect() as coordinator:
                table = await coordinator.find_draft_costs(key)
            return parse_object(table) if table else None
        except (SpecrlError, ValueError) as error:
            log.info("draft_costs_not_shared", reason=str(error))
            return None

    async def keep_costs(self, key: str, costs: dict[str, Any]) -> None:
        """Send a table to the coordinator."""
        try:
            async with self._connect() as coordinator:
                await coordinator.keep_draft_costs(key, json.dumps(costs))
        except SpecrlError as error:
            log.info("draft_costs_not_shared", reason=str(error))

    def _connect(self) -> CoordinatorClient:
        return CoordinatorClient(self._address, self._identity, self._token)
