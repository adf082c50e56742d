"""The file of a plan's pictures: `fp8plan plan ... --plot FILE`.

A .png has the pictures. A .html has them with tables, reasons and settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fp8plan.errors import Fp8PlanError
from fp8plan.model.setup import check_kv_scales
from fp8plan.model.targets import TARGETS
from fp8plan.views.page import as_svg, document, paragraphs, table, write_plot
from fp8plan.views.plan_pictures import picture
from fp8plan.views.report import MISMATCH_LEGEND, plan_text
from fp8plan.views.text import Column

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.plan.planner import Prediction


def page(prediction: Prediction, kv_scales: str = "unit", before: str = "") -> str:
    """The whole page as HTML.

    kv_scales: for its settings, as in `emit`
    before:    HTML that stands first
    """
    plan = prediction.plan
    text = plan_text(plan)
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in plan.reasons)
    settings = "".join(_settings(plan, target, kv_scales) for target in TARGETS)
    step = f"<h2>RL step</h2>{as_table(text.step, text.picked[0])}" if text.step else ""
    body = (
        f"{paragraphs(text.title[1:])}{paragraphs(plan.warnings, 'dim')}{before}"
        f"<h2>Speed</h2>{as_table(text.speed, text.picked[0])}{paragraphs([text.speed_legend], 'dim')}{step}"
        f"<h2>Mismatch</h2>{as_table(text.mismatch, text.picked[1])}{paragraphs([MISMATCH_LEGEND], 'dim')}"
        f"{paragraphs(text.absent)}<h2>Why {escape(plan.select().precision)}</h2><ul>{reasons}</ul>"
        f"{paragraphs([text.settings], 'dim')}<h2>Pictures</h2>{as_svg(picture(prediction))}"
        f"<h2>Settings</h2>{settings}"
    )
    return document(text.title[0], "", body)


def as_table(columns: Sequence[Column], bold: int | None = None) -> str:
    """The table of a terminal as HTML. bold: a row"""
    rows = list(zip(*(column.cells for column in columns), strict=True))
    kinds = "".join("l" if column.left else "r" for column in columns)
    return table([column.name for column in columns], rows, bold, kinds)


def _settings(plan: Plan, target: str, kv_scales: str) -> str:
    """The settings that `--emit` prints, or the reason why there are none."""
    try:
        text = plan.emit(target, kv_scales=kv_scales, python=True)
    except Fp8PlanError as error:
        return f"<details><summary>{target}: cannot have this plan</summary>{paragraphs([str(error)])}</details>"
    is_open = " open" if target == "vllm" else ""
    return f"<details{is_open}><summary>{target}</summary><pre>{escape(text)}</pre></details>"


def draw(prediction: Prediction, target: Path, kv_scales: str = "unit") -> None:
    """Write the picture. Raises as `write_plot` does."""
    check_kv_scales(kv_scales)
    write_plot(target, lambda: picture(prediction), lambda: page(prediction, kv_scales))
