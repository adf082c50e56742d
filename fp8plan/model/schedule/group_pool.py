"""A pool of blocks that several KV-cache groups share, without prefix caching: it counts blocks.

The order of the calls is that of vLLM's `allocate_slots` (vllm/v1/core/kv_cache_manager.py): blocks out of the window
are freed first, even if the request then cannot be served; then all groups together must find their new blocks.
"""

from __future__ import annotations

from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec
from fp8plan.model.schedule.groups import admission_cap, skipped_tokens

NEVER = 2**62  # blocks that no pool has


class GroupPool:
    """The blocks that the scheduler hands out. `free` counts those that are left."""

    def __init__(self, num_blocks: int, groups: tuple[Spec, ...], limits: EngineLimits, requests: int) -> None:
        self.free = num_blocks
        self.changes = 0  # of the blocks, so that a look-up need not be repeated
        self.hit_freed_blocks = False
        self.evictions = 0  # of blocks that could still have been hit
        self.shared_prefix = 0  # found by the last look-up: how far a longer hit of one group reaches; 0: none
        self._groups = groups
        self._caps = [admission_cap(group, limits) for group in groups]
        self._ends = [[0] * requests for _ in groups]  # blocks of a request, those out of the window included
        self._starts = [[0] * requests for _ in groups]  # the first ones, out of the window

    def begin_step(self) -> None:
        """Forget what was computed in the step before."""

    def drop(self, request: int, processed: int) -> None:
        """Free what no token after the first `processed` ones looks at."""
        for at, group in enumerate(self._groups):
            if not group.window:
                continue
            start = min(skipped_tokens(group, processed) // group.block_size, self._ends[at][request])
            gone = start - self._starts[at][request]
            if gone > 0:
                self._starts[at][request] = start
                self.free += gone
                self.changes += 1

    def needs(self, request: int, tokens: int) -> int:
        """New blocks for a running request that is to have room for that many tokens."""
        total = 0
        for at, group in enumerate(self._groups):
            more = self._blocks(group, tokens) - self._ends[at][request]
            if more > 0:
                total += more
        return total

    def take(self, request: int, tokens: int) -> None:
        """Hand out those blocks."""
        for at, group in enumerate(self._groups):
            more = self._blocks(group, tokens) - self._ends[at][request]
            if more > 0:
                self._ends[at][request] += more
                self.free -= more
                self.changes += 1

    def cache(self, request: int, tokens: int) -> None:
        """Note that the first `tokens` tokens are computed: their full blocks become findable."""

    def lookup(self, request: int, tokens: int) -> int:
        """Tokens that a request of that many finds in the cache of every group."""
        return 0

    def admission_needs(self, request: int, tokens: int, hit: int, whole: bool) -> int:
        """Free blocks needed to admit the request looked up last. whole: this is the check of its whole prompt."""
        total = 0
        for at, group in enumerate(self._groups):
            blocks = self._blocks(group, tokens)
            if whole and 0 <= self._caps[at] < blocks:
                blocks = self._caps[at]
            total += blocks
        return total

    def admit(self, request: int, hit: int) -> None:
        """Hold what the last look-up found."""

    def release(self, request: int, hashed_tokens: int) -> None:
        """Free all blocks of a request; those that its first `hashed_tokens` tokens fill have a hash."""
        for ends, starts in zip(self._ends, self._starts, strict=True):
            self.free += ends[request] - starts[request]
            ends[request] = starts[request] = 0
        self.changes += 1

    def _blocks(self, group: Spec, tokens: int) -> int:
        return 1 if group.kind == "state" else -(-tokens // group.block_size)
