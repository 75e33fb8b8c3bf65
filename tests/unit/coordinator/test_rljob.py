"""The status that a run reports to its RLJob, and which API server it uses. Writes: tests/integration/coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrl.coordinator.ledger import make_claim
from specrl.coordinator.observe.rljob_status import build_rljob_status
from specrl.coordinator.requests.rljob_api import ACCOUNT, locate_rljob
from specrl.errors import RunInvalid, StoreInvalid
from specrl.formats.reports import Phase, PhaseSeconds, ReplicaReport, StatusReport, StepReport
from specrl.spec.cluster import Layout, NvLink, Placement, Profile, Rdma

ANYWHERE = Placement()
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


def a_status(**changes: object) -> StatusReport:
    return StatusReport(run="tiny", phase=Phase.TRAINING, steps=4, policy_version=-1).model_copy(update=changes)


def a_report(**changes: object) -> StepReport:
    numbers = dict.fromkeys(
        (
            *("exposed_generation", "mean_length", "policy_lag_mean", "loss", "grad_norm", "learning_rate", "entropy"),
            *("clip_fraction", "importance_weight_mean", "effective_sample_size", "mismatch_mean_abs"),
            *("mismatch_max_abs", "mismatch_kl"),
        ),
        0.0,
    )
    counts = {"rollouts": 4, "tokens": 40, "policy_lag_max": 1, "mismatch_tokens": 0}
    phases = PhaseSeconds(generation=1.0, train=3.0)
    counts |= {"exposed_generation": 1.0, "generation_under_way": 2.5, "hidden_generation": 1.5}
    whole = {"step": 3, "policy_version": 3, "phases": phases, "reward": 0.5, "acceptance_length": 2.345}
    return StepReport.model_validate(numbers | counts | whole | changes)


def condition(status: StatusReport, kind: str, placement: Placement = ANYWHERE) -> dict[str, str]:
    return next((it for it in build_rljob_status(status, [], placement)["conditions"] if it["type"] == kind), {})


def test_the_progress_is_of_the_last_step() -> None:
    assert build_rljob_status(a_status(step=3, policy_version=3), [a_report()], ANYWHERE)["progress"] == {
        "step": 3,
        "policyVersion": 3,
        "policyLag": 1,
        "exposedGenerationShare": "0.25",
        "exposedGenerationSeconds": "1.00",
        "generationUnderWaySeconds": "2.50",
        "hiddenGenerationSeconds": "1.50",
        "weightSyncSeconds": "0.00",
        "acceptanceLength": "2.35",
    }


def test_unknown_figures_are_omitted() -> None:
    assert build_rljob_status(a_status(), [], ANYWHERE) == {"progress": {"step": 0}, "conditions": []}
    assert build_rljob_status(a_status(is_paused=True), [], ANYWHERE)["progress"] == {"step": 0, "paused": True}
    reports = [a_report(acceptance_length=None)]
    assert "acceptanceLength" not in build_rljob_status(a_status(), reports, ANYWHERE)["progress"]


def test_the_acceptance_length_is_of_the_last_step_that_generated() -> None:
    """With a policy lag the last step of a run generates nothing, and the status of a Complete RLJob had no length."""
    reports = [a_report(acceptance_length=2.1), a_report(acceptance_length=3.4), a_report(acceptance_length=None)]
    assert build_rljob_status(a_status(), reports, ANYWHERE)["progress"]["acceptanceLength"] == "3.40"


def test_the_first_weights_decide_the_condition_collective_ready() -> None:
    assert condition(a_status(), "CollectiveReady") == {}
    assert condition(a_status(policy_version=0), "CollectiveReady")["status"] == "True"
    assert build_rljob_status(a_status(policy_version=0), [], None)["conditions"] == [], "placement is not known yet"
    replica = ReplicaReport(
        id="tiny-generation-0", state="stale", reason="3 attempts failed", policy_version=-1, live_rollouts=0
    )
    failed = a_status(replicas=[replica], replica_transitions={"updating -> stale": 1, "joining -> updating": 3})
    found = condition(failed, "CollectiveReady")
    assert (found["status"], found["reason"]) == ("False", "PreflightFailed")
    assert "tiny-generation-0: 3 attempts failed" in found["message"]
    assert "NetworkPolicies" in found["message"]
    healed = failed.model_copy(update={"policy_version": 0})
    assert condition(healed, "CollectiveReady")["status"] == "True"


def test_a_checkpoint_that_could_not_be_written_is_a_condition() -> None:
    """A volume that filled during a run showed in a metric and the log alone, until the run failed at its end."""
    assert condition(a_status(), "CheckpointsWritten") == {}
    assert condition(a_status(checkpoint_step=8), "CheckpointsWritten")["status"] == "True"
    problem = "could not write checkpoint step-16: No space left on device; free space on its disk"
    found = condition(a_status(checkpoint_step=8, checkpoint_error=problem), "CheckpointsWritten")
    assert (found["status"], found["reason"]) == ("False", "CheckpointFailed")
    assert found["message"] == f"{problem}; the newest checkpoint is of step 8"


REQUIRED = Placement(profile=Profile.GB200, nvlink=NvLink.REQUIRED, layout=Layout.SAME_DOMAIN)
WITH_RDMA = Placement(rdma=Rdma(resource_name="rdma/ib"))


@pytest.mark.parametrize(
    ("transport", "placement", "status", "reason"),
    [
        ("", REQUIRED, "True", "WeightsArrived"),
        ("P2P/MNNVL", REQUIRED, "True", "WeightsArrived"),
        ("NET/IB", REQUIRED, "False", "MultiNodeNVLinkUnavailable"),
        ("NET/Socket", REQUIRED, "False", "MultiNodeNVLinkUnavailable"),
        ("NET/IB", WITH_RDMA, "True", "WeightsArrived"),
        ("NET/Socket", WITH_RDMA, "True", "SocketFallback"),
        ("NET/Socket", ANYWHERE, "True", "WeightsArrived"),
    ],
)
def test_a_fallback_of_nccl_is_seen_in_the_status(
    transport: str, placement: Placement, status: str, reason: str
) -> None:
    """NCCL used TCP where RDMA and NVLink were configured, and nothing said so."""
    arrived = a_status(policy_version=0, nccl_transport=transport)
    found = condition(arrived, "CollectiveReady", placement)
    assert (found["status"], found["reason"]) == (status, reason)
    assert transport in found["message"]
    assert build_rljob_status(arrived, [], placement)["progress"].get("ncclTransport", "") == transport


def test_the_transport_of_the_weights_is_in_the_progress() -> None:
    """Whether trainer and replicas sent weights through main memory was in their logs alone."""
    assert "weightTransport" not in build_rljob_status(a_status(), [], ANYWHERE)["progress"]
    arrived = a_status(policy_version=0, weight_transport="Gloo: 2 ranks on 1 GPUs")
    assert build_rljob_status(arrived, [], ANYWHERE)["progress"]["weightTransport"] == "Gloo: 2 ranks on 1 GPUs"


def test_the_isolation_of_programs_is_a_condition() -> None:
    assert condition(a_status(), "SandboxReady") == {}
    found = condition(a_status(isolations={"rewards.code": "Landlock", "tools": "Namespaces"}), "SandboxReady")
    assert (found["status"], found["message"]) == ("True", "rewards.code: Landlock, tools: Namespaces")


def test_the_drafters_initialisation_is_a_condition_until_it_serves() -> None:
    replica = ReplicaReport(id="tiny-generation-0", state="serving", policy_version=0, live_rollouts=0)
    served = [replica.model_copy(update={"drafter_version": 0})]
    assert condition(a_status(phase=Phase.WAITING, replicas=served), "DrafterReady") == {}, "no trained drafter"
    begun = a_status(phase=Phase.INITIALISING, replicas=served, detail="drafter: training", done=1, total=3)
    found = condition(begun, "DrafterReady")
    assert (found["status"], found["reason"]) == ("False", "Initializing")
    assert found["message"] == "drafter: training (1 of 3)"
    assert condition(a_status(replicas=served), "DrafterReady")["status"] == "True"
    assert condition(a_status(replicas=[replica]), "DrafterReady") == {}, "the run has no drafter"


def test_a_run_is_finished_by_its_phase_and_not_by_its_steps() -> None:
    assert condition(a_status(step=4), "RunFinished") == {}
    assert condition(a_status(step=4, phase=Phase.FAILED), "RunFinished") == {}
    assert condition(a_status(step=4, phase=Phase.FINISHED), "RunFinished")["status"] == "True"


def test_the_api_server_is_taken_from_the_pods_environment() -> None:
    place = locate_rljob("rl/tiny", IN_A_POD)
    assert (place.server, place.namespace, place.name) == ("https://10.0.0.1:6443", "rl", "tiny")
    assert place.account == ACCOUNT
    assert (
        locate_rljob("rl/tiny", {**IN_A_POD, "KUBERNETES_SERVICE_HOST": "fd00::1"}).server == "https://[fd00::1]:6443"
    )


@pytest.mark.parametrize("rljob", ["tiny", "/tiny", "rl/"])
def test_a_name_without_its_namespace_is_refused(rljob: str) -> None:
    with pytest.raises(RunInvalid, match="must be NAMESPACE/NAME"):
        locate_rljob(rljob, IN_A_POD)


def test_an_rljob_outside_a_pod_is_refused() -> None:
    with pytest.raises(RunInvalid, match="KUBERNETES_SERVICE_HOST"):
        locate_rljob("rl/tiny", {})


def test_a_run_keeps_its_id_when_its_folder_was_lost(tmp_path: Path) -> None:
    name = "0123456789abcdef0123456789abcdef"
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        assert make_claim(folder, name).run_id == name
    assert make_claim(tmp_path / "one").run_id == name


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    make_claim(tmp_path)
    with pytest.raises(StoreInvalid, match="must be the folder of run"):
        make_claim(tmp_path, "0" * 32)
