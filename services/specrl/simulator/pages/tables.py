"""Renders results and advice as tables and sentences, in Markdown and as one self-contained HTML page.

Called by `specrl simulate` and `specrl plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from specrl.simulator.costs.memory import GIB
from specrl.simulator.pipeline import PHASES
from specrl.simulator.scenarios.scenario import Scenario
from specrl.simulator.search import LayoutAdvice
from specrl.simulator.simulate import SimulationResult

STYLE = (
    "body{font:15px sans-serif;max-width:60em;margin:2em auto;color:#222}td,th{padding:2px 14px 2px 0;text-align:left}"
)

Table = list[Sequence[str]]


def phase_table(outcome: SimulationResult) -> Table:
    """Return the seconds by phase, without and with speculation, like table 1 of arXiv:2604.26779."""
    plain = outcome.plain
    mine = outcome.speculative
    names = {"generation": "generation (exposed)"}
    return [
        ("phase", "without speculation, s", "with, s"),
        *((names.get(it, it), f"{plain.phases_s[it]:.3g}", f"{mine.phases_s[it]:.3g}") for it in PHASES),
        ("step", f"{plain.step_s:.4g}", f"{mine.step_s:.4g}"),
        ("one step's rollouts alone", f"{plain.batch_s:.4g}", f"{mine.batch_s:.4g}"),
        ("replicas busy", f"{plain.busy_share:.0%}", f"{mine.busy_share:.0%}"),
    ]


def result_sentences(outcome: SimulationResult) -> list[str]:
    """Return everything else about the result, one sentence each."""
    scenario = outcome.scenario
    memory = outcome.memory
    layout = scenario.layout
    found = [
        f"speed-up by speculation: rollouts {outcome.rollout_speedup:.2f}x, step {outcome.step_speedup:.2f}x",
        f"{layout.replica_count} replicas of {layout.gpus_per_replica} GPUs, {layout.training_gpus} GPUs for training, "
        f"policy lag at most {outcome.speculative.policy_lag_max}",
        f"{outcome.run_steps} steps: {outcome.gpu_hours:.3g} GPU-hours"
        + (f", {outcome.cost_usd:,.0f} USD" if outcome.cost_usd is not None else ""),
    ]
    if memory is not None:
        found.append(
            f"memory of a generation GPU: weights {memory.weights / GIB:.1f} GiB, "
            f"drafter {memory.drafter / GIB:.1f} GiB, sampler {memory.sampler / GIB:.1f} GiB, "
            f"KV cache {memory.kv_cache / GIB:.1f} GiB; a replica's KV cache holds {memory.max_live} rollouts "
            "of mean length"
        )
    return found + [f"note: {warning}" for warning in outcome.warnings]


def advice_table(advice: LayoutAdvice) -> Table:
    """Return today's layout beside the recommended one."""
    rows: Table = [("", "today", "recommended")]
    now = advice.today.scenario
    best = advice.best.scenario
    k_now = "by live batch" if now.speculation.is_adaptive else str(now.speculation.k)
    told = ", ".join(f"{k} for {low} to {high} live rollouts" for low, high, k in advice.draft_lengths)
    rows.append(("draft length k", "none" if now.speculation.mechanism == "none" else k_now, told))
    rows.append(("generate : train", _format_split(now), _format_split(best)))
    rows.append(("replicas x tensor parallel", _format_width(now), _format_width(best)))
    rows.append(("maxPolicyLag", str(now.schedule.max_policy_lag), str(best.schedule.max_policy_lag)))
    rows.append(("step, s", f"{advice.today.means.step_s:.4g}", f"{advice.best.means.step_s:.4g}"))
    if advice.capture_tokens is not None:
        rows.append(("query tokens for CUDA graphs", str(now.engine.capture_tokens), str(advice.capture_tokens)))
    return rows


def _format_split(scenario: Scenario) -> str:
    layout = scenario.layout
    return "all GPUs do both" if layout.colocated else f"{layout.generation_gpus} : {layout.training_gpus}"


def _format_width(scenario: Scenario) -> str:
    return f"{scenario.layout.replica_count} x {scenario.layout.tensor_parallel}"


def advice_sentences(advice: LayoutAdvice) -> list[str]:
    """Return the gain with its uncertainty, the bottleneck that is left, and how many layouts were tried."""
    shares = ", ".join(f"{phase} {share:.0%}" for phase, share in advice.shares.items())
    return [
        f"{advice.gain:.2f}x today's speed (p10 {advice.gain_low:.2f}, p90 {advice.gain_high:.2f})",
        f"bottleneck of the recommended layout: {advice.bottleneck}; shares of a step: {shares}",
        f"{advice.layouts_tried} layouts tried; {advice.layouts_impossible} of them are impossible",
        *(f"note: {warning}" for warning in advice.warnings),
    ]


def render_markdown(title: str, about: str, table: Table, sentences: Sequence[str], figures: Sequence[str] = ()) -> str:
    """Render a page as Markdown. figures: names of image files in the same folder."""
    head, *rows = table
    lines = [f"# {title}", "", about, ""] if about else [f"# {title}", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows), ""]
    lines += [f"- {sentence}" for sentence in sentences]
    lines += ["", *(f"![]({name})" for name in figures)] if figures else []
    return "\n".join(lines) + "\n"


def render_html(title: str, about: str, table: Table, sentences: Sequence[str], figures: Sequence[str] = ()) -> str:
    """Render the same page as one HTML file. figures: SVG text, which the page contains."""
    head, *rows = table
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    told = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    drawn = "".join(f"<p>{figure}</p>" for figure in figures)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
        f"<h1>{escape(title)}</h1><p>{escape(about)}</p><table><tr>{cells}</tr>{body}</table><ul>{told}</ul>{drawn}</html>\n"
    )
