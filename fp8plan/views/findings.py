"""The findings of a probe and of a doctor as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8plan.model.plan.choice import power
from fp8plan.model.risk.remedies import BF16, NO_REMEDIES
from fp8plan.runtime.apply.doctor.observed import State
from fp8plan.runtime.measure.probe.results import Interval
from fp8plan.views.text import Column, Fitted, Paragraph, counted

if TYPE_CHECKING:
    from fp8plan.runtime.apply.doctor.doctor import Diagnosis
    from fp8plan.runtime.measure.probe.results import Probe, Probed

LEGEND = (
    "KL k3, k1: nats per token, with 90% intervals (sequences resampled). floor: times the KL of bf16, which is from "
    "kernels that add in another order. trainer: precision of its linears. replay: the trainer uses the engine's "
    "experts. kept: first and last layers in BF16. other experts: tokens for which the trainer's routers pick others. "
    "above 2: tokens that token TIS at C = 2 cuts. enough: tokens for +-10% of KL k3. expected: by fp8plan's model of "
    "mismatch, with its 90% band."
)


def probe_report(probe: Probe) -> RenderableType:
    """A row for each precision that was measured, and why the others were not."""
    rows = [row for row in probe.findings if row.figures is not None]
    failed = dict.fromkeys(f"{row.precision}: {row.error}" for row in probe.findings if row.error is not None)
    synced = {
        row.precision: f"{facts['bytes'] / 1e6:,.3g} MB, residual {facts['residual']:.1e}"
        for row in rows
        if (facts := (row.facts or {}).get("synced"))
    }
    scales = {str((row.facts or {}).get("kv_scales")) for row in rows} - {"None"}
    about = (
        f"{counted(probe.prompts, 'prompt')} x {counted(probe.settings.samples, 'sample')} of at most "
        f"{probe.settings.max_tokens} tokens, temperature {probe.settings.temperature:g}, seed {probe.settings.seed}"
    )
    table: list[RenderableType] = [Fitted(_columns(rows)), Paragraph(LEGEND, style="dim")] if rows else []
    return Group(
        Paragraph(f"{probe.model} on {probe.gpu}: vLLM {probe.engine_version} against {probe.reference}"),
        Paragraph(about + (f"; KV scales: {', '.join(sorted(scales))}" if scales else "")),
        *(Paragraph(f"synced to {probe.settings.after}, {name}: {text}") for name, text in synced.items()),
        "",
        *table,
        *(Paragraph(f"Not measured: {text}", indent=2) for text in failed),
        *(Paragraph(f"{r.precision}: {r.invalid:,} log-probs are not finite", style="red") for r in rows if r.invalid),
    )


def _columns(rows: list[Probed]) -> list[Column]:
    figures = [row.figures or {} for row in rows]
    floor = next((row.kl_k3.value for row in rows if row.precision == "bf16" and row.remedies == NO_REMEDIES), None)
    ess = [f["ess_raw"] for f in figures]
    return [
        Column("precision", [row.precision for row in rows], left=True),
        *_remedies(rows),
        Column("KL k3 (90%)", [_spread(f["kl_k3"]) for f in figures]),
        Column("floor", [f"{f['kl_k3'].value / floor:.1f}x" if floor else "-" for f in figures], rank=4),
        Column("k1", [power(f["k1"].value) for f in figures], rank=6),
        Column("raw ESS (90%)", [f"{e.value:.4f} ({e.low:.4f}-{e.high:.4f})" for e in ess], rank=2),
        Column("above 2", [_share(f["ratio_above_2"]) for f in figures], rank=3),
        Column("tokens", [f"{row.tokens:,}" for row in rows], rank=1),
        Column("enough", [f"{row.tokens_needed:,}" if row.tokens_needed else "-" for row in rows], rank=5),
        Column("expected (90%)", ["-" if row.predicted is None else _spread(row.predicted) for row in rows], rank=7),
    ]


def _remedies(rows: list[Probed]) -> list[Column]:
    columns = []
    if any(row.remedies.trainer_precision != BF16 for row in rows):
        columns.append(Column("trainer", [row.remedies.trainer_precision for row in rows], left=True))
    if any(row.remedies.router_replay for row in rows):
        columns.append(Column("replay", ["yes" if row.remedies.router_replay else "no" for row in rows], left=True))
    if any(any(row.remedies.keep_bf16) for row in rows):
        columns.append(Column("kept", [",".join(map(str, row.remedies.keep_bf16)) for row in rows], left=True))
    if any(row.experts_differ is not None for row in rows):
        shares = ["-" if row.experts_differ is None else f"{row.experts_differ:.1%}" for row in rows]
        columns.append(Column("other experts", shares, rank=5))
    return columns


def _spread(interval: Interval) -> str:
    return f"{power(interval.value)} ({power(interval.low)} to {power(interval.high)})"


def _share(interval: Interval) -> str:
    return f"{interval.value:.2%}" if interval.value else f"< {interval.high:.2%}"


STYLES: Final = {State.OK: "green", State.WARNING: "yellow", State.FAULT: "red", State.UNKNOWN: "dim"}


def doctor_report(diagnosis: Diagnosis) -> RenderableType:
    """A row for each finding, and the command to type for each fault and warning."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for header in ("check", "state", "what runs"):
        table.add_column(header, overflow="fold", no_wrap=header != "what runs")
    for finding in diagnosis.findings:
        table.add_row(finding.check, Text(finding.state.value, STYLES[finding.state]), Text(finding.says))
    return Group(Paragraph(diagnosis.target), "", table, "", *_todo(diagnosis))


def _todo(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    for finding in (*diagnosis.faults, *diagnosis.warnings):
        yield Paragraph(f"{finding.fault}: type {finding.todo}", indent=2)
    unseen = [finding for finding in diagnosis.findings if finding.state == State.UNKNOWN]
    if not diagnosis.faults:
        parts = ["No fault"]
        if unseen:
            made = counted(len(diagnosis.findings) - len(unseen), "check")
            parts = [f"No fault in {made}; {len(unseen)} could not be made"]
        if diagnosis.warnings:
            parts.append(counted(len(diagnosis.warnings), "warning"))
        yield Paragraph(f"{'; '.join(parts)}.")
    for todo in dict.fromkeys(finding.todo for finding in unseen if finding.todo):
        yield Paragraph(f"To see more: {todo}", indent=2, style="dim")
