"""A thread of its own for one thing after another, which nobody waits for at the end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from fp8plan.runtime.apply.weight_sync.nccl import Lane


def test_things_are_done_in_turn_and_errors_are_the_futures() -> None:
    lane, done = Lane("of a test"), list[int]()
    futures = [lane.submit(done.append, number) for number in range(50)]
    failed = lane.submit(lambda: 1 // 0)
    assert lane.submit(threading.current_thread).result().name == "of a test"
    assert done == list(range(50))
    assert all(future.done() for future in futures)
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_what_is_cancelled_in_time_is_not_done_and_costs_nobody_else() -> None:
    lane, go_on, done = Lane("of a test"), threading.Event(), list[int]()
    first = lane.submit(go_on.wait)
    cancelled = lane.submit(done.append, 1)
    assert cancelled.cancel()
    go_on.set()
    lane.submit(done.append, 2).result(timeout=10)
    assert first.result()
    assert done == [2]


def test_the_thread_ends_with_its_lane() -> None:
    lane = Lane("that ends")
    thread = lane.submit(threading.current_thread).result()
    del lane
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_process_ends_although_a_lane_waits_for_ever() -> None:
    code = "import threading; from fp8plan.runtime.apply.weight_sync.nccl import Lane\n"
    code += "lane = Lane('waits'); future = lane.submit(threading.Event().wait); raise SystemExit(3)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 3
