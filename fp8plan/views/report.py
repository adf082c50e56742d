"""The report of a plan: the contents of its tables, and the lines around them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType

from fp8plan.model.plan.choice import SpeedUp, power, seconds
from fp8plan.model.rollout import TAIL_SHARE
from fp8plan.views.text import Column, Fitted, Paragraph, best_rows, counted, short

if TYPE_CHECKING:
    from fp8plan.model.plan.choice import Choice
    from fp8plan.model.plan.plan import Plan

# The bound is COUNTED_TIS of fp8plan.model.risk.expected.
MISMATCH_LEGEND = (
    "KL k3: mean per token, with its 90% band. clipped: tokens that token TIS at C = 2 cuts. risk: by the unfavourable "
    "ends of the bands, which the reasons below name."
)
TURN_LEGEND = (
    "prefix hits: of the tokens of prompts. computed again: tokens in full blocks of earlier turns that the cache has "
    "not. tools: time in which the slowest replica is idle, because all its trajectories wait for tools. limit: what "
    "would save most of the time, and how much: tools that answer at once, an endless cache, or no tail; compute, if "
    "none of them saves a tenth."
)


class PlanText(NamedTuple):
    """The text on a plan, for a terminal or a page."""

    title: list[str]
    speed: list[Column]  # a row for each choice that can run and is shown
    more: list[str]  # a line on the choices that are not shown
    speed_legend: str
    step: list[Column]  # likewise; empty if the RL step's times are not known
    mismatch: list[Column]  # a row for each precision
    absent: list[str]
    settings: str
    picked: tuple[int, int]  # the chosen choice's rows in `speed` and `mismatch`


def plan_text(plan: Plan, every: bool = True) -> PlanText:
    """The text on the speed of the choices, the risk of each precision, and the choices that cannot run.

    every: the speed of every choice; else of the chosen one, of the BF16 that speed-ups are over, and of the fastest
    """
    able, picked = [c for c in plan.choices if c.available], plan.select()
    base = None if plan.baseline is None else plan.choices[plan.baseline]
    rows, more = best_rows(able, lambda c: (c is not picked, c is not base, c.seconds), every)
    several = plan.several_layouts
    # A mismatch depends on the layout only through the linears that stay in BF16. The chosen layout's is shown.
    known = {c.precision: c for c in sorted(able, key=lambda c: c.layout == picked.layout)}
    precisions = [known[name] for name in dict.fromkeys(c.precision for c in able)]
    names = [c.precision for c in precisions]
    return PlanText(
        title=_title(plan, several),
        speed=_speed_columns(rows, picked, several),
        more=more,
        speed_legend=_speed_legend(rows, several, plan.baseline_label),
        step=_step_columns(rows, picked, several) if picked.rl_step_s is not None else [],
        mismatch=_mismatch_columns(precisions, picked, able),
        absent=_absent(plan.choices, several),
        settings=_settings(plan),
        picked=(rows.index(picked), names.index(picked.precision)),
    )


def plan_report(plan: Plan, every: bool = False) -> RenderableType:
    """The tables, the choices that cannot run, and the reasons for the chosen one. every: as in `plan_text`"""
    text = plan_text(plan, every)
    step: list[RenderableType] = ["", "RL step", Fitted(text.step, bold=text.picked[0])] if text.step else []
    return Group(
        *(Paragraph(line) for line in text.title),
        "",
        Fitted(text.speed, bold=text.picked[0]),
        *(Paragraph(line) for line in text.more),
        Paragraph(text.speed_legend, style="dim"),
        *step,
        "",
        Fitted(text.mismatch, bold=text.picked[1]),
        Paragraph(MISMATCH_LEGEND, style="dim"),
        "",
        *(Paragraph(line) for line in text.absent),
        *(Paragraph("- " + reason, indent=2) for reason in plan.reasons),
        Paragraph(text.settings, style="dim"),
    )


def _title(plan: Plan, several: bool) -> list[str]:
    work, picked = plan.workload, plan.select()
    gpus = picked.tensor_parallel * picked.data_parallel
    layout = "every TP x DP layout" if several else _replicas(picked)
    where = f"{gpus} x {plan.gpu} ({layout})" if gpus > 1 else plan.gpu
    limit, longest = work["max_response_tokens"], work.get("longest_response_tokens")
    spread = f"longest {longest:,} of at most {limit:,}" if longest is not None else f"at most {limit:,}"
    if "turns" in work:
        spread = f"longest {longest:,}, with those of tools {limit:,}"
    upto = "" if work.get("prompt_lengths", {}).get("kind") == "fixed" else "up to "
    responses = f"{work['response_tokens']:,} response tokens: mean {work['mean_response_tokens']:,.0f}, {spread}"
    batch = f"{counted(work['prompts'], 'prompt')} x {counted(work['samples'], 'sample')}"
    return [f"{plan.model} on {where}", f"{batch}; prompts of {upto}{work['max_prompt_tokens']:,} tokens; {responses}"]


def _replicas(choice: Choice) -> str:
    count, replica = choice.data_parallel, choice.replica_label
    return f"1 replica, {replica}" if count == 1 else f"{count} replicas, {replica}"


def _settings(plan: Plan) -> str:
    limits = plan.limits
    return (
        f"profile: {plan.profile['kind']}, vLLM {plan.profile['engine_version']}; gpu_memory_utilization "
        f"{limits.gpu_memory_utilization:g}, max_num_seqs {limits.max_num_seqs}, max_num_batched_tokens "
        f"{limits.max_num_batched_tokens}; seed {plan.seed}"
    )


def _marked(rows: Sequence[Choice], picked: Choice) -> Column:
    return Column("precision", [("> " if c is picked else "  ") + c.precision for c in rows], left=True)


def _compared(rows: Sequence[Choice], picked: Choice, several: bool) -> list[Column]:
    layouts = [Column("TPxDP", [c.layout_label for c in rows])] if several else []
    return [_marked(rows, picked), *layouts]


def _speed_columns(rows: Sequence[Choice], picked: Choice, several: bool) -> list[Column]:
    replicas = any(c.data_parallel > 1 for c in rows)
    return [
        *_compared(rows, picked, several),
        Column("rollout s\n(90%)", [_spread(c.makespan_s, c.makespan_low_s, c.makespan_high_s) for c in rows]),
        *_gains([c.best_gain for c in rows]),
        *_on_same_layout(rows, several),
        Column("tokens\n/s", [f"{c.output_tokens_per_s:,.0f}" for c in rows], rank=4),
        Column("KV tok./\nreplica" if replicas else "KV\ntok.", [short(c.kv_cache_tokens) for c in rows], rank=1),
        Column("pre-\nemp-\ntions", [f"{c.preemptions:,}" for c in rows], rank=2),
        Column("tail", [f"{c.tail_fraction:.0%}" for c in rows], rank=3),
        *(_turn_columns([c.turns for c in rows if c.turns]) if picked.turns else []),
    ]


def _turn_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns on trajectories with several turns. rows: `turns` of each choice"""
    return [
        Column("prefix\nhits", [f"{turns['hit_share']:.1%}" for turns in rows]),
        Column("com-\nputed\nagain", [short(turns["again_tokens"]) for turns in rows], rank=5),
        Column("tools", [f"{turns['tool_share']:.0%}" for turns in rows], rank=6),
        Column("limit", [_limit(turns) for turns in rows], rank=7, left=True),
    ]


def _limit(turns: Mapping[str, Any]) -> str:
    limit = turns["limit"]
    return limit if limit == "compute" else f"{limit} {turns['saves'][limit]:.0%}"


def _step_columns(rows: Sequence[Choice], picked: Choice, several: bool) -> list[Column]:
    return [
        *_compared(rows, picked, several),
        Column("step s\n(90%)", [_spread(c.rl_step_s, *c.rl_step_band_s) for c in rows]),
        *_gains([c.best_step_gain for c in rows]),
    ]


def _spread(value: float | None, low: float | None, high: float | None) -> str:
    return f"{seconds(value)} ({seconds(low)}-{seconds(high)})"


def _gains(gains: Sequence[SpeedUp | None]) -> list[Column]:
    """The column of speed-ups; none if no row has one, as without BF16."""
    cells = ["-" if gain is None else gain.cell for gain in gains]
    return [Column("speed-up\n(90%)", cells)] if any(gains) else []


def _on_same_layout(rows: Sequence[Choice], several: bool) -> list[Column]:
    """The column of speed-ups over bf16 on each row's own layout, without their intervals."""
    if not (several and any(c.speedup_over_best is not None for c in rows)):
        return []
    cells = ["-" if c.gain is None else f"{c.gain.ratio:.2f}x" for c in rows]
    return [Column("same\nlay-\nout", cells, rank=5)]


def _mismatch_columns(rows: Sequence[Choice], picked: Choice, able: Sequence[Choice]) -> list[Column]:
    """able: all choices that can run, of which some have remedies"""
    remedies = {c.precision: c.remedy.remedies.options for c in able if c.remedy is not None}
    chosen = next(c for c in rows if c.precision == picked.precision)
    bands = [f"({power(c.kl_k3_low)} to {power(c.kl_k3_high)})" for c in rows]
    columns = [
        _marked(rows, chosen),
        Column("KL k3 (90%)", [f"{power(c.kl_k3)} {band}" for c, band in zip(rows, bands, strict=True)]),
        Column("clipped", [_percent(c.clip_fraction) for c in rows], rank=1),
        Column("raw\nESS", [f"{c.ess_raw:.2f}" for c in rows], rank=2),
        Column("risk", [c.risk or "" for c in rows], left=True),
    ]
    if remedies:
        columns.append(Column("allowed with", [remedies.get(c.precision, "") for c in rows], rank=3, left=True))
    return columns


def _speed_legend(rows: Sequence[Choice], several: bool, baseline: str) -> str:
    same = " same layout: over bf16 on it." if baseline and several else ""
    bf16 = "bf16 on the same layout" if several else "bf16"
    replicas = " preemptions: in all replicas." if any(c.data_parallel > 1 for c in rows) else ""
    tail = f"tail: time in which nothing waits and under {TAIL_SHARE:.0%} of the requests run."
    whole = " EP: expert parallelism." if several and any(c.expert_parallel for c in rows) else ""
    doubt = " Where its interval holds 1.00, a row may be no faster." if any(_in_doubt(c) for c in rows) else ""
    over = f"speed-up: over {baseline or bf16}.{same}{doubt}" if any(c.best_gain for c in rows) else ""
    turns = TURN_LEGEND if any(c.turns for c in rows) else ""
    return f"{over}{replicas}{whole} {tail} {turns}".strip()


def _in_doubt(choice: Choice) -> bool:
    return any(gain is not None and gain.in_doubt for gain in (choice.best_gain, choice.best_step_gain))


def _absent(choices: Sequence[Choice], several: bool) -> list[str]:
    """The choices that cannot run, each reason once.

    Reasons that differ only in their numbers count as one. The one for the largest tensor_parallel_size is given, as
    that is nearest to fitting.
    """
    groups: dict[str, list[Choice]] = {}
    for choice in choices:
        if choice.reason is not None:
            kind = choice.reason.replace(choice.precision, "").partition(":")[0]
            groups.setdefault(re.sub(r"\d[\d.,]*", "#", kind), []).append(choice)
    sentences = []
    for members in groups.values():
        nearest = max(members, key=lambda c: c.tensor_parallel)
        example = "for instance, " if len({c.reason for c in members}) > 1 else ""
        sentences.append(f"Not available: {_named(members, several)}: {example}{nearest.reason}")
    return sentences


def _named(members: Sequence[Choice], several: bool) -> str:
    """Choices in words, such as "bf16, fp8_kv (TP 1, 2); fp8_block (TP 1)"."""
    sizes: dict[str, list[str]] = {}
    for choice in members:
        sizes.setdefault(choice.precision, []).append(choice.replica_label.removeprefix("TP "))
    if not several:
        return ", ".join(sizes)
    alike: dict[str, list[str]] = {}
    for precision, at in sizes.items():
        alike.setdefault(", ".join(at), []).append(precision)
    return "; ".join(f"{', '.join(names)} (TP {at})" for at, names in alike.items())


def _percent(share: float | None) -> str:
    assert share is not None
    if 0 < share < 1e-4:
        return "<0.01%"
    if 0.995 <= share < 1:
        return ">99%"
    return f"{share:.2%}" if share < 0.01 else f"{share:.0%}"
