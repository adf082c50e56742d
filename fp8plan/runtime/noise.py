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
    _flush()
    kept = {stream: os.dup(stream) for stream in STREAMS if _is_open(stream)}
    number, name = tempfile.mkstemp(prefix="fp8plan-engine-", suffix=".log")
    for stream in kept:
        os.dup2(number, stream)
    os.close(number)
    try:
        yield Path(name)
    except BaseException as error:
        error.add_note(f"its output is in {name}")
        raise
    else:
        if engine_stays:
            atexit.register(_forget, name)
        else:
            os.unlink(name)
    finally:
        _flush()
        for stream, before in kept.items():
            os.dup2(before, stream)
            os.close(before)


def _forget(name: str) -> None:
    if hasattr(sys, "last_value"):  # what Python ends with
        print(f"the engine's output is in {name}", file=sys.stderr)
    else:
        with suppress(OSError):
            os.unlink(name)


def _is_open(stream: int) -> bool:
    with suppress(OSError):
        return os.fstat(stream) is not None
    return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
