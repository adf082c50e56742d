"""How fast the host's cores are, and which are left alone.

A rollout of a small model is bound by Python, and the cores of a virtual machine are hyperthreads whose other half may
serve someone else: on a machine of 16 of them a loop took 2.3 ms on some cores and 4.5 ms on others, for seconds, then
on other ones (profiles/README.md). So that a measurement is the engine's and not a neighbour's, the engine's processes
are moved to quiet cores before a run, and their cores are timed during it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

import psutil

LOOP, LOOPS = 20_000, 5  # a quarter of a millisecond each
QUIET = 1.25  # a core is taken for quiet below this multiple of the fastest loop; with a busy other half it is 1.7 to 2
FEWEST = 4  # cores to leave to an engine: its loop, its two messengers, and the front end


class Host:
    """The cores this process may use, and the fastest loop seen on any of them since it was made."""

    def __init__(self) -> None:
        self.cores = sorted(os.sched_getaffinity(0))
        self.best_s = float("inf")
        self._processes = [psutil.Process()]

    def settle(self) -> None:
        """Move all threads of this process and of its children to the cores that are quiet now."""
        seconds = {core: loop_seconds(core, LOOPS) for core in self.cores}
        self.best_s = min(self.best_s, *seconds.values())
        own = psutil.Process()
        children = own.children(recursive=True)
        for thread in threads((own, *children)):
            _move(thread, quiet(seconds))
        engine = max(children, key=lambda child: child.cpu_times().user, default=own)  # the one that computes most
        self._processes = [own, engine]

    def slowdown(self) -> float:
        """Of the slower of the cores that the front end and the engine run on at this moment, against the best."""
        seconds = [loop_seconds(core, 1) for core in {process.cpu_num() for process in self._processes}]
        self.best_s = min(self.best_s, *seconds)
        return max(seconds) / self.best_s


def quiet(seconds: dict[int, float]) -> list[int]:
    """The cores whose loop took less than QUIET times the fastest, but FEWEST at least. seconds: of each core."""
    order = sorted(seconds, key=seconds.__getitem__)
    close = [core for core in order if seconds[core] < QUIET * seconds[order[0]]]
    return order[: max(len(close), FEWEST)]


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


def threads(processes: Iterable[psutil.Process]) -> list[int]:
    """Ids of all their threads; a process that has ended has none."""
    found: list[int] = []
    for process in processes:
        try:
            found += [thread.id for thread in process.threads()]
        except psutil.NoSuchProcess:
            continue
    return found


def _loop() -> float:
    begun = time.thread_time()
    for _ in range(LOOP):
        pass
    return time.thread_time() - begun


def _move(thread: int, cores: Sequence[int]) -> None:
    try:
        os.sched_setaffinity(thread, cores)
    except ProcessLookupError:  # it has ended meanwhile
        return
