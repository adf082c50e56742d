"""A program that a measurement has started, with all that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress


def end(process: subprocess.Popen[bytes], patience_s: float = 60.0) -> None:
    """End a process group, which was begun by start_new_session; kill what is left of it after patience_s at most."""
    with suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    with suppress(ProcessLookupError):  # a child may outlive the first process, and keep the GPU
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
