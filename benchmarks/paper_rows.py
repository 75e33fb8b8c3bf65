"""The rows of benchmarks/paper_table.py, the paper's figures, and how ratios follow from the steps' reports.

Pure: it starts no runs. `PUBLISHED` has every row of arXiv 2604.26779 that is measured; `PROJECTED` has those that its
authors simulated. benchmarks/simulator_accuracy.py compares the simulator with the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from specrl.formats.reports import PhaseSeconds, StepReport
from specrl.spec.yaml_input import quote_yaml

WARM_UP_STEPS = 1
PHASES = ("data", "prepare", "generation", "logprob", "train")
IN_DOMAIN = "drafter-in-domain"
WEAK = "drafter-weak"
CHAT = "drafter-chat"
DRAFT_MODEL = "draft-model"


@dataclass(frozen=True)
class Workload:
    """Runs that share policy, prompts and rewards.

    beside: the paper's workload whose figures stand beside it, of `PUBLISHED_PHASES`. rows: names. once: rows that have
    one round, however many the others have. published_as: the paper's row by ours, where their names differ.
    """

    name: str
    says: str
    beside: str
    rows: tuple[str, ...]
    once: frozenset[str] = frozenset()
    published_as: Mapping[str, str] = field(default_factory=dict)

    def find_published(self, row: str) -> Published | None:
        """Return the paper's figures beside a row; None if it has none."""
        return PUBLISHED.get((self.beside, self.published_as.get(row, row)))


@dataclass(frozen=True)
class Configuration:
    """A row and what distinguishes it. drafter: its kind. reference: the row that its ratios are relative to."""

    name: str
    says: str
    speculation: str = "none: {}"
    drafter: str | None = None
    is_adaptive: bool = False
    is_online: bool = False
    lag: int = 0
    reference: str = "none"

    def overrides(self, drafters: Mapping[str, Path]) -> dict[str, str]:
        """Fields of the run file. drafters: folders by kind."""
        speculation = self.speculation
        if self.drafter is not None:
            speculation = speculation.replace("}", f", path: {quote_yaml(drafters[self.drafter])}}}")
        return {
            "generation.speculation": f"{{{speculation}}}",
            "generation.draftLength": "Adaptive" if self.is_adaptive else "Fixed",
            "trainer.drafter.online": "true" if self.is_online else "false",
            "schedule.maxPolicyLag": str(self.lag),
            "trainer.threads": "1" if self.lag else "2",
        }


@dataclass(frozen=True)
class Published:
    """The paper's figures for one row; None if it has none. step_s, exposed_s: seconds of a step."""

    generation: float | None = None
    step: float | None = None
    acceptance_length: float | None = None
    step_s: float | None = None
    exposed_s: float | None = None


@dataclass(frozen=True)
class Projected:
    """A row that the paper's authors simulated: Qwen3-235B-A22B on `gpus` GB200. generation, step: speed-ups."""

    gpus: int
    lag: int
    k: int
    acceptance_length: float
    generation: float
    step: float


def eagle3(k: int) -> str:
    """Make the `generation.speculation` section of a fresh head that drafts k tokens."""
    return f"eagle3: {{numDraftTokens: {k}}}"


CONFIGURATIONS = (
    Configuration("none", "no speculation; what the others are relative to"),
    *(
        Configuration(f"eagle3:{k}", f"k = {k}, drafter initialised in domain, not trained on", eagle3(k), IN_DOMAIN)
        for k in (1, 3, 5, 7)
    ),
    Configuration("adaptive", "k = 0 to 5 by batch, in domain, not trained on", eagle3(5), IN_DOMAIN, is_adaptive=True),
    Configuration("online", "k = 3, in domain, trained at every step", eagle3(3), IN_DOMAIN, is_online=True),
    Configuration("weak", "k = 3, drafter initialised on another family's prompts", eagle3(3), WEAK),
    Configuration(
        "weak-online", "k = 3, initialised on another family's, trained at every step", eagle3(3), WEAK, is_online=True
    ),
    Configuration("chat", "k = 3, drafter initialised on general chat text", eagle3(3), CHAT),
    Configuration(
        "chat-online", "k = 3, initialised on general chat text, trained at every step", eagle3(3), CHAT, is_online=True
    ),
    Configuration(
        "draft-model",
        "k = 3, the policy's first layers, distilled in domain, not trained on",
        "draftModel: {numDraftTokens: 3}",
        DRAFT_MODEL,
    ),
    Configuration("ngram", "k = 3, prompt look-up", "ngram: {numDraftTokens: 3}"),
    Configuration("suffix", "k = 1 to 8, look-up in all completions so far", "suffix: {}"),
    Configuration("none-lag1", "policy lag 1, no speculation", lag=1, reference="none-lag1"),
    Configuration(
        "eagle3:3-lag1",
        "policy lag 1, k = 3, drafter initialised in domain, not trained on",
        eagle3(3),
        IN_DOMAIN,
        lag=1,
        reference="none-lag1",
    ),
    Configuration(
        "adaptive-lag1",
        "policy lag 1, k = 0 to 5, in domain, trained at every step",
        eagle3(5),
        IN_DOMAIN,
        is_adaptive=True,
        is_online=True,
        lag=1,
        reference="none-lag1",
    ),
)
NAMES = tuple(configuration.name for configuration in CONFIGURATIONS)
QUICK = ("none", "eagle3:3", "adaptive", "ngram")

TOY_ROWS = tuple(name for name in NAMES if name not in {"chat", "chat-online", "draft-model", "suffix"})
BASE = Workload(
    "base",
    "a base model, as RL-Zero: it works its answers out, and mostly wrongly",
    "base",
    tuple(name for name in TOY_ROWS if not name.endswith("-lag1")),
)
# The paper's asynchronous run has this workload.
REASONING = Workload("reasoning", "a model trained for longer on longer answers, as RL-Think", "reasoning", TOY_ROWS)

# The workloads of a real language model. The rows that the paper's argument rests on have several rounds.
ONCE = frozenset({"adaptive", "eagle3:1", "eagle3:5", "eagle3:7", "draft-model", "ngram", "suffix"})
GENERAL_CHAT = {"weak": "", "weak-online": "", "chat": "weak", "chat-online": "weak-online"}
SHORT = Workload(
    "short", "short answers: the facts of a sentence as JSON", "base", NAMES, once=ONCE, published_as=GENERAL_CHAT
)
LONG = Workload("long", "long answers: GSM8K, worked out", "reasoning", NAMES, once=ONCE, published_as=GENERAL_CHAT)
CROWD = Workload(
    "crowd",
    "short answers, 32 at a time, so that verification costs",
    "base",
    ("none", "eagle3:1", "eagle3:3", "eagle3:5", "eagle3:7", "adaptive", "ngram"),
    once=frozenset(NAMES),
)
TOY_WORKLOADS = (BASE, REASONING)
REAL_WORKLOADS = (SHORT, LONG, CROWD)
# arXiv 2604.26779, 32 GB200, synchronous, EAGLE-3 initialised on DAPO: seconds by phase, without and with speculation.
PUBLISHED_PHASES = {
    "base": (
        PhaseSeconds(data=0.2, prepare=1.9, generation=100.0, logprob=17.8, train=31.3),
        PhaseSeconds(data=0.2, prepare=2.1, generation=56.6, logprob=18.1, train=30.5),
    ),
    "reasoning": (
        PhaseSeconds(data=0.3, prepare=2.1, generation=133.6, logprob=17.9, train=31.4),
        PhaseSeconds(data=0.2, prepare=1.6, generation=87.0, logprob=18.1, train=30.5),
    ),
}
PUBLISHED = {
    ("base", "eagle3:3"): Published(100.0 / 56.6, 1.41, 3.32),
    ("base", "eagle3:5"): Published(generation=1.44, acceptance_length=4.35),
    ("base", "eagle3:7"): Published(generation=1.21, acceptance_length=5.06),
    ("base", "online"): Published(generation=1.78, acceptance_length=3.29),
    ("base", "weak"): Published(generation=1.51, acceptance_length=2.88),
    ("base", "weak-online"): Published(generation=1.63, acceptance_length=3.04),
    ("base", "ngram"): Published(generation=100.0 / 140.2, acceptance_length=2.47),
    ("reasoning", "eagle3:3"): Published(133.6 / 87.0, 1.35, 2.77),
    ("reasoning", "eagle3:5"): Published(generation=0.84, acceptance_length=3.23),
    ("reasoning", "eagle3:7"): Published(generation=0.71, acceptance_length=3.48),
    ("reasoning", "online"): Published(generation=1.52, acceptance_length=2.74),
    ("reasoning", "weak"): Published(generation=1.19, acceptance_length=2.40),
    ("reasoning", "weak-online"): Published(generation=1.26, acceptance_length=2.55),
    ("reasoning", "ngram"): Published(generation=133.6 / 262.9, acceptance_length=2.05),
    # On 16 nodes, of which 12 generate.
    ("reasoning", "none-lag1"): Published(step_s=75.0, exposed_s=10.4),
    ("reasoning", "eagle3:3-lag1"): Published(step=1.24, step_s=60.5, exposed_s=0.6),
}
"""By workload and row. The paper's weak drafter was initialised on general chat text; the toy policy's on another
family of problems, and a real model's on both (`GENERAL_CHAT`)."""

PROJECTED = (
    Projected(gpus=512, lag=0, k=3, acceptance_length=3, generation=2.72, step=1.70),
    Projected(gpus=512, lag=0, k=7, acceptance_length=5, generation=4.07, step=1.96),
    # The paper's best cell. Its acceptance length is not published; 8 fits both figures.
    Projected(gpus=512, lag=0, k=7, acceptance_length=8, generation=6.49, step=2.22),
    Projected(gpus=2048, lag=2, k=5, acceptance_length=4, generation=3.5, step=2.5),
)

Middle = Callable[[Iterable[float]], float]
SecondsOf = Callable[[StepReport], float]
Place = tuple[str, int, int]
"""Start, round and step. Steps of different starts are never compared (`paper_runs`)."""
Steps = dict[Place, StepReport]
"""The measured steps of one row."""


@dataclass(frozen=True)
class Ratio:
    """Speed-up over the reference: the median of the ratios of equal steps and their middle half.

    With a policy lag, the value is the ratio of the means instead.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class Row:
    """One line of the table. None: nothing to divide by, no speculation, or (generation) a policy lag."""

    name: str
    says: str
    steps: int
    """Steps that the row and its reference both have. All figures are of these."""
    generation: Ratio | None
    per_token: Ratio | None
    step: Ratio | None
    acceptance_length: float | None
    exposed_share: float
    """Exposed generation: share of the steps' time."""
    exposed_s: float
    """Exposed generation: mean seconds of a step."""
    hidden_s: float
    """Hidden generation: mean seconds of a step."""
    step_s: float
    """Mean seconds of a step."""
    phases: dict[str, float]
    """Each phase of a typical step, and the total, as shares of the reference's step."""
    mean_length: float
    published: Published

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_steps(metrics: str, start: str, number: int) -> Steps:
    """Read the steps of a run after its warm-up, from the text of its metrics.jsonl. number: its round."""
    reports = [StepReport.model_validate_json(line) for line in metrics.splitlines() if line.strip()]
    return {(start, number, report.step): report for report in reports if report.step > WARM_UP_STEPS}


def ratio(reference: Steps, own: Steps, seconds: SecondsOf, *, is_of_means: bool = False) -> Ratio | None:
    """Compute the reference's time over the row's, on steps that both have; None if a time is 0 or there is no such
    step.

    The value is the median of the ratios of equal steps. The ratio of the medians would compare different prompts, and
    may be outside of the middle half. is_of_means: the ratio of the means instead, where equal steps do different work.
    """
    places = sorted(set(reference) & set(own))
    theirs = [seconds(reference[place]) for place in places]
    mine = [seconds(own[place]) for place in places]
    if len(places) < 2 or min(theirs) <= 0 or min(mine) <= 0:
        return None
    ratios = [their / my for their, my in zip(theirs, mine, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return Ratio(mean(theirs) / mean(mine) if is_of_means else middle, low, high)


def row_of(workload: Workload, configuration: Configuration, found: Mapping[str, Steps]) -> Row:
    """Make a row of the table. found: steps by row name, with those of this row and of its reference.

    All figures are of the steps that both have: another round has other prompts, and another start another machine.

    With a policy lag, steps that find their rollouts ready alternate with steps that waited. So the mean of both kinds
    is used, and exposed generation, which is 0 for one kind, is given as a share and not as a ratio.
    """
    places = _common_places(configuration, found)
    own = {place: found[configuration.name][place] for place in places}
    reference = {place: found[configuration.reference][place] for place in places}
    reports = list(own.values())
    is_synchronous = configuration.lag == 0
    middle: Middle = median if is_synchronous else mean
    whole = middle([report.phases.wall_seconds for report in reference.values()])
    seconds = {phase: middle([getattr(report.phases, phase) for report in reports]) for phase in PHASES}
    seconds["total"] = middle([report.phases.wall_seconds for report in reports])
    accepted = [report.acceptance_length for report in reports if report.acceptance_length is not None]
    generation = per_token = None
    if is_synchronous:
        generation = ratio(reference, own, lambda report: report.phases.generation)
        # A step that trained no rollout has no tokens, and so no time of one.
        speaking = {place: own[place] for place in places if own[place].tokens and reference[place].tokens}
        per_token = ratio(reference, speaking, lambda report: report.phases.generation / report.tokens)
    return Row(
        name=configuration.name,
        says=configuration.says,
        steps=len(reports),
        generation=generation,
        per_token=per_token,
        step=ratio(reference, own, lambda report: report.phases.wall_seconds, is_of_means=not is_synchronous),
        acceptance_length=mean(accepted) if accepted else None,
        exposed_share=sum(r.exposed_generation for r in reports) / sum(r.phases.wall_seconds for r in reports),
        exposed_s=mean(report.exposed_generation for report in reports),
        hidden_s=mean(report.hidden_generation for report in reports),
        step_s=mean(report.phases.wall_seconds for report in reports),
        phases={phase: value / whole for phase, value in seconds.items()},
        mean_length=sum(r.tokens for r in reports) / max(1, sum(r.rollouts for r in reports)),
        published=workload.find_published(configuration.name) or Published(),
    )


def rows_of(workload: Workload, found: Mapping[str, Steps]) -> list[Row]:
    """Make the rows in the order of `CONFIGURATIONS`. A row without steps that its reference has, too, is left out."""
    return [row_of(workload, c, found) for c in CONFIGURATIONS if _common_places(c, found)]


def _common_places(configuration: Configuration, found: Mapping[str, Steps]) -> list[Place]:
    """Return the places of the steps that a row and its reference both have."""
    return sorted(found.get(configuration.name, {}).keys() & found.get(configuration.reference, {}).keys())


def list_unmeasured(workload: Workload, rows: Sequence[Row]) -> list[Configuration]:
    """Return the rows of a workload with a published figure that are not among `rows`."""
    measured = {row.name for row in rows}
    return [
        c
        for c in CONFIGURATIONS
        if c.name in workload.rows and c.name not in measured and workload.find_published(c.name)
    ]


def relative_error(ours: float, published: float) -> float:
    """Return by how much our figure is above the published one, as a share of it."""
    return ours / published - 1


def published_shares(workload: Workload) -> tuple[dict[str, float], dict[str, float]]:
    """Make the paper's phases without and with speculation, as shares of its step without."""
    plain, speculated = PUBLISHED_PHASES[workload.beside]
    plain_s, speculated_s = (
        {phase: getattr(seconds, phase) for phase in PHASES} | {"total": seconds.wall_seconds}
        for seconds in (plain, speculated)
    )
    whole = plain_s["total"]
    return (
        {phase: value / whole for phase, value in plain_s.items()},
        {phase: value / whole for phase, value in speculated_s.items()},
    )


def plan(names: Sequence[str], rounds: int, once: Collection[str] = ()) -> list[tuple[int, Configuration]]:
    """Order the rows of each round. A round starts one third further on, so that no row is always first or last.

    once: rows of the first round alone.
    """
    order: list[tuple[int, Configuration]] = []
    for number in range(1, rounds + 1):
        chosen = [c for c in CONFIGURATIONS if c.name in names and (number == 1 or c.name not in once)]
        shift = (number - 1) * max(1, len(chosen) // 3) % max(1, len(chosen))
        order += [(number, configuration) for configuration in [*chosen[shift:], *chosen[:shift]]]
    return order
