"""The picture of a plan as a file of pixels, by matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8plan.views.axes import decimals
from fp8plan.views.plan import figure as plots
from fp8plan.views.plan.figure import LIMIT_COLOURS, Curve, Point, colour_of

if TYPE_CHECKING:
    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.plan.planner import Prediction

WIDTH, PANEL, TRADEOFF = 9.0, 2.3, 4.6  # inches


def write_png(prediction: Prediction, path: Path) -> None:
    """Panels over time, and speed against KL below. Raises ImportError without matplotlib, OSError as writing does."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = plots.curves(prediction)
    shown = plots.panels(lines)
    figure = pyplot.figure(figsize=(WIDTH, PANEL * len(shown) + TRADEOFF), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[PANEL * len(shown), TRADEOFF])
    heading = [part for line in plots.title(prediction.plan) for part in textwrap.wrap(line, 115)]
    above.suptitle("\n".join(heading), x=0.01, ha="left", fontsize=10)
    _over_time(above.subplots(len(shown), 1, sharex=True), lines, shown)
    _tradeoff(below.subplots(), prediction.plan)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _over_time(axes: Sequence[Any], lines: Sequence[Curve], shown: Sequence[tuple[str, str]]) -> None:
    from matplotlib.ticker import PercentFormatter

    for axis, (column, label) in zip(axes, shown, strict=True):
        for line in lines:
            colour = colour_of(line.precision)
            times, low, high = plots.band(line, column)
            axis.fill_between(times, low, high, color=colour, alpha=0.13, linewidth=0)
            axis.plot(*plots.closed(line, column), color=colour, label=line.name, linewidth=1.6)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        _number_ticks(axis)
        _tidy(axis)
    axes[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[0].legend(frameon=False, ncols=2, fontsize=9)
    axes[-1].set_xlabel(plots.TIME_LABEL)
    axes[-1].set_xlim(left=0)


def _number_ticks(axis: Any) -> None:
    """Ticks that differ, on the axis as it is."""
    from matplotlib.ticker import StrMethodFormatter

    bottom, top = axis.get_ylim()
    axis.yaxis.set_major_formatter(StrMethodFormatter(f"{{x:,.{decimals(top - bottom)}f}}"))


def _tradeoff(axis: Any, plan: Plan) -> None:
    found, several = plots.points(plan), plan.several_layouts
    best = plots.front(found)
    axis.plot([x.kl[0] for x in best], [x.speed[0] for x in best], "--", color="0.55", linewidth=1.2, zorder=1)
    for point in found:
        _point(axis, point, several)
    for level, limit in plots.risk_limits(plan).items():
        axis.axvline(limit, color=LIMIT_COLOURS[level], linestyle=":", linewidth=1.6)
        axis.annotate(
            plots.limit_label(level),
            (limit, 1),
            xytext=(0, 2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=LIMIT_COLOURS[level],
        )
    axis.set_xscale("log")
    axis.set_xlabel(plots.KL_LABEL)
    axis.set_ylabel(plots.SPEED_LABEL)
    _number_ticks(axis)
    axis.set_title("\n".join(textwrap.wrap(plots.tradeoff_title(plan), 115)), loc="left", fontsize=10, pad=18)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}
    axis.legend(title=plots.SPEEDUP_LABEL, title_fontsize=9, frameon=False, ncols=2, fontsize=9, **place)
    _tidy(axis)


def _point(axis: Any, point: Point, several: bool) -> None:
    """The best layout of a precision with both intervals; the others, which have the same KL, small beside it."""
    (kl, kl_low, kl_high), (speed, low, high), colour = point.kl, point.speed, colour_of(point.precision)
    style = {"fmt": "o", "color": colour, "capsize": 3}
    across = {"xerr": [[kl - kl_low], [kl_high - kl]]} if point.main else {}
    axis.errorbar(
        kl,
        speed,
        yerr=[[speed - low], [high - speed]],
        **across,
        **style,
        alpha=1.0 if point.main else 0.45,
        markersize=7 if point.main else 4,
        elinewidth=1.3 if point.main else 0.8,
        label=plots.label(point, several) if point.main else None,
    )
    if point.chosen:
        axis.plot(kl, speed, "o", markersize=15, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.6)
    if several:
        place = {"xytext": (10 if point.main else 6, 4), "textcoords": "offset points"}
        axis.annotate(point.layout, (kl, speed), **place, fontsize=8 if point.main else 7, color=colour)


def _tidy(axis: Any) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
