"""The drill's results: a line of JSON for each fault and place, and the tables of docs/evidence/weight_sync.md."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from fp8plan import jsonl

from .fault import NEW, OLD, PLACE_NAMES, REFUSES

ROOT: Final = Path(__file__).resolve().parents[2]
RESULTS: Final = ROOT / "benchmarks" / "results" / "fault_drill.jsonl"
Rows = Sequence[Mapping[str, Any]]


@cache
def _run() -> dict[str, Any]:
    """What all rows of a run share."""
    import torch
    import vllm

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"commit": commit.stdout.strip(), **versions, "cpus": os.cpu_count()}


def stamped(row: dict[str, Any]) -> dict[str, Any]:
    """A row with when, where and with what it ran. load: of the machine, by processes that want a core"""
    return {"date": jsonl.now(), **_run(), "load": round(os.getloadavg()[0], 1), **row}


def keep(row: dict[str, Any], path: Path) -> None:
    """Put a row in the place of the one before."""
    rows = list(jsonl.rows(path)) if path.exists() else []
    key = row["place"], row["fault"]
    others = [old for old in rows if (old["place"], old["fault"]) != key]
    path.write_bytes(b"".join(map(jsonl.line, [*others, row])))


def line(row: Mapping[str, Any]) -> str:
    """A row for the terminal."""
    said = row["said"] or row["refusal"]
    mark = "WRONG" if row["wrong"] else "ok"
    times = f"{row['seconds']:5.1f} s, heals in {row['heal_seconds']:.1f} s by {row['healed_by']}"
    memory = f"x{row['rss_most'] / max(row['rss_before'], 1):.2f}"
    text = f"{mark:5} {row['place']:6} {row['fault']:32} {row['outcome']:13} {times}, memory {memory}  {said[:160]}"
    return "\n".join([text, *(f"      {problem}" for problem in row["wrong"])])


def summary(rows: Rows) -> str:
    """Outcomes by place."""
    from benchmarks.tables.markdown import table

    cells = []
    for place, shown in PLACE_NAMES.items():
        own = [row for row in rows if row["place"] == place]
        counts = Counter(row["outcome"] for row in own)
        most = max((row["rss_most"] / row["rss_before"] for row in own if row["rss_before"]), default=0.0)
        slowest = max((row["seconds"] for row in own), default=0.0)
        wrong = sum(bool(row["wrong"]) for row in own)
        numbers = (len(own), counts[OLD], counts[NEW], counts[REFUSES], wrong)
        cells.append((shown, *map(str, numbers), f"{slowest:.1f} s", f"{most:.2f}"))
    heads = ("place", "faults", OLD, NEW, REFUSES, "wrong", "slowest", "most memory, of that before")
    return table(heads, cells)
