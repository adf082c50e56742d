"""A Monitor's state in the checkpoints of a trainer: the thresholds, and the guard's memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fp8plan.errors import ConfigError
from fp8plan.jsonl import parse

if TYPE_CHECKING:
    from fp8plan.runtime.monitor.monitor import Monitor

STATE_FILE: Final = "fp8plan.json"


def save_state(monitor: Monitor, checkpoint: Path) -> None:
    """Write the state into the folder of a checkpoint, whole or not at all."""
    part = checkpoint / f"{STATE_FILE}.part"
    part.write_text(json.dumps(monitor.state_dict()), encoding="utf-8")
    part.replace(checkpoint / STATE_FILE)


def load_state(monitor: Monitor, checkpoint: Path) -> bool:
    """Go on with the state in the folder of a checkpoint. Return False if there is none.

    Raises ConfigError for a file that cannot be read, that is not JSON, and for values that no state has.
    """
    file = checkpoint / STATE_FILE
    if not file.is_file():
        return False
    where = f"{file}, without which thresholds begin anew,"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}; take it from another checkpoint, or delete it") from None
    monitor.load_state_dict(parse(text, where, finite=False))  # limit_kl and C may be infinite
    return True
