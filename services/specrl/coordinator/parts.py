"""What a run is made of: handed to the loop and its stages whole, so that tests can replace any part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from specrl.coordinator.board import Board
from specrl.coordinator.controls import Controls
from specrl.coordinator.events import EventLog
from specrl.coordinator.registry import Registry
from specrl.coordinator.run_spans import RunSpans
from specrl.coordinator.samples import Samples
from specrl.coordinator.store_link import StoreLink
from specrl.coordinator.timeline import Timeline
from specrl.coordinator.turns import Turns
from specrl.records import Prompt, Reward
from specrl.spec import RunSpec


class PromptStream(Protocol):
    """What the loop needs of `specrl.prompts`."""

    def prompt(self, position: int) -> Prompt:
        """The prompt at this place of the shuffled stream, from 0, over all epochs."""

    def __len__(self) -> int:
        """Prompts of one epoch."""

    def identity(self) -> str:
        """Digest: streams of one identity have the same problem at every place."""


class Grader(Protocol):
    """What the loop needs of `specrl.rewards`."""

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        """The verifier's verdict; ungraded, with the reason, when it fails."""


@dataclass(frozen=True)
class Parts:
    """One run's parts. `directory` holds its run file, store, logs, checkpoints and export.

    turns: None where a rollout has one. spans: unheard unless somebody is given them. events, samples, timeline: what
    is kept of the run for people to look at.
    """

    spec: RunSpec
    directory: Path
    registry: Registry
    store: StoreLink
    board: Board
    controls: Controls
    prompts: PromptStream
    validation_prompts: Sequence[Prompt]
    grader: Grader
    turns: Turns | None = None
    spans: RunSpans = field(default_factory=RunSpans)
    events: EventLog = field(default_factory=EventLog)
    samples: Samples = field(default_factory=Samples)
    timeline: Timeline = field(default_factory=Timeline)
