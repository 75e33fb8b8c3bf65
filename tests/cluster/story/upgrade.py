"""An upgrade and a rollback of a release, as two of its jobs see it. test_upgrade.py judges it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.cluster.harness.pods import wait_until_ready
from tests.cluster.product import NAMESPACE, RELEASE
from tests.cluster.story.jobs import SHORT_RUN, Jobs
from tests.cluster.story.newer import DEFAULT, FIELD, VERSION
from tests.e2e.harness.api import RLJOBS, Object, find_condition, is_condition_true
from tests.e2e.harness.release import Release
from tests.e2e.jobs import COMPONENT, KINDS, describe_job, pods_of

WAIT_S = 2400.0
STEPS = {"kept": 60, "added": 60}
"""Three times what was trained when the release was rolled back."""
SCHEDULE: Object = {"promptsPerStep": 16, "groupSize": 8, "maxPolicyLag": 1}
OPERATOR = f"{RELEASE}-operator"
OLDER = f"{OPERATOR}-older"
LEASES = "coordination.k8s.io/v1/leases"
CHILDREN = (*KINDS, "jobset.x-k8s.io/v1alpha2/jobsets")
MANAGER = "specrl-operator"
"""Beginning of the operators' field managers."""


@dataclass
class Seen:
    """The observations of both jobs."""

    old: dict[str, str]
    new: dict[str, str]
    """Digests of the images of both versions, by role."""
    pods: dict[str, dict[str, str]] = field(default_factory=dict)
    """Image of each pod's container by the pod's uid, by moment."""
    accepted: dict[str, Object] = field(default_factory=dict)
    """The condition Accepted of `kept`, by moment."""
    writes: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    """Uid of each child of `kept`, and when operators wrote it, by moment."""
    leaders: list[str] = field(default_factory=list)
    """Digest of the image of the operator that led when a change of `kept` was observed."""
    suspended: list[Object] = field(default_factory=list)
    """The RLJob `kept`, each time it was Suspended."""
    left: list[str] = field(default_factory=list)
    """Pods and resource claims of the suspended job."""
    run_file: str = ""
    """The run file of `added`."""
    first_lines: dict[str, str] = field(default_factory=dict)
    """First line of the log of each role of `added`."""
    rolled_back: Object = field(default_factory=dict)
    """The RLJob `added` after the rollback."""
    finished: dict[str, Object] = field(default_factory=dict)
    steps: dict[str, list[Object]] = field(default_factory=dict)
    """Both RLJobs at the end, and the metrics of each step."""
    reasons: set[str] = field(default_factory=set)
    """Reasons of all events about both jobs."""


@dataclass
class Run(Jobs):
    """The only RLJob of its namespace."""

    def start(self, **schedule: int) -> None:
        """Create it. Its requests are small, so that two runs fit on two cores."""
        sections = SHORT_RUN | {
            role: SHORT_RUN[role] | {"podTemplate": _request_cpu(role, "100m")} for role in ("generation", "trainer")
        }
        claim = {"everySteps": 10, "claimName": "local-run"}
        self.create(f"in {self.namespace}", **sections, schedule=SCHEDULE | schedule, checkpoint=claim)

    def read(self) -> Object:
        """Read the RLJob. Fails if it has failed."""
        found = super().read()
        failed = find_condition(found, "Failed")
        assert failed.get("status") != "True", failed
        return found

    def step(self) -> int:
        """The last trained step."""
        return int(self.read().get("status", {}).get("progress", {}).get("step") or 0)

    def train(self, steps: int) -> None:
        """Wait until so many more steps are trained, which must not be the last ones."""
        wanted = self.step() + steps
        assert wanted < STEPS[self.namespace], f"STEPS must be larger, got {wanted} trained already"
        is_trained = lambda: self.step() >= wanted  # noqa: E731 - beside its event
        self.log.wait_until(is_trained, f"{self.namespace}: step {wanted} is trained", WAIT_S, self.state)

    def await_true(self, kind: str) -> Object:
        """Wait until a condition is True. Returns the RLJob."""
        is_true = lambda: is_condition_true(self.read(), kind)  # noqa: E731 - beside its event
        self.log.wait_until(is_true, f"{self.namespace}: {kind} is True", WAIT_S, self.state)
        return self.read()

    def change(self, **spec: object) -> None:
        """Change the spec."""
        self.cluster.admin.patch(RLJOBS, "local", {"spec": spec}, self.namespace)

    def await_observed(self) -> None:
        """Wait until an operator has seen the last change of the spec."""

        def is_observed() -> bool:
            found = self.read()
            return bool(found["status"]["observedGeneration"] == found["metadata"]["generation"])

        self.log.wait_until(is_observed, f"{self.namespace}: the change is observed", WAIT_S, self.state)

    def state(self) -> str:
        return describe_job(self.cluster.admin, self.read())

    def list_images(self) -> dict[str, str]:
        """Return the image of each pod's container as the runtime pulled it, by role and uid of the pod."""
        return {
            f"{pod['metadata']['labels'][COMPONENT]} {pod['metadata']['uid']}": status["imageID"].rpartition("@")[2]
            for pod in pods_of(self.cluster.admin, self.read())
            for status in pod["status"].get("containerStatuses", [])
        }

    def list_writes(self) -> dict[str, tuple[str, ...]]:
        """Return uid and times of the operators' writes of each child of the RLJob."""
        uid = self.read()["metadata"]["uid"]
        found = {}
        for kind in CHILDREN:
            for item in self.cluster.admin.list(kind, self.namespace):
                metadata = item["metadata"]
                if any(owner["uid"] == uid for owner in metadata.get("ownerReferences", [])):
                    times = [it["time"] for it in metadata["managedFields"] if it["manager"].startswith(MANAGER)]
                    found[f"{kind} {metadata['name']}"] = (metadata["uid"], *sorted(times))
        return found

    def list_left(self) -> list[str]:
        """List pods of the job, those on their way out as well, and resource claims."""
        admin = self.cluster.admin
        found = admin.list("v1/pods", self.namespace, "specrl.dev/rljob=local")
        found += admin.list("resource.k8s.io/v1/resourceclaims", self.namespace)
        return [item["metadata"]["name"] for item in found]


def upgrade_while_it_trains(seen: Seen, kept: Run, upgraded: Release) -> None:
    """Upgrade while the job trains. Then the operator of the old version leads once more, and the new one again."""
    admin = kept.cluster.admin
    kept.start(steps=STEPS["kept"])
    kept.train(2)
    _note(seen, kept, "before")
    template = admin.get("apps/v1/deployments", OPERATOR, NAMESPACE)["spec"]["template"]
    upgraded.upgrade()
    kept.log.add(f"upgraded the release to {VERSION} at step {kept.step()}")
    _await_leader(kept, seen.new["control"])
    kept.train(2)
    _lead_once(seen, kept, "upgraded")

    metadata = {"name": OLDER, "namespace": NAMESPACE, "labels": template["metadata"]["labels"]}
    older = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    admin.create(older)
    wait_until_ready(admin, older)
    kept.log.add("an operator of the old version waits for the lease")
    _scale_operator(kept, 0)
    _await_leader(kept, seen.old["control"])
    _lead_once(seen, kept, "older")
    _scale_operator(kept, 1)
    admin.delete("v1/pods", OLDER, NAMESPACE)
    _await_leader(kept, seen.new["control"])
    _lead_once(seen, kept, "newer")
    kept.train(1)


def suspend(seen: Seen, run: Run) -> None:
    """Suspend a job, and note what is left of it."""
    run.change(suspend=True)
    run.log.add(f"suspended {run.namespace} at step {run.step()}")
    seen.suspended.append(run.await_true("Suspended"))
    seen.left += run.list_left()


def train_both(seen: Seen, kept: Run, added: Run) -> None:
    """Create the one, which sets the new field, and resume the other, which starts faster."""
    added.start(**{"steps": STEPS["added"], FIELD: DEFAULT + 7})
    added.await_true("Ready")
    kept.change(suspend=False)
    kept.train(1)
    added.train(1)
    _note(seen, kept, "resumed")
    seen.pods["added"] = added.list_images()
    admin = kept.cluster.admin
    (run_file,) = (
        it for it in admin.list("v1/configmaps", added.namespace) if it["metadata"]["name"].startswith("local-run-")
    )
    seen.run_file = run_file["data"]["run.yaml"]
    for pod in pods_of(admin, added.read()):
        role = pod["metadata"]["labels"][COMPONENT]
        seen.first_lines[role] = admin.logs(pod["metadata"]["name"], added.namespace, role).partition("\n")[0]


def roll_back_while_both_train(seen: Seen, release: Release, kept: Run, added: Run) -> None:
    """Roll back while both train. Then suspend and resume the job that leaves the field at its default."""
    release.run("rollback", RELEASE, "--wait", "--timeout=300s")
    kept.log.add(f"rolled back at steps {kept.step()} and {added.step()}")
    _await_leader(kept, seen.old["control"])
    for run in (kept, added):
        run.change(activeDeadlineSeconds=80000)
        run.await_observed()
        run.train(1)
    _note(seen, kept, "rolled back")
    seen.rolled_back = added.read()
    seen.pods["added, rolled back"] = added.list_images()
    suspend(seen, kept)
    kept.change(suspend=False)
    kept.train(1)
    _note(seen, kept, "resumed again")


def _note(seen: Seen, kept: Run, moment: str) -> None:
    seen.pods[moment] = kept.list_images()
    seen.accepted[moment] = find_condition(kept.read(), "Accepted")
    seen.writes[moment] = kept.list_writes()


def _lead_once(seen: Seen, kept: Run, moment: str) -> None:
    """Let the leader look at the job, which it must after a change, and note what it did."""
    kept.change(activeDeadlineSeconds=90000 + len(seen.leaders))
    kept.await_observed()
    seen.leaders.append(_read_leader(kept))
    _note(seen, kept, moment)


def _scale_operator(run: Run, replicas: int) -> None:
    """Scale the release's operator, and wait until all its pods are ready."""
    admin = run.cluster.admin
    admin.scale("apps/v1/deployments", OPERATOR, NAMESPACE, replicas)

    def is_scaled() -> bool:
        status = admin.get("apps/v1/deployments", OPERATOR, NAMESPACE)["status"]
        return bool((status.get("replicas", 0), status.get("availableReplicas", 0)) == (replicas, replicas))

    run.log.wait_until(is_scaled, f"the release has {replicas} operators", WAIT_S, lambda: _read_leader(run))


def _await_leader(run: Run, digest: str) -> None:
    """Wait until an operator of this image leads."""
    explain = lambda: f"{_read_leader(run)} leads"  # noqa: E731 - one expression
    run.log.wait_until(lambda: _read_leader(run) == digest, f"an operator of {digest[:19]} leads", WAIT_S, explain)


def _read_leader(run: Run) -> str:
    """Return the digest of the image of the operator that leads; empty if none does, or its pod is gone."""
    holder = str(run.cluster.admin.get(LEASES, RELEASE, NAMESPACE)["spec"].get("holderIdentity", ""))
    pod = run.cluster.admin.find("v1/pods", holder.rpartition("_")[0], NAMESPACE) if holder else None
    return "" if pod is None else str(pod["spec"]["containers"][0]["image"]).rpartition("@")[2]


def _request_cpu(container: str, amount: str) -> Object:
    """Build a pod template whose container asks for so much CPU."""
    return {"spec": {"containers": [{"name": container, "resources": {"requests": {"cpu": amount}}}]}}
