"""The steps of a run in columns. A long run has 100,000 of them, and views show a few numbers and words of each."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fp8plan.schemas import FIRST, K3, SHOWN, Judged, KlPart, RunRecord

FloatArray = NDArray[np.float64]
EPOCH: Final = datetime.fromtimestamp(0, UTC)

# A run record as views need it, with its version. What is not shown is passed over: the lengths of every request, which
# are most of a line, and other metrics.
_WORDS: Final = (
    "step",
    "date",
    "model",
    "precision",
    "gpu",
    "decision",
    "reason",
    "alarms",
    "profile",
    "guard",
    "attribution",
)
_PLACES: Final = {name: place for place, name in enumerate(SHOWN)}
_FIELDS: Final = {f"m{place}": name for name, place in _PLACES.items()}
ShownMetrics: Any = msgspec.defstruct(
    "ShownMetrics", [(field, float | None, np.nan) for field in _FIELDS], rename=_FIELDS, gc=False
)
ShownRecord: Any = msgspec.defstruct(
    "ShownRecord",
    [
        *((x.name, x.type, x.default) for x in msgspec.structs.fields(RunRecord) if x.name in _WORDS),
        ("metrics", ShownMetrics),
        ("schema_version", Any, FIRST),
    ],
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


@dataclass(slots=True)
class Steps:
    """The steps of a run, each column with an entry for every step.

    numbers:  the steps' own, each larger than the one before
    dates:    of their records
    metrics:  each of SHOWN, step by step, nan where a record has none
    infinite: 1 where k3 was infinite, for which JSON has no number: the record has null, though it had data
    attribution: the parts of the last step's KL, as its record has them
    said:     the words
    spans, ends: KL by position in the response, as (first token, tokens, k3), three numbers each, of all steps; the
              number of spans up to the end of a step. Those without tokens or k3 are left out
    """

    numbers: array[int] = field(default_factory=lambda: array("q"))
    dates: list[str | None] = field(default_factory=list)
    metrics: array[float] = field(default_factory=lambda: array("d"))
    infinite: array[int] = field(default_factory=lambda: array("b"))
    said: list[Said] = field(default_factory=list)
    attribution: Sequence[KlPart] = ()
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
        self.dates.append(record.date)
        values = msgspec.structs.astuple(record.metrics)
        self.metrics.extend([np.nan if value is None else value for value in values])
        self.infinite.append(values[_PLACES[K3]] is None and record.decision != "no_data")
        self.attribution = record.attribution or ()
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
            del self.metrics[len(SHOWN) * start :]
            columns: tuple[Any, ...] = (self.numbers, self.dates, self.infinite, self.said, self.ends)
            for column in columns:
                del column[start:]
        return gone

    def last(self, count: int) -> Steps:
        """The last steps as steps of their own, without their spans."""
        start = max(0, len(self) - count)
        return Steps(
            self.numbers[start:],
            self.dates[start:],
            self.metrics[len(SHOWN) * start :],
            self.infinite[start:],
            self.said[start:],
            ends=array("q", [0]) * (len(self) - start),
        )

    def column(self, metric: str) -> FloatArray:
        """One metric of SHOWN over the steps, nan where a record has none; shape (steps,)."""
        return np.array(self.metrics[_PLACES[metric] :: len(SHOWN)], dtype=np.float64)

    def value(self, metric: str, index: int = -1) -> float | None:
        """One metric of one step, the last by default; None if it has none."""
        value = self.metrics[index % len(self) * len(SHOWN) + _PLACES[metric]] if len(self) else np.nan
        return None if np.isnan(value) else value

    def when(self, index: int) -> datetime:
        """The date of a record, UTC; for one without a date, long ago."""
        try:
            return datetime.fromisoformat(self.dates[index] or "").astimezone(UTC)
        except (ValueError, OverflowError):
            return EPOCH
