"""Reader of run files, also while they grow: one JSON object a line for every training step."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.jsonl import parse
from fp8plan.schemas import RunRecord, check_version, checked

LENGTHS: Final = ("prompt_lengths", "response_lengths", "prompt_ids")  # of every request; no view shows them


@dataclass(slots=True)
class RunReader:
    """The records of a run file, also of one that grows, without the lengths of their requests, which are most of it.

    rows:     the records in the order of their steps. A record replaces earlier ones with the same step number or a
              higher one, as a run does that went back to a checkpoint
    replaced: number of records that were replaced so
    skipped:  number of lines that are no records
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
        """True if the content shows that this is no run file, not even one that has just been begun."""
        return not self.rows and (self.skipped > 0 or self._torn not in (b"", b"{"))

    def read(self) -> int:
        """Read what has been added since the last call, and return the number of new records.

        Raises ConfigError without a readable regular file; `rows` stay then, and what is there next is read from its
        beginning. Raises it, too, for a record of a version that this fp8plan does not know.
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
                    found += self._take(text)
                    self._offset += len(text)
        except OSError as error:
            self._file = 0, 0
            raise ConfigError(f"cannot read {self.path}: {error.strerror}; give the file of a Monitor") from None
        return found

    def _take(self, text: bytes) -> bool:
        row: Any = None
        with suppress(ConfigError):
            row = parse(text, "it")
        if isinstance(row, dict):
            check_version(row, "record", str(self.path))
        try:
            step = checked(row, RunRecord, "it").step
        except ConfigError:
            self.skipped += bool(text.strip())
            return False
        while self.rows and self.rows[-1]["step"] >= step:
            self.rows.pop()
            self.replaced += 1
        self.rows.append({name: value for name, value in row.items() if name not in LENGTHS})
        return True


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)
