"""A program that a measurement has started, with all that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def run(words: Sequence[str], log: Path, limit_s: float, env: Mapping[str, str] | None = None) -> str:
    """Run a command, and end it after limit_s seconds. Return how it has failed; "" if it has not."""
    with log.open("wb") as out:
        process = subprocess.Popen(words, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"ended after {limit_s:g} s"
    finally:
        end(process)
    return f"ended with {status}" if status else ""


def end(process: subprocess.Popen[bytes], patience_s: float = 60.0) -> None:
    """End a process group, which was begun by start_new_session; kill what is left of it after patience_s at most."""
    with suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    with suppress(ProcessLookupError):  # a child may outlive the first process, and keep the GPU
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
