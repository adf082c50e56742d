"""The loop of vLLM's engine over time: when steps are scheduled, begin and end, and what has arrived by then.

vllm/v1/engine/core.py takes all requests that have arrived, and then schedules a step. `step` waits for the end of that
step. With asynchronous scheduling, `step_with_batch_queue` schedules the next step while one runs. So step j is
scheduled when step j-2 has ended. An engine without a request waits for the next arrival.

A step takes the time of the model on the GPU and nothing else. A client knows of the end of a turn at once.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple


class Times(NamedTuple):
    """Seconds since the start: when the last step was scheduled, and when the last two steps ended."""

    scheduled: float = 0.0
    ended_before: float = 0.0
    ended: float = 0.0

    def next_scheduled(self, lag: int) -> float:
        """The time at which the next step is scheduled. lag: 1 with asynchronous scheduling, else 0"""
        return max(self.ended_before if lag else self.ended, self.scheduled)

    def after(self, seconds: float, lag: int) -> Times:
        """The times after a step of so many seconds."""
        scheduled = self.next_scheduled(lag)
        return Times(scheduled, self.ended, max(self.ended, scheduled) + seconds)


class Loop:
    """The times of the steps so far, and the trajectories whose next request is still to arrive.

    idle_s: seconds that the engine waited for a request, since `take_idle`
    """

    def __init__(self, lag: int) -> None:
        self.times = Times()
        self.idle_s = 0.0
        self._lag = lag
        self._arrivals: list[tuple[float, int]] = []  # a heap of (seconds, trajectory)

    @property
    def awaits(self) -> bool:
        """True if a request is still to arrive."""
        return bool(self._arrivals)

    def expect(self, wait_s: float, trajectory: int) -> None:
        """Let a trajectory's next request arrive `wait_s` after the end of the last step."""
        heappush(self._arrivals, (self.times.ended + wait_s, trajectory))

    def take_arrived(self) -> list[int]:
        """The trajectories whose requests the next step sees, in order of arrival, then of number."""
        arrived = []
        while self._sees_arrival(self.times):
            arrived.append(heappop(self._arrivals)[1])
        return arrived

    def wait(self) -> None:
        """Let an engine without a request wait for the next arrival."""
        arrival = self._arrivals[0][0]
        self.idle_s += max(arrival - self.times.ended, 0.0)
        self.times = self.times._replace(scheduled=max(arrival, self.times.scheduled))

    def take_idle(self) -> float:
        idle_s, self.idle_s = self.idle_s, 0.0
        return idle_s

    def serve(self, seconds: float) -> None:
        """Pass a step that serves requests, in seconds above 0."""
        self.times = self.times.after(seconds, self._lag)

    def skip(self) -> None:
        """Pass a step that serves nobody, which takes no time."""
        self.times = self.times.after(0.0, self._lag)

    def steps_to_arrival(self, most: int, seconds: Callable[[int], float]) -> int:
        """The number of steps before one that sees an arrival, at most `most`. seconds: of the step of each number"""
        if not self._arrivals:
            return most
        times = self.times
        for step in range(most):
            times = times.after(seconds(step), self._lag)
            if self._sees_arrival(times):
                return step + 1
        return most

    def _sees_arrival(self, times: Times) -> bool:
        return bool(self._arrivals) and self._arrivals[0][0] <= times.next_scheduled(self._lag)
