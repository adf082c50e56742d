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

LOCK_S: Final = 1.0  # how long another writer of the same file is waited for
BLOCK: Final = 1 << 16
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
    """The records of a run file, also of one that grows.

    rows:    in the order of their steps. A run that went back to a checkpoint writes some steps again: the later ones
             count, `replaced` is how many did not
    skipped: lines that are no records
    """

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    replaced: int = 0
    skipped: int = 0
    _offset: int = 0
    _file: tuple[int, int] = (0, 0)  # device and inode: a file that was begun anew is read anew

    def read(self) -> int:
        """Read what has been added since. How many records that were. Raises ConfigError without a readable file."""
        try:
            with open(self.path, "rb") as file:
                info = os.fstat(file.fileno())
                if (info.st_dev, info.st_ino) != self._file or info.st_size < self._offset:
                    self.rows, self.replaced, self.skipped, self._offset = [], 0, 0, 0
                    self._file = info.st_dev, info.st_ino
                file.seek(self._offset)
                text = file.read()
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}; give the file of a Monitor") from None
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        return sum(self._take(one) for one in text.split(b"\n"))

    def _take(self, text: bytes) -> bool:
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        if not (isinstance(row, dict) and type(row.get("step")) is int and isinstance(row.get("metrics"), dict)):
            self.skipped += bool(text.strip())
            return False
        while self.rows and self.rows[-1]["step"] >= row["step"]:
            self.rows.pop()
            self.replaced += 1
        self.rows.append(row)
        return True
