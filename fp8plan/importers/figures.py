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
from collections.abc import Iterable
from math import nan
from pathlib import Path
from typing import Any

from fp8plan.checks import is_number
from fp8plan.errors import ConfigError
from fp8plan.jsonl import lines

Figures = dict[int, dict[str, float]]  # step -> name -> value
STEP = re.compile(r"\bstep:(\d+) - (.*)")
FIGURE = re.compile(r"(\S+):(?:np\.\w+\()?([-+.\w]+)\)?")  # numpy's numbers print as np.float64(1.5)


def figures(path: Path, absent: bool = False) -> Figures:
    """Read a trainer's figures.

    absent: keep figures that were logged and are no numbers (null, NaN, infinite), as NaN; else they are left out

    Raises ConfigError for a path that is not there or holds none.
    """
    if not path.exists():
        raise ConfigError(f"there is no log {path}; give one of: {_kinds()}")
    rows: Iterable[tuple[Any, dict[str, Any]]]
    if path.is_dir() or "tfevents" in path.name:
        rows = _tensorboard(path)
    elif path.suffix == ".json":
        rows = _trainer_state(path)
    elif path.suffix == ".jsonl":
        rows = ((row.get("step", row.get("_step")), row.get("data", row)) for row in _objects(path))
    else:
        rows = _console(path)
    by_step: Figures = defaultdict(dict)
    for step, values in rows:
        if is_number(step):
            by_step[int(step)] |= {name: float(x) for name, x in values.items() if is_number(x)}
            for name in values if absent else ():
                if _is_absent(values[name]):
                    by_step[int(step)].setdefault(name, nan)  # another row of the step may have the number
    if not by_step:
        raise ConfigError(f"{path} holds no figures of steps; give one of: {_kinds()}")
    return dict(by_step)


def _is_absent(value: Any) -> bool:
    """True for null, NaN and infinity, also as text, which W&B writes."""
    if value is None or str(value).lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return True
    return is_number(value, finite=False) and not is_number(value)


def _kinds() -> str:
    return "a TensorBoard folder, TRL's trainer_state.json, JSON lines with a step each, or verl's console output"


def _tensorboard(path: Path) -> Iterable[tuple[int, dict[str, float]]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ConfigError(f"reading {path} needs TensorBoard; type: pip install 'fp8plan[monitor]'") from None
    log = EventAccumulator(str(path), size_guidance={"scalars": 0})  # 0: all of them
    log.Reload()
    for name in log.Tags()["scalars"]:
        yield from ((event.step, {name: event.value}) for event in log.Scalars(name))


def _trainer_state(path: Path) -> Iterable[tuple[Any, dict[str, Any]]]:
    try:
        history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        return [(row["step"], row) for row in history]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not a trainer's state; give a trainer_state.json of a TRL checkpoint") from None


def _objects(path: Path) -> Iterable[dict[str, Any]]:
    return (row for _, row in lines(path, "log") if isinstance(row, dict))


def _console(path: Path) -> Iterable[tuple[int, dict[str, float]]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if match := STEP.search(line):
                pairs = (FIGURE.fullmatch(part) for part in match[2].split(" - "))
                yield int(match[1]), dict(_number(pair[1], pair[2]) for pair in pairs if pair)


def _number(name: str, text: str) -> tuple[str, float]:
    try:
        return name, float(text)
    except ValueError:
        return name, float("nan")  # a figure that is no number is passed over
