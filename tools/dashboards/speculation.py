"""The dashboard of speculation: acceptance, draft lengths, speed-up, and the drafter's age and training."""

from __future__ import annotations

from tools.dashboards.expressions import divide_series, latest_value, ratio_to_run, sum_rate
from tools.dashboards.model import RUN_VARIABLES, Dashboard, Panel, PanelKind

DRAFTS = sum_rate("vllm:spec_decode_num_drafts_total")

SPECULATION = Dashboard(
    "specrl-speculation",
    "specrl / Speculation",
    "Acceptance, draft lengths, speed-up, and the drafter's age and training.",
    RUN_VARIABLES,
    (
        Panel(
            "Acceptance length",
            "Mean tokens per verification, including the bonus token, at the run's sampling settings. 1: drafts gain "
            "nothing.",
            "short",
            (
                (
                    "1 + " + divide_series(sum_rate("vllm:spec_decode_num_accepted_tokens_total"), DRAFTS),
                    "{{rljob}} measured by vLLM",
                ),
                (latest_value("specrl_generation_acceptance_length"), "{{rljob}} of the last step"),
            ),
        ),
        Panel(
            "Acceptance by position",
            "Share of drafts whose token at this position (from 0) was accepted: as vLLM counts, and in the last step "
            "without canaries.",
            "percentunit",
            (
                (
                    ratio_to_run(sum_rate("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"), DRAFTS),
                    "{{rljob}} position {{position}}",
                ),
                (
                    latest_value("specrl_generation_accepted_share", "position"),
                    "{{rljob}} position {{position}}, last step",
                ),
            ),
            maximum=1,
        ),
        Panel(
            "Chosen draft length by live batch",
            "Draft length k at each number of live requests, mean of the replicas. 0: drafts do not pay. Only with "
            "adaptive draft length.",
            "short",
            ((latest_value("specrl_generation_chosen_draft_length", "live", how="avg"), "{{rljob}} {{live}} live"),),
            kind=PanelKind.BARS,
        ),
        Panel(
            "Draft length and live batch over time",
            "Mean tokens per draft in the last step, and requests that a replica computes at the same time.",
            "short",
            (
                (latest_value("specrl_generation_draft_length"), "{{rljob}} draft length"),
                (latest_value("vllm:num_requests_running", how="avg"), "{{rljob}} live requests of a replica"),
            ),
        ),
        Panel(
            "Speed-up over decoding without drafts",
            "Speed relative to the calibrated speed of autoregressive decoding at each replica's recent loads: "
            "predicted from costs and acceptance, and measured. Below 1, the drafter is switched off. Only with "
            "adaptive draft length.",
            "suffix:x",
            (
                (
                    latest_value("specrl_generation_replica_speculation_gain", "replica, kind"),
                    "{{rljob}} {{replica}} {{kind}}",
                ),
                (latest_value("specrl_generation_speculation_gain"), "{{rljob}} mean of the replicas, last step"),
            ),
        ),
        Panel(
            "Calibrated cost of a decoding step",
            "Wall seconds of one decoding step by live requests and draft length, mean of the replicas. Length -1 is "
            "autoregressive decoding, with the drafter off. Every step since the calibration updates the costs.",
            "s",
            (
                (
                    latest_value("specrl_generation_step_cost_seconds", "live, draft_length", how="avg"),
                    "{{rljob}} {{live}} live, length {{draft_length}}",
                ),
            ),
        ),
        Panel(
            "Drafter's age",
            "Policy versions since the served drafter was trained: the oldest of the run, and by replica.",
            "short",
            (
                (latest_value("specrl_drafter_version_lag"), "{{rljob}} oldest"),
                (
                    latest_value("specrl_coordinator_replica_policy_version", "replica")
                    + " - "
                    + latest_value("specrl_generation_drafter_version", "replica"),
                    "{{rljob}} {{replica}}",
                ),
            ),
            minimum=None,
        ),
        Panel(
            "Drafter's loss",
            "Loss of the drafter's training in the last step, and its gradient norm before clipping.",
            "short",
            (
                (latest_value("specrl_drafter_loss"), "{{rljob}} loss"),
                (latest_value("specrl_trainer_drafter_grad_norm"), "{{rljob}} gradient norm"),
            ),
        ),
        Panel(
            "Acceptance at the trainer, by position",
            "Probability that the policy accepts the draft token at this position if it accepted those before, for the "
            "drafter in training, on its training batch.",
            "percentunit",
            ((latest_value("specrl_trainer_drafter_acceptance", "position"), "{{rljob}} position {{position}}"),),
            maximum=1,
        ),
        Panel(
            "Catch-ups of drafters",
            "Per second: recomputations of all live requests, after which the drafter has read the tokens that were "
            "decoded while it was switched off.",
            "ops",
            ((sum_rate("specrl_generation_catch_ups_total"), "{{rljob}}"),),
        ),
        Panel(
            "Drafts per second, and drafters switched off",
            "Verified drafts per second, and replicas whose drafter is switched off because it does not pay.",
            "short",
            (
                (DRAFTS, "{{rljob}} drafts per second"),
                (latest_value("specrl_generation_drafters_off"), "{{rljob}} switched off"),
            ),
        ),
    ),
)
