"""The machine while a rollout runs: quiet cores for the engine, their speed, and the GPU's clock and power.

A rollout of a small model is bound by Python, and a virtual machine's cores may share their hardware with a neighbour
(profiles/README.md has measurements). So the engine's processes are moved to the faster cores before a run, and those
cores are timed during it. The figures show a disturbed run without a look at the prediction. A GPU at its power limit
lowers its clock (fp8plan.model.cost.power).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from statistics import mean, median
from threading import Event, Thread
from typing import Any

import psutil

from fp8plan.runtime.measure.machine import gpu_power_w, sm_clock_mhz
from fp8plan.schemas import QUIET_HOST

LOOP = 20_000  # turns of a loop, a quarter of a millisecond
PROBES, SAMPLES = 5, 3  # loops of which the best counts: on each core before a run, and at each sample during it
SPARE = 3  # cores for the engine's sending and receiving threads, beside one for each process
EVERY_S = 0.25
BUSY_ROUNDS, BUSY_SAMPLES, BUSY_S = 5, 4, 0.2  # of `busy_loop_s`; each round is on the cores that are quiet then


class Host:
    """The cores that this process may use, and the fastest loop on any of them so far."""

    def __init__(self) -> None:
        self.cores = sorted(os.sched_getaffinity(0))
        self.best_s = float("inf")
        self._watched = [psutil.Process()]

    def settle(self, watched: Sequence[psutil.Process] | None = None) -> None:
        """Move all threads of this process and its children to the cores that are quiet now.

        watched: processes whose cores are timed; None: this one and the busiest child, front end and engine
        """
        seconds = {core: self._probe(core, PROBES) for core in self.cores}
        own = psutil.Process()
        processes = [own, *own.children(recursive=True)]
        chosen = quiet(seconds, SPARE + len(processes))
        for thread in threads(processes):
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(thread, chosen)
        self._watched = [*watched] if watched else [own, max(processes[1:], key=_user_seconds, default=own)]

    def loop_s(self) -> float | None:
        """The seconds of a loop on the slower of two cores, of front end and engine; None if either has ended."""
        try:
            return max(self._probe(process.cpu_num(), SAMPLES) for process in self._watched)
        except psutil.NoSuchProcess:
            return None

    def _probe(self, core: int, loops: int) -> float:
        seconds = loop_seconds(core, loops)
        self.best_s = min(self.best_s, seconds)
        return seconds


def quiet(seconds: dict[int, float], fewest: int) -> list[int]:
    """The cores whose loop took under QUIET_HOST times the fastest, at least `fewest`. seconds: loop of each core"""
    order = sorted(seconds, key=seconds.__getitem__)
    close = [core for core in order if seconds[core] < QUIET_HOST * seconds[order[0]]]
    return order[: max(len(close), fewest)]


def loop_seconds(core: int, loops: int) -> float:
    """CPU seconds of LOOP turns of an empty loop on `core`, the best of `loops`, without waiting for the core.

    Moves the calling thread, and back.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        return min(_loop() for _ in range(loops))
    finally:
        os.sched_setaffinity(0, before)


def threads(processes: Iterable[psutil.Process]) -> Sequence[int]:
    """The ids of all threads of these processes; a process that has ended has none."""
    ids: list[int] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            ids += [thread.id for thread in process.threads()]
    return ids


def _loop() -> float:
    begun = time.thread_time()
    for _ in range(LOOP):
        pass
    return time.thread_time() - begun


def _user_seconds(process: psutil.Process) -> float:
    try:
        return float(process.cpu_times().user)
    except psutil.NoSuchProcess:
        return 0.0


class Watch:
    """`with Watch(host) as watch: run()`, then `watch.facts`, sampled four times a second:

    host_loop_s:     mean of Host.loop_s; None without a `host`
    host_slowdown:   the same as a multiple of the fastest loop on any core so far
    sm_mhz, power_w: median clock and mean power of the first visible GPU; None without a GPU
    """

    def __init__(self, host: Host | None) -> None:
        self._host = host

    def __enter__(self) -> Watch:
        self._samples: list[tuple[int | None, float | None, float | None]] = []
        self._over = Event()
        self._thread = Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        clocks = [clock for clock, _, _ in self._samples if clock is not None]
        powers = [power for _, power, _ in self._samples if power is not None]
        loops = [loop_s for *_, loop_s in self._samples if loop_s is not None]
        self.facts: dict[str, Any] = {
            "host_loop_s": mean(loops) if loops else None,
            "host_slowdown": mean(loops) / self._host.best_s if loops and self._host else None,
            "sm_mhz": median(clocks) if clocks else None,
            "power_w": mean(powers) if powers else None,
        }

    def _sample(self) -> None:
        while True:
            over = self._over.wait(EVERY_S)
            self._samples.append((sm_clock_mhz(), gpu_power_w(), self._host.loop_s() if self._host else None))
            if over:
                return


def busy_loop_s() -> float:
    """The `host_loop_s` to expect of an engine on this machine, measured without one: the median of BUSY_ROUNDS.

    Two processes compute meanwhile, in the place of front end and engine core. This process stays on the cores that it
    was moved to, so let it end afterwards (fp8plan.runtime.this_host).
    """
    host, loops = Host(), list[float]()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for _ in range(BUSY_ROUNDS):
            host.settle([psutil.Process(process.pid) for process in busy])
            loops.append(mean(_sampled(host) for _ in range(BUSY_SAMPLES)))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return median(loops)


def _sampled(host: Host) -> float:
    time.sleep(BUSY_S / BUSY_SAMPLES)
    loop_s = host.loop_s()
    assert loop_s is not None  # both processes compute until they are killed
    return loop_s


if __name__ == "__main__":
    print(busy_loop_s())
