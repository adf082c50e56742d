"""The pictures of a run's report, by plotly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fp8plan import schemas
from fp8plan.views.run import columns as runs
from fp8plan.views.run.columns import Event, Row

# Okabe and Ito's palette, as in fp8plan.views.plan.figure.
BLUE, ORANGE, GREEN, RED, SKY, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#000000"
MARKED: Final = 200  # lines through the panels
EVENT_COLOURS: Final = {"decision": SKY, "alarm": RED, "guard": ORANGE}
HEIGHT, TOP, BOTTOM = 240, 60, 60  # pixels of a panel, above the first and below the last
GAP: Final = 36  # pixels between two panels, where the lower one's legend is
FEW: Final = 60  # steps of which each is a point


class Trace(NamedTuple):
    """One curve. band: the metrics of the lower and the upper end of an area that goes with it."""

    name: str
    metric: str
    colour: str
    dash: str = "solid"
    band: tuple[str, str] | None = None
    step: bool = False  # holds until the next one


class Panel(NamedTuple):
    """One picture; all have the training step below them."""

    label: str
    traces: tuple[Trace, ...]
    log: bool = False
    form: str = ""

    @property
    def metrics(self) -> list[str]:
        return [x for trace in self.traces for x in (trace.metric, *(trace.band or ()))]


PERCENT: Final = ".5~p"  # 99.98% and 100% are told apart

PANELS: Final = (
    Panel("reward", (Trace("mean reward of the rollout", schemas.REWARD, BLACK),)),
    Panel(
        "KL k3 per token",
        (
            Trace("k3", schemas.K3, BLUE),
            Trace("k3, robust", schemas.K3_ROBUST, SKY),
            Trace("limit", schemas.KL_LIMIT, RED, "dash", step=True),
        ),
        log=True,
    ),
    Panel("TIS threshold C", (Trace("C", schemas.TIS, GREEN, step=True),)),
    Panel(
        "MIS band",
        (
            Trace("upper end", schemas.BAND_HIGH, GREEN, step=True),
            Trace("lower end", schemas.BAND_LOW, ORANGE, step=True),
        ),
    ),
    Panel(
        "effective sample size",
        (Trace("ESS of the weights", schemas.ESS, BLUE), Trace("raw ESS", schemas.ESS_RAW, ORANGE)),
        form=PERCENT,
    ),
    Panel(
        "clipped and lost",
        (
            Trace("tokens with a ratio above C", schemas.CLIP_FRACTION, BLUE),
            Trace("weight cut away", schemas.CLIPPED_MASS, RED),
            Trace("tokens lost", schemas.LOST_TOKENS, ORANGE),
        ),
        form=PERCENT,
    ),
    Panel(
        "response tokens/s",
        (Trace("achieved", schemas.TOKENS_PER_S, BLUE), Trace("predicted", schemas.PREDICTED, ORANGE, "dash")),
    ),
    Panel(
        "achieved / predicted",
        (
            Trace(
                "tokens/s over the prediction, with its 90% band",
                runs.SPEED,
                BLUE,
                band=(runs.SPEED_LOW, runs.SPEED_HIGH),
            ),
        ),
        form=PERCENT,
    ),
)


def figure(rows: Sequence[Row], found: Sequence[Event]) -> Any:
    """All panels that have something to show, one above the other, and the events as lines through them."""
    from plotly.subplots import make_subplots

    steps = [row["step"] for row in rows]
    data = runs.columns(rows, {x for panel in PANELS for x in panel.metrics} - runs.OF_PREDICTED.keys())
    shown = [p for p in PANELS if any(np.isfinite(data[trace.metric]).any() for trace in p.traces)]
    if not shown:
        shown = [PANELS[0]]
    space = GAP / HEIGHT / len(shown)
    made: Any = make_subplots(rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=space)
    for number, panel in enumerate(shown, 1):
        legend = "legend" if number == 1 else f"legend{number}"
        where = {"row": number, "col": 1}
        for trace in panel.traces:
            if np.isfinite(data[trace.metric]).any():
                _draw(made, steps, data, trace, legend, where)
        made.update_yaxes(title_text=panel.label, type="log" if panel.log else "linear", tickformat=panel.form, **where)
        if panel.log:
            made.update_yaxes(dtick=_log_ticks([data[x] for x in panel.metrics]), tickformat="~e", **where)
        top = made.layout[f"yaxis{number if number > 1 else ''}"].domain[1]
        place = {"orientation": "h", "x": 1, "xanchor": "right", "y": top, "yanchor": "bottom"}
        made.update_layout({legend: place | {"bgcolor": "rgba(0,0,0,0)"}})
    _mark(made, found)
    made.update_xaxes(title_text="training step", row=len(shown), col=1)
    if steps[-1] - steps[0] <= 10:
        made.update_xaxes(dtick=1)  # there is no half a step
    made.update_xaxes(showspikes=True, spikemode="across", spikethickness=1, spikedash="dot")
    made.update_layout(
        template="plotly_white",
        hovermode="x unified",
        height=HEIGHT * len(shown) + TOP + BOTTOM,
        margin={"t": TOP, "b": BOTTOM, "l": 90, "r": 20},
    )
    return made


def _draw(made: Any, steps: list[int], data: dict[str, Any], trace: Trace, legend: str, where: dict[str, int]) -> None:
    line = {"color": trace.colour, "dash": trace.dash, "width": 1.6, "shape": "hv" if trace.step else "linear"}
    if trace.band and all(np.isfinite(data[end]).any() for end in trace.band):
        edge = {"mode": "lines", "line": {"width": 0}, "legend": legend, "hoverinfo": "skip", "showlegend": False}
        edge |= {"connectgaps": True}  # where not every step has a rollout
        low, high = (_values(data[end]) for end in trace.band)
        made.add_scatter(x=steps, y=low, **edge, **where)
        made.add_scatter(x=steps, y=high, **edge | {"fill": "tonexty", "fillcolor": "rgba(230,159,0,0.18)"}, **where)
    values = data[trace.metric]
    mode = "lines+markers" if len(steps) <= FEW or _lonely(values) else "lines"
    style = {"mode": mode, "line": line, "marker": {"size": 4}}
    made.add_scatter(x=steps, y=_values(values), name=trace.name, legend=legend, **style, **where)


def _lonely(values: Any) -> bool:
    """Return True if any value stands alone between two gaps, where no line shows it."""
    known = np.concatenate([[False], np.isfinite(values), [False]])
    return bool((known[1:-1] & ~known[:-2] & ~known[2:]).any())


def _log_ticks(curves: Sequence[Any]) -> int | str:
    """Ticks at powers of 10; over less than two of them, at 2 and 5 times those too."""
    known = np.concatenate(curves)
    known = known[np.isfinite(known) & (known > 0)]
    return 1 if known.size and known.max() >= 100 * known.min() else "D2"


def _values(numbers: Any) -> list[float | None]:
    """Round to five digits: enough for a picture, and it keeps the page small."""
    return [float(f"{x:.5g}") if np.isfinite(x) else None for x in numbers.tolist()]


def _mark(made: Any, found: Sequence[Event]) -> None:
    """Alarms and actions of the guard as lines through all panels; decisions show in the thresholds themselves."""
    for event in [x for x in found if x.kind != "decision"][-MARKED:]:
        line = {"color": EVENT_COLOURS[event.kind], "width": 1.5, "dash": "dot"}
        made.add_vline(x=event.step, line=line, opacity=0.7, layer="below")


def by_position(rows: Sequence[Row]) -> Any:
    """Picture of k3 by position in the response, early and late in the run: does the mismatch grow along it?

    None if no record has it, or if all responses are too short to tell.
    """
    from plotly.graph_objects import Figure

    known = [row for row in rows if _spans(row)]
    if len({span["first"] for row in known for span in _spans(row)}) < 2:
        return None
    tenth = max(1, len(known) // 10)
    parts = [("first", known[:tenth], SKY), ("last", known[-tenth:], BLUE)][len(known) == 1 :]
    made = Figure()
    for name, some, colour in parts:
        x, y = _profile(some)
        shown = f"{name} {len(some):,} steps" if len(some) > 1 else f"step {some[0]['step']:,}"
        made.add_scatter(x=x, y=y, name=shown, mode="lines+markers", line={"color": colour})
    made.update_xaxes(title_text="position in the response, tokens", type="log", dtick="D2", tickformat=",")
    made.update_yaxes(title_text="KL k3 per token", rangemode="tozero", exponentformat="power")
    place = {"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"}
    margin = {"t": TOP, "b": BOTTOM, "l": 90, "r": 20}
    made.update_layout(template="plotly_white", height=340, legend=place, margin=margin, hovermode="x unified")
    return made


def _spans(row: Row) -> list[dict[str, Any]]:
    """Spans that have tokens and a known k3: for an infinite one, the record has null."""
    return [x for x in row.get("profile") or () if x["tokens"] > 0 and x.get("k3") is not None]


def _profile(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """First token of each bin (1 in the place of 0), and the mean k3 in it, weighted by tokens."""
    sums: dict[int, list[float]] = {}
    for span in (span for row in rows for span in _spans(row)):
        total = sums.setdefault(span["first"], [0.0, 0.0])
        total[0] += span["tokens"]
        total[1] += span["tokens"] * span["k3"]
    firsts = sorted(sums)
    return [float(max(x, 1)) for x in firsts], [sums[x][1] / sums[x][0] for x in firsts]
