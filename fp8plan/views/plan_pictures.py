"""The pictures of a plan: the rollout over time, and speed against mismatch. Their data, and their drawing by
matplotlib.

Each line over time is one precision. At every moment, its band spans the values at all paces within the 90% interval of
the makespan.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp8plan.model.cost.base import FloatArray
from fp8plan.model.plan.choice import seconds
from fp8plan.model.precision import find_precision
from fp8plan.model.rollout import Timeline
from fp8plan.views.axes import decimals
from fp8plan.views.text import counted

if TYPE_CHECKING:
    from fp8plan.model.plan.choice import SpeedUp
    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.plan.planner import Prediction

# Okabe and Ito's palette, told apart with any colour vision; one colour per precision, always the same.
COLOURS = {"bf16": "#000000", "fp8_block": "#0072B2", "fp8_kv": "#E69F00", "fp8_block+fp8_kv": "#009E73"}
LIMIT_COLOURS = {"low": "#56B4E9", "moderate": "#D55E00"}  # from the same palette: the ends of the levels of risk
BINS = 160
PACES = 25  # between both ends of an interval
WIDTH, PANEL, TRADEOFF = 9.0, 2.3, 4.6  # inches


def colour_of(precision: str) -> str:
    """The colour of a precision. An FP8 checkpoint, with its one format of weights, has that of FP8 in blocks."""
    known = find_precision(precision)
    return COLOURS[precision if precision in COLOURS else precision.replace(known.weights, "fp8_block")]


class Curve(NamedTuple):
    """One choice over time, all arrays of shape (BINS,)."""

    name: str
    precision: str
    seconds: FloatArray  # middle of each bin
    tokens_per_s: FloatArray
    occupancy: FloatArray  # share of the KV pool in use
    running: FloatArray
    waiting: FloatArray  # not admitted yet, or preempted
    paces: tuple[float, float] = (1.0, 1.0)  # lower and upper end of the 90% interval / makespan


class Point(NamedTuple):
    """The KL and the speed of one choice, with 90% intervals: (value, low, high)."""

    precision: str
    layout: str  # TPxDP
    kl: tuple[float, float, float]  # nats per token
    speed: tuple[float, float, float]  # output tokens/s of all replicas
    gain: SpeedUp | None  # over the plan's baseline
    chosen: bool
    main: bool  # the choice of its precision that `curves` draws over time
    on_front: bool  # no other choice is as safe and faster, or as fast and safer


def curves(prediction: Prediction) -> list[Curve]:
    """The chosen choice and the fastest one of each other precision, each by its slowest replica."""
    choices, chosen = prediction.plan.choices, prediction.plan.select()
    several, lines = prediction.plan.several_layouts, []
    for index in _drawn(prediction.plan):
        choice, candidate = choices[index], prediction.tried[index]
        rollout, memory = candidate.rollout, candidate.memory
        if rollout is not None and memory is not None:
            mark = ", chosen" if choice is chosen else ""
            where = f", {choice.replica_label} x DP {choice.data_parallel}" if several else ""
            name = f"{choice.precision} ({seconds(choice.makespan_s)} s{where}){mark}"
            paces = rollout.makespan_low_s / rollout.makespan_s, rollout.makespan_high_s / rollout.makespan_s
            lines.append(Curve(name, choice.precision, *binned(rollout.timeline, memory.usable_blocks, BINS), paces))
    return lines


def _drawn(plan: Plan) -> list[int]:
    best: dict[str, int] = {}
    for index, choice in enumerate(plan.choices):
        if choice.makespan_s is not None:
            other = plan.choices[best.get(choice.precision, index)].makespan_s
            if choice.precision not in best or (other is not None and choice.makespan_s < other):
                best[choice.precision] = index
    return list((best | {plan.select().precision: plan.chosen}).values())


def closed(curve: Curve, column: str) -> tuple[FloatArray, FloatArray]:
    """Seconds and values of a column, from the first moment to the end, where the value is 0."""
    values, width = getattr(curve, column), curve.seconds[1] - curve.seconds[0]
    end = curve.seconds[-1] + width / 2
    times = np.concatenate([[0.0], curve.seconds, [end, end]])
    return times, np.concatenate([values[:1], values, values[-1:], [0.0]])


def band(curve: Curve, column: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(seconds, lowest, highest) of a column at every pace within the interval, each of shape (2 BINS,)."""
    own_times, values = closed(curve, column)
    paces = np.linspace(*curve.paces, PACES)
    times = np.linspace(0, own_times[-1] * paces[-1], 2 * BINS)
    own = times / paces[:, None]  # the same moment at each pace, in the curve's own time
    at = np.where(own <= own_times[-1] * (1 + 1e-9), np.interp(own, own_times[:-1], values[:-1]), 0.0)
    if column == "tokens_per_s":
        at = at / paces[:, None]
    return times, at.min(axis=0), at.max(axis=0)


def points(plan: Plan) -> list[Point]:
    """Every available choice, on every layout."""
    drawn, every = _drawn(plan), list[Point]()
    for index, choice in enumerate(plan.choices):
        if not choice.available:
            continue
        tokens: Any = plan.workload["response_tokens"]
        times: Any = choice.makespan_s, choice.makespan_high_s, choice.makespan_low_s
        kl: Any = choice.kl_k3, choice.kl_k3_low, choice.kl_k3_high
        speed, low, high = (tokens / time for time in times)
        name, chosen, main = (choice.precision, choice.layout_label), index == plan.chosen, index in drawn
        every.append(Point(*name, kl, (speed, low, high), choice.best_gain, chosen, main, on_front=False))
    return [point._replace(on_front=not any(_beats(other, point) for other in every)) for point in every]


def _beats(point: Point, other: Point) -> bool:
    safe, fast = point.kl[0] - other.kl[0], other.speed[0] - point.speed[0]
    return safe <= 0 and fast <= 0 and (safe < 0 or fast < 0)


def front(every: Sequence[Point]) -> list[Point]:
    """The Pareto front, the safest first."""
    return sorted((point for point in every if point.on_front), key=lambda point: point.kl[0])


def binned(line: Timeline, pool: int, bins: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
    """The columns of a Curve from `seconds` to `waiting`, at the middle of equal time bins. A row's tokens are spread
    evenly over its time, so their sum is kept.
    """
    edges = np.linspace(0, line.seconds[-1], bins + 1)
    made = np.interp(edges, np.append(0.0, line.seconds), np.append(0.0, np.cumsum(line.output_tokens)))
    middle = (edges[:-1] + edges[1:]) / 2
    row = np.minimum(np.searchsorted(line.seconds, middle), len(line.seconds) - 1)
    used = np.interp(middle, line.seconds, line.used_blocks)  # `used_blocks` holds at the end of a row, and grows in it
    running, waiting = (counts[row].astype(np.float64) for counts in (line.decode_requests, line.waiting))
    return middle, np.diff(made) / np.diff(edges), used / pool, running, waiting


def title(plan: Plan) -> list[str]:
    """Lines of the title: the rollout, and the part of it that is drawn."""
    work, chosen = plan.workload, plan.select()
    layout = ""
    if plan.several_layouts:
        count = len({c.layout for c in plan.choices})
        layout = f"; each precision on its fastest of {count} layouts, the chosen one as chosen; slowest replica"
    elif chosen.data_parallel > 1:
        layout = f"; slowest of {chosen.data_parallel} replicas, {chosen.replica_label}"
    elif chosen.tensor_parallel > 1:
        layout = f"; {chosen.replica_label}"
    batch = f"{counted(work['prompts'], 'prompt')} x {counted(work['samples'], 'sample')}"
    return [
        f"{plan.model} on {plan.gpu}: {batch}, responses of at most {work['max_response_tokens']:,} tokens",
        f"predicted, not measured: {plan.profile['kind']} profile; bands: 90% intervals{layout}",
    ]


def panels(lines: Sequence[Curve]) -> list[tuple[str, str]]:
    """Field of Curve -> label. Waiting requests get a panel where there are any."""
    shown = [("tokens_per_s", "output tokens/s"), ("occupancy", "KV pool in use"), ("running", "running requests")]
    return [*shown, ("waiting", "waiting requests")] if any(line.waiting.any() for line in lines) else shown


def label(point: Point, several: bool) -> str:
    """The label of a choice, such as "fp8_block 2x4, 1.31x (1.12-1.53), chosen"."""
    name = f"{point.precision} {point.layout}" if several else point.precision
    gain = [] if point.gain is None or point.precision == "bf16" else [point.gain.cell]
    return ", ".join([name, *gain, *(["chosen"] if point.chosen else [])])


def picture(prediction: Prediction) -> Any:
    """Panels over time, and speed against KL below, as a figure of matplotlib. Raises ImportError without it."""
    from matplotlib.figure import Figure

    lines = curves(prediction)
    shown = panels(lines)
    figure: Any = Figure(figsize=(WIDTH, PANEL * len(shown) + TRADEOFF), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[PANEL * len(shown), TRADEOFF])
    heading = [part for line in title(prediction.plan) for part in textwrap.wrap(line, 115)]
    above.suptitle("\n".join(heading), x=0.01, ha="left", fontsize=10, parse_math=False)
    _over_time(above.subplots(len(shown), 1, sharex=True), lines, shown)
    _tradeoff(below.subplots(), prediction.plan)
    return figure


def _over_time(axes: Sequence[Any], lines: Sequence[Curve], shown: Sequence[tuple[str, str]]) -> None:
    from matplotlib.ticker import PercentFormatter

    for axis, (column, label) in zip(axes, shown, strict=True):
        for line in lines:
            colour = colour_of(line.precision)
            times, low, high = band(line, column)
            axis.fill_between(times, low, high, color=colour, alpha=0.13, linewidth=0)
            axis.plot(*closed(line, column), color=colour, label=line.name, linewidth=1.6)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        _number_ticks(axis)
        _tidy(axis)
    axes[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[0].legend(frameon=False, ncols=2, fontsize=9)
    axes[-1].set_xlabel("seconds since the rollout began")
    axes[-1].set_xlim(left=0)


def _number_ticks(axis: Any) -> None:
    """Give an axis ticks that differ, in its present range."""
    from matplotlib.ticker import StrMethodFormatter

    bottom, top = axis.get_ylim()
    axis.yaxis.set_major_formatter(StrMethodFormatter(f"{{x:,.{decimals(top - bottom)}f}}"))


def _tradeoff(axis: Any, plan: Plan) -> None:
    every, several = points(plan), plan.several_layouts
    best = front(every)
    axis.plot([p.kl[0] for p in best], [p.speed[0] for p in best], "--", color="0.55", linewidth=1.2, zorder=1)
    for point in every:
        _point(axis, point, several)
    above: dict[str, Any] = {"xytext": (0, 2), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    # A limit holds for the upper end of a choice's interval.
    for level, limit in (("low", plan.budget.low_kl), ("moderate", plan.budget.moderate_kl)):
        colour = LIMIT_COLOURS[level]
        axis.axvline(limit, color=colour, linestyle=":", linewidth=1.6)
        axis.annotate(f"KL limit of {level} risk", (limit, 1), **above, ha="center", fontsize=8, color=colour)
    axis.set_xscale("log")
    axis.set_xlabel("KL k3, nats per token (lower is safer)")
    axis.set_ylabel("output tokens/s (higher is faster)")
    _number_ticks(axis)
    heading = (
        f"speed against mismatch: every choice with its 90% intervals{', marked TPxDP' if several else ''}; dashed: "
        "the Pareto front; a KL limit holds for the right end of an interval, and risk has other limits, too"
    )
    axis.set_title("\n".join(textwrap.wrap(heading, 115)), loc="left", fontsize=10, pad=18)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}
    legend = "with the speed-up (90%) over the best bf16"
    axis.legend(title=legend, title_fontsize=9, frameon=False, ncols=2, fontsize=9, **place)
    _tidy(axis)


def _point(axis: Any, point: Point, several: bool) -> None:
    """Draw the best layout of a precision with both intervals, and its other layouts, of the same KL, as small dots."""
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
        label=label(point, several) if point.main else None,
    )
    if point.chosen:
        axis.plot(kl, speed, "o", markersize=15, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.6)
    if several:
        place = {"xytext": (10 if point.main else 6, 4), "textcoords": "offset points"}
        axis.annotate(point.layout, (kl, speed), **place, fontsize=8 if point.main else 7, color=colour)


def _tidy(axis: Any) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
