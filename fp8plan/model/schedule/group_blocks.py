"""Blocks of a pool with prefix caching and several groups, runs of them in its free queue, and tables of requests.

Free blocks without a hash are only counted. Free blocks with a hash form a queue, the least recently freed first.
Requests share the full blocks of a prompt, so each such block is an object. So is each state. All other blocks are a
request's own, and no other request finds them. They are counted while it runs, and queue in runs. A run is a `Span` of
one request, or a `Step` in which many requests freed one block each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Freed:
    """Neighbouring blocks in the queue."""

    __slots__ = ()

    def evict(self, blocks: int) -> int:
        """Evict at most that many blocks, and return the number evicted."""
        raise NotImplementedError

    def empty(self) -> bool:
        return True


class Block(Freed):
    """A full block of a prompt, or a state. copies: the findable ones, oldest first; None: it is none of them"""

    __slots__ = ("copies", "holders")

    def __init__(self) -> None:
        self.holders = 1
        self.copies: list[Block] | None = None

    def evict(self, blocks: int) -> int:
        if self.copies is not None:
            self.copies.remove(self)
            self.copies = None
        return 1


class Piece(Freed):
    """Findable blocks of one request in one group."""

    __slots__ = ()

    def found(self) -> Sequence[int]:
        """The numbers of these blocks."""
        raise NotImplementedError

    def pick(self, wanted: Sequence[int]) -> Sequence[int]:
        """Take the wanted blocks that are here out of the queue, and return the other wanted ones."""
        raise NotImplementedError


class Span(Piece):
    """Blocks of one request in one group, in the order of their numbers. They were freed together, last one first."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = blocks

    def evict(self, blocks: int) -> int:
        left = max(len(self.blocks) - blocks, 0)
        gone = len(self.blocks) - left
        self.blocks = self.blocks[:left]
        return gone

    def empty(self) -> bool:
        return not self.blocks

    def found(self) -> Sequence[int]:
        return self.blocks

    def pick(self, wanted: Sequence[int]) -> Sequence[int]:
        picked = set(wanted).intersection(self.blocks)
        left = [number for number in self.blocks if number not in picked]
        if left and left[-1] - left[0] == len(left) - 1:
            self.blocks = range(left[0], left[-1] + 1)
        else:
            self.blocks = left
        return [number for number in wanted if number not in picked]


class Step(Freed):
    """The blocks that steady requests freed in one step: one for each (request, group), in that order."""

    __slots__ = ("pairs", "step")

    def __init__(self, step: int, pairs: Sequence[tuple[int, int]]) -> None:
        self.step, self.pairs = step, pairs

    def evict(self, blocks: int) -> int:
        gone = min(blocks, len(self.pairs))
        self.pairs = self.pairs[gone:]
        return gone

    def empty(self) -> bool:
        return not self.pairs


class Trail(Piece):
    """Blocks that one steady request freed in one group, and that were not yet evicted when it stopped."""

    __slots__ = ("pair", "steps")

    def __init__(self, pair: tuple[int, int], steps: dict[int, Step]) -> None:
        self.pair, self.steps = pair, steps

    def empty(self) -> bool:
        return not self.found()

    def found(self) -> Sequence[int]:
        return [number for number, step in self.steps.items() if self.pair in step.pairs]

    def pick(self, wanted: Sequence[int]) -> Sequence[int]:
        picked = set(wanted).intersection(self.found())
        for number in picked:
            step = self.steps.pop(number)
            step.pairs = [pair for pair in step.pairs if pair != self.pair]
        return [number for number in wanted if number not in picked]


class Table:
    """The blocks of one request in one group."""

    __slots__ = ("blocks", "end", "hashed", "hit", "last_state", "start")

    def __init__(self) -> None:
        self.blocks: list[Block | None] = []  # blocks that are objects; None where one was freed or never needed
        self.start = 0  # the first block that the request holds
        self.end = 0  # number of blocks, with those that it no longer holds
        self.hit = 0  # number of blocks found at its admission
        self.hashed = 0  # leading blocks that have a hash, or need none
        self.last_state = -1  # in a group of states: the block of the step before the last

    # States (mamba_cache_mode "align"): a step writes the state of its last token. The block of the step before is its
    # input, so a request holds two blocks for a while. This is vLLM 0.30. In 0.26 the search for blocks to free ends at
    # the first gap. So asynchronous scheduling may hold the states of a long prefill for longer there.

    def add_state(self, blocks: int) -> int:
        """Add the state of the last of `blocks` blocks unless it is there; returns the number of new blocks."""
        if blocks <= self.end:
            return 0
        if self.end:
            self.last_state = self.end - 1
        self.blocks += [None] * (blocks - 1 - self.end)
        self.blocks.append(Block())
        self.end = blocks
        return 1

    def has_old_states(self, processed: int, size: int) -> bool:
        """True if `drop_states` may have states to drop."""
        return min((processed - 1) // size, len(self.blocks)) > self.start or self._before_last(processed, size)

    def drop_states(self, processed: int, size: int) -> list[Block]:
        """Drop the states before that of the last of `processed` tokens; returns their blocks, the last one first."""
        end, last = min((processed - 1) // size, len(self.blocks)), self.last_state
        places = [*range(end - 1, self.start - 1, -1), *([last] if self._before_last(processed, size) else [])]
        self.start = max(end, self.start)
        blocks = []
        for place in places:
            block, self.blocks[place] = self.blocks[place], None
            if block is not None:
                blocks.append(block)
        return blocks

    def _before_last(self, processed: int, size: int) -> bool:
        return 0 <= self.last_state < -(-processed // size) - 1


class FreeQueue:
    """The free blocks. clean: the number without a hash, which are handed out first."""

    def __init__(self, blocks: int) -> None:
        self.clean = blocks
        self._hashed: OrderedDict[Freed, None] = OrderedDict()  # least recently freed first
        self._steps: dict[int, list[Step]] = {}  # the Steps in the queue, by number
        self._oldest_step = 0  # the first step that may still be in the queue

    def add(self, freed: Freed) -> None:
        self._hashed[freed] = None

    def add_step(self, step: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Queue one block of each (request, group)."""
        freed = Step(step, pairs)
        self._hashed[freed] = None
        self._steps.setdefault(step, []).append(freed)

    def remove(self, block: Block) -> None:
        del self._hashed[block]

    def take(self, blocks: int) -> int:
        """Hand out blocks, and return the number that had to be evicted."""
        self.clean -= blocks
        if self.clean >= 0:
            return 0
        evicted = left = -self.clean
        self.clean = 0
        while left:
            oldest = next(iter(self._hashed))
            left -= oldest.evict(left)
            step = oldest.step if isinstance(oldest, Step) else -1
            if step >= 0:
                self._oldest_step = step
            if oldest.empty():
                del self._hashed[oldest]
                if step >= 0:
                    del self._steps[step][0]
                    if not self._steps[step]:
                        del self._steps[step]
        return evicted

    def trail(self, pair: tuple[int, int], numbers: range, first_step: int, size: int) -> Trail:
        """The queued blocks of a (request, group) that freed one every `size` steps, from `first_step` on."""
        gone = max(0, -(-(self._oldest_step - first_step) // size))
        here = {}
        for number in numbers[gone:]:
            for freed in self._steps.get(first_step + (number - numbers[0]) * size, ()):
                if pair in freed.pairs:
                    here[number] = freed
        return Trail(pair, here)
