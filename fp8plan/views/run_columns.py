"""The columns and events of a Monitor's run file, for the terminal view and the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fp8plan.model.cost.base import FloatArray
from fp8plan.runtime.watch.controller.alarms import MEANINGS, Alarm
from fp8plan.runtime.watch.mismatch.attribution import sentence
from fp8plan.runtime.watch.monitor.steps import RunReader, Steps
from fp8plan.schemas import (
    K3,
    K3_ROBUST,
    KL_LIMIT,
    PREDICTED,
    PREDICTED_HIGH,
    PREDICTED_LOW,
    ROUTING_DIFFERS,
    TOKENS_PER_S,
    Judged,
)

SPEED, SPEED_LOW, SPEED_HIGH = "achieved/predicted", "low/predicted", "high/predicted"  # in no record
OF_PREDICTED: Final = {SPEED: TOKENS_PER_S, SPEED_LOW: PREDICTED_LOW, SPEED_HIGH: PREDICTED_HIGH}

QUIET: Final = ("hold", "warm_up", None)  # decisions that are no news


@dataclass(frozen=True, slots=True)
class Event:
    """A notable event: a decision that changed a threshold, a new alarm, or an action of the guard."""

    step: int
    kind: str  # "decision", "alarm", "guard"
    what: str
    why: str


def meaning(alarm: str) -> str:
    """The meaning of an alarm and its remedy; "" for a word that this version does not know."""
    return ": ".join(MEANINGS[Alarm(alarm)]) if alarm in {*Alarm} else ""


def columns(steps: Steps, metrics: Iterable[str]) -> dict[str, FloatArray]:
    """Several metrics over the steps, and speeds as shares of the predicted one (OF_PREDICTED)."""
    curves = {metric: steps.column(metric) for metric in metrics}
    predicted = steps.column(PREDICTED)
    with np.errstate(divide="ignore", invalid="ignore"):
        return curves | {share: steps.column(metric) / predicted for share, metric in OF_PREDICTED.items()}


def infinite_kl(steps: Steps) -> NDArray[np.bool_]:
    """Steps whose k3 was infinite, bool of shape (steps,). One log-prob of -9999, vLLM's minus infinity, is enough."""
    return np.array(steps.infinite, dtype=np.bool_)


def warm(steps: Steps) -> NDArray[np.bool_]:
    """True for each step unless its rollout was an engine's first, and slow for that: bool of shape (steps,)."""
    return np.array([not fields.cold for fields in steps.said], dtype=np.bool_)


def shown_kl(steps: Steps) -> FloatArray:
    """k3 over the steps. Without it, the robust k3, which is finite unless many tokens are infinite."""
    k3, robust = steps.column(K3), steps.column(K3_ROBUST)
    robust = np.where(np.isnan(robust) & infinite_kl(steps), np.inf, robust)
    return np.where(np.isnan(k3), robust, k3)


def over_limit(steps: Steps) -> NDArray[np.bool_]:
    """True for each step whose KL was over its limit, among those with both. An infinite KL is over any limit."""
    limit, infinite = steps.column(KL_LIMIT), infinite_kl(steps)
    k3 = np.where(infinite, np.inf, steps.column(K3))
    known = np.isfinite(limit) & ~np.isnan(k3)
    over: NDArray[np.bool_] = k3[known] > limit[known]
    return over


def causes(steps: Steps) -> str:
    """The last step's KL by cause, in words; "" without parts."""
    return sentence(steps.attribution, steps.value(ROUTING_DIFFERS))


def last_judged(steps: Steps) -> Judged | None:
    """The guard's part of the last record with a verdict, or with a reason why there is none."""
    guards = (record.guard for record in reversed(steps.said) if record.guard)
    return next((guard for guard in guards if guard.verdict or guard.off), None)


def events(steps: Steps) -> list[Event]:
    """All events, in the order of the steps."""
    return [event for index in range(len(steps)) for event in _events_of(steps, index)]


def last_events(steps: Steps, count: int) -> list[Event]:
    """The last events, in the order of the steps. Steps are read from the last one back, as far as necessary."""
    latest: list[Event] = []
    for index in range(len(steps) - 1, -1, -1):
        latest = _events_of(steps, index) + latest
        if len(latest) >= count:
            break
    return latest[-count:]


def _events_of(steps: Steps, index: int) -> list[Event]:
    record, step, notable = steps.said[index], steps.numbers[index], list[Event]()
    if record.decision not in QUIET:
        notable.append(Event(step, "decision", str(record.decision), record.reason or ""))
    if record.alarms:
        before = steps.said[index - 1].alarms if index else ()
        if begun := [alarm for alarm in record.alarms if alarm not in before]:
            why = "; ".join(filter(None, map(meaning, begun)))
            notable.append(Event(step, "alarm", ", ".join(begun), why))
    verdict = record.guard.verdict if record.guard else None
    if verdict and (verdict.action or "none") != "none":
        notable.append(Event(step, "guard", str(verdict.action), verdict.reason or ""))
    return notable


def title(steps: Steps) -> str:
    """The model, precision and GPU of a run, as far as a record names them."""
    model, precision, gpu = next((step.ran for step in reversed(steps.said) if step.ran[0]), (None, None, None))
    return " ".join([*filter(None, (model, precision)), *(["on", gpu] if gpu else [])])


def pace(steps: Steps) -> float | None:
    """Seconds between two records, the median of the last 20; None before there are two.

    Two records between which the clock was set back do not count.
    """
    passed = np.diff([steps.when(index).timestamp() for index in range(max(0, len(steps) - 21), len(steps))])
    passed = passed[passed > 0]
    return float(np.median(passed)) if passed.size else None


def age(steps: Steps) -> float:
    """Seconds since the last record."""
    return max(0.0, (datetime.now(UTC) - steps.when(len(steps) - 1)).total_seconds())


def hidden(reader: RunReader) -> str:
    """A note on the records that a RunReader left out, because their step number came again."""
    are, their = ("record is", "its") if reader.replaced == 1 else ("records are", "their")
    went = "once" if reader.returns == 1 else f"{reader.returns:,} times"
    why = f"{their} step number, or a lower one, comes again later (the steps went back {went})"
    two = ". More are hidden than shown: two runs may be in one file" if most_hidden(reader) else ""
    return f"{reader.replaced:,} {are} not shown: {why}; the last record of a step is shown{two}"


def most_hidden(reader: RunReader) -> bool:
    """True if as many records are left out as shown, or more, as when two runs write to one file."""
    return reader.replaced >= len(reader.steps)


def unread(skipped: int) -> str:
    """A note on lines that a RunReader could not use."""
    return f"{skipped:,} line is no record" if skipped == 1 else f"{skipped:,} lines are no records"
