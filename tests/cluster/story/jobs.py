"""RLJobs that tests create one by one, each from the local example with other sections, and wait for."""

from __future__ import annotations

from dataclasses import dataclass

from tests.cluster.harness.cluster import Cluster
from tests.cluster.product import create_example
from tests.cluster.story.log import StoryLog
from tests.e2e.harness.api import RLJOBS, Object, find_condition
from tests.e2e.jobs import describe_job

CONDITION_S = 600.0  # for a condition whose pod must start first, on a busy machine
SHORT_RUN: Object = {
    "generation": {
        "replicas": 1,
        "sampling": {"temperature": "1", "maxTokens": 32},
        "speculation": {"ngram": {"numDraftTokens": 3}},
        "maxLiveRollouts": 16,
    },
    "trainer": {"optimizer": {"learningRate": "1e-4"}},
    "validation": None,
}
"""Sections of the example without a drafter, with one replica and one rank."""
NOWHERE: Object = {"spec": {"nodeSelector": {"specrl.test/no-such-node": "true"}}}
IDLE_RUN: Object = SHORT_RUN | {
    "generation": SHORT_RUN["generation"] | {"podTemplate": NOWHERE},
    "trainer": SHORT_RUN["trainer"] | {"podTemplate": NOWHERE},
}
"""The same without engines, where a test needs none: they would take the machine's CPUs."""


@dataclass
class Jobs:
    """RLJobs in a namespace of their own, and what is recorded of them."""

    cluster: Cluster
    namespace: str
    log: StoryLog

    def create(self, what: str, **changes: Object | None) -> Object:
        """Create the local example, changed. what: for the record. changes: sections of the spec; None removes one."""
        job = create_example(self.cluster, self.namespace, **changes)
        self.log.add(f"applied a job {what}")
        return job

    def read(self) -> Object:
        """Read the RLJob."""
        return self.cluster.admin.get(RLJOBS, "local", self.namespace)

    def wait_for(self, kind: str, state: tuple[str, str], words: str = "", timeout_s: float = CONDITION_S) -> str:
        """Wait until a condition has a state and these words, and record it. Returns its message.

        state: status and reason.
        """

        def there() -> Object | None:
            found = find_condition(self.read(), kind)
            has_state = (found.get("status"), found.get("reason")) == state
            return found if has_state and words in found["message"] else None

        explain = lambda: describe_job(self.cluster.admin, self.read())  # noqa: E731 - one expression
        found: Object = self.log.wait_until(there, f"{kind} is {', '.join(state)}", timeout_s, explain)
        self.log.add(f"  {found['message']}")
        return str(found["message"])
