"""The file of a plan's pictures: `fp8plan plan ... --plot FILE`.

A .png has the pictures by matplotlib. A .html has them by plotly, with tables, reasons and settings.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from math import log10
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.model.cost.base import FloatArray
from fp8plan.model.setup import check_kv_scales
from fp8plan.model.shards import TARGETS
from fp8plan.views import plan_pictures as plots
from fp8plan.views.axes import number_axis, share_axis
from fp8plan.views.page import document, figures, paragraphs, table, write_plot
from fp8plan.views.plan_pictures import LIMIT_COLOURS, Point, colour_of, write_png
from fp8plan.views.report import MISMATCH_LEGEND, plan_text
from fp8plan.views.text import Column

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.plan.planner import Prediction

HEIGHT: Final = 250  # pixels of a panel over time
SHADE: Final = 0.13  # opacity of a band


def page(prediction: Prediction, kv_scales: str = "unit", before: str = "") -> str:
    """The whole page as HTML.

    kv_scales: for its settings, as in `emit`
    before:    HTML that stands first, with plotly's program; empty: nothing does
    """
    plan = prediction.plan
    text = plan_text(plan)
    drawn = figures([over_time(prediction), tradeoff(plan)], program=not before)
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in plan.reasons)
    settings = "".join(_settings(plan, target, kv_scales) for target in TARGETS)
    step = f"<h2>RL step</h2>{as_table(text.step, text.picked[0])}" if text.step else ""
    body = (
        f"{paragraphs(text.title[1:])}{paragraphs(plan.warnings, 'dim')}{before}"
        f"<h2>Speed</h2>{as_table(text.speed, text.picked[0])}{paragraphs([text.speed_legend], 'dim')}{step}"
        f"<h2>Mismatch</h2>{as_table(text.mismatch, text.picked[1])}{paragraphs([MISMATCH_LEGEND], 'dim')}"
        f"{paragraphs(text.absent)}<h2>Why {escape(plan.select().precision)}</h2><ul>{reasons}</ul>"
        f"{paragraphs([text.settings], 'dim')}<h2>Pictures</h2>{paragraphs(plots.title(plan)[1:], 'dim')}{drawn}"
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
    is_open = " open" if target == TARGETS[0] else ""
    return f"<details{is_open}><summary>{target}</summary><pre>{escape(text)}</pre></details>"


def over_time(prediction: Prediction) -> Any:
    """Panels over time, one below the other, as a plotly figure."""
    from plotly.subplots import make_subplots

    lines = plots.curves(prediction)
    shown = plots.panels(lines)
    figure: Any = make_subplots(rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=0.05)
    for number, (column, label) in enumerate(shown, 1):
        where, heights = {"row": number, "col": 1}, list[FloatArray]()
        for line in lines:
            colour, edge = colour_of(line.precision), {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
            group = {"legendgroup": line.name}
            times, low, high = plots.band(line, column)
            heights.append(high)
            figure.add_scatter(x=_short(times), y=_short(low), showlegend=False, **group, **edge, **where)
            fill = {"fill": "tonexty", "fillcolor": _shade(colour)}
            figure.add_scatter(x=_short(times), y=_short(high), showlegend=False, **fill, **group, **edge, **where)
            x, y = (_short(values) for values in plots.closed(line, column))
            style = {"mode": "lines", "line": {"color": colour}, "name": line.name, "showlegend": number == 1}
            figure.add_scatter(x=x, y=y, **style, **group, **where)
        kind = share_axis if column == "occupancy" else number_axis
        figure.update_yaxes(title_text=label, **kind([np.zeros(1), *heights]), **where)
    figure.update_xaxes(title_text=plots.TIME_LABEL, row=len(shown), col=1)
    figure.update_layout(
        template="plotly_white",
        hovermode="x unified",
        height=HEIGHT * len(shown) + 60,
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"},
        margin={"t": 60, "l": 90, "r": 20},
    )
    return figure


def tradeoff(plan: Plan) -> Any:
    """Speed against KL, as a plotly figure."""
    from plotly.graph_objects import Figure

    figure, drawn, several = Figure(), plots.points(plan), plan.several_layouts
    best = plots.front(drawn)
    style = {"mode": "lines", "line": {"color": "#999", "dash": "dash", "width": 1.5}, "hoverinfo": "skip"}
    figure.add_scatter(x=[p.kl[0] for p in best], y=[p.speed[0] for p in best], name="Pareto front", **style)
    for point in drawn:
        _add_point(figure, point, several)
    for level, limit in plots.risk_limits(plan).items():
        figure.add_vline(x=limit, line={"color": LIMIT_COLOURS[level], "dash": "dot", "width": 2})
        place = {"x": log10(limit), "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
        figure.add_annotation(text=plots.limit_label(level), font={"color": LIMIT_COLOURS[level], "size": 11}, **place)
    figure.update_xaxes(
        title_text=plots.KL_LABEL, type="log", dtick=1, exponentformat="power", minor={"showgrid": True}
    )
    figure.update_yaxes(title_text=plots.SPEED_LABEL, tickformat=",")
    figure.update_layout(
        title={"text": "<br>".join(textwrap.wrap(plots.tradeoff_title(plan), 120)), "font": {"size": 13}},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "title": {"text": plots.SPEEDUP_LABEL + "  "}},
        template="plotly_white",
        height=500,
        margin={"t": 100, "l": 90, "r": 90},
    )
    return figure


def _add_point(figure: Any, point: Point, several: bool) -> None:
    (kl, kl_low, kl_high), (speed, low, high), colour = point.kl, point.speed, colour_of(point.precision)
    across = {"type": "data", "symmetric": False, "array": [kl_high - kl], "arrayminus": [kl - kl_low]}
    along = {"type": "data", "symmetric": False, "array": [high - speed], "arrayminus": [speed - low]}
    ring = {"line": {"color": colour, "width": 2}, "symbol": "circle-open-dot", "size": 16} if point.chosen else {}
    figure.add_scatter(
        x=[kl],
        y=[speed],
        error_x=across if point.main else None,  # the other choices have the same KL
        error_y=along,
        mode="markers+text" if several else "markers",
        text=[point.layout],
        textposition="top right",
        marker={"color": colour, "size": 10 if point.main else 5} | ring,
        opacity=1.0 if point.main else 0.55,
        name=plots.label(point, several),
        legendgroup=point.precision,
        showlegend=point.main,
        hovertemplate=f"{plots.label(point, True)}<br>KL %{{x:.2e}}<br>%{{y:,.0f}} tokens/s<extra></extra>",
    )


def _shade(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{SHADE})"


def _short(values: Any) -> list[float]:
    """Round to five digits: enough for a picture, and it keeps the page small."""
    return [float(f"{x:.5g}") for x in values.tolist()]


def plot(prediction: Prediction, path: str | Path, kv_scales: str = "unit") -> None:
    """Write the picture. kv_scales: for the settings on the page, as in `emit`

    Raises ConfigError for another suffix, a file that cannot be written, or a plotting package that is not installed.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise ConfigError(f"cannot plot to {target}: there is no folder {target.parent}")
    try:
        draw(prediction, target, kv_scales)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot write {target}: {reason}; give a file that can be written") from None


def draw(prediction: Prediction, target: Path, kv_scales: str = "unit") -> None:
    """Write the picture. Raises as `write_plot` does."""
    check_kv_scales(kv_scales)
    write_plot(target, lambda: write_png(prediction, target), lambda: page(prediction, kv_scales))
