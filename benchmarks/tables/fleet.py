"""Tables of a fleet of two replicas on two H100s: rollouts beside their prediction, and syncs.

`git show 4f9b9518:benchmarks/gpu/fleet.py` measured them, as the first row of their file says.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables.markdown import table
from fp8plan import jsonl

MEASURED = Path(__file__).parents[1] / "results" / "fleet_h100.jsonl"
ROUTINGS = {
    "static": "nothing: the static split",
    "last": "the mean of the prompt's responses in another rollout",
    "known": "each length",
}
Row = dict[str, Any]


def rollouts(rows: list[Row]) -> str:
    """A row for each routing: its warm rollout, beside the prediction of that routing."""
    lines = []
    for routing, known in ROUTINGS.items():
        (row,) = (r for r in rows if r["what"] == "rollout" and r["routing"] == routing and r["warm"])
        seconds, predicted = row["report"]["seconds"], row["report"]["predicted_routed_s"]
        figures = (f"{seconds:.2f}", f"{predicted:.2f}", f"{predicted / seconds - 1:+.1%}")
        lines.append((known, f"{row['report']['routed_tokens']:,}", *figures, f"{row['tokens_per_s']:,.0f}"))
    heads = ("known of the lengths", "most tokens of a replica", "rollout (s)", "predicted (s)", "error", "tokens/s")
    return table(heads, lines)


def syncs(rows: list[Row]) -> str:
    """The first sync over Ray's object store, the median of the others, and what came after."""
    reports = [row["report"] for row in rows if row["what"] == "sync"]
    seconds = [report["seconds"]["total"] for report in reports]
    size, warm = reports[0]["bytes"], median(seconds[1:])
    scales = median(report["seconds"]["kv_scales"] for report in reports[1:])
    (equal,) = (row for row in rows if row["what"] == "equal" and row["way"] == "object_store")
    figures = (f"{size / 1e9:.1f}", f"{seconds[0]:.2f}", f"{warm:.2f}", f"{size / warm / 1e9:.1f}", f"{scales:.2f}")
    heads = ("weights over", "GB", "first sync (s)", "others (s)", "GB/s", "of it KV scales (s)", "tensors that differ")
    return table(heads, [("object store", *figures, f"{len(equal['differ'])} of {equal['tensors']}")])


def committed() -> str:
    """Both tables, and what a start and a replacement took."""
    rows = jsonl.rows(MEASURED)
    begun, filled = (next(row for row in rows if row["what"] == what) for what in ("fleet", "replace"))
    took = f"The fleet started in {begun['start_s']:.0f} s, and the place of a killed replica was filled in "
    return "\n\n".join((rollouts(rows), syncs(rows), f"{took}{filled['seconds']:.0f} s."))
