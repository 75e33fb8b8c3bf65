"""The dashboard of training: loss, gradients, clipping, and the mismatch of sampler and trainer."""

from __future__ import annotations

from tools.dashboards.expressions import histogram_mean, histogram_quantile, latest_value, sum_rate
from tools.dashboards.model import RUN_VARIABLES, Dashboard, Panel

TRAINER_HEALTH = Dashboard(
    "specrl-trainer-health",
    "specrl / Trainer health",
    "Loss, gradients, clipping, and the mismatch of sampler and trainer, as measured by the trainer's rank 0.",
    RUN_VARIABLES,
    (
        Panel(
            "Policy loss",
            "Loss of the last step.",
            "short",
            ((latest_value("specrl_trainer_loss"), "{{rljob}}"),),
            minimum=None,
        ),
        Panel(
            "Gradient norm",
            "Global gradient norm of the policy in the last step, before clipping.",
            "short",
            ((latest_value("specrl_trainer_grad_norm"), "{{rljob}}"),),
        ),
        Panel(
            "Entropy",
            "Mean entropy of the policy per token, in nats. Near 0, the policy no longer explores.",
            "short",
            ((latest_value("specrl_trainer_entropy_nats"), "{{rljob}}"),),
        ),
        Panel(
            "Effective sample size",
            "Effective sample size of the importance weights, as a share of the batch's tokens. Low values mean uneven "
            "weights, because rollouts are old or sampler and trainer disagree.",
            "percentunit",
            ((latest_value("specrl_trainer_effective_sample_size"), "{{rljob}}"),),
            maximum=1,
        ),
        Panel(
            "Clipped tokens",
            "Share of the batch's tokens that were clipped: low and high (the policy's ratio), importance (the bound "
            "of the importance weight).",
            "percentunit",
            ((latest_value("specrl_trainer_clip_fraction", "clip"), "{{rljob}} {{clip}}"),),
        ),
        Panel(
            "Masked tokens and skipped steps",
            "Share of the batch's tokens that are masked out of the policy gradient, and number of steps that were "
            "skipped because gradients were not finite.",
            "short",
            (
                (latest_value("specrl_trainer_masked_fraction"), "{{rljob}} masked"),
                (latest_value("specrl_trainer_steps_skipped_total"), "{{rljob}} skipped"),
            ),
        ),
        Panel(
            "Groups without signal",
            "Groups per second whose rewards are all equal: trained on, or left out (trainer.loss.withoutSignal).",
            "short",
            ((sum_rate("specrl_coordinator_groups_without_signal_total", "outcome"), "{{rljob}} {{outcome}}"),),
        ),
        Panel(
            "KL divergence from the reference",
            "KL divergence (k3) of the policy from the reference, in nats per token. 0 without a reference.",
            "short",
            ((latest_value("specrl_trainer_reference_kl_nats"), "{{rljob}}"),),
        ),
        Panel(
            "Importance weight",
            "Mean importance weight of the batch's tokens, after truncation. Near 1 if sampler and trainer agree.",
            "short",
            ((latest_value("specrl_trainer_importance_weight_mean"), "{{rljob}}"),),
        ),
        Panel(
            "Mismatch of sampler and trainer",
            "KL divergence (k3) between sampler and trainer over rollouts of the newest policy version, in nats. It "
            "shows differences of the engines, without the effect of policy lag.",
            "short",
            ((latest_value("specrl_sampler_mismatch_kl"), "{{rljob}}"),),
        ),
        Panel(
            "Learning rate",
            "Learning rate of the last step.",
            "short",
            ((latest_value("specrl_trainer_learning_rate"), "{{rljob}}"),),
        ),
        Panel(
            "Trainer time per step",
            "Mean wall seconds per step of log-probabilities and training, including the drafter's.",
            "s",
            ((histogram_mean("specrl_trainer_phase_seconds", "phase"), "{{rljob}} {{phase}}"),),
            stacked=True,
        ),
        Panel(
            "Sampling sets",
            "Of the last step, for runs with topP or topK: tokens that they left to sample from, the memory of the "
            "sets in bytes per sampled token, and the share of tokens that were the only one left.",
            "short",
            (
                (latest_value("specrl_trainer_sampling_set_tokens"), "{{rljob}} tokens"),
                (latest_value("specrl_trainer_sampling_set_bytes"), "{{rljob}} bytes per token"),
                (latest_value("specrl_trainer_certain_fraction"), "{{rljob}} share without a choice"),
            ),
        ),
        Panel(
            "Trained tokens per second",
            "Sampled tokens that were trained on, per second of wall time.",
            "short",
            ((sum_rate("specrl_trainer_tokens_total"), "{{rljob}}"),),
        ),
        Panel(
            "Checkpoints",
            "95th percentile of the wall seconds of writing a checkpoint, the part of them that blocks training "
            "(snapshot), and failed checkpoints per second.",
            "short",
            (
                (histogram_quantile(0.95, "specrl_trainer_checkpoint_snapshot_seconds"), "{{rljob}} snapshot seconds"),
                (histogram_quantile(0.95, "specrl_trainer_checkpoint_seconds"), "{{rljob}} seconds"),
                (sum_rate("specrl_coordinator_checkpoints_failed_total"), "{{rljob}} failed per second"),
            ),
        ),
        Panel(
            "Trained step and recoveries",
            "Last step that the trainer reports, and the number of its recoveries from a checkpoint.",
            "short",
            (
                (latest_value("specrl_trainer_step"), "{{rljob}} step"),
                (latest_value("specrl_coordinator_trainer_recoveries_total"), "{{rljob}} recoveries"),
            ),
        ),
    ),
)
