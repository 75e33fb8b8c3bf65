"""Speculation: what drafts add, how long they are made, what that gains, and how old the drafter is."""

from __future__ import annotations

from tools.dashboards.expressions import latest, rate, ratio, ratio_to_run
from tools.dashboards.model import OF_A_RUN, Dashboard, Kind, Panel

DRAFTS = rate("vllm:spec_decode_num_drafts_total")

SPECULATION = Dashboard(
    "specrl-speculation",
    "specrl / Speculation",
    "What drafts add, how long they are made, what that gains, and how old the drafter is.",
    OF_A_RUN,
    (
        Panel(
            "Acceptance length",
            "Mean tokens of a verification, bonus token included: 1 is no gain from drafts. At the run's own sampling.",
            "short",
            (
                (
                    "1 + " + ratio(rate("vllm:spec_decode_num_accepted_tokens_total"), DRAFTS),
                    "{{rljob}} measured by vLLM",
                ),
                (latest("specrl_generation_acceptance_length"), "{{rljob}} of the last step"),
            ),
        ),
        Panel(
            "Acceptance by position",
            "Share of drafts whose token at this position, from 0, was accepted: counted by vLLM, and over the last "
            "step, canaries left out.",
            "percentunit",
            (
                (
                    ratio_to_run(rate("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"), DRAFTS),
                    "{{rljob}} position {{position}}",
                ),
                (latest("specrl_generation_accepted_share", "position"), "{{rljob}} position {{position}}, last step"),
            ),
            maximum=1,
        ),
        Panel(
            "Chosen draft length by live batch",
            "The k that is drafted at each number of live requests, mean of the replicas: 0 where drafts do not pay. "
            "Adaptive draft length only.",
            "short",
            ((latest("specrl_generation_chosen_draft_length", "live", how="avg"), "{{rljob}} {{live}} live"),),
            kind=Kind.BARS,
        ),
        Panel(
            "Draft length and live batch over time",
            "Mean tokens of a draft over the last step, and requests that a replica computes at once.",
            "short",
            (
                (latest("specrl_generation_draft_length"), "{{rljob}} draft length"),
                (latest("vllm:num_requests_running", how="avg"), "{{rljob}} live requests of a replica"),
            ),
        ),
        Panel(
            "Speed-up over decoding without drafts",
            "Speed over the calibrated speed of autoregressive decoding, at each replica's recent loads: predicted "
            "from costs and acceptance, and measured. Below 1 the drafter is switched off. Adaptive draft length only.",
            "suffix:x",
            (
                (
                    latest("specrl_generation_replica_speculation_gain", "replica, kind"),
                    "{{rljob}} {{replica}} {{kind}}",
                ),
                (latest("specrl_generation_speculation_gain"), "{{rljob}} mean of the replicas, last step"),
            ),
        ),
        Panel(
            "Calibrated cost of a step",
            "Wall seconds of one decoding step by live requests and draft length, mean of the replicas; length -1: the "
            "drafter rests, which is autoregressive decoding. Corrected by every step since the calibration.",
            "s",
            (
                (
                    latest("specrl_generation_step_cost_seconds", "live, draft_length", how="avg"),
                    "{{rljob}} {{live}} live, length {{draft_length}}",
                ),
            ),
        ),
        Panel(
            "Drafter's age",
            "Policy versions since the drafter that is served was trained: the oldest of the run, and by replica.",
            "short",
            (
                (latest("specrl_drafter_version_lag"), "{{rljob}} oldest"),
                (
                    latest("specrl_coordinator_replica_policy_version", "replica")
                    + " - "
                    + latest("specrl_generation_drafter_version", "replica"),
                    "{{rljob}} {{replica}}",
                ),
            ),
            minimum=None,
        ),
        Panel(
            "Drafter's loss",
            "Loss of the last step's drafter training, and the norm of its gradient before the clip.",
            "short",
            (
                (latest("specrl_drafter_loss"), "{{rljob}} loss"),
                (latest("specrl_trainer_drafter_grad_norm"), "{{rljob}} gradient norm"),
            ),
        ),
        Panel(
            "Acceptance at the trainer, by position",
            "How probably the policy accepts the draft token at this position, given those before it: of the drafter "
            "that is being trained, on the batch that it learns from.",
            "percentunit",
            ((latest("specrl_trainer_drafter_acceptance", "position"), "{{rljob}} position {{position}}"),),
            maximum=1,
        ),
        Panel(
            "Drafts a second, and drafters that rest",
            "Drafts that were verified; replicas whose drafter is switched off because it does not pay.",
            "short",
            (
                (DRAFTS, "{{rljob}} drafts a second"),
                (latest("specrl_generation_drafters_resting"), "{{rljob}} resting"),
            ),
        ),
    ),
)
