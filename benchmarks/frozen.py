"""Predictions that are frozen before a measurement: for a host that is not known, and for hosts of several speeds.

A measurement is judged by what was frozen for its own host's loop, between the two nearest of HOST_LOOPS_US.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fp8plan.errors import ConfigError

HOST_LOOPS_US: Final = (None, 260, 330, 400, 470, 540)  # None: not known; from the fastest host seen to the slowest
HOST: Final = "host_loop_us"

Row = Mapping[str, Any]


def freeze(path: Path, measured: Path, rows: Iterable[Row]) -> None:
    """Write predictions, one a line. Raises ConfigError once there are measurements."""
    if measured.exists():
        raise ConfigError(f"{measured} is measured already: its predictions stay as they were frozen, in {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def command(
    name: str, path: Path, measured: Path, predictions: Callable[[], Iterable[Row]], printed: Callable[[], str]
) -> None:
    """`python -m benchmarks.NAME` prints what is measured, and with --freeze writes the predictions."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--freeze", action="store_true", help="predict everything, before anything is measured")
    if parser.parse_args().freeze:
        freeze(path, measured, predictions())
    else:
        print(printed())


def seconds(host_loop_us: int | None) -> float | None:
    """The loop of a host in seconds; None stays None."""
    return None if host_loop_us is None else host_loop_us * 1e-6


def on_host(rows: Sequence[Row], numbers: Sequence[str], host_loop_s: float | None) -> dict[str, float]:
    """Some numbers of one prediction for a host. Outside of HOST_LOOPS_US they are those of the nearest one.

    rows:        the prediction, for each of HOST_LOOPS_US
    host_loop_s: None: not known
    """
    if host_loop_s is None:
        row = next(row for row in rows if row[HOST] is None)
        return {name: row[name] for name in numbers}
    known = sorted((row for row in rows if row[HOST] is not None), key=lambda row: row[HOST])
    loops = [row[HOST] for row in known]
    return {name: float(np.interp(1e6 * host_loop_s, loops, [row[name] for row in known])) for name in numbers}
