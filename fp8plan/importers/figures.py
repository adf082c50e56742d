"""The figures that a trainer logged, step by step: seconds of generation, mean lengths.

FOLDER or events.out.tfevents.*   TensorBoard, of any trainer
*.json                            trainer_state.json of a TRL checkpoint
*.jsonl                           verl's logger "file" ({"step", "data"}), or rows with "step" or "_step" (W&B)
anything else                     verl's logger "console": lines "step:1 - timing_s/gen:12.3 - ..."
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import isfinite, nan
from pathlib import Path
from typing import Any, Final

from fp8plan.errors import ConfigError
from fp8plan.importers.logged import Note
from fp8plan.importers.notes import TORN_FIGURE
from fp8plan.jsonl import TORN, lines, torn_note
from fp8plan.packages import package

EVENT_FILES: Final = "tensorboard.backend.event_processing.event_accumulator"
Figures = dict[int, dict[str, float]]  # step -> name -> value
STEP = re.compile(r"\bstep:(\S+) - (.*)")
# A name and a number. numpy prints np.float64(1.5), and Ray writes "[repeated 2x across cluster]" behind a line.
FIGURE = re.compile(r"(\S+):(?:np\.\w+\()?([-+.,'’\w\s]+)\)?(?:\s*\[.*)?")
THOUSANDS = re.compile(r"[-+]?\d{1,3}([,'’_\s])\d{3}(?:\1\d{3})*(?:\.\d*)?")
# Colours and other commands to a terminal. A pipe or an editor may have turned the escape into "^[", or dropped it.
TERMINAL = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|(?:\x1b\[|\^\[\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[@-Z\\^_]|\[\d{1,3}(?:;\d{1,3})*m"
)


def figures(path: Path, note: Note = str) -> Figures:
    """Read a trainer's figures. One that was logged as null is NaN; NaN and infinite ones are kept.

    note: called with a remark on a last line that breaks off

    Raises ConfigError for a path that is not there or holds none.
    """
    if not path.exists():
        raise ConfigError(f"there is no log {path}; give one of: {_kinds()}")
    rows: Iterable[tuple[Any, Any]]
    if path.is_dir() or "tfevents" in path.name:
        rows = _tensorboard(path)
    elif path.suffix == ".json":
        rows = _trainer_state(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        rows = _objects(path, note)
    else:
        rows = _console(path, note)
    by_step: Figures = defaultdict(dict)
    for step, values in rows:
        at = _number(step)
        if at is not None and isfinite(at) and isinstance(values, Mapping):
            known = by_step[int(at)]
            for name, value in values.items():
                figure = _number(value)
                if figure is not None and (isfinite(figure) or name not in known):  # a number of this step is kept
                    known[name] = figure
    if not by_step:
        raise ConfigError(f"{path} holds no figures of steps; give one of: {_kinds()}")
    return dict(by_step)


def _kinds() -> str:
    return "a TensorBoard folder, TRL's trainer_state.json, JSON lines with a step each, or verl's console output"


def _tensorboard(path: Path) -> Iterable[tuple[int, dict[str, float]]]:
    events = package(EVENT_FILES, f"reading {path}", "pip install 'fp8plan[monitor]'")
    log = events.EventAccumulator(str(path), size_guidance={"scalars": 0})  # 0: all of them
    log.Reload()
    for name in log.Tags()["scalars"]:
        yield from ((event.step, {name: event.value}) for event in log.Scalars(name))


def _trainer_state(path: Path) -> Iterable[tuple[Any, dict[str, Any]]]:
    try:
        history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        return [(row["step"], row) for row in history]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not a trainer's state; give a trainer_state.json of a TRL checkpoint") from None


def _objects(path: Path, note: Note) -> Iterable[tuple[Any, Any]]:
    for number, row in lines(path, "log"):
        if row is TORN:
            note(torn_note(number, path))
        elif isinstance(row, dict):
            yield row.get("step", row.get("_step")), row.get("data", row)


def _console(path: Path, note: Note) -> Iterable[tuple[str, dict[str, str]]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if match := STEP.search(TERMINAL.sub("", line)):
                figures = [FIGURE.fullmatch(part.strip()) for part in match[2].split(" - ")]
                if not line.endswith("\n") and figures.pop():
                    note(TORN_FIGURE.format(number, path))
                yield match[1], {figure[1]: figure[2] for figure in figures if figure}


def _number(value: Any) -> float | None:
    """A figure as a number, with thousands separators or without; NaN for null, None if it is no number."""
    try:
        if value is None:
            return nan
        if isinstance(value, str):
            value = value.strip()
            digits = THOUSANDS.fullmatch(value)
            return float(value.replace(digits[1][0], "") if digits else value)
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
