"""Pictures of a plan: the rollout over time, and speed against mismatch. What they show is here; png and page draw it.

Each line over time is one precision. The band around it is the same rollout slowed down and sped up to both ends of its
90% interval: at every moment it spans what any pace between them gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fp8plan.model.cost.base import FloatArray
from fp8plan.model.plan.time_reasons import seconds
from fp8plan.model.precision import precision as find_precision
from fp8plan.model.rollout import Timeline
from fp8plan.views.tables import counted

if TYPE_CHECKING:
    from fp8plan.model.plan.choice import Choice
    from fp8plan.model.plan.plan import Plan
    from fp8plan.model.plan.planner import Prediction
    from fp8plan.model.plan.speedup import SpeedUp

# Okabe and Ito's palette, told apart with any colour vision; one colour per precision, always the same.
COLOURS = {"bf16": "#000000", "fp8_block": "#0072B2", "fp8_kv": "#E69F00", "fp8_block+fp8_kv": "#009E73"}
LIMIT_COLOURS = {"low": "#56B4E9", "moderate": "#D55E00"}  # of the same palette: where a risk ends
BINS = 160
PACES = 25  # between both ends of an interval
TIME_LABEL = "seconds since the rollout began"
KL_LABEL = "KL k3, nats per token (lower is safer)"
SPEED_LABEL = "output tokens/s (higher is faster)"
SPEEDUP_LABEL = "with the speed-up (90%) over bf16 on the same layout"


def colour_of(precision: str) -> str:
    """The colour of a precision. An FP8 checkpoint has one format of weights, which takes that of FP8 in blocks."""
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
    """One choice as a compromise, with 90% intervals: (value, low, high)."""

    precision: str
    layout: str  # TPxDP
    kl: tuple[float, float, float]  # nats per token
    speed: tuple[float, float, float]  # output tokens/s of all replicas
    gain: SpeedUp | None  # over bf16 on the same layout
    chosen: bool
    main: bool  # of its precision the choice that `curves` draws over time
    on_front: bool  # no other choice is as safe and faster, or as fast and safer


def curves(prediction: Prediction) -> list[Curve]:
    """The chosen choice and the fastest one of each other precision, each by its slowest replica."""
    choices, chosen = prediction.plan.choices, prediction.plan.select()
    several = prediction.plan.several_layouts
    found = []
    for index in _drawn(prediction.plan):
        choice, rollout, pool = choices[index], prediction.rollouts[index], prediction.pools[index]
        if rollout is not None and pool is not None:
            mark = ", chosen" if choice is chosen else ""
            where = f", {choice.replica_label} x DP {choice.data_parallel}" if several else ""
            name = f"{choice.precision} ({seconds(choice.makespan_s)} s{where}){mark}"
            paces = rollout.makespan_low_s / rollout.makespan_s, rollout.makespan_high_s / rollout.makespan_s
            found.append(Curve(name, choice.precision, *binned(rollout.timeline, pool, BINS), paces))
    return found


def _drawn(plan: Plan) -> list[int]:
    best: dict[str, int] = {}
    for index, choice in enumerate(plan.choices):
        if choice.available and (choice.precision not in best or _faster(choice, plan.choices[best[choice.precision]])):
            best[choice.precision] = index
    return list((best | {plan.select().precision: plan.chosen}).values())


def _faster(one: Choice, other: Choice) -> bool:
    assert one.makespan_s is not None
    assert other.makespan_s is not None
    return one.makespan_s < other.makespan_s


def closed(curve: Curve, column: str) -> tuple[FloatArray, FloatArray]:
    """Seconds and values of a column, from the first moment to the end, where it falls to nothing."""
    values, width = getattr(curve, column), curve.seconds[1] - curve.seconds[0]
    end = curve.seconds[-1] + width / 2
    times = np.concatenate([[0.0], curve.seconds, [end, end]])
    return times, np.concatenate([values[:1], values, values[-1:], [0.0]])


def band(curve: Curve, column: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(seconds, lowest, highest) of a column at every pace within the interval, each of shape (2 BINS,)."""
    own_times, values = closed(curve, column)
    paces = np.linspace(*curve.paces, PACES)
    times = np.linspace(0, own_times[-1] * paces[-1], 2 * BINS)
    own = times / paces[:, None]  # the same moment of each pace, in the curve's own time
    at = np.where(own <= own_times[-1] * (1 + 1e-9), np.interp(own, own_times[:-1], values[:-1]), 0.0)
    if column == "tokens_per_s":
        at = at / paces[:, None]
    return times, at.min(axis=0), at.max(axis=0)


def points(plan: Plan) -> list[Point]:
    """Every available choice, on every layout."""
    drawn, found = _drawn(plan), []
    for index, choice in enumerate(plan.choices):
        if not choice.available:
            continue
        tokens: Any = plan.workload["response_tokens"]
        times: Any = choice.makespan_s, choice.makespan_high_s, choice.makespan_low_s
        kl: Any = choice.kl_k3, choice.kl_k3_low, choice.kl_k3_high
        speed, low, high = (tokens / time for time in times)
        point = Point(
            precision=choice.precision,
            layout=choice.layout_label,
            kl=kl,
            speed=(speed, low, high),
            gain=choice.gain,
            chosen=index == plan.chosen,
            main=index in drawn,
            on_front=False,
        )
        found.append(point)
    return [point._replace(on_front=not any(_beats(other, point) for other in found)) for point in found]


def _beats(one: Point, other: Point) -> bool:
    safe, fast = one.kl[0] - other.kl[0], other.speed[0] - one.speed[0]
    return safe <= 0 and fast <= 0 and (safe < 0 or fast < 0)


def front(found: Sequence[Point]) -> list[Point]:
    """The Pareto front, the safest first."""
    return sorted((x for x in found if x.on_front), key=lambda x: x.kl[0])


def risk_limits(plan: Plan) -> dict[str, float]:
    """Level of risk -> the highest KL that it allows. It holds for the upper end of a choice's interval."""
    return {"low": plan.budget.low_kl, "moderate": plan.budget.moderate_kl}


def limit_label(level: str) -> str:
    return f"KL limit of {level} risk"


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
    """Lines of the title: what is rolled out on what, and what is drawn of it."""
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


def tradeoff_title(plan: Plan) -> str:
    """Title of the chart beside the lines over time."""
    layouts = ", marked TPxDP" if plan.several_layouts else ""
    return (
        f"speed against mismatch: every choice with its 90% intervals{layouts}; dashed: the Pareto front; a KL limit "
        "holds for the right end of an interval, and risk has other limits, too"
    )


def panels(lines: Sequence[Curve]) -> list[tuple[str, str]]:
    """Field of Curve -> label. Waiting requests get a panel where there are any."""
    shown = [("tokens_per_s", "output tokens/s"), ("occupancy", "KV pool in use"), ("running", "running requests")]
    return [*shown, ("waiting", "waiting requests")] if any(line.waiting.any() for line in lines) else shown


def label(point: Point, several: bool) -> str:
    """The label of a choice, such as "fp8_block 2x4, 1.31x (1.12-1.53), chosen"."""
    name = f"{point.precision} {point.layout}" if several else point.precision
    gain = [] if point.gain is None or point.precision == "bf16" else [point.gain.cell]
    return ", ".join([name, *gain, *(["chosen"] if point.chosen else [])])
