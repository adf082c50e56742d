"""The loop of vLLM's engine over time, and its client: when steps begin and end, and what has arrived by then.

vllm/v1/engine/core.py takes all requests that have arrived, and then schedules a step. `step` waits for the end of that
step. With asynchronous scheduling, `step_with_batch_queue` schedules the next step while one runs. So step j is
scheduled when step j-2 has ended. An engine without a request waits for the next arrival.

Between two steps no time passes, unless the engine waits for an arrival. A client knows of the end of a turn at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from fp8plan.model.cost.clock import Clock
from fp8plan.model.schedule.rows import Rows, Work
from fp8plan.model.turn_table import TurnTable


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

    Without a clock no time passes: then all requests wait at the start.
    """

    def __init__(self, lag: int, clock: Clock | None) -> None:
        self._lag, self._clock = lag, clock
        self._times = Times()
        self._ahead = 0.0  # seconds that the GPU still needs for the last step (`Clock.step`)
        self._idle_s = 0.0
        self._arrivals: list[tuple[float, int]] = []  # a heap of (seconds, trajectory)

    @property
    def awaits(self) -> bool:
        """True if a request is still to arrive."""
        return bool(self._arrivals)

    def expect(self, wait_s: float, trajectory: int) -> None:
        """Let a trajectory's next request arrive `wait_s` after the end of the last step."""
        heappush(self._arrivals, (self._times.ended + wait_s, trajectory))

    def take_arrived(self) -> list[int]:
        """The trajectories whose requests the next step sees, in order of arrival, then of number."""
        arrived = []
        while self._sees_arrival(self._times):
            arrived.append(heappop(self._arrivals)[1])
        return arrived

    def wait(self) -> None:
        """Let an engine without a request wait for the next arrival."""
        arrival = self._arrivals[0][0]
        if arrival > self._times.ended:
            self._idle_s += arrival - self._times.ended
            self._ahead = 0.0
        self._times = self._times._replace(scheduled=max(arrival, self._times.scheduled))

    def take_idle(self) -> float:
        """The seconds that the engine has waited since this was asked."""
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    def skip(self) -> None:
        """Pass a step that serves nobody, which takes no time."""
        self._times = self._times.after(0.0, self._lag)

    def serve(self, rows: Rows) -> None:
        """Pass the steps of the last row. One of a single step follows the row before (fp8plan.model.rollout)."""
        if self._clock is None:
            return
        steps = rows.last_steps()
        for work in steps:
            ahead = self._ahead if len(steps) == 1 else 0.0
            seconds, self._ahead = self._clock.step(**work, ahead=ahead)
            self._times = self._times.after(seconds, self._lag)

    def steps_to_arrival(self, most: int, decodes: Iterable[Work]) -> int:
        """Steps in which only requests decode, up to one before a step that sees an arrival, at most `most`."""
        if self._clock is None or not self._arrivals:
            return most
        times, steps = self._times, 0
        for work in islice(decodes, most):
            times = times.after(self._clock.step(**work)[0], self._lag)
            steps += 1
            if self._sees_arrival(times):
                break
        return steps

    def _sees_arrival(self, times: Times) -> bool:
        return bool(self._arrivals) and self._arrivals[0][0] <= times.next_scheduled(self._lag)


class Client:
    """Sends the requests of trajectories, turn by turn.

    begun: number of trajectories that have begun, which is the index of the next to begin
    away:  trajectories whose tool works, from the end of a turn until the next one's request is seen
    """

    def __init__(self, turns: TurnTable, loop: Loop) -> None:
        self._generated: list[int] = turns.generated.tolist()
        self._tool: list[int] = turns.tool.tolist()
        self._wait_s: list[float] = turns.wait_s.tolist()
        self._dropped: list[int] = turns.dropped.tolist()
        self._turn: list[int] = turns.first[:-1].tolist()
        self._end: list[int] = turns.first[1:].tolist()
        self._loop = loop
        self.begun = len(self._turn) if turns.concurrent is None else min(turns.concurrent, len(self._turn))
        self.away: set[int] = set()

    def generated(self, trajectory: int) -> int:
        """Tokens that its turn generates."""
        return self._generated[self._turn[trajectory]]

    def end_turn(self, trajectory: int) -> None:
        """Let the next request of a trajectory arrive when its tool has answered, or let another trajectory begin."""
        turn = self._turn[trajectory]
        if turn + 1 < self._end[trajectory]:
            self.away.add(trajectory)
            self._loop.expect(self._wait_s[turn], trajectory)
        elif self.begun < len(self._turn):
            self._loop.expect(0.0, self.begun)
            self.begun += 1

    def next_turn(self, trajectory: int, prompt: int) -> tuple[int, int]:
        """Go on to the next turn, whose prompt has all tokens so far, but for the first `dropped` ones of the answer.

        prompt: tokens of the last turn's prompt

        Returns the tokens of the next prompt, and how many of the first ones are the same as before.
        """
        turn = self._turn[trajectory]
        self.away.remove(trajectory)
        self._turn[trajectory] += 1
        tokens, dropped = prompt + self._generated[turn], self._dropped[turn]
        return tokens - dropped + self._tool[turn], prompt if dropped else tokens
