"""A run as its Monitor recorded it, in columns: what the terminal view and the report show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fp8plan.model.cost.base import FloatArray
from fp8plan.schemas import (
    K3,
    K3_ROBUST,
    KL_LIMIT,
    PREDICTED,
    PREDICTED_HIGH,
    PREDICTED_LOW,
    TOKENS_PER_S,
)

Row = dict[str, Any]

SPEED, SPEED_LOW, SPEED_HIGH = "achieved/predicted", "low/predicted", "high/predicted"  # in no record
OF_PREDICTED: Final = {SPEED: TOKENS_PER_S, SPEED_LOW: PREDICTED_LOW, SPEED_HIGH: PREDICTED_HIGH}

# What the words of fp8plan.runtime.controller.state.Alarm mean to who reads the report.
ALARMS: Final = {
    "kl": "smoothed KL above its limit",
    "broken": "KL beyond what any correction repairs",
    "raw_ess": "effective sample size of the untruncated weights too low",
    "chi2": "variance of the ratios too high",
    "tail": "too many tokens with extreme ratios",
    "unit_mean": "the ratios' mean is not 1: the log-probs are not those of the policy that sampled",
}
QUIET: Final = ("hold", "warm_up", None)  # decisions that are no news


@dataclass(frozen=True, slots=True)
class Event:
    """A notable event: a decision that changed a threshold, an alarm that began, an action of the guard."""

    step: int
    kind: str  # "decision", "alarm", "guard"
    what: str
    why: str


def column(rows: Sequence[Row], metric: str) -> FloatArray:
    """One metric over the steps, nan where a record has none; shape (rows,)."""
    values = (row["metrics"].get(metric) for row in rows)
    return np.array([np.nan if x is None else x for x in values], dtype=np.float64)


def columns(rows: Sequence[Row], metrics: Iterable[str]) -> dict[str, FloatArray]:
    """Several metrics over the steps, and speeds as shares of the predicted one (OF_PREDICTED)."""
    found = {metric: column(rows, metric) for metric in metrics}
    predicted = column(rows, PREDICTED)
    return found | {share: column(rows, metric) / predicted for share, metric in OF_PREDICTED.items()}


def infinite_kl(rows: Sequence[Row]) -> NDArray[np.bool_]:
    """Steps whose k3 was infinite, bool of shape (rows,). JSON has no number for it, so the record has null.

    One token is enough, whose log-prob an engine gave as -9999, vLLM's word for minus infinity.
    """
    return np.array([row["metrics"].get(K3, 0.0) is None for row in rows], dtype=np.bool_)


def shown_kl(rows: Sequence[Row]) -> FloatArray:
    """k3 over the steps; where there is none the robust one, which is finite unless many tokens are to blame."""
    k3, robust = column(rows, K3), column(rows, K3_ROBUST)
    robust = np.where(np.isnan(robust) & infinite_kl(rows), np.inf, robust)
    return np.where(np.isnan(k3), robust, k3)


def over_limit(rows: Sequence[Row]) -> NDArray[np.bool_]:
    """Steps whose KL was over its limit, of those that know both. An infinite KL is over any limit."""
    limit, infinite = column(rows, KL_LIMIT), infinite_kl(rows)
    k3 = np.where(infinite, np.inf, column(rows, K3))
    known = np.isfinite(limit) & ~np.isnan(k3)
    over: NDArray[np.bool_] = k3[known] > limit[known]
    return over


def last(rows: Sequence[Row], metric: str) -> float | None:
    """The newest value of a metric in the last row; None if it has none."""
    value = rows[-1]["metrics"].get(metric) if rows else None
    return None if value is None else float(value)


def as_fast(verdict: Row) -> bool | None:
    """True if the guard found a rollout as fast as predicted or faster; None if it did not say. Records of schema 1.1
    call it `within`."""
    judged: bool | None = verdict.get("as_fast", verdict.get("within"))
    return judged


def events(rows: Sequence[Row]) -> list[Event]:
    """All events, in the order of the steps."""
    found, known = list[Event](), set[str]()
    for row in rows:
        step, alarms = row["step"], [str(x) for x in row.get("alarms") or ()]
        if row.get("decision") not in QUIET:
            found.append(Event(step, "decision", row["decision"], row.get("reason") or ""))
        if begun := [x for x in alarms if x not in known]:
            why = "; ".join(filter(None, (ALARMS.get(x) for x in begun)))
            found.append(Event(step, "alarm", ", ".join(begun), why))
        known = set(alarms)
        verdict = (row.get("guard") or {}).get("verdict") or {}
        if verdict.get("action", "none") != "none":
            found.append(Event(step, "guard", verdict["action"], verdict.get("reason") or ""))
    return found


def title(rows: Sequence[Row]) -> str:
    """The model, precision and GPU of a run, as far as a record names them."""
    row: Row = next((x for x in reversed(rows) if x.get("model")), {})
    precision, gpu = row.get("precision"), row.get("gpu")
    return " ".join([*filter(None, (row.get("model"), precision)), *(["on", gpu] if gpu else [])])


def pace(rows: Sequence[Row]) -> float | None:
    """Seconds between two records, the median of the last 20; None before there are two.

    Where the clock was set back the time between two is not known.
    """
    passed = np.diff([when(row).timestamp() for row in rows[-21:]])
    passed = passed[passed > 0]
    return float(np.median(passed)) if passed.size else None


def age(rows: Sequence[Row]) -> float:
    """Seconds since the last record."""
    return max(0.0, (datetime.now(UTC) - when(rows[-1])).total_seconds())


def when(row: Row) -> datetime:
    """The date of a record; for one without a date, long ago."""
    try:
        return datetime.fromisoformat(row["date"]).astimezone(UTC)
    except (KeyError, TypeError, ValueError, OverflowError):
        return datetime.fromtimestamp(0, UTC)


def left_out(replaced: int) -> str:
    """A note on records whose step number came again, which a RunReader left out."""
    are, their = ("record is", "its") if replaced == 1 else ("records are", "their")
    why = f"{their} step number, or a lower one, comes again later"
    return f"{replaced:,} {are} not shown: {why}; the last record of a step is shown"


def unread(skipped: int) -> str:
    """A note on lines that a RunReader could not use."""
    return f"{skipped:,} line is no record" if skipped == 1 else f"{skipped:,} lines are no records"
