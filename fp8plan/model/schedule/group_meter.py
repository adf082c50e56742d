"""The work of attention over a window, counted while requests decode."""

from __future__ import annotations

from heapq import heappop, heappush

from fp8plan.model.memory.kv_specs import Spec


class WindowMeter:
    """KV tokens that the decoding requests read in a window: the last `window` tokens, or those of a chunk.

    `reads` is what they read in the next step, and grows by `growing` a step but for the turns: where a window is
    full it grows no more, where a chunk begins it falls by the chunk.
    """

    def __init__(self, group: Spec, requests: int) -> None:
        self.group = group
        self._sliding = group.kind == "sliding"
        self._window = group.window
        self._requests = requests
        self._now = 0
        self._reads = self._growing = 0
        self._turns: list[int] = []  # heap of step * requests + request; outdated where _turn_of differs
        self._turn_of = [-1] * requests

    def read_by(self, computed: int) -> int:
        """KV tokens that a token reads, itself included, before which that many are computed."""
        if self._sliding:
            return computed + 1 if computed < self._window else self._window
        return computed % self._window + 1

    def start(self, request: int, computed: int) -> None:
        """Count a request from the next step on."""
        read = self.read_by(computed)
        self._reads += read
        if not self._sliding or read < self._window:
            self._growing += 1
            self._turn(request, self._now + self._window - read + (not self._sliding))

    def stop(self, request: int, computed: int) -> None:
        """Count it no more from the next step on."""
        self._reads -= self.read_by(computed)
        if self._turn_of[request] >= 0:
            self._growing -= 1
            self._turn_of[request] = -1

    def advance(self, steps: int) -> int:
        """Go on by that many steps; returns the KV tokens read in them."""
        total, end, turns, requests = 0, self._now + steps, self._turns, self._requests
        while self._now < end:
            until = end
            if turns and turns[0] // requests < end:
                until = turns[0] // requests
            steps = until - self._now
            total += steps * self._reads + self._growing * (steps * (steps - 1) // 2)
            self._reads += steps * self._growing
            self._now = until
            self._pass_turns()
        return total

    def _pass_turns(self) -> None:
        turns, now, requests = self._turns, self._now, self._requests
        while turns and turns[0] // requests <= now:
            turn = heappop(turns)
            request = turn % requests
            if self._turn_of[request] != turn:
                continue
            if self._sliding:
                self._growing -= 1
                self._turn_of[request] = -1
            else:
                self._reads -= self._window
                self._turn(request, now + self._window)

    def _turn(self, request: int, step: int) -> None:
        self._turn_of[request] = turn = step * self._requests + request
        heappush(self._turns, turn)
