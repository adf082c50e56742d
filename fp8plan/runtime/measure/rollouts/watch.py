"""Watch of the machine while a rollout runs: the speed of its host, and the clock and power of its GPU.

Virtual machines share their host, and a rollout of a small model is bound by Python: the same cell took 3.2, 3.4 and
4.5 s in a row (profiles/README.md). Nothing but these figures can say, without looking at the prediction, which was
disturbed. A GPU at its power limit lowers its clock (fp8plan.model.cost.power).
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from threading import Event, Thread
from typing import Any

from fp8plan.runtime.measure.machine import gpu_power_w, sm_clock_mhz
from fp8plan.runtime.measure.rollouts.host import Host

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
