"""What a run tells its RLJob, and where its API server is. Writing: tests/integration/coordinator/test_rljob.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrl.coordinator.report import Phase, ReplicaReport, StageSeconds, Status, StepReport
from specrl.coordinator.rljob import ACCOUNT, place_of, told
from specrl.coordinator.store import claim_for
from specrl.errors import RunInvalid, StoreInvalid

IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


def a_status(**changes: object) -> Status:
    return Status(run="tiny", phase=Phase.TRAINING, steps=4, policy_version=-1).model_copy(update=changes)


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
    stages = StageSeconds(generation=1.0, train=3.0)
    whole = {"step": 3, "policy_version": 3, "stages": stages, "reward": 0.5, "acceptance_length": 2.345}
    return StepReport.model_validate(numbers | counts | whole | changes)


def condition(status: Status, kind: str) -> dict[str, str]:
    return next((it for it in told(status, None)["conditions"] if it["type"] == kind), {})


def test_progress_is_that_of_the_last_step() -> None:
    assert told(a_status(step=3, policy_version=3), a_report())["progress"] == {
        "step": 3,
        "policyVersion": 3,
        "policyLag": 1,
        "exposedGenerationShare": "0.25",
        "acceptanceLength": "2.35",
    }


def test_what_is_not_known_yet_is_left_out() -> None:
    assert told(a_status(), None) == {"progress": {"step": 0}, "conditions": []}
    assert told(a_status(is_paused=True), None)["progress"] == {"step": 0, "paused": True}
    assert "acceptanceLength" not in told(a_status(), a_report(acceptance_length=None))["progress"]


def test_the_first_weights_are_the_preflight() -> None:
    assert condition(a_status(), "CollectiveReady") == {}
    assert condition(a_status(policy_version=0), "CollectiveReady")["status"] == "True"
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


def test_a_drafter_s_initialisation_is_a_condition_until_it_serves() -> None:
    replica = ReplicaReport(id="tiny-generation-0", state="serving", policy_version=0, live_rollouts=0)
    served = [replica.model_copy(update={"drafter_version": 0})]
    assert condition(a_status(phase=Phase.WAITING, replicas=served), "DrafterReady") == {}, "it is untrained yet"
    begun = a_status(phase=Phase.INITIALISING, replicas=served, detail="drafter: training", done=1, total=3)
    found = condition(begun, "DrafterReady")
    assert (found["status"], found["reason"]) == ("False", "Initialising")
    assert found["message"] == "drafter: training (1 of 3)"
    assert condition(a_status(replicas=served), "DrafterReady")["status"] == "True"
    assert condition(a_status(replicas=[replica]), "DrafterReady") == {}, "a run without one"


def test_a_run_is_finished_when_it_says_so_and_not_when_its_steps_are_done() -> None:
    assert condition(a_status(step=4), "RunFinished") == {}
    assert condition(a_status(step=4, phase=Phase.FAILED), "RunFinished") == {}
    assert condition(a_status(step=4, phase=Phase.FINISHED), "RunFinished")["status"] == "True"


def test_the_api_server_is_that_of_the_pod() -> None:
    place = place_of("rl/tiny", IN_A_POD)
    assert (place.server, place.namespace, place.name) == ("https://10.0.0.1:6443", "rl", "tiny")
    assert place.account == ACCOUNT
    assert place_of("rl/tiny", {**IN_A_POD, "KUBERNETES_SERVICE_HOST": "fd00::1"}).server == "https://[fd00::1]:6443"


@pytest.mark.parametrize("rljob", ["tiny", "/tiny", "rl/"])
def test_a_name_without_its_namespace_is_refused(rljob: str) -> None:
    with pytest.raises(RunInvalid, match="must be NAMESPACE/NAME"):
        place_of(rljob, IN_A_POD)


def test_outside_of_a_pod_it_is_refused() -> None:
    with pytest.raises(RunInvalid, match="KUBERNETES_SERVICE_HOST"):
        place_of("rl/tiny", {})


def test_a_run_whose_folder_was_lost_is_still_the_same_run(tmp_path: Path) -> None:
    name = "0123456789abcdef0123456789abcdef"
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        assert claim_for(folder, name).run_id == name
    assert claim_for(tmp_path / "one").run_id == name


def test_the_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    claim_for(tmp_path)
    with pytest.raises(StoreInvalid, match="must be this run's folder"):
        claim_for(tmp_path, "0" * 32)
