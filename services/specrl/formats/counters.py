"""The meaning of each counter in a run's status, for terminals and reports. Programs use the names."""

from __future__ import annotations

from collections.abc import Mapping

COUNTERS = {
    "requeued": "rollouts requeued because their replica was lost",
    "resumed": "rollouts resumed after a restart of the coordinator",
    "poisoned": "rollouts that failed a record check and were sampled again",
    "ungraded": "rollouts that could not be graded and were sampled again",
    "noAnswer": "completions in which the verifier found no answer",
    "verifierErrors": "completions on which the verifier raised, crashed or timed out",
    "failedPrompts": "prompts given up after too many attempts",
    "groupsLeftOut": "groups left out because all their rewards were equal",
    "stepsSkipped": "updates skipped because their gradients were not finite",
    "unaccountedRollouts": "graded rollouts that were neither trained nor kept (a bug)",
    "replicasGivenUp": "replicas given up, because every start or every update failed alike",
    "trainerRecoveries": "recoveries of the trainer",
    "canariesSkipped": "canaries skipped because the answer came too late",
    "canariesDisagreed": "canaries on which sampler and trainer disagreed",
    "storeRetries": "retried reads and writes of the store",
    "checkpointsFailed": "checkpoints that could not be written",
    "problemsSkipped": "problems of the source that were skipped",
    "problemsRepeated": "problems that the source contains more than once",
}


def count_events(counters: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """Return name, meaning and count of each counter that is not 0. An unknown name is its own meaning."""
    return [(name, COUNTERS.get(name, name), count) for name, count in counters.items() if count]
