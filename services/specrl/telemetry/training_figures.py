"""The table of training figures, such as the loss. Everything that transports or shows a figure is derived from it.

Adding a figure takes one line here and one in each trainer backend that computes it. These parts read the table:

- the value on the wire, and the field of the step report
- the trainer's Prometheus gauge, and the table in docs/metrics.md
- the live page's chart, and the row of `specrl report`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True)
class FigureInfo:
    """The meaning of one figure.

    gauge: name of the trainer's Prometheus gauge; empty without one.
    is_drawn: whether the live page has a chart of it.
    over: name of the figure that counts what this one is averaged over. If that is 0, this one is unknown.
    """

    unit: str
    help: str
    gauge: str = ""
    is_drawn: bool = False
    over: str = ""


def _declare_figure(unit: str, text: str, gauge: str = "", *, default: Any = 0.0, **shown: Any) -> Any:
    """Declare a field of the table. shown: `is_drawn` and `over` of `FigureInfo`."""
    field = Field(default=default, description=text, json_schema_extra={"unit": unit})
    # pydantic keeps metadata that it does not know; `FIGURES` collects it from there.
    field.metadata.append(FigureInfo(unit, text, gauge, **shown))
    return field


class TrainingFigures(BaseModel):
    """The figures of one training step. In a step without rollouts they are 0.

    The mismatch is the difference between sampler and trainer log-probabilities. It is measured only on rollouts that
    were sampled entirely under the policy version from which the step starts. In a step's report it is null without
    any.

    With topP or topK, log-probabilities are renormalised over the tokens that could be sampled, in the sampler, the
    trainer and the reference alike. So loss, entropy, weights, divergences and mismatch are over these tokens.
    """

    model_config = ConfigDict(frozen=True)

    loss: float = _declare_figure("loss", "Policy loss, averaged over tokens.", "specrl_trainer_loss")
    grad_norm: float = _declare_figure(
        "norm", "Norm of the step's first gradient, before clipping.", "specrl_trainer_grad_norm"
    )
    learning_rate: float = _declare_figure("rate", "Learning rate of the step.", "specrl_trainer_learning_rate")
    entropy: float = _declare_figure(
        "nats per token",
        "Mean entropy of the policy per token; with topP or topK, over the tokens that could be sampled.",
        "specrl_trainer_entropy_nats",
    )
    sampling_set_tokens: float | None = _declare_figure(
        "tokens",
        "Tokens that topP and topK left to sample from, on average; null without both.",
        "specrl_trainer_sampling_set_tokens",
        default=None,
    )
    sampling_set_bytes: float | None = _declare_figure(
        "bytes per token",
        "Bytes of the rollouts' sampling sets per sampled token; null without topP and topK.",
        "specrl_trainer_sampling_set_bytes",
        default=None,
    )
    certain_fraction: float | None = _declare_figure(
        "share of tokens",
        "Tokens that were the only one left by topP and topK, which have no gradient; null without both.",
        "specrl_trainer_certain_fraction",
        default=None,
    )
    clip_fraction: float = _declare_figure("share of tokens", "Tokens whose policy ratio was clipped.")
    clip_fraction_high: float = _declare_figure(
        "share of tokens", "Tokens whose policy ratio was clipped at the upper bound."
    )
    importance_capped_fraction: float = _declare_figure(
        "share of tokens", "Tokens whose importance weight was truncated or masked."
    )
    masked_fraction: float = _declare_figure(
        "share of tokens",
        "Tokens that a mask of tokens or of rollouts excluded from the policy gradient.",
        "specrl_trainer_masked_fraction",
    )
    reference_kl: float | None = _declare_figure(
        "nats per token",
        "KL divergence of the policy from the reference (k3 estimator, weighted by policy over sampler), with topP or "
        "topK over the tokens that could be sampled; null without a reference.",
        "specrl_trainer_reference_kl_nats",
        default=None,
    )
    importance_weight_mean: float = _declare_figure(
        "mean", "Mean importance weight per token, after capping.", "specrl_trainer_importance_weight_mean"
    )
    effective_sample_size: float = _declare_figure(
        "share of tokens",
        "Effective sample size of the importance weights w of n tokens: (sum w)^2 / (n sum w^2), 0 to 1.",
        "specrl_trainer_effective_sample_size",
        is_drawn=True,
    )
    mismatch_mean_abs: float | None = _declare_figure(
        "nats", "Mean absolute mismatch of sampler and trainer.", over="mismatch_tokens"
    )
    mismatch_max_abs: float | None = _declare_figure(
        "nats", "Largest absolute mismatch of sampler and trainer.", over="mismatch_tokens"
    )
    mismatch_kl: float | None = _declare_figure(
        "nats",
        "KL divergence (k3 estimator) between sampler and trainer, over rollouts of the newest version.",
        "specrl_sampler_mismatch_kl",
        is_drawn=True,
        over="mismatch_tokens",
    )
    mismatch_tokens: int = _declare_figure("tokens", "Tokens over which the mismatch is measured.", default=0)

    def known_values(self) -> dict[str, float]:
        """Return the known figures by name. Figures that are null, or averaged over nothing, are omitted."""
        found = {name: getattr(self, name) for name in FIGURES}
        return {
            name: found[name]
            for name, figure in FIGURES.items()
            if found[name] is not None and (not figure.over or found[figure.over])
        }


FIGURES: dict[str, FigureInfo] = {
    name: figure
    for name, field in TrainingFigures.model_fields.items()
    for figure in field.metadata
    if isinstance(figure, FigureInfo)
}
"""The meaning of each figure by name, in the table's order."""
