"""KV tokens and query-key pairs that attention over a window reads, in chunks of prefill and while requests decode."""

from __future__ import annotations

from heapq import heappop, heappush

from fp8plan.model.memory.kv_specs import Spec


def tokens_read(group: Spec, before: int, after: int) -> int:
    """The number of tokens whose keys the queries of positions [before, after) read."""
    if group.kind == "sliding":
        return after - max(0, before - group.window + 1)
    return after - before // group.window * group.window


def pairs_read(group: Spec, before: int, after: int) -> int:
    """Query-key pairs of the queries of positions [before, after)."""
    return _pairs_below(group, after) - _pairs_below(group, before)


def _pairs_below(group: Spec, position: int) -> int:
    window = group.window
    if group.kind == "sliding":
        growing = min(position, window)
        return growing * (growing + 1) // 2 + (position - growing) * window
    rest = position % window
    return position // window * (window * (window + 1) // 2) + rest * (rest + 1) // 2


class WindowMeter:
    """KV tokens that the decoding requests read in a window: the last `window` tokens, or those of a chunk.

    The next step reads `_reads` tokens, and each step after it `_growing` more, until a request comes to a turn. A full
    window grows no more. At the beginning of a chunk, a request reads one chunk less.
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
        """KV tokens that the token after `computed` ones reads, itself included."""
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
        """Stop counting a request, from the next step on."""
        self._reads -= self.read_by(computed)
        if self._turn_of[request] >= 0:
            self._growing -= 1
            self._turn_of[request] = -1

    def advance(self, steps: int) -> int:
        """Advance by that many steps, and return the KV tokens read in them."""
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
