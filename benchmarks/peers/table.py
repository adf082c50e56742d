"""The verdicts on peers' tests. Their summary is a table of docs/evidence/speed.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.tables.markdown import table

RESULTS: Final = Path(__file__).parents[1] / "results" / "peers.jsonl"
PASS, FAIL, UNSAID = VERDICTS = ("pass", "fail", "cannot be said")

Rows = Sequence[Mapping[str, Any]]


def summary(rows: Rows) -> str:
    """How many tests of each file have each verdict."""
    files = list(dict.fromkeys((row["peer"], row["commit"], row["file"]) for row in rows))
    cells = []
    for peer, commit, file in files:
        own = [row["verdict"] for row in rows if (row["peer"], row["commit"], row["file"]) == (peer, commit, file)]
        counts = [str(own.count(verdict)) for verdict in VERDICTS]
        cells.append((peer, f"`{commit[:9]}`", f"`{Path(file).name}`", str(len(own)), *counts))
    return table(("peer", "commit", "file", "tests", *VERDICTS), cells)


def reasons(rows: Rows) -> str:
    """The tests that do not pass, with the reason of each."""
    cells: dict[tuple[str, ...], int] = {}
    for row in rows:
        if row["verdict"] != PASS:
            key = row["peer"], f"`{row['test'].partition('[')[0]}`", row["verdict"], row["reason"]
            cells[key] = cells.get(key, 0) + 1
    return table(("peer", "test", "verdict", "reason"), list(cells))


def unexplained(rows: Rows) -> list[Mapping[str, Any]]:
    """Failed tests without a known reason."""
    return [row for row in rows if row["verdict"] == FAIL and not row["known"]]


def committed() -> dict[str, str]:
    """The block of docs/evidence/speed.md, from the committed file."""
    from fp8plan import jsonl

    rows = jsonl.rows(RESULTS)
    dated = f"On {rows[0]['date']}."
    return {"peers": f"{summary(rows)}\n\n{dated}"}
