"""Text of a doctor's findings, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fp8plan.runtime.doctor.finding import State
from fp8plan.views.tables import Paragraph

if TYPE_CHECKING:
    from fp8plan.runtime.doctor.doctor import Diagnosis

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
