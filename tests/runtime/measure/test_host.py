"""Which cores an engine is moved to, how their speed is watched, and which of several attempts is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

psutil = pytest.importorskip("psutil")  # comes with vLLM
if not hasattr(os, "sched_setaffinity"):
    pytest.skip("only Linux moves threads to cores", allow_module_level=True)

from fp8plan.runtime.measure.rollouts import engine as again  # noqa: E402
from fp8plan.runtime.measure.rollouts import host  # noqa: E402
from fp8plan.runtime.measure.rollouts.engine import AGAIN_S, TRIES, Attempt, attempts, disturbance  # noqa: E402
from fp8plan.runtime.measure.rollouts.host import (  # noqa: E402
    Host,
    Watch,
    loop_seconds,
    quiet,
    threads,
)
from fp8plan.runtime.measure.rollouts.timed import Requests  # noqa: E402

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits, the only child of this one (tests before may have left others, as Python's resource
    tracker); this one's cores are put back afterwards."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    one = psutil.Process(process.pid)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [one])
    yield process
    process.kill()
    process.wait()
    for thread in threads([psutil.Process()]):
        os.sched_setaffinity(thread, CORES)


def test_busy_cores_are_left_unless_too_few_remain() -> None:
    assert quiet({0: 4.5, 1: 2.3, 2: 2.4, 3: 4.4, 4: 2.3, 5: 2.6, 6: 2.5}, 4) == [1, 4, 2, 6, 5]
    assert quiet({0: 4.5, 1: 2.3, 2: 4.0, 3: 4.4, 4: 4.3, 5: 4.6}, 4) == [1, 2, 4, 3]
    assert quiet({0: 1.0, 1: 9.0}, 4) == [0, 1]


def test_a_loop_is_timed_on_its_core_and_the_thread_comes_back() -> None:
    before = os.sched_getaffinity(0)
    assert 0 < loop_seconds(CORES[0], 2) < 1
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(len(CORES) < 2, reason="one core leaves no choice")
def test_processes_are_moved_to_the_quiet_core(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = dict.fromkeys(CORES, 2.0) | {CORES[1]: 1.0}
    monkeypatch.setattr(host, "SPARE", -9)
    monkeypatch.setattr(host, "loop_seconds", lambda core, _: seconds[core])
    here = Host()
    here.settle()
    assert os.sched_getaffinity(0) == os.sched_getaffinity(child.pid) == {CORES[1]}
    assert here.best_s == 1.0


def test_the_slower_of_front_end_and_engine_counts(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {101: 1.5, 102: 1.2}
    here = Host()
    here.settle()
    assert child.pid in {process.pid for process in here._watched}
    monkeypatch.setattr(host, "loop_seconds", lambda core, _: seconds[core])
    monkeypatch.setattr(psutil.Process, "cpu_num", lambda self: 101 if self.pid == child.pid else 102)
    assert here.loop_s() == 1.5
    seconds[102] = 1.7
    here.best_s = 1.0
    with Watch(here) as watch:
        pass
    assert watch.facts["host_slowdown"] == pytest.approx(1.7)
    assert watch.facts["host_loop_s"] == pytest.approx(1.7)


def test_a_busy_hosts_loop_is_timed_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = iter([3.0, 5.0, 1.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(host, "BUSY_ROUNDS", 3)
    monkeypatch.setattr(host, "BUSY_SAMPLES", 2)
    monkeypatch.setattr(host, "BUSY_S", 0.0)
    seen: list[int] = []

    def timed(self: Host) -> float:
        seen.append(len(self._watched))
        return next(loops)

    monkeypatch.setattr(Host, "loop_s", timed)
    assert host.busy_loop_s() == 3.0
    assert seen == [2] * 6
    for thread in threads([psutil.Process()]):
        os.sched_setaffinity(thread, CORES)


def test_a_process_that_has_ended_says_nothing(child: subprocess.Popen[bytes]) -> None:
    here, process = Host(), psutil.Process(child.pid)
    here.settle()
    child.kill()
    child.wait()
    assert threads([process]) == []
    assert host._user_seconds(process) == 0
    assert here.loop_s() is None


class FakeTrace:
    rows: tuple[float, ...] = ()

    def start(self) -> None:
        self.rows = ()

    def slowest(self) -> dict[str, float]:
        return {}


def run(
    monkeypatch: pytest.MonkeyPatch, slowdowns: list[float], compiled: list[int], seconds: float = 1.0
) -> list[Attempt]:
    """Attempts of a run of `seconds`, in each of which the host is so slow and so many files are compiled."""
    clock, asked, now = iter(slowdowns), [0], [0.0]

    def count() -> int:  # asked before and after each run
        asked[0] += 1
        return sum(compiled[: asked[0] // 2])

    def timed(*_: object) -> dict[str, Any]:
        now[0] += seconds
        return {"seconds": seconds}

    class FakeHost:
        best_s = 1.0

        def settle(self) -> None:
            self.now = next(clock)

        def loop_s(self) -> float:
            return self.now

    monkeypatch.setattr(again, "compiled_files", count)
    monkeypatch.setattr(again, "timed", timed)
    monkeypatch.setattr(again.time, "perf_counter", lambda: now[0])
    llm: Any = None
    trace: Any = FakeTrace()
    fake: Any = FakeHost()
    return attempts(llm, Requests([], []), trace, fake)


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


def test_long_runs_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(run(monkeypatch, [1.9, 1.9], [0, 0], seconds=AGAIN_S + 1)) == 1
    assert len(run(monkeypatch, [1.9, 1.9, 1.9], [0, 0, 0], seconds=0.6 * AGAIN_S)) == 2
