"""Processes of a large plan: the results of one process, and no process left after Ctrl-C, an error or a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8plan.errors import ConfigError, Fp8PlanError
from fp8plan.model.workers import mapper

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs fork")


def square(number: int) -> int:
    time.sleep(0.01 * (number % 3))  # they end in another order
    return number * number


def unlucky(number: int) -> int:
    if number == 3:
        raise ConfigError("three")
    return number


def killed(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("workers", [1, 2, 5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("items", [0, 1, 17])
def test_results_come_in_the_order_of_the_items(workers: int, items: int) -> None:
    with mapper(workers) as map_items:
        for _ in range(2):  # a mapper may be used again
            assert list(map_items(square, range(items))) == [square(x) for x in range(items)]


def test_the_error_of_a_worker_is_raised() -> None:
    with pytest.raises(ConfigError, match="three"), mapper(2) as map_items:
        list(map_items(unlucky, range(9)))


def test_a_killed_worker_is_an_error() -> None:
    with pytest.raises(Fp8PlanError, match="a worker process ended early"), mapper(2) as map_items:
        list(map_items(killed, range(9)))


def test_a_handler_of_sigint_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with mapper(2) as map_items:
        next(iter(map_items(square, range(9))))
        assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before


LONG = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from fp8plan.model.workers import mapper
def work(number):
    print("busy", flush=True)
    time.sleep({seconds})
    return bytes(200_000)  # more than a pipe holds
try:
    with mapper(4) as map_items:
        for _ in map_items(work, range(2000)):
            {between}
except KeyboardInterrupt:
    sys.exit(130)
"""


def _left(group: int, seconds: float) -> bool:
    """True if a process of the group still runs after so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    return True


@pytest.mark.parametrize("to", ["every process", "the first"])
@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.1, 0.4])
@pytest.mark.parametrize("seconds", [0.001, 60])
def test_no_process_is_left_after_ctrl_c(wait_s: float, seconds: float, to: str) -> None:
    program = [sys.executable, "-c", LONG.format(seconds=seconds, between="time.sleep(0.01)")]
    process = subprocess.Popen(program, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # the first worker has started, the others may not have
    time.sleep(wait_s)
    (os.killpg if to == "every process" else os.kill)(process.pid, signal.SIGINT)
    try:
        error = process.communicate(timeout=20)[1]
    finally:
        left = _left(process.pid, 5)
    assert (process.returncode, error.decode(), left) == (130, "", False)


def test_no_process_is_left_after_its_parent_is_killed() -> None:
    program = [sys.executable, "-c", LONG.format(seconds=0.001, between="time.sleep(0.1)")]
    process = subprocess.Popen(program, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait(20)
    process.stdout.close()
    assert not _left(process.pid, 10)


PLAN = """
import signal, sys
from fp8plan import cli
signal.signal(signal.SIGINT, signal.default_int_handler)
print("ready", flush=True)
sys.argv = ["fp8plan", "plan", "Qwen/Qwen3-235B-A22B", "--gpu", "h200", "--gpus", "64"]
cli.main()
"""


@pytest.mark.parametrize("wait_s", [0.1, 0.5, 1.0, *(pytest.param(x, marks=pytest.mark.slow) for x in (2.0, 3.0))])
def test_ctrl_c_ends_a_plan_of_many_gpus(wait_s: float, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PLAN], start_new_session=True, cwd=tmp_path, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(wait_s)
    os.killpg(process.pid, signal.SIGINT)
    try:
        printed, _ = process.communicate(timeout=20)
    finally:
        left = _left(process.pid, 5)
    assert not left
    # A plan that has printed its last line is about to end. Then Python has no handler of SIGINT any more.
    done = b"profile: " in printed
    assert process.returncode == 130 or (done and process.returncode in (0, -signal.SIGINT))
