"""Files of one JSON object a line that survive a lost machine, and several processes that write one of them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8plan.errors import ConfigError


def append(path: str | Path, row: Mapping[str, Any]) -> None:
    """One line, whole and on the disk before this returns."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def repair(path: Path) -> int:
    """Cut off a last line without its end, as a lost machine leaves it. How many bytes that were."""
    if not path.exists():
        return 0
    with open(path, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        whole = text.rfind(b"\n") + 1
        file.truncate(whole)
    return len(text) - whole


def rows(path: Path) -> list[dict[str, Any]]:
    """All lines of a file that may not exist. Raises ConfigError, naming the line, for one that is not JSON."""
    if not path.exists():
        return []
    with open(path, encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        lines = file.read().splitlines()
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            raise ConfigError(f"{path} has a line that is not JSON: {line[:60]!r}; delete it, then go on") from None
    return found
