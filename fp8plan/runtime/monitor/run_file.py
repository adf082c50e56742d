"""The run file: one JSON object a line for every training step, readable at every moment.

A line is appended by one write, to a file that is opened for it and closed after it. So nothing is held between two
steps that a fork could inherit, a deleted or moved file is begun again, and a process that is killed (kill -9) leaves
whole lines and at most one torn one, the last, whose step was not over. A torn line is cut off before the next is
written; what was cut is kept beside the file, in NAME.torn. Readers take whole lines only.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.runtime.monitor.record_shape import is_record

LOCK_S: Final = 1.0  # how long another writer of the same file is waited for
BLOCK: Final = 1 << 16
LENGTHS: Final = ("prompt_lengths", "response_lengths", "prompt_ids")  # of every request; no view shows them
NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)  # of file systems and devices without them


def line(row: Mapping[str, Any]) -> bytes:
    """A row as it stands in the file. What JSON has no number for (nan, inf) becomes null."""
    return json.dumps(plain(row), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def plain(value: Any) -> Any:
    """A value as JSON has it: arrays become lists, nan and inf None. Raises TypeError for what is no data."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, str | int | None):
        return value
    if callable(getattr(value, "tolist", None)):  # numpy's and torch's arrays and numbers
        return plain(value.tolist())
    raise TypeError(f"a record holds {value!r}; allowed: text, numbers, true, false, null, lists and mappings of them")


def append(path: Path, text: bytes) -> int:
    """Append whole lines by one write. Bytes of a torn line that were cut off before it (mostly 0).

    Raises OSError if they could not be written; then nothing of them stands in the file.
    """
    with _opened(path) as file:
        cut = _repair(path, file)
        size = os.fstat(file).st_size
        written = os.write(file, text)
        if written < len(text):  # the disk is full: take back the beginning of a line
            os.ftruncate(file, size)
            raise OSError(
                errno.ENOSPC, f"No space left: only {written} of {len(text)} bytes could be written", str(path)
            )
    return cut


def repair(path: Path) -> int:
    """Cut off a torn last line; the file is made if there is none. Bytes that were cut.

    Raises OSError as the operating system does.
    """
    with _opened(path) as file:
        return _repair(path, file)


def to_disk(path: Path) -> None:
    """Wait until what was appended would survive a lost machine, not only a lost process."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _lock(file, path)
        yield file
    finally:
        os.close(file)


def _lock(file: int, path: Path) -> None:
    """One writer at a time. A writer that hangs must not hang this one, too."""
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise OSError(errno.EAGAIN, "another process has locked it", str(path)) from None
            time.sleep(0.01)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return
            raise
        else:
            return


def _repair(path: Path, file: int) -> int:
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode):
        return 0
    size = whole = info.st_size
    tail = b""
    while whole and b"\n" not in tail:  # from the end, a block at a time; mostly one byte is looked at
        step = min(BLOCK if tail else 1, whole)
        tail = os.pread(file, step, whole - step) + tail
        whole -= step
    whole += tail.rfind(b"\n") + 1
    if whole < size:
        _keep(path, whole, os.pread(file, size - whole, whole))
        os.ftruncate(file, whole)
    return size - whole


def _keep(path: Path, offset: int, torn: bytes) -> None:
    """What is cut is kept if it can be: on a full disk the run file comes first."""
    note = {"date": now(), "offset": offset, "bytes": len(torn), "text": torn.decode(errors="backslashreplace")}
    try:
        with open(torn_path(path), "ab") as file:
            file.write(line(note))
    except OSError:
        return


def torn_path(path: Path) -> Path:
    """Where the torn lines of a run file are kept."""
    return path.with_name(path.name + ".torn")


def now() -> str:
    """Date and time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(slots=True)
class RunReader:
    """The records of a run file, also of one that grows, without the lengths of their requests, which are most of it.

    rows:     in the order of their steps. Of records with the same step number the last counts, and a lower number than
              before begins anew there, as a run does that went back to a checkpoint
    replaced: how many records are not in `rows` for that
    skipped:  lines that are no records
    """

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    replaced: int = 0
    skipped: int = 0
    _offset: int = 0
    _torn: bytes = b""  # the first byte of a last line that is not whole
    _file: tuple[int, int] = (0, 0)  # device and inode: a file that was begun anew is read anew

    @property
    def foreign(self) -> bool:
        """Whether what was read shows that this is no run file, not even one that has just been begun."""
        return not self.rows and (self.skipped > 0 or self._torn not in (b"", b"{"))

    def read(self) -> int:
        """Read what has been added since. How many records that were.

        Raises ConfigError without a readable regular file; `rows` stay then, and what is there next is read from its
        beginning.
        """
        found = 0
        try:
            with open(self.path, "rb", opener=_at_once) as file:
                info = os.fstat(file.fileno())
                if not stat.S_ISREG(info.st_mode):  # a device may have no end, and a pipe is read once
                    raise OSError(errno.EINVAL, "it is no regular file")
                if (info.st_dev, info.st_ino) != self._file or info.st_size < self._offset:
                    self.rows, self.replaced, self.skipped, self._offset = [], 0, 0, 0
                    self._file = info.st_dev, info.st_ino
                file.seek(self._offset)
                self._torn = b""
                for text in file:  # one at a time: a file may be larger than the memory
                    if not text.endswith(b"\n"):
                        self._torn = text[:1]
                        break
                    self._offset += len(text)
                    found += self._take(text)
        except OSError as error:
            self._file = 0, 0
            raise ConfigError(f"cannot read {self.path}: {error.strerror}; give the file of a Monitor") from None
        return found

    def _take(self, text: bytes) -> bool:
        row = _parsed(text)
        if row is None:
            self.skipped += bool(text.strip())
            return False
        while self.rows and self.rows[-1]["step"] >= row["step"]:
            self.rows.pop()
            self.replaced += 1
        self.rows.append(row)
        return True


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _parsed(text: bytes) -> dict[str, Any] | None:
    """The record in a line; None: there is none, or one whose fields are not what they should be."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not is_record(row):
        return None
    return {name: value for name, value in row.items() if name not in LENGTHS}
