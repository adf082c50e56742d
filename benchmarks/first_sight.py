"""The rollouts of held-out families as they were predicted before anyone had seen them.

    python -m benchmarks.first_sight     prints the table of docs/evidence/accuracy.md

Parts of the model were added after looks at these rollouts, so its error on them today is no error at first sight.
Each prediction is that of the commit that was frozen before its look, as in
profiles/h200_sxm/vllm-0.26.0/families/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables.cells import accuracy, merged
from benchmarks.tables.markdown import table as markdown
from fp8plan import jsonl
from fp8plan.model.profile.library import profiles_path
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import validate

RESULTS = Path(__file__).parent / "results" / "first_sight.jsonl"
RECORDS = profiles_path() / "h200_sxm" / "vllm-0.26.0" / "families" / "held_out.jsonl"
FROZEN = ("101456e7", "78235582", "66e8adbc", "3cce3dc7", "7718cbd1")  # in the order of the looks


def at_first_sight(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of today's validation with the predictions of first sight."""
    first = {row["line"]: row["predicted_s"] for row in jsonl.rows(RESULTS)}
    return [{**row, "predicted_s": first[row["line"]]} for row in rows]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The errors at first sight and today, by look and in all, in Markdown. rows: today's validation"""
    commits = {row["line"]: row["commit"] for row in jsonl.rows(RESULTS)}
    looks = {commit: [row for row in rows if commits[row["line"]] == commit] for commit in FROZEN}
    lines = []
    for name, own in {**looks, "all": list(rows)}.items():
        models = {str(row["model"]).partition("/")[2] for row in own}
        first, today = (accuracy(merged(x)) for x in (at_first_sight(own), own))
        shown = [f"{x.makespan_mape:.1%}, {x.makespan_worst:.1%}" for x in (first, today)]
        lines.append((name, str(len(own)), ", ".join(sorted(models)) if name in looks else "", *shown))
    head = ("frozen in", "rollouts", "models", "at first sight: mean, worst", "today: mean, worst")
    return markdown(head, lines)


if __name__ == "__main__":
    print(table(validate(read_records(RECORDS)).records))
