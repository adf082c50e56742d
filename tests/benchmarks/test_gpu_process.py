"""A measurement ends the processes that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.process import end, run

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
LEADER = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def started(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)


def runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_that_ignores_the_signal_does_not_outlive_its_parent() -> None:
    process = started(LEADER)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        end(process)
        deadline = time.monotonic() + 10
        while runs(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not runs(child)
    finally:
        if runs(child):
            os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_who_ignores_the_signal_is_killed_and_waited_for() -> None:
    process = started(CHILD)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
        end(process, patience_s=0.1)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("waited", [False, True])
def test_one_that_has_ended_by_itself_is_no_error(waited: bool) -> None:
    process = started("")
    if waited:
        process.wait()
    end(process)
    assert process.poll() is not None
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize(
    ("code", "failed"),
    [("print('here')", ""), ("exit(3)", "ended with 3"), ("import time; time.sleep(60)", "ended after 2 s")],
)
def test_a_command_says_how_it_failed(code: str, failed: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run([sys.executable, "-c", code], log, 2.0) == failed
    assert log.read_text() == ("" if failed else "here\n")
