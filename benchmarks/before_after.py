"""Examples of what a user may type, run with the package of a commit before a change and with that after it.

A list of examples has a results file with a row for each answer under the label "before" or "after", and a page that
shows both (benchmarks/odd_inputs.py, benchmarks/odd_measurements.py).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tables import markdown

from fp8plan import jsonl

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"
MOST_SHOWN = 240  # characters of an answer in the table

Files = dict[str, str | bytes]  # name in the example's folder -> its content
Show = Callable[[subprocess.CompletedProcess[str]], str]


@dataclass(frozen=True)
class Example:
    """One thing that a user may type.

    point:   number of the point in its issue
    title:   the input, in words
    command: arguments of `fp8plan`; MODEL stands for the folder that holds `files`; or Python code after "-c", which
             may import what stands in this folder
    files:   files of that folder
    show:    the part of an answer that the table shows
    answers: exit codes of an answer; any other is a refusal, of which the last line on stderr is shown
    """

    point: int
    title: str
    command: tuple[str, ...]
    files: Files = field(default_factory=dict)
    show: Show = lambda done: f"exit {done.returncode}"
    answers: tuple[int, ...] = (0,)


def lines(pattern: str, stream: str = "stdout") -> Show:
    """The lines of an output that match."""

    def shown(done: subprocess.CompletedProcess[str]) -> str:
        text = " ".join(line.strip() for line in getattr(done, stream).splitlines() if re.search(pattern, line))
        return text or f"exit {done.returncode}, no such line on {stream}"

    return shown


def answer(example: Example, checkout: Path) -> dict[str, Any]:
    """Run one example with the package of a checkout. Returns its row."""
    with tempfile.TemporaryDirectory() as base:
        model = Path(base) / "model"
        for name, content in example.files.items():
            (model / name).parent.mkdir(parents=True, exist_ok=True)
            (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        model.mkdir(exist_ok=True)
        words = [word.replace("MODEL", str(model)) for word in example.command]
        command = [sys.executable, *(words if words[0] == "-c" else ["-m", "fp8plan", *words])]
        path = os.pathsep.join((str(checkout), str(ROOT / "benchmarks")))
        env = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONSAFEPATH": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=base, timeout=300)
        text = example.show(done) if done.returncode in example.answers else refusal(done.stderr)
    title, shown = example.title, text.replace(str(model), "MODEL").replace(base, "")
    shown = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", shown)  # another at each run
    return {"point": example.point, "input": title, "exit": done.returncode, "answer": " ".join(shown.split())}


def refusal(stderr: str) -> str:
    """The line that refuses, or the last one of a traceback with its name."""
    text = [line for line in stderr.splitlines() if line.strip() and not line.startswith("note: ")]
    last = text[-1] if text else "nothing on stderr"
    return f"Traceback: {last}" if any("Traceback" in line for line in text) else last


def table(results: Path, most: int = MOST_SHOWN) -> str:
    """The committed answers, before and after, as Markdown. most: characters that are shown of each"""
    rows: dict[tuple[int, str], dict[str, str]] = {}
    for row in jsonl.rows(results):
        text = row["answer"] if len(row["answer"]) <= most else row["answer"][: most - 1] + "…"
        status = "" if row["exit"] == 0 else f"**exit {row['exit']}** "
        rows.setdefault((row["point"], row["input"]), {})[row["label"]] = status + text.replace("|", "\\|")
    cells = [
        (str(point), title, of.get("before", ""), of.get("after", "")) for (point, title), of in sorted(rows.items())
    ]
    return markdown.table(("point", "input", "before", "after"), cells)


def main(description: str | None, examples: Iterable[Example], results: Path) -> None:
    """The command line of a list of examples: run those, and replace the rows of a label."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--label", choices=("before", "after"), required=True)
    options = parser.parse_args()
    kept = [row for row in jsonl.rows(results) if row["label"] != options.label] if results.exists() else []
    made = []
    for example in examples:
        made.append(answer(example, options.checkout.resolve()) | {"label": options.label})
        print(
            f"{example.point} {example.title}\n    exit {made[-1]['exit']}: {made[-1]['answer'][:300]}", file=sys.stderr
        )
    results.write_bytes(b"".join(map(jsonl.line, [*kept, *made])))
