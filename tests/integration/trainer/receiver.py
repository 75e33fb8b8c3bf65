"""A replica's side of the broadcast: receives weights from layouts under test and records the checksums."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from tests.integration.trainer.worker_group import GROUP

from specrl.records import TensorMeta, WeightManifest, WeightOwner
from specrl.weights.group import BroadcastGroup
from specrl.weights.stream import receive_version

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.trainer.conftest import Launch

BROADCASTS = 2


def receive_broadcasts(launch: Launch, out: Path) -> None:
    """Wait until a layout listens, join its weight group, and take part in both broadcasts."""
    port_file = out / "port"
    while not port_file.exists():
        assert all(process.poll() is None for process in launch.processes), launch.log()
        time.sleep(0.05)
    described = json.loads((out / "manifest.json").read_text())
    metas = [TensorMeta(m["name"], WeightOwner(m["owner"]), m["dtype"], tuple(m["shape"])) for m in described]
    group = BroadcastGroup(replace(GROUP, port=int(port_file.read_text()), rank=1))
    received = []
    for _ in range(BROADCASTS):
        area = receive_version(group, WeightManifest(tuple(metas), 64 << 20))
        received.append(list(area.checksums))
    group.close()
    save_file(
        {
            ("drafter." if meta.owner is WeightOwner.DRAFTER else "") + meta.name: tensor
            for meta, tensor in area.gather_tensors([None])
        },
        out / "received.safetensors",
    )
    (out / "received.json").write_text(json.dumps(received))
