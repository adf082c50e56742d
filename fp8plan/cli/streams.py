"""stdout and stderr of the command line: they may be full, closed, a pipe whose reader left, or ASCII only."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from fp8plan.errors import ConfigError

READER_GONE: Final = 141  # exit code: 128 + SIGPIPE, as of any other program whose reader left
# What fp8plan writes beyond ASCII, and what stands for it where that cannot be. A bar stays one character.
PLAIN: Final = dict(zip("▁▂▃▄▅▆▇█", "._-=+*%#", strict=True)) | {
    "≤": "<=",
    "≥": ">=",
    "±": "+-",
    "…": "...",
    "→": "->",
    "×": "x",
    "–": "-",
    "—": "-",
    "−": "-",
    "µ": "u",
}


def plain(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: PLAIN, and an escape for any other character, so that none is lost unseen."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(PLAIN.get(x) or x.encode("ascii", "backslashreplace").decode() for x in text), error.end


codecs.register_error("fp8plan.plain", plain)


class Results(io.TextIOWrapper):
    """stdout. A result that cannot be written is an error; a reader that left has what it wanted."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise self._lost(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise self._lost(error) from None

    def _lost(self, error: OSError) -> BaseException:
        """The exception to raise. What is left in the buffer goes nowhere, lest it fails once more at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            return SystemExit(READER_GONE)
        why = "it is closed" if error.errno == errno.EBADF else error.strerror
        return ConfigError(f"stdout cannot be written: {why}; the result is lost or incomplete: send it somewhere else")


class Notes(io.TextIOWrapper):
    """stderr. A note that cannot be written must not cost the result; the exit code says the rest."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


@contextmanager
def standard_streams() -> Iterator[None]:
    """sys.stdout as Results and sys.stderr as Notes, in the encoding they have. Streams that a program put in their
    place stay."""
    before = sys.stdout, sys.stderr
    if before[0] is sys.__stdout__:
        sys.stdout = _stream(Results, sys.__stdout__)
    if before[1] is sys.__stderr__:
        sys.stderr = _stream(Notes, sys.__stderr__)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ConfigError, SystemExit):
                stream.flush()
        sys.stdout, sys.stderr = before


def _stream(kind: type[io.TextIOWrapper], given: Any) -> io.TextIOWrapper:
    if given is None:  # closed: to write there fails, and no file that is opened later gets its number
        file, encoding = os.open(os.devnull, os.O_RDONLY), "utf-8"
    else:
        given.flush()
        file, encoding = given.fileno(), given.encoding
    raw: Any = io.FileIO(file, "wb", closefd=False)
    lines = kind is Notes or os.isatty(file)
    return kind(io.BufferedWriter(raw), encoding, "fp8plan.plain", line_buffering=lines)
