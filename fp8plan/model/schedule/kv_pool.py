"""A model of vLLM's paged KV pool, which counts blocks instead of listing them.

vLLM keeps free blocks in one queue (vllm/v1/core/block_pool.py, `free_blocks`). Blocks without a content hash are at
the front. Hashed ones follow in the order in which they were freed, a request's last block before its first. Eviction
pops the front, so the survivors of a freed request are always its first blocks. One `Span` per freed piece, whose end
shrinks, replaces thousands of blocks exactly.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from fp8plan.model.cost.base import IntArray


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class Pool:
    """The blocks that a scheduler hands out, without prefix caching. `free` counts those that are left."""

    def __init__(self, num_blocks: int) -> None:
        self.free = num_blocks

    def lookup(self, request: int, tokens: int) -> tuple[int, int]:
        """The pair (blocks that a request of that many tokens finds in the cache, those of them in the free queue)."""
        return 0, 0

    def admit(self, request: int, hit_blocks: int) -> None:
        """Hold the blocks that `lookup` hit."""

    def take(self, blocks: int) -> None:
        """Hand out blocks, least recently freed first."""
        self.free -= blocks

    def computed(self, request: int, tokens: int) -> None:
        """Note that a prefill has reached that many tokens: its full blocks can be found from now on."""

    def release(self, request: int, held_blocks: int, hashed_tokens: int) -> None:
        """Free the `held_blocks` of a request; those that its first `hashed_tokens` tokens fill have a hash."""
        self.free += held_blocks


class Span:
    """Consecutive hashed blocks [start, end) that are held and freed together. Eviction lowers `end`."""

    __slots__ = ("end", "holders", "siblings", "start")

    def __init__(self, start: int, end: int, holders: int, siblings: dict[Span, None] | None = None) -> None:
        self.start, self.end, self.holders = start, end, holders
        self.siblings = siblings  # the other copies of the same content, oldest first


class CachingPool(Pool):
    """A pool with prefix caching. Requests with the same prompt share its full blocks.

    A request's blocks are three spans: the shared prompt blocks, the last prompt block if the prompt fills it exactly,
    and the private blocks. Each sibling computes its own copy of that last block, because a hit must leave one token to
    compute. But all copies have one hash, and a resumed sibling finds the oldest.
    """

    def __init__(self, num_blocks: int, block_size: int, prompts: IntArray, prompt_ids: IntArray) -> None:
        super().__init__(num_blocks)
        self._clean = num_blocks  # free blocks without a hash
        # Free spans, least recently freed first. A plain dict would pass all deleted entries to find the first one.
        self._queue: OrderedDict[Span, None] = OrderedDict()
        self._block_size = block_size
        group: list[int] = prompt_ids.tolist()
        self._shared_blocks, self._has_copy = shared_layout(prompts, prompt_ids, block_size)
        groups = max(group, default=-1) + 1
        shared = [Span(0, 0, 0) for _ in range(groups)]
        copies: list[dict[Span, None]] = [{} for _ in range(groups)]
        self._shared = [shared[i] for i in group]  # the same for all siblings
        self._copies = [copies[i] for i in group]
        self._held_copy: list[Span | None] = [None] * len(group)
        self._private: list[Span | None] = [None] * len(group)  # blocks of requests that do not run

    def lookup(self, request: int, tokens: int) -> tuple[int, int]:
        most = (tokens - 1) // self._block_size
        shared = self._shared[request]
        hit = shared.end
        if hit > most:
            hit = most
        in_queue = 0 if shared.holders else hit
        if hit < self._shared_blocks[request]:
            return hit, in_queue
        if self._has_copy[request]:
            copies = self._copies[request]
            if not copies or most <= hit:
                return hit, in_queue
            hit += 1
            if not next(iter(copies)).holders:
                in_queue += 1
        private = self._private[request]
        if private is not None:
            size = private.end - private.start
            return hit + size, in_queue + size
        return hit, in_queue

    def admit(self, request: int, hit_blocks: int) -> None:
        blocks = self._shared_blocks[request]
        self._hold(self._shared[request])
        if self._has_copy[request] and hit_blocks > blocks:
            self._held_copy[request] = copy = next(iter(self._copies[request]))
            self._hold(copy)
            blocks += 1
        # A surviving private block implies surviving prompt blocks: those were freed later, or are still held.
        private = self._private[request]
        if private is not None:
            self._private[request] = None
            if hit_blocks > blocks:
                self._hold(private)

    def take(self, blocks: int) -> None:
        self.free -= blocks
        clean = self._clean - blocks
        while clean < 0:  # the queue's unhashed front is used up: evict
            oldest = next(iter(self._queue))
            size = oldest.end - oldest.start
            if size + clean > 0:
                oldest.end += clean
                clean = 0
            else:
                clean += size
                oldest.end = oldest.start
                del self._queue[oldest]
                if oldest.siblings is not None:
                    del oldest.siblings[oldest]
        self._clean = clean

    def computed(self, request: int, tokens: int) -> None:
        shared_blocks, shared = self._shared_blocks[request], self._shared[request]
        if shared.end < shared_blocks:
            shared.end = max(shared.end, min(tokens // self._block_size, shared_blocks))
        if self._has_copy[request] and self._held_copy[request] is None and tokens // self._block_size > shared_blocks:
            copies = self._copies[request]
            self._held_copy[request] = copy = Span(shared_blocks, shared_blocks + 1, 1, copies)
            copies[copy] = None

    def release(self, request: int, held_blocks: int, hashed_tokens: int) -> None:
        full = hashed_tokens // self._block_size
        unhashed = held_blocks - full
        self._clean += unhashed
        self.free += unhashed
        start = self._shared_blocks[request] + self._has_copy[request]
        if full > start:
            self._private[request] = private = Span(start, full, 0)
            self._queue[private] = None
            self.free += full - start
        copy = self._held_copy[request]
        if copy is not None:
            self._held_copy[request] = None
            self._let_go(copy)
        self._let_go(self._shared[request])

    def _hold(self, span: Span) -> None:
        if not span.holders and span in self._queue:
            del self._queue[span]
            self.free -= span.end - span.start
        span.holders += 1

    def _let_go(self, span: Span) -> None:
        span.holders -= 1
        if not span.holders and span.end > span.start:
            self._queue[span] = None
            self.free += span.end - span.start


def shared_layout(prompts: IntArray, prompt_ids: IntArray, block_size: int) -> tuple[list[int], list[bool]]:
    """The number of leading blocks that siblings share, by request, and true if each has its copy of the next."""
    has_siblings = np.bincount(prompt_ids)[prompt_ids] > 1 if len(prompt_ids) else np.zeros(0, bool)
    shared = np.where(has_siblings, (prompts - 1) // block_size, 0)
    copies = has_siblings & (prompts % block_size == 0)
    return shared.tolist(), copies.tolist()
