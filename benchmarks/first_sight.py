"""The rollouts of held-out families as they were predicted before anyone had seen them.

    python -m benchmarks.first_sight             prints the table of docs/evidence/accuracy.md
    python -m benchmarks.first_sight --update    predicts again with the frozen commits, in a clone with its history

Parts of the model were added after looks at these rollouts, so its error on them today is no error at first sight.
LOOKS has the commit that was frozen before each look, as in profiles/h200_sxm/vllm-0.26.0/families/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.tables.cells import accuracy, merged
from benchmarks.tables.markdown import table as markdown
from fp8plan import jsonl
from fp8plan.model.profile.library import profiles_path
from fp8plan.model.validate.records import read_records
from fp8plan.model.validate.validate import validate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "first_sight.jsonl"
RECORDS = profiles_path() / "h200_sxm" / "vllm-0.26.0" / "families" / "held_out.jsonl"
# Start of the rollouts of a look -> the frozen commit.
LOOKS = {
    "2026-11-23T00:00": "101456e7",
    "2026-11-23T09:00": "78235582",
    "2026-11-23T15:00": "66e8adbc",
    "2026-11-23T19:00": "3cce3dc7",
    "2026-11-24T00:00": "7718cbd1",
}


def at_first_sight(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of today's validation with the predictions of first sight."""
    first = {row["line"]: row["predicted_s"] for row in jsonl.rows(RESULTS)}
    return [{**row, "predicted_s": first[row["line"]]} for row in rows]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The errors at first sight and today, by look and in all, in Markdown. rows: today's validation"""
    commits = {row["line"]: row["commit"] for row in jsonl.rows(RESULTS)}
    looks = {commit: [row for row in rows if commits[row["line"]] == commit] for commit in LOOKS.values()}
    lines = []
    for name, own in {**looks, "all": list(rows)}.items():
        models = {str(row["model"]).partition("/")[2] for row in own}
        first, today = (accuracy(merged(x)) for x in (at_first_sight(own), own))
        shown = [f"{x.makespan_mape:.1%}, {x.makespan_worst:.1%}" for x in (first, today)]
        lines.append((name, str(len(own)), ", ".join(sorted(models)) if name in looks else "", *shown))
    head = ("frozen in", "rollouts", "models", "at first sight: mean, worst", "today: mean, worst")
    return markdown(head, lines)


def predicted_by(commit: str, records: Sequence[str]) -> list[float]:
    """The makespans of `fp8plan validate`, in seconds, by the code and the profile of a commit. records: their lines"""
    with TemporaryDirectory() as place:
        tree = subprocess.run(("git", "archive", commit, "fp8plan", "profiles"), cwd=ROOT, stdout=PIPE, check=True)
        subprocess.run(("tar", "x", "-C", place), input=tree.stdout, check=True)
        file = Path(place) / "records.jsonl"
        file.write_text("".join(records), encoding="utf-8")
        command = (sys.executable, "-m", "fp8plan", "validate", str(file), "--json")
        said = subprocess.run(command, cwd=place, env=os.environ | {"PYTHONPATH": place}, stdout=PIPE, check=True)
    return [row["predicted_s"] for row in json.loads(said.stdout)["records"]]


def update() -> None:
    looks: dict[str, dict[int, str]] = {}
    for number, line in enumerate(RECORDS.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        date = json.loads(line)["date"]
        looks.setdefault(LOOKS[max(start for start in LOOKS if start <= date)], {})[number] = line
    rows = [
        {"line": number, "commit": commit, "predicted_s": seconds}
        for commit, lines in looks.items()
        for number, seconds in zip(lines, predicted_by(commit, list(lines.values())), strict=True)
    ]
    rows.sort(key=itemgetter("line"))
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="predict again with the frozen commits")
    if parser.parse_args().update:
        update()
    today = validate(read_records(RECORDS)).records
    print(table(today))


if __name__ == "__main__":
    main()
