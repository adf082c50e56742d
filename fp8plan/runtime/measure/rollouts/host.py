"""Speed of the host's cores, and the choice of quiet ones.

A rollout of a small model is bound by Python, and the cores of a virtual machine are hyperthreads whose other half may
serve someone else: on a machine of 16 of them a loop took twice as long on some cores as on others, for seconds, then
on other ones (profiles/README.md). So that a measurement is the engine's and not a neighbour's, the engine's processes
are moved to the faster cores before a run, and the cores they run on are timed during it.

Watch of the machine while a rollout runs: the speed of its host, and the clock and power of its GPU.

Virtual machines share their host, and a rollout of a small model is bound by Python: the same cell took 3.2, 3.4 and
4.5 s in a row (profiles/README.md). Nothing but these figures can say, without looking at the prediction, which was
disturbed. A GPU at its power limit lowers its clock (fp8plan.model.cost.power).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from threading import Event, Thread
from typing import Any

import psutil

from fp8plan.runtime.measure.machine import gpu_power_w, sm_clock_mhz

LOOP = 20_000  # turns, a quarter of a millisecond
PROBES, SAMPLES = 5, 3  # loops of which the best counts: before a run on each core, and at each look during it
QUIET = 1.25  # a core is taken for quiet below this multiple of the fastest loop; with a busy other half it is 1.7 to 2
SPARE = 3  # cores to leave to the engine beside one for each process: for its threads that send and receive


class Host:
    """The cores this process may use, and the fastest loop seen on any of them since it was made."""

    def __init__(self) -> None:
        self.cores = sorted(os.sched_getaffinity(0))
        self.best_s = float("inf")
        self._watched = [psutil.Process()]

    def settle(self) -> None:
        """Move all threads of this process and of its children to the cores that are quiet now."""
        seconds = {core: self._probe(core, PROBES) for core in self.cores}
        own = psutil.Process()
        processes = [own, *own.children(recursive=True)]
        chosen = quiet(seconds, SPARE + len(processes))
        for thread in threads(processes):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(thread, chosen)
        self._watched = [own, max(processes[1:], key=_user_seconds, default=own)]  # the front end and the engine

    def loop_s(self) -> float | None:
        """Seconds of a loop on the slower of the cores that front end and engine run on; None if one has ended."""
        try:
            return max(self._probe(process.cpu_num(), SAMPLES) for process in self._watched)
        except psutil.NoSuchProcess:
            return None

    def _probe(self, core: int, loops: int) -> float:
        seconds = loop_seconds(core, loops)
        self.best_s = min(self.best_s, seconds)
        return seconds


def quiet(seconds: dict[int, float], fewest: int) -> list[int]:
    """The cores whose loop took less than QUIET times the fastest, but `fewest` at least. seconds: of each core."""
    order = sorted(seconds, key=seconds.__getitem__)
    close = [core for core in order if seconds[core] < QUIET * seconds[order[0]]]
    return order[: max(len(close), fewest)]


def loop_seconds(core: int, loops: int) -> float:
    """CPU seconds of LOOP turns of an empty loop on `core`, the best of `loops`: waiting for the core does not count.

    Moves the calling thread, and back.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        return min(_loop() for _ in range(loops))
    finally:
        os.sched_setaffinity(0, before)


def threads(processes: Iterable[psutil.Process]) -> Sequence[int]:
    """Ids of all their threads; a process that has ended has none."""
    found: list[int] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found += [thread.id for thread in process.threads()]
    return found


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


EVERY_S = 0.25
STAT = Path("/proc/stat")


class Watch:
    """`with Watch(host) as watch: run()`, then `watch.facts`, sampled four times a second:

    host_loop_s:     mean seconds of a loop in Python on the slower of the cores of front end and engine; None without
                     a `host`
    host_slowdown:   the same as a multiple of the fastest loop that was seen on any core until the run's end
    cpu_steal_share: of all cores' time, what the hypervisor gave to others; None where Linux does not say
    sm_mhz, power_w: median clock and mean power of the first visible GPU; None without one
    """

    def __init__(self, host: Host | None) -> None:
        self._host = host

    def __enter__(self) -> Watch:
        self._ticks = cpu_ticks()
        self._samples: list[tuple[Any, Any, Any]] = []
        self._over = Event()
        self._thread = Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        before, after = self._ticks, cpu_ticks()
        clocks, powers, loops = ([x[i] for x in self._samples if x[i] is not None] for i in range(3))
        self.facts: dict[str, Any] = {
            "host_loop_s": mean(loops) if loops else None,
            "host_slowdown": mean(loops) / self._host.best_s if loops and self._host else None,
            "cpu_steal_share": (after[0] - before[0]) / max(after[1] - before[1], 1) if before and after else None,
            "sm_mhz": median(clocks) if clocks else None,
            "power_w": mean(powers) if powers else None,
        }

    def _sample(self) -> None:
        while True:
            over = self._over.wait(EVERY_S)
            self._samples.append((sm_clock_mhz(), gpu_power_w(), self._host.loop_s() if self._host else None))
            if over:
                return


def cpu_ticks() -> tuple[int, int] | None:
    """(stolen, all) ticks of all cores since the boot; None where /proc/stat does not say."""
    if not STAT.exists():
        return None
    name, *fields = STAT.read_text(encoding="utf-8").split("\n", 1)[0].split()
    ticks = [int(field) for field in fields[:8]]  # user nice system idle iowait irq softirq steal
    return (ticks[7], sum(ticks)) if name == "cpu" and len(ticks) == 8 else None
