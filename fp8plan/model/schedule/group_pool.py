"""Groups of layers that keep the same kind of cache, and a pool of blocks that several of them share.

One block of a group is one page: `block_size` tokens of each of its layers, or one recurrent state of each.
(vllm/v1/core/single_type_kv_cache_manager.py; the rules for windows and the admission cap are the same in 0.26 and
0.30.)

States follow vLLM's mamba_cache_mode (MambaModelConfig in vllm/model_executor/models/config.py, 0.26 and 0.30).
Without prefix caching the mode is "none", and a request holds one block whatever it computes. With prefix caching it is
"align", and prefill goes in whole blocks. A request then holds the block it writes, the one it read, and under
asynchronous scheduling one more in flight. The mode "all", a state for every block, is not modelled.

The pool here has no prefix caching: it counts blocks. Its calls have the order of vLLM's `allocate_slots`
(vllm/v1/core/kv_cache_manager.py). Blocks out of the window are freed first, even if the request then cannot be
served. After that, all groups together must find their new blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import lcm

from fp8plan.errors import ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec, blocks_of_window

NEVER = 2**62  # a step that does not come, and blocks that no pool has


def check_groups(groups: tuple[Spec, ...], limits: EngineLimits) -> None:
    """Raise ConfigError for malformed groups, or if their prefix caching is not modelled."""
    for group in groups:
        windowed = group.kind in ("sliding", "chunked")
        if group.block_size < 1 or (group.window > 0) != windowed:
            raise ConfigError(
                f"{group} is no KV-cache group; allowed: a block_size of at least 1, and a window of at least 1 for "
                "sliding and chunked, 0 for the others"
            )
    if not limits.enable_prefix_caching:
        return
    sizes = sorted({group.block_size for group in groups})
    if len(sizes) > 1:
        raise ConfigError(
            f"the KV-cache groups have block sizes {sizes}; with prefix caching only one size for all is modelled; "
            "set enable_prefix_caching=False"
        )
    if all(group.kind == "state" for group in groups):
        raise ConfigError(
            "prefix caching of a model without attention is not modelled (vLLM leaves it off); "
            "set enable_prefix_caching=False"
        )


def skipped_tokens(group: Spec, processed: int) -> int:
    """Leading tokens that no later token reads once `processed` are computed (`get_num_skipped_tokens`)."""
    if group.kind == "sliding":
        return max(0, processed - group.window + 1)
    if group.kind == "chunked":
        return processed // group.window * group.window
    return 0


def admission_cap(group: Spec, limits: EngineLimits) -> int:
    """The most blocks that the check of the whole prompt asks for (`max_admission_blocks_per_request`); -1: no cap.

    vLLM also cuts it by max_model_len. That never matters: no request is longer.
    """
    in_flight = limits.max_num_batched_tokens * (2 if limits.async_scheduling else 1)
    return blocks_of_window(group, in_flight) if group.window else -1


def next_drop(group: Spec, computed: int, lag: int) -> int:
    """The next number of computed tokens, above `computed`, at which a decoding request frees a block of the group.

    lag: tokens in flight while it decodes: 1 under asynchronous scheduling. A block leaves the window only when the
    step that made it useless has been processed.
    """
    if group.kind == "sliding":
        return _next(computed, group.window - 1 + lag, group.block_size)
    if group.kind == "chunked":
        return _next(computed, lag, group.window)
    if group.kind == "state":
        return _next(computed, 1 + lag, group.block_size)
    return NEVER


def _next(above: int, start: int, period: int) -> int:
    """The least of start + period, start + 2 * period, ... that is greater than `above`."""
    cycles = (above - start) // period + 1
    return start + (cycles if cycles > 1 else 1) * period


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


class Phase:
    """The blocks that steady requests take and free in the steps with one remainder modulo the pool's cycle."""

    __slots__ = ("drops", "freed", "takes")

    def __init__(self) -> None:
        self.takes: dict[int, int] = {}  # request -> blocks
        self.drops: dict[int, list[int]] = {}  # request -> groups in which it frees a block
        self.freed: list[tuple[int, int]] | None = None  # the result of `pairs`; None: `drops` has changed

    def pairs(self) -> list[tuple[int, int]]:
        """Each (request, group) that frees a block, in order of service."""
        if self.freed is None:
            self.freed = [(request, at) for request in sorted(self.drops) for at in self.drops[request]]
        return self.freed


class GroupPool:
    """The blocks that the scheduler hands out. `free` counts those that are left.

    A request that decodes is steady from `start` to `stop`. It takes and frees its blocks in a fixed rhythm, so
    `serve` moves all steady ones on by a step at once. A calendar has the steps in which a request leaves the rhythm.
    """

    def __init__(self, num_blocks: int, groups: tuple[Spec, ...], limits: EngineLimits, requests: int) -> None:
        self.free = num_blocks
        self.changes = 0  # counted, so that no look-up is repeated without one
        self.hit_freed_blocks = False
        self.evictions = 0  # number of evicted blocks that could still have been hit
        self.shared_prefix = 0  # tokens of one group's longer hit in the last look-up; 0: none
        same = {group: group for group in groups}
        self._groups = [same[group] for group in groups]  # equal ones are one object
        self._caps = [admission_cap(group, limits) for group in groups]
        self._ends = [[0] * requests for _ in groups]  # blocks that a request has taken
        self._starts = [[0] * requests for _ in groups]  # the first of them, which it has freed
        self._lag = int(limits.async_scheduling)
        caching = limits.enable_prefix_caching
        self._sizes = [group.block_size for group in groups if caching or group.kind != "state"]  # groups that grow
        self._cycle = lcm(*self._sizes)
        self._phases = [Phase() for _ in range(self._cycle)]
        self._taken = [0] * self._cycle  # by phase: blocks that steady requests take in a step
        self._dropped = [0] * self._cycle  # and blocks that they free
        self._windows = [at for at, group in enumerate(groups) if group.window]
        self._followed_groups = self._windows  # groups whose blocks steady requests free
        self._offset = [0] * requests  # a steady request has computed step + offset tokens
        self._since = [-1] * requests  # the step in which it became steady; -1: it is not
        self._in_flight = [0] * requests  # its tokens in flight in that step
        self._served = [-1] * requests  # the last step in which its blocks were freed one by one
        self._regular = [[False] * requests for _ in groups]  # a steady request frees the group's blocks in the rhythm
        self._calendar: dict[int, list[int]] = {}  # step -> steady requests; outdated where _event differs
        self._event = [-1] * requests

    def begin_step(self) -> None:
        """Forget what was computed in the step before."""

    # Requests that are not steady

    def drop(self, request: int, processed: int) -> None:
        """Free the blocks that no token after the first `processed` ones reads."""
        for at in self._followed_groups:
            self._drop(at, request, processed)

    def needs(self, request: int, tokens: int) -> int:
        """The new blocks that a running request needs to hold that many tokens."""
        total = 0
        for at, group in enumerate(self._groups):
            more = self._blocks(group, tokens) - self._ends[at][request]
            if more > 0:
                total += more
        return total

    def take(self, request: int, tokens: int) -> None:
        """Hand out the blocks that `needs` counts."""
        for at, group in enumerate(self._groups):
            more = self._blocks(group, tokens) - self._ends[at][request]
            if more > 0:
                self._ends[at][request] += more
                self._use(more)

    def cache(self, request: int, tokens: int) -> None:
        """Note that the first `tokens` tokens are computed: their full blocks become findable."""

    def lookup(self, request: int, tokens: int) -> int:
        """The tokens of a request, out of that many, that are cached in every group."""
        return 0

    def admission_needs(self, request: int, tokens: int, hit: int, whole: bool) -> int:
        """Free blocks needed to admit the request looked up last. whole: for its whole prompt"""
        total = 0
        for at, group in enumerate(self._groups):
            blocks = self._blocks(group, tokens)
            if whole and 0 <= self._caps[at] < blocks:
                blocks = self._caps[at]
            total += blocks
        return total

    def least_needs(self, request: int, tokens: int, hit: int) -> int:
        """A lower bound of `admission_needs` for the whole prompt, while others only decode or end."""
        return self.admission_needs(request, tokens, hit, True)

    def admit(self, request: int, hit: int) -> None:
        """Hold the blocks that the last look-up hit."""

    def release(self, request: int, hashed_tokens: int) -> None:
        """Free all blocks of a request; those that its first `hashed_tokens` tokens fill have a hash."""
        for ends, starts in zip(self._ends, self._starts, strict=True):
            self.free += ends[request] - starts[request]
            ends[request] = starts[request] = 0
        self.changes += 1

    # Steady requests

    def start(self, request: int, step: int, computed: int, in_flight: int) -> None:
        """Let a request decode from `step` on. in_flight: its computed tokens that are not yet processed"""
        self._offset[request] = offset = computed - step
        self._since[request], self._in_flight[request] = step, in_flight
        for size in self._sizes:
            for phase in range(-offset % size, self._cycle, size):
                takes = self._phases[phase].takes
                takes[request] = takes.get(request, 0) + 1
                self._taken[phase] += 1
        if self._followed_groups:
            self._follow(request, step)

    def stop(self, request: int, step: int) -> None:
        """End the steady decoding of a request at `step`."""
        offset = self._offset[request]
        for size in self._sizes:
            for phase in range(-offset % size, self._cycle, size):
                self._taken[phase] -= self._phases[phase].takes.pop(request, 0)
        processed = step + offset - self._lag - (self._served[request] != step)
        for at, group in enumerate(self._groups):
            start, size = self._start_of(at, request), group.block_size
            if self._regular[at][request]:
                self._regular[at][request] = False
                for phase in range(self._rhythm(at, request), self._cycle, size):
                    self._phases[phase].freed = None
                    self._dropped[phase] -= len(self._phases[phase].drops.pop(request, ()))
                start = max(start, skipped_tokens(group, processed) // size)
            self._set_held(at, request, start, self._blocks(group, step + offset))
        self._since[request] = self._event[request] = -1

    def takes(self, step: int) -> int:
        """The new blocks that all steady requests together need in a step."""
        return self._taken[step % self._cycle]

    def serve(self, step: int) -> None:
        """Serve all steady requests. There are at least `takes` free blocks."""
        phase = step % self._cycle
        if self._taken[phase] or self._dropped[phase]:
            self.free += self._dropped[phase] - self._taken[phase]
            self.changes += 1
        for request in self._followed(step):
            self.free -= len(self._phases[phase].drops.get(request, ()))
            self.drop_due(request, step)

    def due(self, step: int) -> list[int]:
        """The steady requests whose blocks change in a step, in order of admission."""
        phase = self._phases[step % self._cycle]
        return sorted({*phase.takes, *phase.drops, *self._followed(step)})

    def drop_due(self, request: int, step: int) -> None:
        """Free the blocks that a steady request frees in a step."""
        self._served[request] = step
        regular = self._phases[step % self._cycle].drops.get(request, ())
        if self._event[request] != step:
            self._drop_regular(step, [(request, at) for at in regular])
            return
        computed = step + self._offset[request]
        processed = computed - (self._in_flight[request] if step == self._since[request] else self._lag)
        for at in self._followed_groups:
            if not self._regular[at][request]:
                self._drop(at, request, processed)
            elif at in regular:
                self._drop_regular(step, [(request, at)])
        self._plan(request, step)

    def takes_due(self, request: int, step: int) -> int:
        """The new blocks that a steady request needs in a step."""
        return self._phases[step % self._cycle].takes.get(request, 0)

    def take_due(self, request: int, step: int) -> None:
        """Hand out the blocks that `takes_due` counts."""
        self._use(self.takes_due(request, step))

    # How blocks are followed

    def _use(self, blocks: int) -> None:
        self.free -= blocks
        self.changes += 1

    def _drop(self, at: int, request: int, processed: int) -> None:
        """Free one group's blocks that no token after the first `processed` ones reads."""
        start = skipped_tokens(self._groups[at], processed) // self._groups[at].block_size
        gone = start - self._starts[at][request]
        if gone > 0:
            self._starts[at][request] = start
            self.free += gone
            self.changes += 1

    def _drop_regular(self, step: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Free one block of each (request, group), which leaves the window in the rhythm."""
        self.free += len(pairs)
        self.changes += 1

    def _set_held(self, at: int, request: int, start: int, end: int) -> None:
        """Note that a request, which is no longer steady, holds blocks [start, end)."""
        self._starts[at][request], self._ends[at][request] = start, end

    def _start_of(self, at: int, request: int) -> int:
        return self._starts[at][request]

    def _regular_from(self, at: int, request: int) -> int:
        """The first block of a request in a group that may be freed in the rhythm."""
        return 0

    def _followed(self, step: int) -> list[int]:
        """The steady requests that may free blocks out of the rhythm in a step, in order of admission."""
        entries = self._calendar.pop(step, None)
        return sorted({entry for entry in entries if self._event[entry] == step}) if entries else []

    def _plan(self, request: int, step: int) -> None:
        """Enter the next step in which a request, served in `step`, may leave the rhythm, if there is one."""
        if step == self._since[request] and self._lag:
            self._follow(request, step + 1)  # tokens in flight before it decoded are processed then
            return
        computed, following, change, last = step + self._offset[request], NEVER, NEVER, None
        for at in self._followed_groups:
            if not self._regular[at][request]:
                group = self._groups[at]
                if group is not last:
                    change, last = next_drop(group, computed, self._lag), group
                following = min(following, self._next_followed(at, request, computed, change))
        if following < NEVER:
            self._follow(request, following - self._offset[request])

    def _next_followed(self, at: int, request: int, computed: int, change: int) -> int:
        """The computed tokens at which a group must be looked at again; NEVER if it keeps the rhythm from now on.

        change: the computed tokens at which it next frees blocks
        """
        group = self._groups[at]
        if group.kind != "sliding" or self._start_of(at, request) < self._regular_from(at, request):
            return change
        if change > computed + group.block_size:
            return change - group.block_size
        self._regular[at][request] = True
        for phase in range(self._rhythm(at, request), self._cycle, group.block_size):
            drops = self._phases[phase].drops.setdefault(request, [])
            drops.append(at)
            drops.sort()
            self._phases[phase].freed = None
            self._dropped[phase] += 1
        return NEVER

    def _follow(self, request: int, step: int) -> None:
        self._event[request] = step
        self._calendar.setdefault(step, []).append(request)

    def _rhythm(self, at: int, request: int) -> int:
        group = self._groups[at]
        return (group.window - 1 + self._lag - self._offset[request]) % group.block_size

    def _blocks(self, group: Spec, tokens: int) -> int:
        return 1 if group.kind == "state" else -(-tokens // group.block_size)
