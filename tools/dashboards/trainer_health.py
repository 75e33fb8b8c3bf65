"""Trainer health: loss, gradients, clips, and how far sampler and trainer are apart."""

from __future__ import annotations

from tools.dashboards.expressions import latest, mean, quantile, rate
from tools.dashboards.model import OF_A_RUN, Dashboard, Panel

TRAINER_HEALTH = Dashboard(
    "specrl-trainer-health",
    "specrl / Trainer health",
    "Loss, gradients, clips, and how far sampler and trainer are apart: figures of the trainer's rank 0.",
    OF_A_RUN,
    (
        Panel(
            "Policy's loss",
            "Mean over the tokens of the last step.",
            "short",
            ((latest("specrl_trainer_loss"), "{{rljob}}"),),
            minimum=None,
        ),
        Panel(
            "Gradient norm",
            "Of the policy, before the clip.",
            "short",
            ((latest("specrl_trainer_grad_norm"), "{{rljob}}"),),
        ),
        Panel(
            "Entropy",
            "Policy's mean entropy of a token, in nats. A fall to 0 is a policy that explores no more.",
            "short",
            ((latest("specrl_trainer_entropy_nats"), "{{rljob}}"),),
        ),
        Panel(
            "Effective sample size",
            "Share of the batch's tokens that count as much as uncorrected ones. Low: importance weights differ much, "
            "since rollouts are old or the sampler is off.",
            "percentunit",
            ((latest("specrl_trainer_effective_sample_size"), "{{rljob}}"),),
            maximum=1,
        ),
        Panel(
            "Clipped tokens",
            "Share of the batch's tokens that a clip held: low and high (the policy's ratio), importance (the cap of "
            "the weight).",
            "percentunit",
            ((latest("specrl_trainer_clip_fraction", "clip"), "{{rljob}} {{clip}}"),),
        ),
        Panel(
            "Masked tokens, and skipped steps",
            "Share of the batch's tokens that a mask left out of the policy gradient; and steps of which an update was "
            "not made, since gradients were not finite.",
            "short",
            (
                (latest("specrl_trainer_masked_fraction"), "{{rljob}} masked"),
                (latest("specrl_trainer_steps_skipped_total"), "{{rljob}} skipped"),
            ),
        ),
        Panel(
            "Groups without signal",
            "Groups a second whose rewards were all the same: trained on, or left out (trainer.loss.withoutSignal).",
            "short",
            ((rate("specrl_coordinator_groups_without_signal_total", "outcome"), "{{rljob}} {{outcome}}"),),
        ),
        Panel(
            "Policy against reference",
            "KL (k3), in nats per token; 0 without a reference.",
            "short",
            ((latest("specrl_trainer_reference_kl_nats"), "{{rljob}}"),),
        ),
        Panel(
            "Importance weight",
            "Mean over the batch's tokens, after the cap. Near 1 when sampler and trainer agree.",
            "short",
            ((latest("specrl_trainer_importance_weight_mean"), "{{rljob}}"),),
        ),
        Panel(
            "Sampler against trainer",
            "KL (k3) between sampler and trainer over the newest version's rollouts, in nats: engines that disagree, "
            "lag left aside.",
            "short",
            ((latest("specrl_sampler_mismatch_kl"), "{{rljob}}"),),
        ),
        Panel(
            "Learning rate",
            "Of the last step.",
            "short",
            ((latest("specrl_trainer_learning_rate"), "{{rljob}}"),),
        ),
        Panel(
            "Step at the trainer",
            "Mean wall seconds of one step's log-probabilities and training, the drafter's included.",
            "s",
            ((mean("specrl_trainer_stage_seconds", "stage"), "{{rljob}} {{stage}}"),),
            stacked=True,
        ),
        Panel(
            "Tokens trained a second",
            "Sampled tokens, of all wall time.",
            "short",
            ((rate("specrl_trainer_tokens_total"), "{{rljob}}"),),
        ),
        Panel(
            "Checkpoints",
            "95th percentile of the wall seconds of one, and those that could not be written, a second.",
            "short",
            (
                (quantile(0.95, "specrl_trainer_checkpoint_seconds"), "{{rljob}} seconds"),
                (rate("specrl_coordinator_checkpoints_failed_total"), "{{rljob}} failed a second"),
            ),
        ),
        Panel(
            "Step, and times the trainer came back",
            "Last step trained, as the trainer says; and its recoveries from a checkpoint.",
            "short",
            (
                (latest("specrl_trainer_step"), "{{rljob}} step"),
                (latest("specrl_coordinator_trainer_recoveries_total"), "{{rljob}} recoveries"),
            ),
        ),
    ),
)
