"""64 hostile clients attack every port of a run at once. Real coordinator and servers; see cluster.py.

benchmarks/hostile_clients.py compares the time of a step with and without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
from tests.hostile_clients import start_attack
from tests.integration.elastic.cluster import PATIENCE_S, Cluster
from tests.integration.elastic.test_elastic import a_run_of, check_all_trained

CLIENTS = 64
STEPS = 8


def list_targets(cluster: Cluster) -> list[str]:
    """Every listening port of the run that answers anybody."""
    served = [("trainer", "trainer_served"), ("gen-0", "generation_served"), ("gen-1", "generation_served")]
    grpc = [f"127.0.0.1:{cluster.port}", *(cluster.events(name, event)[-1]["address"] for name, event in served)]
    http = [f"127.0.0.1:{cluster.http_port}"]
    http += [cluster.events(name, "metrics_served")[-1]["address"] for name, _ in served]
    return [*(f"grpc:{address}" for address in grpc), *(f"http:{address}" for address in http)]


def call_without_token(address: str) -> grpc.StatusCode:
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary("/specrl.api.v1.CoordinatorService/Register")(b"", timeout=PATIENCE_S)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def test_a_run_finishes_amid_hostile_clients_and_its_owner_is_answered(tmp_path: Path) -> None:
    """Idle, slow, flooding and malformed ones, over HTTP and gRPC. What is refused is counted, and loses nothing."""
    # The machine is busy with the attack itself.
    patient: dict[str, Any] = {"weights": {"timeoutS": 60}, "telemetry": {"heartbeatS": 10}}
    with Cluster(tmp_path, a_run_of(STEPS) | patient, token_seconds=0.02) as cluster:
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        cluster.until(lambda: cluster.status().get("step", 0) >= 1)
        for kind, _, address in (target.partition(":") for target in list_targets(cluster)):
            if kind == "grpc":
                assert call_without_token(address) is grpc.StatusCode.UNAUTHENTICATED, address
        with start_attack(CLIENTS, *list_targets(cluster)):
            status = cluster.finish()
            check_all_trained(cluster, status)
            page = cluster._page("metrics").text
        refused = [
            line for line in page.splitlines() if line.startswith(("specrl_http_refused", "specrl_rpc_calls_ref"))
        ]
        kinds = {line.split('"')[1] for line in refused if not line.endswith(" 0.0") and "http" in line}
        assert {"host", "token", "malformed", "timeout"} & kinds, refused
        assert any("TokenRefused" in line and not line.endswith(" 0.0") for line in refused), refused
        assert cluster.processes["trainer"].poll() is None or cluster.processes["trainer"].wait(PATIENCE_S) == 0
