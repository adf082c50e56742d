"""Speed of the host's cores, and the choice of quiet ones.

A rollout of a small model is bound by Python, and the cores of a virtual machine are hyperthreads whose other half may
serve someone else: on a machine of 16 of them a loop took twice as long on some cores as on others, for seconds, then
on other ones (profiles/README.md). So that a measurement is the engine's and not a neighbour's, the engine's processes
are moved to the faster cores before a run, and the cores they run on are timed during it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

import psutil

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
