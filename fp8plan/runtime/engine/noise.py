"""The output of an engine that starts, a hundred lines when all is well: held back, and at hand when it is not."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STREAMS = (1, 2)  # stdout and stderr, of the processes that are started meanwhile, too


@contextmanager
def held_back(engine_stays: bool = True) -> Iterator[Path]:
    """Write the output of this process, and of those it starts, to a file; yield its path.

    engine_stays: keep the file until Python ends, as processes that were started here write to it as long as they live

    An exception gets a note that names the file. The file then stays; so it does if an exception ends Python.
    """
    number, name = tempfile.mkstemp(prefix="fp8plan-engine-", suffix=".log")
    try:
        with _into(number):
            yield Path(name)
    except BaseException as error:
        error.add_note(f"its output is in {name}")
        raise
    if engine_stays:
        atexit.register(_forget, name, _last_error())
    else:
        with suppress(OSError):
            os.unlink(name)


@contextmanager
def _into(number: int) -> Iterator[None]:
    """Send STREAMS to the file of this descriptor, which is then closed."""
    _flush()
    kept = {stream: os.dup(stream) for stream in STREAMS if _is_open(stream)}
    try:
        for stream in kept:
            os.dup2(number, stream)
        os.close(number)
        yield
    finally:
        try:
            _flush()
        finally:
            for stream, before in kept.items():
                os.dup2(before, stream)
                os.close(before)


def _last_error() -> BaseException | None:
    """The last exception whose traceback Python has shown: of an earlier interactive line, or the one that ends it."""
    return getattr(sys, "last_value", None)


def _forget(name: str, before: BaseException | None) -> None:
    """Remove the file when Python ends, unless it ends with an exception.

    before: the last exception that had been shown when the engine was there
    """
    if _last_error() is not before:
        print(f"the engine's output is in {name}", file=sys.stderr)
    else:
        with suppress(OSError):
            os.unlink(name)


def _is_open(stream: int) -> bool:
    with suppress(OSError):
        return os.fstat(stream) is not None
    return False


def _flush() -> None:
    """Flush stdout and stderr. A closed or broken one (full disk, unread pipe) must not cost the engine."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
