"""Which cores an engine is moved to, how their speed is watched, and which of several attempts is kept."""

from __future__ import annotations

import os
from typing import Any

import pytest

from fp8plan.runtime.measure import host, rollout_engine
from fp8plan.runtime.measure.host import FEWEST, Host, loop_seconds, quiet
from fp8plan.runtime.measure.rollout_engine import TRIES, Attempt, attempts, disturbance
from fp8plan.runtime.measure.watch import Watch


def test_busy_cores_are_left_unless_too_few_remain() -> None:
    assert quiet({0: 4.5, 1: 2.3, 2: 2.4, 3: 4.4, 4: 2.3, 5: 2.6, 6: 2.5}) == [1, 4, 2, 6, 5]
    slow = quiet({0: 4.5, 1: 2.3, 2: 4.0, 3: 4.4, 4: 4.3, 5: 4.6})
    assert slow == [1, 2, 4, 3]
    assert len(slow) == FEWEST
    assert quiet({0: 1.0, 1: 9.0}) == [0, 1]


def test_a_loop_is_timed_on_its_core_and_the_thread_comes_back() -> None:
    cores = os.sched_getaffinity(0)
    assert 0 < loop_seconds(min(cores), 2) < 1
    assert os.sched_getaffinity(0) == cores


def test_threads_are_moved_and_a_slow_core_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = dict.fromkeys(os.sched_getaffinity(0), 1.0)
    moved: list[list[int]] = []
    monkeypatch.setattr(host, "loop_seconds", lambda core, _: seconds[core])
    monkeypatch.setattr(host, "_move", lambda _, cores: moved.append(list(cores)))
    here = Host()
    here.settle()
    assert moved
    assert set(moved[0]) <= set(seconds)
    for core in seconds:
        seconds[core] = 1.8
    with Watch(here) as watch:
        pass
    assert watch.facts["host_slowdown"] == pytest.approx(1.8)
    assert watch.facts["host_loop_s"] == 1.0


class FakeTrace:
    rows: tuple[float, ...] = ()

    def start(self) -> None:
        self.rows = ()

    def slowest(self) -> dict[str, float]:
        return {}


def run(monkeypatch: pytest.MonkeyPatch, slowdowns: list[float], compiled: list[int]) -> list[Attempt]:
    """Attempts of a run during which the host is so slow and so many files are compiled, one after the other."""
    clock, asked = iter(slowdowns), [0]

    def count() -> int:  # asked before and after each run
        asked[0] += 1
        return sum(compiled[: asked[0] // 2])

    class FakeHost:
        best_s = 1.0

        def __init__(self) -> None:
            self.now = 1.0

        def settle(self) -> None:
            self.now = next(clock)

        def slowdown(self) -> float:
            return self.now

    monkeypatch.setattr(rollout_engine, "compiled_files", count)
    monkeypatch.setattr(rollout_engine, "timed", lambda *_: {"seconds": 1.0})
    llm: Any = None
    trace: Any = FakeTrace()
    fake: Any = FakeHost()
    return attempts(llm, [], [], trace, fake)


def test_a_quiet_run_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [disturbance(x) for x in run(monkeypatch, [1.1], [0])] == [(0, 0.0)]


def test_a_disturbed_run_is_repeated_until_one_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = run(monkeypatch, [1.7, 1.0, 1.2], [0, 9, 0])
    assert [x.facts["compiled_files"] for x in tries] == [0, 9, 0]
    assert min(tries, key=disturbance) is tries[2]


def test_it_ends_after_some_tries_with_the_least_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = run(monkeypatch, [1.9, 1.5, 1.4, 1.6, 1.0], [0, 0, 3, 0, 0])
    assert len(tries) == TRIES
    assert min(tries, key=disturbance) is tries[1]
