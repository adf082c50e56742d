"""Table of the faults that a drill planted on the way of weights, from its committed rows.

The drill is at the commit that its rows name: `git show 4f9b9518:benchmarks/fault_drill/table.py` lists its faults.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

from benchmarks.tables.markdown import table
from fp8plan import jsonl

RESULTS: Final = Path(__file__).parents[1] / "results" / "fault_drill.jsonl"
PLACES: Final = {
    "store": "a RolloutEngine that follows a store",
    "server": "`vllm serve` that follows a store over HTTP",
    "engine": "a RolloutEngine in a process of its own, whose trainer holds it",
    "fleet": "a RolloutFleet of two",
}
OUTCOMES: Final = ("old weights", "new weights", "refuses")


def committed() -> str:
    """Outcomes by place, and when and how long the drill ran."""
    rows = jsonl.rows(RESULTS)
    places = {place: [row for row in rows if row["place"] == place] for place in PLACES}
    heads = ("place", "faults", *OUTCOMES, "wrong", "slowest answer", "most memory / before")
    first, loads = rows[0], [row["load"] for row in rows]
    faults = len({row["fault"] for row in rows})
    minutes = sum(max(row["elapsed_s"] for row in own) for own in places.values()) / 60
    ran = f"On {first['date'][:10]}, with vLLM {first['vllm']}: {faults} faults in {len(rows)} rows"
    took = f"{minutes:.0f} minutes on {first['cpus']} cores, whose load was {min(loads):g} to {max(loads):g}"
    return f"{table(heads, (_line(place, own) for place, own in places.items()))}\n\n{ran}, {took}."


def _line(place: str, rows: list[dict[str, Any]]) -> list[str]:
    counts = Counter(row["outcome"] for row in rows)
    most = max(row["rss_most"] / row["rss_before"] for row in rows if row["rss_most"] is not None)
    slowest = max(row["seconds"] for row in rows)
    numbers = [len(rows), *(counts[outcome] for outcome in OUTCOMES), sum(bool(row["wrong"]) for row in rows)]
    return [PLACES[place], *map(str, numbers), f"{slowest:.1f} s", f"{most:.2f}"]
