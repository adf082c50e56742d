"""Groups of layers that keep the same kind of cache, and a pool of blocks that several of them share.

One block of a group is one page: `block_size` tokens of each of its layers, or one recurrent state of each.
(vllm/v1/core/single_type_kv_cache_manager.py; the rules for windows and the admission cap are the same in all
versions.)

States follow vLLM's mamba_cache_mode (MambaModelConfig in vllm/model_executor/models/config.py).
Without prefix caching the mode is "none", and a request holds one block whatever it computes. With prefix caching it is
"align", and prefill goes in whole blocks. A request then holds the block it writes, the one it read, and under
asynchronous scheduling one more in flight. With checkpoint blocks (from 0.32) a prefill is not cut at its last whole
block: its last chunk keeps that state in one block more. The mode "all", a state for every block, is not modelled.

The pool here has no prefix caching: it counts blocks. Its calls have the order of vLLM's `allocate_slots`
(vllm/v1/core/kv_cache_manager.py). Blocks out of the window are freed first, even if the request then cannot be
served. After that, all groups together must find their new blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import groupby
from math import lcm

from fp8plan.errors import CapacityError, ConfigError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec, blocks_of_window
from fp8plan.model.schedule.group_blocks import Drops, FreeQueue, Phase

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


def too_few_blocks(num_blocks: int) -> CapacityError:
    """The error of a request that does not find the blocks that it needs in a pool that it has to itself."""
    return CapacityError(
        f"the pool has {num_blocks} KV blocks, and a request that has it to itself does not find the ones it needs; "
        "raise gpu_memory_utilization or tensor_parallel_size, or use an FP8 precision"
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


class GroupPool:
    """The blocks that the scheduler hands out. `free` counts those that are left.

    Equal groups in a row do the same, so they are followed as one; the lists by group have one entry for all of them.

    A request that decodes is steady from `start` to `stop`. It takes and frees its blocks in a fixed rhythm, so
    `serve` moves all steady ones on by a step at once. A calendar has the steps in which a request leaves the rhythm.
    """

    def __init__(self, num_blocks: int, groups: tuple[Spec, ...], limits: EngineLimits, requests: int) -> None:
        self.free = num_blocks
        self.changes = 0  # counted, so that no look-up is repeated without one
        self.hit_freed_blocks = False
        self.shared_prefix = 0  # tokens of one group's longer hit in the last look-up; 0: none
        self._queue = FreeQueue(num_blocks)
        rows = [list(equal) for _, equal in groupby(groups)]
        self._groups = [equal[0] for equal in rows]
        self._counts = [len(equal) for equal in rows]  # the number of groups that each stands for
        self._caps = [admission_cap(group, limits) for group in self._groups]
        self._ends = [[0] * requests for _ in rows]  # blocks that a request has taken
        self._starts = [[0] * requests for _ in rows]  # the first of them, which it has freed
        self._lag = int(limits.async_scheduling)
        caching = limits.enable_prefix_caching
        self._growth: dict[int, int] = {}  # size -> the blocks of that size that a request fills at once
        for group in groups:
            if caching or group.kind != "state":
                self._growth[group.block_size] = self._growth.get(group.block_size, 0) + 1
        self._cycle = lcm(*self._growth)
        self._phases = [Phase() for _ in range(self._cycle)]
        self._windows = [at for at, group in enumerate(self._groups) if group.window]
        self._followed_groups = self._windows  # groups whose blocks steady requests free
        self._keeps = [False] * len(rows)  # groups whose blocks have a hash when a steady request frees them
        self._states: list[int] = []  # groups of states that the prefix cache keeps
        self._frees_clean = True  # steady requests free blocks without a hash
        self._offset = [0] * requests  # a steady request has computed step + offset tokens
        self._since = [-1] * requests  # the step in which it became steady; -1: it is not
        self._in_flight = [0] * requests  # its tokens in flight in that step
        self._served = [-1] * requests  # the last step in which its blocks were freed one by one
        self._regular = [[False] * requests for _ in rows]  # a steady request frees the group's blocks in the rhythm
        self._regular_from = [[0] * requests for _ in rows]  # the first block that may be freed in the rhythm
        self._calendar: dict[int, list[int]] = {}  # step -> steady requests; outdated where _event differs
        self._event = [-1] * requests

    @property
    def missed_evicted(self) -> bool:
        """True once a look-up came upon an evicted block."""
        return self._queue.missed_evicted

    def begin_step(self, step: int) -> None:
        """Forget what was computed in the step before."""

    # Requests that are not steady

    def drop(self, request: int, processed: int) -> None:
        """Free the blocks that no token after the first `processed` ones reads."""
        for at in self._followed_groups:
            self._drop(at, request, processed)

    def needs(self, request: int, tokens: int, checkpoint: bool) -> int:
        """The new blocks that a running request needs to hold that many tokens.

        checkpoint: with a state inside the chunk (`GroupState._has_checkpoint`)
        """
        total = 0
        for at, group in enumerate(self._groups):
            total += max(self._blocks(group, tokens) - self._ends[at][request], 0) * self._counts[at]
        return total

    def take(self, request: int, tokens: int, checkpoint: bool) -> None:
        """Hand out the blocks that `needs` counts."""
        self._use(self.needs(request, tokens, checkpoint))
        for at, group in enumerate(self._groups):
            self._ends[at][request] = max(self._blocks(group, tokens), self._ends[at][request])

    def cache(self, request: int, tokens: int) -> None:
        """Note that the first `tokens` tokens are computed: their full blocks become findable."""

    def lookup(self, request: int, tokens: int) -> int:
        """The tokens of a request, out of that many, that are cached in every group."""
        return 0

    def admission_needs(self, request: int, tokens: int, hit: int, whole: bool, checkpoint: bool) -> int:
        """Free blocks needed to admit the request looked up last; if there are too few, a lower bound.

        whole: for its whole prompt
        """
        total = 0
        for at, group in enumerate(self._groups):
            blocks = self._blocks(group, tokens)
            if whole and 0 <= self._caps[at] < blocks:
                blocks = self._caps[at]
            total += blocks * self._counts[at]
        return total

    def least_needs(self, request: int, tokens: int, hit: int) -> int:
        """A lower bound of `admission_needs` for the whole prompt, for all hits of at most `hit` tokens."""
        return self.admission_needs(request, tokens, hit, True, False)

    def admit(self, request: int, hit: int) -> None:
        """Hold the blocks that the last look-up hit."""

    def release(self, request: int, hashed_tokens: int) -> None:
        """Free all blocks of a request; those that its first `hashed_tokens` tokens fill have a hash."""
        for at, count in enumerate(self._counts):
            self._free_clean((self._ends[at][request] - self._starts[at][request]) * count)
            self._ends[at][request] = self._starts[at][request] = 0

    # Steady requests

    def start(self, request: int, step: int, computed: int, in_flight: int) -> None:
        """Let a request decode from `step` on. in_flight: its computed tokens that are not yet processed"""
        self._offset[request] = offset = computed - step
        self._since[request], self._in_flight[request] = step, in_flight
        for size, blocks in self._growth.items():
            for phase in self._phases[-offset % size :: size]:
                phase.takes[request] = phase.takes.get(request, 0) + blocks
                phase.taken += blocks
        if self._followed_groups:
            self._follow(request, step)

    def stop(self, request: int, step: int) -> None:
        """End the steady decoding of a request at `step`."""
        offset = self._offset[request]
        for size in self._growth:
            for phase in self._phases[-offset % size :: size]:
                phase.taken -= phase.takes.pop(request, 0)
        processed = step + offset - self._lag - (self._served[request] != step)
        for at, group in enumerate(self._groups):
            start, size = self._start_of(at, request), group.block_size
            if self._regular[at][request]:
                self._regular[at][request] = False
                for phase in self._phases[self._rhythm(at, request) :: size]:
                    phase.freed = None
                    phase.drops.pop(request, ())
                start = max(start, skipped_tokens(group, processed) // size)
            self._set_held(at, request, start, self._blocks(group, step + offset))
        self._since[request] = self._event[request] = -1

    def takes(self, step: int) -> int:
        """The new blocks that all steady requests together need in a step."""
        return self._phases[step % self._cycle].taken

    def serve(self, step: int, first: int = 0) -> int:
        """Serve the steady requests from `first` on, up to one that does not find its blocks; returns it, or -1."""
        phase, followed = self._phases[step % self._cycle], self._followed(step, first)
        drops, clean = self._drops(phase), self._queue.clean
        # A block that comes free without a hash spares the next request an eviction.
        spares = self._frees_clean and clean < phase.taken and (bool(followed) or drops.clean[-1] > 0)
        if first or phase.taken > self.free or spares or self._states:
            return self._serve_in_turn(step, first, followed)
        done = 0
        for request in followed:
            i = bisect_left(drops.requests, request, done)
            self._free(step, drops, done, i)
            self.drop_due(request, step)
            done = bisect_left(drops.requests, request + 1, i)
        self._free(step, drops, done, len(drops.requests))
        self._use(phase.taken)
        return -1

    def due(self, step: int) -> list[int]:
        """The steady requests whose blocks change in a step, in order of admission."""
        phase = self._phases[step % self._cycle]
        return sorted({*phase.takes, *phase.drops, *self._followed(step)})

    def drop_due(self, request: int, step: int) -> None:
        """Free the blocks that a steady request frees in a step."""
        self._served[request] = step
        phase = self._phases[step % self._cycle]
        if self._event[request] != step:
            drops = self._drops(phase)
            i = bisect_left(drops.requests, request)
            self._free(step, drops, i, bisect_left(drops.requests, request + 1, i))
            return
        computed = step + self._offset[request]
        processed = computed - (self._in_flight[request] if step == self._since[request] else self._lag)
        for at in self._followed_groups:
            if not self._regular[at][request]:
                self._drop(at, request, processed)
            elif at in phase.drops.get(request, ()):
                if self._keeps[at]:
                    drops = self._drops(phase)
                    offset = drops.offsets[request, at]
                    self._free_hashed(step, drops, offset, offset + self._counts[at])
                else:
                    self._free_clean(self._counts[at])
        self._plan(request, step)

    def takes_due(self, request: int, step: int) -> int:
        """The new blocks that a steady request needs in a step."""
        return self._phases[step % self._cycle].takes.get(request, 0)

    def take_due(self, request: int, step: int) -> None:
        """Hand out the blocks that `takes_due` counts."""
        blocks = self.takes_due(request, step)
        if blocks:
            self._add_states(request, step)
        self._use(blocks)

    # How blocks are followed

    def _serve_in_turn(self, step: int, first: int, followed: list[int]) -> int:
        """Serve as `serve` does, one request after the other."""
        phase, queue, events = self._phases[step % self._cycle], self._queue, set(followed)
        takes, drops, evicted = phase.takes, self._drops(phase), 0
        requests, clean, hashed = drops.requests, drops.clean, drops.hashed
        queued = i = bisect_left(requests, first)
        self.changes += 1
        short = -1
        for request in sorted({*takes, *requests, *followed}):
            if request < first:
                continue
            self._served[request] = step
            here = i < len(requests) and requests[i] == request
            if request in events:
                queue.add_drops(step, drops, hashed[queued], hashed[i])
                i += here
                queued = i
                self.drop_due(request, step)
            elif here:
                freed = clean[i + 1] - clean[i]
                queue.clean += freed
                self.free += freed + hashed[i + 1] - hashed[i]
                i += 1
            blocks = takes.get(request, 0)
            if blocks > self.free:
                short = request
                break
            if blocks:
                self._add_states(request, step)
            self.free -= blocks
            queue.clean -= blocks
            if queue.clean < 0:
                evicted -= queue.clean
                queue.clean = 0
        queue.add_drops(step, drops, hashed[queued], hashed[i])
        queue.evict(evicted)
        return short

    def _add_states(self, request: int, step: int) -> None:
        """Add the states that a steady request begins in a step."""

    def _use(self, blocks: int) -> None:
        if blocks:
            self.free -= blocks
            self.changes += 1
            self._queue.take(blocks)

    def _free(self, step: int, drops: Drops, first: int, end: int) -> None:
        """Free the blocks that the requests from the first to before the end-th one of `drops` free in the rhythm."""
        if first < end:
            self._free_clean(drops.clean[end] - drops.clean[first])
            self._free_hashed(step, drops, drops.hashed[first], drops.hashed[end])

    def _free_clean(self, blocks: int) -> None:
        self.free += blocks
        self.changes += 1
        self._queue.clean += blocks

    def _free_hashed(self, step: int, drops: Drops, start: int, end: int) -> None:
        """Free the blocks [start, end) of those with a hash that leave the windows in the rhythm."""
        self.free += end - start
        self.changes += 1
        self._queue.add_drops(step, drops, start, end)

    def _drop(self, at: int, request: int, processed: int) -> None:
        """Free one group's blocks that no token after the first `processed` ones reads."""
        start = skipped_tokens(self._groups[at], processed) // self._groups[at].block_size
        gone = start - self._starts[at][request]
        if gone > 0:
            self._starts[at][request] = start
            self._free_clean(gone * self._counts[at])

    def _drops(self, phase: Phase) -> Drops:
        if phase.freed is None:
            phase.freed = Drops(phase.drops, self._counts, self._keeps)
        return phase.freed

    def _set_held(self, at: int, request: int, start: int, end: int) -> None:
        """Note that a request, which is no longer steady, holds blocks [start, end)."""
        self._starts[at][request], self._ends[at][request] = start, end

    def _start_of(self, at: int, request: int) -> int:
        return self._starts[at][request]

    def _followed(self, step: int, first: int = 0) -> list[int]:
        """The steady requests that may free blocks out of the rhythm in a step, in order of admission."""
        entries = self._calendar.get(step)
        if entries is None:
            return []
        return sorted({entry for entry in entries if entry >= first and self._event[entry] == step})

    def _plan(self, request: int, step: int) -> None:
        """Enter the next step in which a request, served in `step`, may leave the rhythm, if there is one."""
        if step == self._since[request] and self._lag:
            self._follow(request, step + 1)  # tokens in flight before it decoded are processed then
            return
        computed, following = step + self._offset[request], NEVER
        for at in self._followed_groups:
            if not self._regular[at][request]:
                following = min(following, self._next_followed(at, request, computed))
        if following < NEVER:
            self._follow(request, following - self._offset[request])

    def _next_followed(self, at: int, request: int, computed: int) -> int:
        """The computed tokens at which a group must be looked at again; NEVER if it keeps the rhythm from now on."""
        group = self._groups[at]
        change = next_drop(group, computed, self._lag)
        if group.kind != "sliding" or self._start_of(at, request) < self._regular_from[at][request]:
            return change
        if change > computed + group.block_size:
            return change - group.block_size
        self._regular[at][request] = True
        for phase in self._phases[self._rhythm(at, request) :: group.block_size]:
            drops = phase.drops.setdefault(request, [])
            drops.append(at)
            drops.sort()
            phase.freed = None
        return NEVER

    def _follow(self, request: int, step: int) -> None:
        self._event[request] = step
        self._calendar.setdefault(step, []).append(request)

    def _rhythm(self, at: int, request: int) -> int:
        group = self._groups[at]
        return (group.window - 1 + self._lag - self._offset[request]) % group.block_size

    def _blocks(self, group: Spec, tokens: int) -> int:
        return 1 if group.kind == "state" else -(-tokens // group.block_size)
