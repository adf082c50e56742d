"""Messages of a measurement to whoever waits for it."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm


def note(text: str) -> None:
    """Print a line on stderr with the time of day, past a progress bar where there is one."""
    tqdm.write(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr)
