"""The deadlines of an update follow the size of the weights."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_run

from specrl.coordinator.members.registry import Replica, Trainer
from specrl.coordinator.members.weight_transports import WeightTransfer, make_transport
from specrl.records import Peer, Role, SentWeights, TensorMeta, WeightChecksums, WeightManifest, WeightOwner
from specrl.records.weights import compute_phase_deadline_s
from specrl.spec import parse_spec
from specrl.telemetry.spans import SILENT_RECORDER

TIMEOUT_S = 120
LAYER = TensorMeta("w", WeightOwner.POLICY, "bfloat16", (235, 10**9))
LARGE = WeightManifest((LAYER,), 64 << 20)
"""235 billion weights: 470 GB."""


@dataclass
class Peers:
    """Answers the calls of an update as trainer and replica, and keeps their deadlines in seconds."""

    manifest: WeightManifest
    deadlines: dict[str, float] = field(default_factory=dict)

    async def describe_weights(self) -> WeightManifest:
        return self.manifest

    async def open_weight_group(self, group: object) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def broadcast_weights(self, group_id: str, deadline_s: float) -> SentWeights:
        self.deadlines["send"] = deadline_s
        return SentWeights(WeightChecksums(1, (5,)), self.manifest.size_bytes, "Nccl: of the test", "NET/IB")

    async def write_weights(self, must_rewrite: bool, deadline_s: float) -> tuple[WeightChecksums, str, int]:
        self.deadlines["send"] = deadline_s
        return WeightChecksums(1, (5,)), "/weights", self.manifest.size_bytes

    async def receive_weights(
        self, version: int, group: object, manifest: object, deadline_s: float
    ) -> tuple[WeightChecksums, float]:
        self.deadlines["receive"] = deadline_s
        return WeightChecksums(1, (5,)), 0.1


@pytest.mark.parametrize("transport", ["Gloo", "Checkpoint"])
def test_large_weights_have_longer_to_arrive(transport: str, tmp_path: Path) -> None:
    """Once all had 250 s, which 470 GB cannot meet, so every replica became stale and no version was ever served."""
    spec = parse_spec(a_run(tmp_path, weights={"transport": transport, "timeoutS": TIMEOUT_S}))

    def deadlines(manifest: WeightManifest) -> dict[str, float]:
        peers: Any = Peers(manifest)
        trainer = Trainer(Peer("trainer", Role.TRAINER, "127.0.0.1:1", "digest"), peers)
        replica = Replica(Peer("gen-0", Role.GENERATION, "127.0.0.1:2", "digest"), peers)
        sending = make_transport(spec, SILENT_RECORDER).send_version(trainer, [replica], WeightTransfer(1))
        asyncio.run(sending)
        found: dict[str, float] = peers.deadlines
        return found

    small = deadlines(WeightManifest((TensorMeta("w", WeightOwner.POLICY, "bfloat16", (4,)),), 64 << 20))
    large = deadlines(LARGE)
    assert large["receive"] - small["receive"] == pytest.approx(470e9 / 125e6)
    assert large["send"] - small["send"] == pytest.approx(470e9 / 125e6)
    # The replica's own deadline ends first, then the call to it, then the trainer's, so that the error names the cause.
    own = TIMEOUT_S + compute_phase_deadline_s(TIMEOUT_S, LARGE.size_bytes)
    assert own < large["receive"] < large["send"]


@pytest.mark.parametrize(
    ("transport", "expected"),
    [("Gloo", "Nccl: of the test"), ("Checkpoint", "Checkpoint: the run file's weights.transport")],
)
def test_the_transport_of_sent_weights_is_kept_for_the_status(transport: str, expected: str, tmp_path: Path) -> None:
    spec = parse_spec(a_run(tmp_path, weights={"transport": transport, "timeoutS": TIMEOUT_S}))
    peers: Any = Peers(WeightManifest((TensorMeta("w", WeightOwner.POLICY, "bfloat16", (4,)),), 64 << 20))
    trainer = Trainer(Peer("trainer", Role.TRAINER, "127.0.0.1:1", "digest"), peers)
    replica = Replica(Peer("gen-0", Role.GENERATION, "127.0.0.1:2", "digest"), peers)
    asyncio.run(make_transport(spec, SILENT_RECORDER).send_version(trainer, [replica], WeightTransfer(1)))
    assert trainer.weight_transport == expected
