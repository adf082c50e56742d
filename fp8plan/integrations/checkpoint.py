"""A Monitor's state in the checkpoints of a trainer: the thresholds, and the guard's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fp8plan.runtime.monitor.monitor import Monitor

STATE_FILE: Final = "fp8plan.json"


def save_state(monitor: Monitor, checkpoint: Path) -> None:
    """Write the state into the folder of a checkpoint."""
    (checkpoint / STATE_FILE).write_text(json.dumps(monitor.state_dict()), encoding="utf-8")


def load_state(monitor: Monitor, checkpoint: Path) -> bool:
    """Go on with the state in the folder of a checkpoint. Return False if there is none."""
    file = checkpoint / STATE_FILE
    if not file.is_file():
        return False
    monitor.load_state_dict(json.loads(file.read_text(encoding="utf-8")))
    return True
