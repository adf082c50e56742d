"""The steps of a run in columns. A long run has 100,000 of them, and views show a few numbers and words of each."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fp8plan.schemas import FIRST, K3, LENGTHS, SHOWN, Judged, RunRecord

FloatArray = NDArray[np.float64]
EPOCH: Final = datetime.fromtimestamp(0, UTC)

# A run record as views need it: without the lengths of every request, which are most of a line, and with its version.
_FIELDS: Final = [x for x in msgspec.structs.fields(RunRecord) if x.name not in LENGTHS]
ShownRecord: Any = msgspec.defstruct(
    "ShownRecord",
    [*((x.name, x.type, x.default) for x in _FIELDS), ("schema_version", Any, FIRST)],
    kw_only=True,
)


class Said(NamedTuple):
    """The words of one record: the controller's, the guard's, and what ran as (model, precision, GPU)."""

    decision: str | None
    reason: str | None
    alarms: tuple[str, ...]
    guard: Judged | None
    ran: tuple[str | None, str | None, str | None]

    @property
    def cold(self) -> bool:
        """True for the first rollout of an engine that was slow for it."""
        return bool(self.guard and self.guard.verdict and self.guard.verdict.cold)


def _metrics() -> dict[str, array[float]]:
    return {name: array("d") for name in SHOWN}


@dataclass(slots=True)
class Steps:
    """The steps of a run, each column with an entry for every step.

    numbers:  the steps' own, each larger than the one before
    times:    seconds since 1970 of their records; 0 where there is no date
    metrics:  each of SHOWN, nan where a record has none
    infinite: 1 where k3 was infinite, for which JSON has no number: the record has null
    said:     the words
    spans, ends: KL by position in the response, as (first token, tokens, k3), three numbers each, of all steps; the
              number of spans up to the end of a step. Those without tokens or k3 are left out
    """

    numbers: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    metrics: dict[str, array[float]] = field(default_factory=_metrics)
    infinite: array[int] = field(default_factory=lambda: array("b"))
    said: list[Said] = field(default_factory=list)
    spans: array[float] = field(default_factory=lambda: array("d"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    _same: dict[Any, Any] = field(default_factory=dict)  # words that come again and again are kept once

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, record: Any) -> int:
        """Add a ShownRecord. It takes the place of those with its number or a higher one, as a run that went back to a
        checkpoint writes them. Returns how many those were.
        """
        replaced = self._cut(bisect_left(self.numbers, record.step))
        self.numbers.append(record.step)
        self.times.append(_seconds(record.date))
        given = record.metrics.get
        for name, column in self.metrics.items():
            value = given(name)
            column.append(np.nan if value is None else value)
        self.infinite.append(given(K3, 0.0) is None)
        ran = record.model, record.precision, record.gpu
        words = record.decision, tuple(record.alarms or ()), ran
        decision, alarms, ran = self._same.setdefault(words, words)
        reason = self._same.setdefault(record.reason, record.reason) if len(self._same) < 1000 else record.reason
        self.said.append(Said(decision, reason, alarms, record.guard, ran))
        spans = (x for x in record.profile or () if x.tokens > 0 and x.k3 is not None)
        self.spans.extend([number for x in spans for number in (x.first, x.tokens, x.k3)])
        self.ends.append(len(self.spans) // 3)
        return replaced

    def _cut(self, start: int) -> int:
        """Take out the steps from an index on, and return their number."""
        gone = len(self) - start
        if gone:
            del self.spans[3 * (self.ends[start - 1] if start else 0) :]
            columns: tuple[Any, ...] = (self.numbers, self.times, self.infinite, self.said, self.ends)
            for column in (*columns, *self.metrics.values()):
                del column[start:]
        return gone

    def last(self, count: int) -> Steps:
        """The last steps as steps of their own, without their spans."""
        start = max(0, len(self) - count)
        return Steps(
            self.numbers[start:],
            self.times[start:],
            {name: column[start:] for name, column in self.metrics.items()},
            self.infinite[start:],
            self.said[start:],
            ends=array("q", [0]) * (len(self) - start),
        )

    def column(self, metric: str) -> FloatArray:
        """One metric of SHOWN over the steps, nan where a record has none; shape (steps,)."""
        return np.array(self.metrics[metric], dtype=np.float64)

    def value(self, metric: str, index: int = -1) -> float | None:
        """One metric of one step, the last by default; None if it has none."""
        value = self.metrics[metric][index] if self.numbers else np.nan
        return None if np.isnan(value) else value

    def when(self, index: int) -> datetime:
        """The date of a record, UTC; for one without a date, long ago."""
        return EPOCH + timedelta(seconds=self.times[index])


def _seconds(date: str | None) -> float:
    try:
        return datetime.fromisoformat(date or "").astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        return 0.0
