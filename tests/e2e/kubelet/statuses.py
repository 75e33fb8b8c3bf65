"""A pod without processes: Running and Ready as soon as it is bound, deleted as soon as its deletion is requested.

A pod with the annotation `specrl.dev/plays` gets that status instead: `Pending`, `NotReady`, `CrashLooping`,
`Succeeded` or `Failed`. The status follows changes of the annotation.
"""

from __future__ import annotations

from tests.e2e.harness.api import Object, path_of
from tests.e2e.kubelet.client import Client
from tests.e2e.kubelet.pod import delete_pod, now, write_status

PLAYS = "specrl.dev/plays"


class StatusOnlyPod:
    """A pod that only has a status."""

    def __init__(self, client: Client, observed: Object, address: str, host: str) -> None:
        self._client = client
        self.observed = observed
        self._address = address
        self._host = host
        self._played = ""
        self._is_ending = False
        self._began = now()

    async def follow(self) -> None:
        """Write the pod's status."""
        metadata = self.observed["metadata"]
        if "deletionTimestamp" in metadata:
            if not self._is_ending:
                self._is_ending = True
                await self._write("Failed")  # the Job controller counts a deleted pod only after its end
                await delete_pod(self._client, self.observed)
            return
        wanted = (metadata.get("annotations") or {}).get(PLAYS, "Running")
        if wanted == self._played:
            return
        self._played = wanted
        await self._write(wanted)

    async def _write(self, plays: str) -> None:
        metadata = self.observed["metadata"]
        path = path_of("v1/pods", metadata["namespace"], metadata["name"])
        await write_status(self._client, path, self._status(plays))

    def _status(self, plays: str) -> Object:
        spec = self.observed["spec"]
        stamp = now()
        ended = {"Succeeded": 0, "Failed": 143}.get(plays)
        is_ready = plays == "Running"
        state: Object = {"running": {"startedAt": stamp}}
        if plays == "Pending":
            state = {"waiting": {"reason": "ContainerCreating"}}
        elif plays == "CrashLooping":
            state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}}
        elif ended is not None:
            state = {
                "terminated": {"exitCode": ended, "reason": "Error" if ended else "Completed", "finishedAt": stamp}
            }
        claims = dict.fromkeys(("ContainersReady", "Ready"), is_ready)
        claims |= dict.fromkeys(("PodReadyToStartContainers", "Initialized"), plays != "Pending")
        conditions = [
            {"type": kind, "status": str(holds), "lastTransitionTime": stamp} for kind, holds in claims.items()
        ]
        conditions += [each for each in self.observed["status"].get("conditions", []) if each["type"] == "PodScheduled"]
        done = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": stamp}}
        return {
            "phase": plays if plays in ("Pending", "Succeeded", "Failed") else "Running",
            "conditions": conditions,
            "hostIP": self._host,
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "startTime": self._began,
            "initContainerStatuses": [_container(each, done, True) for each in spec.get("initContainers", [])],
            "containerStatuses": [_container(each, state, is_ready) for each in spec["containers"]],
        }


def _container(spec: Object, state: Object, is_ready: bool) -> Object:
    image = spec.get("image", "")
    crashes = state.get("waiting", {}).get("reason") == "CrashLoopBackOff"
    last = {"terminated": {"exitCode": 1, "reason": "Error", "message": "played"}} if crashes else {}
    fixed = {"name": spec["name"], "image": image, "imageID": image, "lastState": last}
    return fixed | {"state": state, "ready": is_ready, "started": is_ready, "restartCount": 5 if crashes else 0}
