"""An outcome or an advice for people: Markdown, and one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from specrl.simulator.memory import GIB
from specrl.simulator.pipeline import STAGES
from specrl.simulator.scenario import Scenario
from specrl.simulator.search import Advice
from specrl.simulator.simulate import Outcome

STYLE = (
    "body{font:15px sans-serif;max-width:60em;margin:2em auto;color:#222}td,th{padding:2px 14px 2px 0;text-align:left}"
)

Table = list[Sequence[str]]


def stages(outcome: Outcome) -> Table:
    """As table 1 of arXiv:2604.26779: seconds by stage, without and with speculation."""
    plain, mine = outcome.plain, outcome.speculative
    rows: Table = [("stage", "without, s", "with, s")]
    for stage in STAGES:
        name = "generation (exposed)" if stage == "generation" else stage
        rows.append((name, f"{plain.stages_s[stage]:.3g}", f"{mine.stages_s[stage]:.3g}"))
    rows.append(("step", f"{plain.step_s:.4g}", f"{mine.step_s:.4g}"))
    rows.append(("one step's rollouts alone", f"{plain.batch_s:.4g}", f"{mine.batch_s:.4g}"))
    rows.append(("replicas busy", f"{plain.busy_share:.0%}", f"{mine.busy_share:.0%}"))
    return rows


def facts(outcome: Outcome) -> list[str]:
    """The rest, one sentence each."""
    scenario, memory = outcome.scenario, outcome.memory
    layout = scenario.layout
    found = [
        f"rollouts {outcome.rollout_speedup:.2f}x, step {outcome.step_speedup:.2f}x against no speculation",
        f"{layout.replicas} replicas of {layout.gpus_per_replica}, {layout.training_gpus} train, "
        f"policy lag at most {outcome.speculative.policy_lag_max}",
        f"{outcome.run_steps} steps: {outcome.gpu_hours:.3g} GPU-hours"
        + (f", {outcome.usd:,.0f} USD" if outcome.usd is not None else ""),
    ]
    if memory is not None:
        found.append(
            f"a generation GPU holds {memory.weights / GIB:.1f} GiB of weights, {memory.drafter / GIB:.1f} of drafter, "
            f"{memory.sampler / GIB:.1f} for the sampler and {memory.kv_cache / GIB:.1f} of KV cache, "
            f"for {memory.max_live} rollouts of mean length at a replica"
        )
    return found + [f"note: {warning}" for warning in outcome.warnings]


def advice_rows(advice: Advice) -> Table:
    """Today beside what is recommended."""
    rows: Table = [("", "today", "recommended")]
    now, best = advice.today.scenario, advice.best.scenario
    assert advice.today.means is not None
    assert advice.best.means is not None
    k_now = "by batch" if now.speculation.is_adaptive else str(now.speculation.k)
    told = ", ".join(f"{k} for {low}-{high} live" for low, high, k in advice.draft_lengths)
    rows.append(("draft length k", "none" if now.speculation.mechanism == "none" else k_now, told))
    rows.append(("generate : train", _split(now), _split(best)))
    rows.append(("replicas x tensor parallel", _width(now), _width(best)))
    rows.append(("maxPolicyLag", str(now.schedule.max_policy_lag), str(best.schedule.max_policy_lag)))
    rows.append(("step, s", f"{advice.today.means.step_s:.4g}", f"{advice.best.means.step_s:.4g}"))
    if advice.capture_tokens is not None:
        rows.append(("query tokens for CUDA graphs", str(now.engine.capture_tokens), str(advice.capture_tokens)))
    return rows


def _split(scenario: Scenario) -> str:
    layout = scenario.layout
    return "all GPUs do both" if layout.colocated else f"{layout.generation_gpus} : {layout.training_gpus}"


def _width(scenario: Scenario) -> str:
    return f"{scenario.layout.replicas} x {scenario.layout.tensor_parallel}"


def advice_facts(advice: Advice) -> list[str]:
    """What it brings, how sure that is, what binds then."""
    impossible = sum(tried.means is None for tried in advice.tried)
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in advice.shares.items())
    return [
        f"{advice.gain:.2f}x today's speed (p10-p90 {advice.gain_low:.2f}-{advice.gain_high:.2f})",
        f"then the {advice.binds} binds: {shares}",
        f"{len(advice.tried)} layouts tried, {impossible} impossible",
    ]


def markdown(title: str, about: str, table: Table, sentences: Sequence[str], figures: Sequence[str] = ()) -> str:
    """A page of text; figures are names of files beside it."""
    head, *rows = table
    lines = [f"# {title}", "", about, ""] if about else [f"# {title}", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows), ""]
    lines += [f"- {sentence}" for sentence in sentences]
    lines += ["", *(f"![]({name})" for name in figures)] if figures else []
    return "\n".join(lines) + "\n"


def html(title: str, about: str, table: Table, sentences: Sequence[str], figures: Sequence[str] = ()) -> str:
    """The same as one file, with the figures in it."""
    head, *rows = table
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    told = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    drawn = "".join(f"<p>{figure}</p>" for figure in figures)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{escape(about)}</p><table><tr>{cells}</tr>{body}</table><ul>{told}</ul>{drawn}</html>\n"
    )
