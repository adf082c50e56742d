"""The reports, and what was seen of each failure once it was injected, as docs/evidence/silent_failures.md has them.

reports.json has a failure a line: `reports` are issues and pull requests as owner/repo#number, `names` the names of
alarms, faults and errors that say which failure it is. results/silent_failures.jsonl has what was seen.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tables import markdown

from fp8plan import jsonl

HERE: Final = Path(__file__).resolve().parent
REPORTS: Final = HERE / "reports.json"
RESULTS: Final = HERE.parent / "results" / "silent_failures.jsonl"
SETTINGS: Final = {"own": "own loop", "trl": "TRL", "serve": "`vllm serve`"}
GROUPS: Final = {
    "weights": "weights and caches",
    "sampling": "sampling",
    "tokens": "tokens and masks",
    "log-probs": "log-probs",
    "trainer": "trainer",
}
BY_NAME, NOTICED, MISSED = "by name", "noticed", "not caught"


def reports() -> dict[str, dict[str, Any]]:
    """Name of a failure -> its line of reports.json."""
    return {one["name"]: one for one in json.loads(REPORTS.read_text(encoding="utf-8"))}


def results() -> list[dict[str, Any]]:
    """The committed results; none before the first run."""
    return list(jsonl.rows(RESULTS)) if RESULTS.exists() else []


def outcome(signs: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    """BY_NAME if a sign names the failure, NOTICED if there is any sign, else MISSED.

    signs: with `from`, `name` and `says`; names: of the failure, as reports.json has them
    """
    if any(sign["name"] in names for sign in signs):
        return BY_NAME
    return NOTICED if signs else MISSED


def table() -> str:
    """One row for each failure, in the order of reports.json."""
    seen = {(row["failure"], row["setting"]): row for row in results()}
    rows = []
    for name, one in reports().items():
        cells = [_cell(seen.get((name, setting)), one["names"]) for setting in SETTINGS]
        where = ", ".join(f"[{address}]({_link(address)})" for address in one["reports"])
        rows.append((GROUPS[one["group"]], f"**{name}**: {one['what']} {one['effect']}", where, *cells))
    return markdown.table(("group", "failure and its effect on log-probs", "reported in", *SETTINGS.values()), rows)


def summary() -> str:
    """Failures by setting and outcome."""
    known, counts = reports(), Counter[tuple[str, str]]()
    for row in results():
        counts[row["setting"], outcome(row["signs"], known[row["failure"]]["names"])] += 1
    outcomes = (BY_NAME, NOTICED, MISSED)
    rows = [
        (shown, str(sum(counts[setting, x] for x in outcomes)), *(str(counts[setting, x]) for x in outcomes))
        for setting, shown in SETTINGS.items()
    ]
    return markdown.table(("setting", "injected", "caught by name", "noticed, by another name", "not caught"), rows)


def _cell(row: Mapping[str, Any] | None, names: Sequence[str]) -> str:
    if row is None:
        return ""
    found = outcome(row["signs"], names)
    if found == MISSED:
        return f"**{MISSED}**"
    shown = [sign for sign in row["signs"] if found == NOTICED or sign["name"] in names]
    by = dict.fromkeys(f"{sign['from']} `{sign['name']}`" for sign in shown)
    return f"{found}: {', '.join(by)}"


def _link(address: str) -> str:
    repository, _, number = address.partition("#")
    return f"https://github.com/{repository}/issues/{number}"  # GitHub leads on to a pull request of that number
