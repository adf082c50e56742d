"""The drill's results: a line of JSON for each fault and place, and the table of docs/evidence/weight_sync.md."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.tables.markdown import table
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


def stamped(row: dict[str, Any], begun: float) -> dict[str, Any]:
    """A row with when, where and with what it ran.

    begun: monotonic seconds at which its place began to start. load: processes that want a core of the machine
    """
    load = round(os.getloadavg()[0], 1)
    elapsed = round(time.monotonic() - begun, 1)
    words = {key: _anywhere(text) if isinstance(text, str) else text for key, text in row.items()}
    return {"date": jsonl.now(), **_run(), "load": load, "elapsed_s": elapsed, **words}


def _anywhere(text: str) -> str:
    """A text without this machine's name and temporary folder."""
    text = text.replace(tempfile.gettempdir(), "$TMPDIR")
    return re.sub(rf"\bon {re.escape(socket.gethostname())}\b", "on HOST", text)


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
    memory = "" if row["rss_most"] is None else f", memory x{row['rss_most'] / row['rss_before']:.2f}"
    text = f"{mark:5} {row['place']:6} {row['fault']:32} {row['outcome']:13} {times}{memory}  {said[:160]}"
    return "\n".join([text, *(f"      {problem} {row['heal_said']}" for problem in row["wrong"])])


def minutes(rows: Rows) -> float:
    """How long a whole run took: each place from the start of its process to its last row."""
    places = {row["place"] for row in rows}
    return sum(max(row["elapsed_s"] for row in rows if row["place"] == place) for place in places) / 60


def summary(rows: Rows) -> str:
    """Outcomes by place, and when and how long it ran."""
    cells = []
    for place, shown in PLACE_NAMES.items():
        own = [row for row in rows if row["place"] == place]
        counts = Counter(row["outcome"] for row in own)
        most = max(row["rss_most"] / row["rss_before"] for row in own if row["rss_most"] is not None)
        slowest = max(row["seconds"] for row in own)
        wrong = sum(bool(row["wrong"]) for row in own)
        numbers = (len(own), counts[OLD], counts[NEW], counts[REFUSES], wrong)
        cells.append((shown, *map(str, numbers), f"{slowest:.1f} s", f"{most:.2f}"))
    heads = ("place", "faults", OLD, NEW, REFUSES, "wrong", "slowest answer", "most memory / before")
    first = rows[0]
    faults, loads = len({row["fault"] for row in rows}), [row["load"] for row in rows]
    ran = f"On {first['date'][:10]}, with vLLM {first['vllm']}: {faults} faults in {len(rows)} rows"
    took = f"{minutes(rows):.0f} minutes on {first['cpus']} cores, whose load was {min(loads):g} to {max(loads):g}"
    return f"{table(heads, cells)}\n\n{ran}, {took}."


def committed() -> dict[str, str]:
    """The block of docs/evidence/weight_sync.md."""
    return {"fault drill": summary(jsonl.rows(RESULTS))}
