"""Tables of a fleet of replicas on GPUs, from committed measurements: rollouts beside their prediction, and syncs.

    python -m benchmarks.tables.fleet

`git show 4f9b9518:benchmarks/gpu/fleet.py` made them, as the first row of their file says.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables.markdown import table
from benchmarks.tables.trainers import runs_of
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
        *_, row = (r for r in rows if r["what"] == "rollout" and r["routing"] == routing and r["warm"])
        found = row["report"]
        seconds, predicted = found["seconds"], found["predicted_routed_s"]
        figures = (
            f"{seconds:.2f}",
            f"{predicted:.2f}",
            f"{predicted / seconds - 1:+.1%}",
            f"{row['tokens_per_s']:,.0f}",
        )
        lines.append((known, f"{found['routed_tokens']:,}", *figures))
    heads = ("known of the lengths", "most tokens of a replica", "rollout (s)", "predicted (s)", "error", "tokens/s")
    return table(heads, lines)


def syncs(rows: list[Row]) -> str:
    """A row for each way of the weights: the first sync, the median of the others, and what came after."""
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows if row["what"] == "sync"):
        reports = [row["report"] for row in rows if row["what"] == "sync" and row["way"] == way]
        seconds = [report["seconds"]["total"] for report in reports]
        warm = median(seconds[1:])
        size = reports[0]["bytes"]
        scales = median(report["seconds"]["kv_scales"] for report in reports[1:])
        (equal,) = (row for row in rows if row["what"] == "equal" and row["way"] == way)
        figures = (f"{size / 1e9:.1f}", f"{seconds[0]:.2f}", f"{warm:.2f}", f"{size / warm / 1e9:.1f}", f"{scales:.2f}")
        lines.append((way.replace("_", " "), *figures, f"{len(equal['differ'])} of {equal['tensors']}"))
    heads = ("weights over", "GB", "first sync (s)", "others (s)", "GB/s", "of it KV scales (s)", "tensors that differ")
    return table(heads, lines)


def committed() -> str:
    """Both tables of the last run of two replicas that came to its end, and what a replacement took."""
    *_, rows = (run for run in runs_of(jsonl.rows(MEASURED), "fleet") if _ended(run) and run[0]["data_parallel"] == 2)
    begun, (filled,) = rows[0], (row for row in rows if row["what"] == "replace")
    took = f"The fleet started in {begun['start_s']:.0f} s, and the place of a killed replica was filled in "
    return "\n\n".join((rollouts(rows), syncs(rows), f"{took}{filled['seconds']:.0f} s."))


def _ended(run: list[Row]) -> bool:
    """Return whether a run measured all that the tables show."""
    did = {row["what"] for row in run}
    failed = {row["part"] for row in run if row["what"] == "failed"} - {"fleet"}  # which did not start, after this run
    return did >= {"rollout", "sync", "equal", "replace"} and not failed


if __name__ == "__main__":
    print(committed())
