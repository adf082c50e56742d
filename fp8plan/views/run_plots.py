"""The pictures of a run's report, by plotly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from textwrap import wrap
from typing import Any, Final, NamedTuple

import numpy as np

from fp8plan import schemas
from fp8plan.model.cost.base import FloatArray
from fp8plan.runtime.watch.monitor.steps import Steps
from fp8plan.views import run_columns
from fp8plan.views.axes import log_axis, number_axis, share_axis, thinned
from fp8plan.views.run_columns import Event

# Okabe and Ito's palette, as in fp8plan.views.plan_pictures.
BLUE, ORANGE, GREEN, RED, SKY, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#000000"
MARKED: Final = 200  # most lines through the panels
EVENT_COLOURS: Final = {"decision": SKY, "alarm": RED, "guard": ORANGE}
HEIGHT, TOP, BOTTOM = 240, 60, 60  # pixels of a panel, above the first and below the last
GAP: Final = 36  # pixels between two panels, with the lower one's legend
FILL: Final = "rgba(230,159,0,0.18)"  # colour of a band
WRAPPED: Final = 80  # characters in a line of a reason


class Trace(NamedTuple):
    """One curve. band: the metrics of the lower and the upper end of its area"""

    name: str
    metric: str
    colour: str
    dash: str = "solid"
    band: tuple[str, str] | None = None
    step: bool = False  # a value holds until the next one
    reasons: bool = False  # the pointer shows the reason of each step's decision


class Panel(NamedTuple):
    """One picture; all have the training step below them."""

    label: str
    traces: tuple[Trace, ...]
    axis: Callable[[Sequence[FloatArray]], dict[str, Any]] = number_axis

    @property
    def metrics(self) -> list[str]:
        return [x for trace in self.traces for x in (trace.metric, *(trace.band or ()))]


_BAND: Final = (run_columns.SPEED_LOW, run_columns.SPEED_HIGH)
_RATIO: Final = Trace("tokens/s over the prediction, with its 90% band", run_columns.SPEED, BLUE, band=_BAND)
PANELS: Final = (
    Panel("reward", (Trace("mean reward of the rollout", schemas.REWARD, BLACK),)),
    Panel(
        "KL k3 per token",
        (
            Trace("k3", schemas.K3, BLUE),
            Trace("k3, robust", schemas.K3_ROBUST, SKY),
            Trace("baseline of the news", schemas.BASELINE, BLACK, "dot", step=True),
            Trace("limit", schemas.KL_LIMIT, RED, "dash", step=True),
        ),
        axis=log_axis,
    ),
    Panel(
        "news",
        (Trace("KL over its baseline", schemas.NEWS, ORANGE),),
        axis=lambda x: log_axis(x) | {"tickformat": "~g"},
    ),
    Panel("TIS threshold C", (Trace("C", schemas.TIS, GREEN, step=True, reasons=True),)),
    Panel(
        "MIS band",
        (
            Trace("upper end", schemas.BAND_HIGH, GREEN, step=True, reasons=True),
            Trace("lower end", schemas.BAND_LOW, ORANGE, step=True),
        ),
    ),
    Panel(
        "effective sample size",
        (Trace("ESS of the weights", schemas.ESS, BLUE), Trace("raw ESS", schemas.ESS_RAW, ORANGE)),
        axis=share_axis,
    ),
    Panel(
        "clipped and lost",
        (
            Trace("tokens with a ratio above C", schemas.CLIP_FRACTION, BLUE),
            Trace("weight cut away", schemas.CLIPPED_MASS, RED),
            Trace("tokens lost", schemas.LOST_TOKENS, ORANGE),
        ),
        axis=share_axis,
    ),
    Panel(
        "response tokens/s",
        (Trace("achieved", schemas.TOKENS_PER_S, BLUE), Trace("predicted", schemas.PREDICTED, ORANGE, "dash")),
    ),
    Panel("achieved / predicted", (_RATIO,), axis=lambda curves: share_axis(curves, high=np.inf)),
)


def figure(steps: Steps, events: Sequence[Event]) -> Any:
    """All panels with data, one above the other, and the events as lines through them."""
    from plotly.subplots import make_subplots

    numbers = np.array(steps.numbers)
    reasons = ["<br>".join(wrap(escape(f"{said.decision}: {said.reason or ''}"), WRAPPED)) for said in steps.said]
    data = run_columns.columns(
        steps, {name for panel in PANELS for name in panel.metrics} - run_columns.OF_PREDICTED.keys()
    )
    shown = [p for p in PANELS if any(np.isfinite(data[trace.metric]).any() for trace in p.traces)] or [PANELS[0]]
    space = GAP / HEIGHT / len(shown)
    made: Any = make_subplots(rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=space)
    for number, panel in enumerate(shown, 1):
        legend = "legend" if number == 1 else f"legend{number}"
        where = {"row": number, "col": 1}
        for trace in panel.traces:
            if np.isfinite(data[trace.metric]).any():
                words = reasons if trace.reasons else None
                _draw(made, numbers, data, trace, legend, where, words)
        made.update_yaxes(title_text=panel.label, **panel.axis([data[name] for name in panel.metrics]), **where)
        top = made.layout[f"yaxis{number if number > 1 else ''}"].domain[1]
        place = {"orientation": "h", "x": 1, "xanchor": "right", "y": top, "yanchor": "bottom"}
        made.update_layout({legend: place | {"bgcolor": "rgba(0,0,0,0)"}})
    made.update_xaxes(title_text="training step", row=len(shown), col=1)
    made.update_xaxes(tickformat=",")
    if numbers[-1] - numbers[0] <= 10:
        made.update_xaxes(dtick=1)  # there is no half a step
    made.update_xaxes(showspikes=True, spikemode="across", spikethickness=1, spikedash="dot")
    made.update_layout(
        template="plotly_white",
        hovermode="x unified",
        height=HEIGHT * len(shown) + TOP + BOTTOM,
        margin={"t": TOP, "b": BOTTOM, "l": 90, "r": 20},
        shapes=_marks(events, len(shown)),
    )
    return made


def _draw(
    made: Any,
    numbers: Any,
    data: dict[str, FloatArray],
    trace: Trace,
    legend: str,
    where: dict[str, int],
    words: Sequence[str] | None,
) -> None:
    """words: a text for each step, which the pointer shows; None: the value alone"""
    line = {"color": trace.colour, "dash": trace.dash, "width": 1.6, "shape": "hv" if trace.step else "linear"}
    if trace.band and all(np.isfinite(data[end]).any() for end in trace.band):
        edge = {"mode": "lines", "line": {"width": 0}, "legend": legend, "hoverinfo": "skip", "showlegend": False}
        edge |= {"connectgaps": True}  # as not every step has a rollout
        low, high = (data[end] for end in trace.band)
        kept = np.union1d(thinned(low), thinned(high))
        edge["x"] = numbers[kept]
        made.add_scatter(y=low[kept], **edge, **where)
        made.add_scatter(y=high[kept], **edge | {"fill": "tonexty", "fillcolor": FILL}, **where)
    kept = thinned(data[trace.metric])
    # Markers show a value between two gaps, where there is no line.
    style: dict[str, Any] = {"mode": "lines+markers", "line": line, "marker": {"size": 3}}
    if words is not None:
        style |= {"text": [words[at] for at in kept], "hovertemplate": "%{y}<br>%{text}"}
    made.add_scatter(x=numbers[kept], y=data[trace.metric][kept], name=trace.name, legend=legend, **style, **where)


def _marks(events: Sequence[Event], panels: int) -> list[dict[str, Any]]:
    """Draw alarms and actions of the guard as lines through all panels. Decisions show in the thresholds."""
    marked = [event for event in events if event.kind != "decision"][-MARKED:]
    lines = {kind: {"color": colour, "width": 1.5, "dash": "dot"} for kind, colour in EVENT_COLOURS.items()}
    shape = {"type": "line", "y0": 0, "y1": 1, "opacity": 0.7, "layer": "below"}
    return [
        shape | {"x0": event.step, "x1": event.step, "line": lines[event.kind], "xref": f"x{n}", "yref": f"y{n} domain"}
        for n in ("", *range(2, panels + 1))
        for event in marked
    ]


def by_position(steps: Steps) -> Any:
    """A picture of k3 by position in the response, early and late in the run.

    None if no record has it, or if all responses are too short.
    """
    from plotly.graph_objects import Figure

    spans = np.array(steps.spans).reshape(-1, 3)
    if np.unique(spans[:, 0]).size < 2:
        return None
    ends = np.array(steps.ends)
    counts = np.diff(ends, prepend=0)
    known = np.flatnonzero(counts)  # steps that have spans
    tenth = max(1, known.size // 10)
    early, late = spans[: ends[known[tenth - 1]]], spans[ends[known[-tenth]] - counts[known[-tenth]] :]
    parts = [("first", early, SKY), ("last", late, BLUE)][known.size == 1 :]
    made, curves = Figure(), []
    for name, some, colour in parts:
        x, y = _profile(some)
        shown = f"{name} {tenth:,} steps"
        if tenth == 1:
            shown = f"step {steps.numbers[known[0 if name == 'first' else -1]]}"
        made.add_scatter(x=x, y=y, name=shown, mode="lines+markers", line={"color": colour})
        curves.append(y)
    made.update_xaxes(title_text="position in the response, tokens", type="log", dtick="D2", tickformat=",")
    made.update_yaxes(title_text="KL k3 per token", **number_axis([*curves, np.zeros(1)]) | {"tickformat": "~e"})
    place = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"}
    margin = {"t": TOP, "b": BOTTOM, "l": 90, "r": 20}
    made.update_layout(template="plotly_white", height=340, legend=place, margin=margin, hovermode="x unified")
    return made


def _profile(spans: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The first token of each bin (1 for 0), and the bin's mean k3, weighted by tokens."""
    firsts, place = np.unique(spans[:, 0], return_inverse=True)
    tokens = np.bincount(place, spans[:, 1])
    return np.maximum(firsts, 1.0), np.bincount(place, spans[:, 1] * spans[:, 2]) / tokens
