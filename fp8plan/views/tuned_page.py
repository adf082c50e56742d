"""The file of `fp8plan tune ... --plot FILE`: a waterfall from before the search to the physical limit.

A .png has the waterfall. A .html has it with the levers, before the page of the plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fp8plan.model.plan.choice import seconds
from fp8plan.model.setup import check_kv_scales
from fp8plan.views.page import as_svg, paragraphs, write_plot
from fp8plan.views.plan_page import as_table, page
from fp8plan.views.plan_pictures import title
from fp8plan.views.run_plots import BLUE, GREEN, RED
from fp8plan.views.tuned import LEGEND, choice, columns, words

if TYPE_CHECKING:
    from fp8plan.model.plan.planner import Prediction
    from fp8plan.model.tune.answer import Answer, Level, Waterfall

GREY: Final = "#999999"
WIDTH, ROW, ROOM = 9.0, 0.42, 1.5  # inches
MARGIN: Final = 1.2  # end of the axis / the longest bar, for the text beside it


class Bar(NamedTuple):
    """One bar, from the first to the second number of seconds. doubt: the ends of its interval, if it has one"""

    name: str
    begin: float
    end: float
    colour: str
    text: str
    doubt: tuple[float, float] | None = None


def bars(fall: Waterfall) -> list[Bar]:
    """The bars from top to bottom. Green ones save time, red ones cost some, and no lever changes the grey ones."""
    drawn = [_whole(fall.before, BLUE)]
    for start, steps, end in ((fall.before, fall.changes, fall.tuned), (fall.tuned, fall.beyond, fall.limit)):
        at, beyond = start.seconds, end is fall.limit
        for level in steps:
            change = level.seconds - at
            colour = GREEN if change <= 0 else RED
            if beyond:
                colour = GREY
            text = f"{'-' if change <= 0 else '+'}{seconds(abs(change))} s ({change / start.seconds:+.0%})"
            drawn.append(Bar(level.name, at, level.seconds, colour, text))
            at = level.seconds
        drawn.append(_whole(end, GREY if beyond else BLUE))
    return drawn


def _whole(level: Level, colour: str) -> Bar:
    doubt = None if level.low is None or level.high is None else (level.low, level.high)
    return Bar(level.name, 0.0, level.seconds, colour, f"{seconds(level.seconds)} s", doubt)


def picture(prediction: Prediction, fall: Waterfall) -> Any:
    """The waterfall as a figure of matplotlib. Raises ImportError without it."""
    from matplotlib.figure import Figure

    drawn = bars(fall)
    figure: Any = Figure(figsize=(WIDTH, ROW * len(drawn) + ROOM), layout="constrained")
    axis = figure.subplots()
    rows = range(len(drawn))
    axis.barh(
        rows,
        [bar.end - bar.begin for bar in drawn],
        left=[bar.begin for bar in drawn],
        color=[bar.colour for bar in drawn],
        height=0.7,
    )
    for row, bar in enumerate(drawn):
        if bar.doubt is not None:
            axis.hlines(row, *bar.doubt, color="black", linewidth=1.2)
        place = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axis.annotate(bar.text, (_right(bar), row), **place)
    for row, bar in enumerate(drawn[:-1]):
        axis.plot([bar.end, bar.end], [row + 0.35, row + 0.65], color="0.6", linewidth=0.8)
    alone = f"longest response alone: {seconds(fall.longest_alone_s)} s"
    axis.axvline(fall.longest_alone_s, color="black", linestyle=":", linewidth=1.2, label=alone)
    axis.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1))
    axis.set_yticks(rows, [bar.name for bar in drawn])
    axis.invert_yaxis()
    axis.set_xlim(0, MARGIN * max(map(_right, drawn)))
    axis.set_xlabel("seconds of the rollout, predicted; lines on blue bars: 90% intervals")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, axis="x")
    axis.set_axisbelow(True)
    figure.suptitle("\n".join(_title(prediction)), x=0.01, ha="left", fontsize=10, parse_math=False)
    return figure


def _right(bar: Bar) -> float:
    return max(bar.begin, bar.end, *(bar.doubt or ()))


def _title(prediction: Prediction) -> list[str]:
    first, _ = title(prediction.plan)
    return [first, f"predicted, not measured: {prediction.plan.profile['kind']} profile"]


def draw(prediction: Prediction, target: Path, kv_scales: str = "unit", *, answer: Answer) -> None:
    """Write the picture or the page. Raises as `write_plot` does."""
    check_kv_scales(kv_scales)
    write_plot(
        target,
        lambda: picture(prediction, answer.waterfall),
        lambda: page(prediction, kv_scales, before=_section(prediction, answer)),
    )


def _section(prediction: Prediction, answer: Answer) -> str:
    levers = answer.levers
    settings = [line for setting, programs in words(levers).items() for line in (setting, *programs)]
    return (
        f"{paragraphs(choice(prediction.plan, answer))}"
        f"<h2>Levers</h2>{as_table(columns(levers))}{paragraphs([LEGEND], 'dim')}"
        f"{paragraphs(answer.sentences)}{paragraphs(settings, 'dim')}"
        f"<h2>To the physical limit</h2>{as_svg(picture(prediction, answer.waterfall))}"
    )
