"""Reader of run files, also while they grow: one JSON object a line for every training step."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from fp8plan.errors import ConfigError
from fp8plan.jsonl import BROKEN, parse, uncompressed
from fp8plan.runtime.monitor.steps import ShownRecord, Steps
from fp8plan.schemas import FIRST, VERSIONS, check_version

READ: Final = (FIRST, VERSIONS["record"])  # versions that need no second look
DECODER: Final = msgspec.json.Decoder(ShownRecord)


@dataclass(slots=True)
class RunReader:
    """The steps of a run file, also of one that grows, without the lengths of their requests, which are most of it.

    steps:    in order. A record replaces earlier ones with the same step number or a higher one, as in a run that went
              back to a checkpoint
    replaced: number of records that were replaced so
    returns:  how often a step number came that was not above the one before
    skipped:  number of lines that are no records

    A compressed file (.gz) is read anew when it has changed.
    """

    path: Path
    steps: Steps = field(default_factory=Steps)
    replaced: int = 0
    returns: int = 0
    skipped: int = 0
    _offset: int = 0
    _torn: bytes = b""  # the first byte of a last line that is not whole
    _file: tuple[int, ...] = ()  # device and inode: a file that was begun anew is read anew

    @property
    def foreign(self) -> bool:
        """True if the content shows that this is no run file, not even one that has just been begun."""
        return not len(self.steps) and (self.skipped > 0 or self._torn not in (b"", b"{"))

    def read(self) -> int:
        """Read what has been added since the last call, and return the number of new records.

        Raises ConfigError without a readable regular file; `steps` stay then, and what is there next is read from its
        beginning. Raises it, too, for a record of a version that this fp8plan does not know.
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
        """The record in a line that msgspec does not take, as one with a lone surrogate; None if it is no record.

        A record of another version need not look like ours, so its version is judged first.
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
