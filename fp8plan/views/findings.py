"""Text of a probe's findings, for people.

Text of a doctor's findings, for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8plan.runtime.doctor.observed import State
from fp8plan.runtime.probe.results import Interval
from fp8plan.views.report import power
from fp8plan.views.text import Column, Fitted, Paragraph, counted

if TYPE_CHECKING:
    from fp8plan.runtime.doctor.doctor import Diagnosis
    from fp8plan.runtime.probe.results import Probe, Probed

LEGEND = (
    "KL k3, k1: nats per token, with 90% intervals (sequences resampled). floor: times the KL of bf16, which is what "
    "kernels that add in another order leave. above 2: tokens that token TIS at C = 2 cuts. enough: tokens for +-10% "
    "of KL k3. expected: by fp8plan's model of mismatch, with its 90% band."
)


def probe_report(found: Probe) -> RenderableType:
    """A row for each precision that was measured, and why the others were not."""
    rows = [one for one in found.precisions.values() if one.figures is not None]
    failed = [one for one in found.precisions.values() if one.error is not None]
    scales = {str((one.facts or {}).get("kv_scales")) for one in rows} - {"None"}
    about = (
        f"{counted(found.prompts, 'prompt')} x {counted(found.settings.samples, 'sample')} of at most "
        f"{found.settings.max_tokens} tokens, temperature {found.settings.temperature:g}, seed {found.settings.seed}"
    )
    table: list[RenderableType] = [Fitted(_columns(rows)), Paragraph(LEGEND, style="dim")] if rows else []
    return Group(
        Paragraph(f"{found.model} on {found.gpu}: vLLM {found.engine_version} against {found.reference}"),
        Paragraph(about + (f"; KV scales: {', '.join(sorted(scales))}" if scales else "")),
        "",
        *table,
        *(Paragraph(f"Not measured: {one.precision}: {one.error}", indent=2) for one in failed),
        *(
            Paragraph(f"{one.precision}: {one.invalid:,} log-probs are not finite", style="red")
            for one in rows
            if one.invalid
        ),
    )


def _columns(rows: list[Probed]) -> list[Column]:
    figures = [one.figures or {} for one in rows]
    floor = next((one.kl_k3.value for one in rows if one.precision == "bf16"), None)
    return [
        Column("precision", [one.precision for one in rows], left=True),
        Column("KL k3 (90%)", [_spread(one["kl_k3"]) for one in figures]),
        Column("floor", [f"{one['kl_k3'].value / floor:.1f}x" if floor else "-" for one in figures], rank=4),
        Column("k1", [power(one["k1"].value) for one in figures], rank=6),
        Column(
            "raw ESS (90%)",
            [f"{e.value:.4f} ({e.low:.4f}-{e.high:.4f})" for e in (f["ess_raw"] for f in figures)],
            rank=2,
        ),
        Column("above 2", [_share(one["ratio_above_2"]) for one in figures], rank=3),
        Column("tokens", [f"{one.tokens:,}" for one in rows], rank=1),
        Column("enough", [f"{one.tokens_needed:,}" if one.tokens_needed else "-" for one in rows], rank=5),
        Column("expected (90%)", ["-" if one.predicted is None else _spread(one.predicted) for one in rows], rank=7),
    ]


def _spread(found: Interval) -> str:
    return f"{power(found.value)} ({power(found.low)} to {power(found.high)})"


def _share(found: Interval) -> str:
    return f"{found.value:.2%}" if found.value else f"< {found.high:.2%}"


STYLES: Final = {State.OK: "green", State.WARNING: "yellow", State.FAULT: "red", State.UNKNOWN: "dim"}


def doctor_report(found: Diagnosis) -> RenderableType:
    """A row for each finding, and what to type for each fault and warning."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for header in ("check", "state", "what runs"):
        table.add_column(header, overflow="fold", no_wrap=header != "what runs")
    for one in found.findings:
        table.add_row(one.check, Text(one.state.value, STYLES[one.state]), Text(one.says))
    return Group(Paragraph(found.target), "", table, "", *_todo(found))


def _todo(found: Diagnosis) -> Iterator[RenderableType]:
    for one in (*found.faults, *found.warnings):
        yield Paragraph(f"{one.fault}: type {one.todo}", indent=2)
    unseen = [one for one in found.findings if one.state == State.UNKNOWN]
    if not found.faults:
        counts = ((found.warnings, "warnings"), (unseen, "checks could not be made"))
        yield Paragraph(f"{'; '.join(['No fault', *(f'{len(some)} {what}' for some, what in counts if some)])}.")
    for todo in dict.fromkeys(one.todo for one in unseen if one.todo):
        yield Paragraph(f"To see more: {todo}", indent=2, style="dim")
