"""The readiness probe of a trainer's pods, run as the kubelet runs it."""

from __future__ import annotations

import os
import socket
import subprocess

from tests.unit.operator.builders import GB200, PAPER, ClusterFacts, a_job, plan_job

from specrl_operator.children.pods import TRAINER_PORT, build_trainer_pod

ADDRESS = "127.70.2.1"  # of loopback, and of no other test


def test_of_several_trainer_pods_that_of_rank_0_is_ready_when_it_listens() -> None:
    """The pods were ready before their processes had imported torch. Only rank 0 listens, and all have one template."""
    (container,) = build_trainer_pod(plan_job(a_job(PAPER), ClusterFacts(GB200)), "node-0")["spec"]["containers"]
    command = container["readinessProbe"]["exec"]["command"]

    def is_ready(pod: int) -> bool:
        environment = os.environ | {"JOB_COMPLETION_INDEX": str(pod), "POD_IP": ADDRESS}
        return subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False).returncode == 0

    assert not is_ready(0)
    assert is_ready(1)
    with socket.create_server((ADDRESS, TRAINER_PORT)):
        assert is_ready(0)
