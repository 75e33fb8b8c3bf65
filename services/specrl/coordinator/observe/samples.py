"""Keeps a few rollouts with their texts: the newest ones for the live page, and some of each step in rollouts.jsonl.

Prompts and completions may be private, so both are bounded and can be switched off. The page's samples stay in this
process's memory (`telemetry.rolloutsShown`, off by default). The file stays in the run's folder, where the store and
usually the data set are, too (`telemetry.rollouts`). Decision 0046 says why a few are written by default.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from pydantic.alias_generators import to_camel

from specrl.coordinator.observe.report_files import ShownFileWrites
from specrl.coordinator.schedule.scheduler import SlotId
from specrl.formats.rollout_samples import RolloutSample
from specrl.records import GradedRollout, Group, Prompt, Reward, Rollout
from specrl.spec.data import Rewards

LONGEST_TEXT = 16 << 10
"""Most characters of each text. 256 rollouts, the largest telemetry.rolloutsShown, take 16 MB at most."""

ROLLOUTS = "rollouts.jsonl"
OLDER_ROLLOUTS = "rollouts.old.jsonl"
LARGEST_FILE = 32 << 20
"""Bytes at which rollouts.jsonl becomes rollouts.old.jsonl. Both together take at most twice as much, and one step.
A typical sample has 2 KB, so four a step fill the first file after 4,000 steps."""


def make_sample(step: int, prompt: Prompt, graded: GradedRollout, rewards: Rewards) -> RolloutSample:
    """Make the record of a graded rollout. rewards: the section of the run file that names the verifier."""
    rollout = graded.rollout
    return RolloutSample(
        step=step,
        id=rollout.rollout_id,
        replica=rollout.replica_id,
        oldest_version=rollout.oldest_version,
        newest_version=max(span.policy_version for span in rollout.versions),
        tokens=rollout.sampled_length,
        seconds=rollout.seconds,
        finish_reason=rollout.finish_reason.value,
        reward=graded.reward.value,
        rewards=_name_rewards(graded.reward, rewards),
        extracted=_bound_text(graded.reward.extracted),
        reason=_bound_text(graded.reward.reason),
        error=graded.reward.error,
        prompt=_bound_text(prompt.text),
        completion=_bound_text(rollout.text),
    )


def _bound_text(text: str) -> str:
    """Return the first LONGEST_TEXT characters. Half of a surrogate pair, which has no UTF-8, becomes `?`."""
    return text[:LONGEST_TEXT].encode("utf-8", "replace").decode("utf-8")


def _name_rewards(reward: Reward, rewards: Rewards) -> dict[str, float | None]:
    """Return the rewards by name, before weighting. A single verifier has the name of its field in the run file."""
    if reward.named:
        return {named.name: named.reward.value for named in reward.named}
    return {} if reward.value is None else {to_camel(rewards.kind): reward.value}


class RolloutSamples:
    """The newest `kept` rollout samples, one of each group, so that the page shows different prompts."""

    def __init__(self, rewards: Rewards, kept: int = 0) -> None:
        self._rewards = rewards
        self._samples: deque[RolloutSample] = deque(maxlen=kept)

    @property
    def sample_limit(self) -> int:
        """Largest number of samples that are kept; 0 if the run has not opted in."""
        return self._samples.maxlen or 0

    def offer_rollout(self, prompt: Prompt, graded: GradedRollout) -> None:
        """Keep the rollout if it is the first sample of its group and the run has opted in."""
        if not self.sample_limit:
            return
        slot = SlotId.from_name(graded.rollout.rollout_id)
        if slot is not None and slot.sample == 0:
            self._samples.append(make_sample(slot.step, prompt, graded, self._rewards))

    def list_newest(self, limit: int) -> list[RolloutSample]:
        """Return up to `limit` samples, the newest first."""
        return list(reversed(self._samples))[:limit]


class RolloutFile:
    """Appends samples of each step to rollouts.jsonl. Nothing reads them to decide anything.

    A full disk loses lines. A crash may lose one step's.
    """

    def __init__(self, directory: Path, rewards: Rewards, per_step: int) -> None:
        """per_step: rollouts that are written of each step; 0 writes no file."""
        self._file = directory / ROLLOUTS
        self._older = directory / OLDER_ROLLOUTS
        self._rewards = rewards
        self._per_step = per_step
        self._may_be_torn = True  # by a crash of a previous coordinator, or by a full disk
        self._writes = ShownFileWrites()

    def append_step(self, step: int, groups: Sequence[Group]) -> None:
        """Write samples of a step's graded groups."""
        chosen = list(islice(_spread_over_groups(groups), self._per_step))
        if not chosen:
            return
        written = [
            make_sample(step, group.prompt, GradedRollout(rollout, reward), self._rewards)
            for group, rollout, reward in chosen
        ]
        lines = [sample.model_dump_json(by_alias=True).encode() + b"\n" for sample in written]
        if not self._writes.try_write(ROLLOUTS, lambda: self._write_lines(lines)):
            self._may_be_torn = True

    def _write_lines(self, lines: Sequence[bytes]) -> None:
        if self._file.exists() and self._file.stat().st_size >= LARGEST_FILE:
            self._file.replace(self._older)
        with self._file.open("ab") as file:
            if self._may_be_torn and file.tell():
                file.write(b"\n")  # ends a truncated line, which readers skip; they skip empty lines, too
            file.write(b"".join(lines))
        self._may_be_torn = False


def _spread_over_groups(groups: Sequence[Group]) -> Iterator[tuple[Group, Rollout, Reward]]:
    """Yield the first rollout of each group, then the second of each, and so on.

    The order depends on the prompts alone, not on rewards or lengths, so that the samples are representative.
    """
    longest = max((len(group.rollouts) for group in groups), default=0)
    for sample in range(longest):
        for group in groups:
            if sample < len(group.rollouts):
                yield group, group.rollouts[sample], group.rewards[sample]
