"""Resident memory of processes, as Linux counts it: now, and the most since the count was reset."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path


def resident(pids: Iterable[int]) -> int:
    """Bytes of the processes that live."""
    return sum(_read(pid, "VmRSS") for pid in pids)


def most(pids: Iterable[int]) -> int:
    """The largest bytes of each process since `reset`, or since its start, added up."""
    return sum(_read(pid, "VmHWM") for pid in pids)


def reset(pids: Iterable[int]) -> None:
    """Begin to count anew."""
    for pid in pids:
        try:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        except OSError:  # it has ended
            continue


def _read(pid: int, name: str) -> int:
    try:
        line = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(line[1]) * 1024 if line else 0
