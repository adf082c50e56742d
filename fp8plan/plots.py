"""Pictures of a plan: tokens per second, KV occupancy and requests over time, one line per precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp8plan.errors import ConfigError
from fp8plan.model.arrays import FloatArray
from fp8plan.model.explain import seconds
from fp8plan.model.rollout import Timeline

if TYPE_CHECKING:
    from fp8plan.model.plan import Plan
    from fp8plan.model.planner import Prediction

# Okabe and Ito's palette, told apart with any colour vision; one colour per precision, always the same.
COLOURS = {"bf16": "#000000", "fp8_block": "#0072B2", "fp8_kv": "#E69F00", "fp8_block+fp8_kv": "#009E73"}
BINS = 160


class Curve(NamedTuple):
    """One precision over time, all arrays of shape (BINS,)."""

    name: str
    precision: str
    seconds: FloatArray  # middle of each bin
    tokens_per_s: FloatArray
    occupancy: FloatArray  # share of the KV pool in use
    running: FloatArray
    waiting: FloatArray  # not admitted yet, or preempted


def plot(prediction: Prediction, path: str | Path) -> None:
    """Write the picture: .png by matplotlib, .html by plotly.

    Raises ConfigError for another suffix, a file that cannot be written, or a plotting package that is not installed.
    """
    target = Path(path)
    writers = {".png": _png, ".html": _html}
    if target.suffix not in writers:
        raise ConfigError(f"cannot plot to {target}; allowed: a name that ends in .png or .html")
    if not target.parent.is_dir():
        raise ConfigError(f"cannot plot to {target}: there is no folder {target.parent}")
    try:
        writers[target.suffix](curves(prediction), title(prediction.plan), target)
    except ImportError as error:
        raise ConfigError(f"plotting needs {error.name}; type: pip install 'fp8plan[report]'") from None
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; give a file that can be written") from None


def curves(prediction: Prediction) -> list[Curve]:
    """The available choices on the chosen layout, each by its slowest replica."""
    choices = prediction.plan.choices
    chosen = choices[prediction.plan.chosen]
    found = []
    for choice, rollout, pool in zip(choices, prediction.rollouts, prediction.pools, strict=True):
        same_layout = choice.tensor_parallel == chosen.tensor_parallel
        if rollout is not None and pool is not None and same_layout:
            mark = ", chosen" if choice is chosen else ""
            name = f"{choice.precision} ({seconds(choice.makespan_s)} s){mark}"
            found.append(Curve(name, choice.precision, *binned(rollout.timeline, pool, BINS)))
    return found


def binned(line: Timeline, pool: int, bins: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
    """(seconds, output tokens/s, share of the pool in use, running requests, waiting requests) at the middle of equal
    time bins. Tokens are spread evenly over the row that makes them, so their sum is kept."""
    edges = np.linspace(0, line.seconds[-1], bins + 1)
    made = np.interp(
        edges, np.concatenate([[0.0], line.seconds]), np.concatenate([[0.0], np.cumsum(line.output_tokens)])
    )
    middle = (edges[:-1] + edges[1:]) / 2
    row = np.minimum(np.searchsorted(line.seconds, middle), len(line.seconds) - 1)
    used = np.interp(middle, line.seconds, line.used_blocks)  # `used_blocks` holds at the end of a row, and grows in it
    running, waiting = (counts[row].astype(np.float64) for counts in (line.decode_requests, line.waiting))
    return middle, np.diff(made) / np.diff(edges), used / pool, running, waiting


def title(plan: Plan) -> list[str]:
    """Lines: what is rolled out on what, and what kind of numbers these are."""
    work, chosen = plan.workload, plan.select()
    layout = ""
    if chosen.data_parallel > 1:
        layout = f"; slowest of {chosen.data_parallel} replicas, TP {chosen.tensor_parallel}"
    elif chosen.tensor_parallel > 1:
        layout = f"; TP {chosen.tensor_parallel}"
    batch = f"{work['prompts']:,} prompts x {work['samples']:,} samples"
    return [
        f"{plan.model} on {plan.gpu}: {batch}, responses of at most {work['max_response_tokens']:,} tokens",
        f"predicted, not measured: {plan.profile['kind']} profile{layout}",
    ]


def panels(lines: Sequence[Curve]) -> list[tuple[str, str]]:
    """Field of Curve -> label. Waiting requests get a panel where there are any."""
    shown = [("tokens_per_s", "output tokens/s"), ("occupancy", "KV pool in use"), ("running", "running requests")]
    return [*shown, ("waiting", "waiting requests")] if any(line.waiting.any() for line in lines) else shown


def _png(lines: Sequence[Curve], heading: Sequence[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    shown = panels(lines)
    figure, axes = pyplot.subplots(len(shown), 1, sharex=True, figsize=(9, 2.5 * len(shown)), layout="constrained")
    for axis, (column, label) in zip(axes, shown, strict=True):
        for line in lines:
            axis.plot(
                line.seconds, getattr(line, column), color=COLOURS[line.precision], label=line.name, linewidth=1.6
            )
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[0].legend(frameon=False, ncols=2)
    axes[0].set_title("\n".join(heading), loc="left", fontsize=10)
    axes[-1].set_xlabel("seconds since the rollout began")
    axes[-1].set_xlim(left=0)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _html(lines: Sequence[Curve], heading: Sequence[str], path: Path) -> None:
    from plotly.subplots import make_subplots

    shown = panels(lines)
    figure: Any = make_subplots(rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=0.05)
    for number, (column, label) in enumerate(shown, 1):
        for line in lines:
            figure.add_scatter(
                x=line.seconds,
                y=getattr(line, column),
                name=line.name,
                legendgroup=line.precision,
                showlegend=number == 1,
                line={"color": COLOURS[line.precision]},
                row=number,
                col=1,
            )
        figure.update_yaxes(title_text=label, rangemode="tozero", row=number, col=1)
    figure.update_yaxes(tickformat=".0%", row=2, col=1)
    figure.update_xaxes(title_text="seconds since the rollout began", row=len(shown), col=1)
    figure.update_layout(
        title={"text": "<br>".join(heading), "font": {"size": 15}},
        template="plotly_white",
        hovermode="x unified",
        height=270 * len(shown),
    )
    figure.write_html(path, include_plotlyjs=True)
