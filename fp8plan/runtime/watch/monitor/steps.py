"""The steps of a run file in columns, and their reader, which follows a file that grows.

A long run has 100,000 steps, and views show a few numbers and words of each.
"""

from __future__ import annotations

import errno
import os
import stat
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fp8plan.errors import ConfigError
from fp8plan.jsonl import BROKEN, uncompressed
from fp8plan.schemas import FIRST, K3, SHOWN, VERSIONS, Judged, KlPart, RunRecord, check_version, parse

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


READ: Final = (FIRST, VERSIONS["record"])  # versions that need no second look
DECODER: Final = msgspec.json.Decoder(ShownRecord)


@dataclass(slots=True)
class RunReader:
    """The steps of a run file, also of one that grows, without the lengths of their requests, which are most of it.

    steps:    in order. A record replaces earlier ones with the same step number or a higher one, as in a run that went
              back to a checkpoint
    replaced: number of replaced records
    returns:  number of records whose step number is not above the one before
    skipped:  number of lines that are no records

    A compressed file (.gz) is read again whenever it has changed.
    """

    path: Path
    steps: Steps = field(default_factory=Steps)
    replaced: int = 0
    returns: int = 0
    skipped: int = 0
    _offset: int = 0
    _torn: bytes = b""  # the first byte of an incomplete last line
    _file: tuple[int, ...] = ()  # device and inode, to notice another file

    @property
    def foreign(self) -> bool:
        """True if the content is certainly no run file, not even the beginning of one."""
        return not len(self.steps) and (self.skipped > 0 or self._torn not in (b"", b"{"))

    def read(self) -> int:
        """Read the lines added since the last call, and return the number of new records.

        Raises ConfigError without a readable regular file; `steps` stay then, and the next call begins at the start of
        the file. Raises it, too, for a record of a version that this fp8plan does not know.
        """
        new, packed = 0, self.path.suffix == ".gz"
        try:
            with open(self.path, "rb", opener=_at_once) as stored, uncompressed(stored, packed) as file:
                info = os.fstat(stored.fileno())
                if not stat.S_ISREG(info.st_mode):  # a device may have no end, and a pipe is read once
                    raise OSError(errno.EINVAL, "it is no regular file")
                same = info.st_dev, info.st_ino, *((info.st_size, info.st_mtime_ns) if packed else ())
                if same != self._file or (not packed and info.st_size < self._offset):
                    self.steps, self.replaced, self.returns, self.skipped, self._offset = Steps(), 0, 0, 0, 0
                    self._file = same
                file.seek(self._offset)
                self._torn = b""
                for text in file:  # one at a time: a file may be larger than the memory
                    if not text.endswith(b"\n"):
                        self._torn = text[:1]
                        break
                    new += self._take(text)
                    self._offset += len(text)
        except BROKEN as error:
            self._file = ()
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot read {self.path}: {reason}; give the file of a Monitor") from None
        return new

    def _take(self, text: bytes) -> bool:
        try:
            record = DECODER.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            record = self._by_json(text)
        if record is None:
            self.skipped += bool(text.strip())
            return False
        if record.schema_version not in READ:
            check_version(parse(text, "it"), "record", str(self.path))
        replaced = self.steps.add(record)
        self.replaced += replaced
        self.returns += replaced > 0
        return True

    def _by_json(self, text: bytes) -> Any:
        """The record in a line that msgspec refuses, such as one with a lone surrogate; None if it is no record.

        A record of another version may look different, so the version is checked first.
        """
        try:
            row = parse(text, "it", finite=False)
        except ConfigError:
            return None
        if isinstance(row, dict):
            check_version(row, "record", str(self.path))
        try:
            return msgspec.convert(row, ShownRecord)
        except msgspec.ValidationError:
            return None


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no such pipes
