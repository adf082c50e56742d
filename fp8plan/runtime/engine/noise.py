"""What an engine writes while it starts, a hundred lines when all is well: held back, and at hand when it is not."""

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
    """Keep all that this process and those it starts write in a file.

    engine_stays: processes that were started here write there as long as they live; it is kept until Python ends

    An exception gets a note that names the file, which then stays, as it does if an exception is what ends Python.
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
    """What is written goes into a file, by its descriptor, which is closed."""
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
    """What Python has shown the traceback of: in an interactive session of an earlier line, or what it ends with."""
    return getattr(sys, "last_value", None)


def _forget(name: str, before: BaseException | None) -> None:
    """Remove the file when Python ends, unless it ends with an exception. before: the last one that had been shown when
    the engine was there."""
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
    """A stream that is closed, or broken as a full disk or a pipe that nobody reads, must not cost the engine."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
