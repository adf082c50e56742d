"""The verdicts on peers' own tests of rollout correction, with fp8plan's numbers in the place of theirs.

`git show 4f9b9518:benchmarks/peers/__main__.py` ran them on checkouts of verl, SkyRL and prime-rl.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables.markdown import table
from fp8plan import jsonl

RESULTS = Path(__file__).parents[1] / "results" / "peers.jsonl"
VERDICTS = ("pass", "fail", "cannot be said")


def committed() -> str:
    """The number of tests of each file with each verdict, in Markdown."""
    rows = jsonl.rows(RESULTS)
    cells = []
    for peer, commit, file in dict.fromkeys((row["peer"], row["commit"], row["file"]) for row in rows):
        own = [row["verdict"] for row in rows if (row["peer"], row["commit"], row["file"]) == (peer, commit, file)]
        counts = [str(own.count(verdict)) for verdict in VERDICTS]
        cells.append((peer, f"`{commit[:9]}`", f"`{Path(file).name}`", str(len(own)), *counts))
    return f"{table(('peer', 'commit', 'file', 'tests', *VERDICTS), cells)}\n\nOn {rows[0]['date']}."
