"""The simulation in C as a library: its compilation, and the types that it takes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from fp8plan.model.cost.clock import DEPTHS, SIZE_STEP, Clock

Numbers, Seconds = ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_double)
TABLES = ("tokens", "sampled", "decode", "first", "further", "uneven", "launches", "host")
COUNTS = ("kinds", "decode_rows", "chunk_rows", "num_depths", "size_step", "overlaps", "leads", "on_cpu")


class ClockInC(ctypes.Structure):
    """Clock in c/state.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*TABLES, "depths")),
        *((name, ctypes.c_int64) for name in COUNTS),
    )

    def __init__(self, clock: Clock) -> None:
        tables = [*(getattr(clock, name) for name in TABLES), np.array(DEPTHS)]
        self._arrays = [np.ascontiguousarray(table, dtype=np.float64) for table in tables]
        sizes = *clock.decode.shape[:2], clock.first.shape[1], len(DEPTHS), SIZE_STEP
        flags = clock.overlaps, clock.leads, clock.on_cpu
        super().__init__(*(array.ctypes.data for array in self._arrays), *sizes, *flags)


@cache
def compiled() -> ctypes.CDLL | None:
    """The library that this machine's C compiler made of c/scheduler.c, in the user's cache folder; None without one.

    The environment variable CC names another compiler, or, if it is empty, none.
    """
    source = Path(__file__).with_name("c") / "scheduler.c"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not compiler:
        return None
    texts = [path.read_text(encoding="utf-8") for path in sorted(source.parent.iterdir())]
    made_from = "\n".join([platform.platform(), *compiler, *texts])
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8plan"
        library = folder / f"scheduler-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                made = Path(temporary) / library.name
                command = [
                    *compiler,
                    "-O1",
                    "-ffp-contract=off",
                    "-shared",
                    "-fPIC",
                    "-o",
                    str(made),
                    str(source),
                    "-lm",
                ]
                subprocess.run(command, check=True, capture_output=True, timeout=60)
                made.replace(library)  # in one go: another process may be about to load it
        loaded = ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError):  # RuntimeError: no home folder
        return None
    loaded.fp8plan_schedule.restype = ctypes.c_int64
    arrays = [Numbers] * 11  # nine tables, the facts, and the rows that end requests
    loaded.fp8plan_schedule.argtypes = [*arrays, Seconds, ctypes.POINTER(ClockInC), ctypes.POINTER(Numbers)]
    loaded.fp8plan_columns.argtypes = [Numbers, ctypes.c_int64, ctypes.c_int64, Numbers]
    return loaded
