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

# The part of a run record that views show, and its version. The lengths of the requests, which are most of a line, and
# other metrics are skipped.
_WORDS: Final = (
    *("step", "date", "model", "precision", "gpu", "decision", "reason", "alarms", "profile", "guard", "attribution"),
)
_PLACES: Final = {name: place for place, name in enumerate(SHOWN)}
_FIELDS: Final = {f"m{place}": name for name, place in _PLACES.items()}
ShownMetrics: Any = msgspec.defstruct(
    "ShownMetrics", [(field, float | None, np.nan) for field in _FIELDS], rename=_FIELDS, gc=False
)
ShownRecord: Any = msgspec.defstruct(
    "ShownRecord",
    [
        *((word.name, word.type, word.default) for word in msgspec.structs.fields(RunRecord) if word.name in _WORDS),
        ("metrics", ShownMetrics),
        ("schema_version", Any, FIRST),
    ],
    kw_only=True,
)


class Said(NamedTuple):
    """The words of one record: the controller's, the guard's, and (model, precision, GPU)."""

    decision: str | None
    reason: str | None
    alarms: tuple[str, ...]
    guard: Judged | None
    ran: tuple[str | None, str | None, str | None]

    @property
    def cold(self) -> bool:
        """True for an engine's first rollout if it was slow."""
        return bool(self.guard and self.guard.verdict and self.guard.verdict.cold)


@dataclass(slots=True)
class Steps:
    """The steps of a run, each column with an entry for every step.

    numbers:  step numbers, each larger than the one before
    dates:    dates of the records
    metrics:  each of SHOWN, step by step; nan: the record has none
    infinite: 1 if k3 was infinite: JSON has no such number, so the record has null despite its data
    attribution: the parts of the last step's KL, from its record
    said:     the words of each record
    spans:    KL by position in the response, three numbers each (first token, tokens, k3), of all steps; spans without
              tokens or k3 are left out
    ends:     number of spans up to the end of each step
    """

    numbers: array[int] = field(default_factory=lambda: array("q"))
    dates: list[str | None] = field(default_factory=list)
    metrics: array[float] = field(default_factory=lambda: array("d"))
    infinite: array[int] = field(default_factory=lambda: array("b"))
    said: list[Said] = field(default_factory=list)
    attribution: Sequence[KlPart] = ()
    spans: array[float] = field(default_factory=lambda: array("d"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    _same: dict[Any, Any] = field(default_factory=dict)  # repeated words are kept once

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, record: Any) -> int:
        """Add a ShownRecord, and return the number of records that it replaces.

        It replaces those with its number or a higher one, from before a run went back to a checkpoint.
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
        spans = (span for span in record.profile or () if span.tokens > 0 and span.k3 is not None)
        self.spans.extend([number for span in spans for number in (span.first, span.tokens, span.k3)])
        self.ends.append(len(self.spans) // 3)
        return replaced

    def _cut(self, start: int) -> int:
        """Remove the steps from an index on, and return their number."""
        gone = len(self) - start
        if gone:
            del self.spans[3 * (self.ends[start - 1] if start else 0) :]
            del self.metrics[len(SHOWN) * start :]
            columns: tuple[Any, ...] = (self.numbers, self.dates, self.infinite, self.said, self.ends)
            for column in columns:
                del column[start:]
        return gone

    def last(self, count: int) -> Steps:
        """A copy of the last `count` steps, without their spans."""
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
        """One metric of SHOWN over the steps, shape (steps,); nan: the record has none."""
        return np.array(self.metrics[_PLACES[metric] :: len(SHOWN)], dtype=np.float64)

    def value(self, metric: str, index: int = -1) -> float | None:
        """One metric of one step, the last by default; None if it has none."""
        value = self.metrics[index % len(self) * len(SHOWN) + _PLACES[metric]] if len(self) else np.nan
        return None if np.isnan(value) else value

    def when(self, index: int) -> datetime:
        """The date of a record, UTC; EPOCH for one without a date."""
        try:
            return datetime.fromisoformat(self.dates[index] or "").astimezone(UTC)
        except (ValueError, OverflowError):
            return EPOCH
