"""The meaning of the counters in a run's status, for terminals and reports. Programs read them by name."""

from __future__ import annotations

from collections.abc import Mapping

from specrl.coordinator.scheduler import MAX_ATTEMPTS

COUNTERS = {
    "requeued": "rollouts sampled again after their replica was lost",
    "resumed": "rollouts taken up after a restart of the coordinator",
    "poisoned": "rollouts refused by their checks and sampled again",
    "ungraded": "rollouts without a verdict, through no fault of an answer; sampled again",
    "noAnswer": "completions in which the verifier found no answer",
    "verifierErrors": "completions on which the verifier raised, or that ended it",
    "failedPrompts": f"prompts given up after {MAX_ATTEMPTS} attempts",
    "groupsLeftOut": "groups left out, since all of their rewards were the same",
    "stepsSkipped": "steps skipped, since their gradients were not finite",
    "discardedForAge": "rollouts discarded for their age",
    "trainerRecoveries": "recoveries of the trainer",
    "canariesSkipped": "canaries that were not answered in time",
    "canariesDisagreed": "canaries that disagreed",
    "storeRetries": "reads and writes of the store that were repeated",
    "checkpointsFailed": "checkpoints that were not written",
    "problemsSkipped": "problems left out of the source",
    "problemsRepeated": "problems that the source has more than once",
}


def count_events(counters: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """Name, words and count of every counter that is not 0. A name of another version stands for itself."""
    return [(name, COUNTERS.get(name, name), count) for name, count in counters.items() if count]
