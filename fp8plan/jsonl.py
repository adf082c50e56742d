"""Reading and writing files of one JSON object per line, which survive a killed process and several writers.

A line is appended by one write, to a file that is opened for it and closed after it. So a fork inherits nothing, and a
deleted or moved file is begun again. A killed process (kill -9) leaves whole lines, and at most one torn line at the
end. The next writer cuts the torn line off, and keeps it beside the file in NAME.torn. Readers take whole lines only.
"""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import stat
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from fp8plan.errors import ConfigError
from fp8plan.schemas import parse

LOCK_S: Final = 1.0  # the longest wait for another writer of the same file
NO_LOCKS: Final = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)  # errors of file systems and devices without locks
APPENDING: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
BROKEN: Final = (OSError, EOFError, zlib.error)  # errors of files that cannot be read, compressed ones among them
TORN: Final = object()  # the value of a line that breaks off


def lines(
    path: Path, what: str = "file", hint: str = "mend or delete that line", whole: bool = False
) -> Iterator[tuple[int, Any]]:
    """Yield (line number, value) of each line that is not blank, as it is read. The file may be compressed (.gz).

    what:  the kind of file, for errors
    hint:  the end of the error for a line that is not JSON
    whole: a last line that breaks off is an error, too; else its value is TORN, unless it is the only one

    NaN and Infinity are floats, as an unread field may be anything. Raises ConfigError for a file that cannot be read,
    and, naming the line, for a line that is not JSON.
    """
    if not path.exists():
        raise ConfigError(f"there is no {what} {path}; give a file of JSON lines")
    try:
        with path.open("rb") as stored, uncompressed(stored, path.suffix == ".gz") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, _value(text, f"line {number} of {path}", hint, torn=not whole and number > 1)
    except BROKEN as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}; give a file of JSON lines") from None


def _value(text: bytes, where: str, hint: str, torn: bool) -> Any:
    """The value of a line. torn: one that is not JSON and has no end, as only a last line may, is TORN"""
    try:
        return parse(text.removesuffix(b"\n"), where, finite=False)
    except ConfigError as error:
        if torn and not text.endswith(b"\n"):
            return TORN
        raise ConfigError(f"{error}; {hint}") from None


def torn_note(number: int, path: Path) -> str:
    """A note on a last line that breaks off."""
    return f"line {number} of {path}, the last one, is left out: it breaks off"


def uncompressed(stored: IO[bytes], packed: bool) -> Any:
    """A context with the content of an open file, unzipped if `packed`."""
    return gzip.GzipFile(fileobj=stored) if packed else nullcontext(stored)


def rows(path: Path, what: str = "file") -> list[Any]:
    """The values in the lines of a file, without a last line that breaks off; [] if there is no file.

    Raises ConfigError as `lines` does.
    """
    return [row for _, row in lines(path, what) if row is not TORN] if path.exists() else []


def line(row: Mapping[str, Any]) -> bytes:
    """One row as the bytes of one line. A number that JSON cannot express (nan, inf) becomes null."""
    return json.dumps(plain(row), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def plain(value: Any) -> Any:
    """A value as plain JSON data: arrays become lists, nan and inf None. Raises TypeError for anything but data."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, str | int | None):
        return value
    if callable(getattr(value, "tolist", None)):  # numpy's and torch's arrays and numbers
        return plain(value.tolist())
    raise TypeError(f"a record holds {value!r}; allowed: text, numbers, true, false, null, lists and mappings of them")


def write(path: str | Path, row: Mapping[str, Any]) -> None:
    """Append one row and return when it is on the disk. Raises OSError as `append` does."""
    append(Path(path), line(row))
    to_disk(Path(path))


class Ended(NamedTuple):
    """The end of a file that is appended to, in bytes.

    cut:    bytes of a torn last line that was cut off (mostly 0)
    before: the size of the file with the torn line
    size:   the size now
    """

    cut: int
    before: int
    size: int


def append(path: Path, text: bytes) -> Ended:
    """Append whole lines in one write, behind the last whole line. A file that does not exist is created.

    text: empty: cut off a torn last line, and no more

    Raises OSError if the lines cannot be written. Then the file has no part of them.
    """
    with _opened(path) as file:
        cut = _repair(path, file)
        size = os.fstat(file).st_size
        written = os.write(file, text)
        if written < len(text):  # the disk is full: remove the beginning of a line
            os.ftruncate(file, size)
            problem = f"No space left: only {written} of {len(text)} bytes could be written"
            raise OSError(errno.ENOSPC, problem, str(path))
    return Ended(cut, size + cut, size + written)


def to_disk(path: Path) -> None:
    """Wait until the appended lines would survive a crash of the machine, not only of the process."""
    with open(path, "r+b") as file:  # Windows does not wait for a file that is open for reading alone
        os.fsync(file.fileno())


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open and lock a file, so that one process writes at a time. It waits at most LOCK_S for another writer."""
    file, until = os.open(path, APPENDING, 0o644), time.monotonic() + LOCK_S
    try:
        while not _locked(file):
            if time.monotonic() > until:
                raise OSError(errno.EAGAIN, "another process has locked it", str(path))
            time.sleep(0.01)
        yield file
    finally:
        os.close(file)


def _locked(file: int) -> bool:
    """Lock a file if nobody else has. Without such locks, as on Windows, it counts as locked."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _repair(path: Path, file: int) -> int:
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode) or not info.st_size:
        return 0
    os.lseek(file, info.st_size - 1, os.SEEK_SET)
    if os.read(file, 1) == b"\n":
        return 0
    with open(path, "rb") as whole:
        torn = deque(whole, maxlen=1)[0]
    offset = info.st_size - len(torn)
    note = {"date": now(), "offset": offset, "bytes": len(torn), "text": torn.decode(errors="backslashreplace")}
    with suppress(OSError), open(torn_path(path), "ab") as kept:  # on a full disk the file itself is more important
        kept.write(line(note))
    os.ftruncate(file, offset)
    return len(torn)


def torn_path(path: Path) -> Path:
    """The file beside `path` that keeps its torn lines."""
    return path.with_name(path.name + ".torn")


def now() -> str:
    """The current date and time in UTC, to the millisecond, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
