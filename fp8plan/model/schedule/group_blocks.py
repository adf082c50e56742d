"""Free blocks of a pool that several groups share, the blocks that requests hold, and the rhythm of steady ones.

Free blocks without a hash are only counted. A free block with a hash has a place in a queue, and the queue is evicted
from its head. So a block is still there if its place is not before the head, unless a hit took it out.

Requests share the full blocks of a prompt, so each such block is an object. So is each state. All other blocks are a
request's own, and no other request finds them. They are counted while it runs, and queue in pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush


class Block:
    """A full block of a prompt in each of some equal groups, or a state.

    hashed: it can be found
    place, last: the places of the first and the last group's block, when they were last queued
    """

    __slots__ = ("hashed", "holders", "last", "place")

    def __init__(self) -> None:
        self.holders = 1
        self.place = self.last = 0
        self.hashed = False

    def places(self, groups: int) -> list[int]:
        """The place of each group's block."""
        return [self.place + i * (self.last - self.place) // max(groups - 1, 1) for i in range(groups)]

    def split(self, groups: int) -> list[Block]:
        """A block for each group."""
        parts = []
        for place in self.places(groups):
            part = Block()
            part.holders, part.hashed, part.place, part.last = self.holders, self.hashed, place, place
            parts.append(part)
        return parts


class Piece:
    """Findable blocks of one request in one group, in the queue. Places only rise with the number, or only fall."""

    __slots__ = ("numbers", "places")

    def __init__(self, numbers: range, places: Sequence[int]) -> None:
        self.numbers, self.places = numbers, places

    def found(self, head: int) -> range:
        """The numbers of the blocks that have not been evicted."""
        places = self.places
        if not places or (places[0] >= head and places[-1] >= head):
            return self.numbers
        if places[0] > places[-1]:
            left = max(len(places) - (head - places[-1]), 0)  # without a gap: such a piece was freed at once
            self.numbers, self.places = self.numbers[:left], places[:left]
        else:
            gone = bisect_left(places, head)
            self.numbers, self.places = self.numbers[gone:], places[gone:]
        return self.numbers

    def part(self, start: int, end: int) -> Piece:
        """The blocks [start, end) of the piece."""
        first = self.numbers.start
        return Piece(range(start, end), self.places[start - first : end - first])


def queued_piece(numbers: range, place: int) -> Piece:
    """A piece that is queued from a place on, its last block first."""
    return Piece(numbers, range(place + len(numbers) - 1, place - 1, -1))


class Table:
    """The blocks of one request in equal groups, which hold the same ones."""

    __slots__ = ("blocks", "end", "hashed", "hit", "last_state", "start")

    def __init__(self, groups: int) -> None:
        # By group: the blocks that are objects; None where one was never needed, or for a state that was freed.
        self.blocks: list[list[Block | None]] = [[] for _ in range(groups)]
        self.start = 0  # the first block that the request holds
        self.end = 0  # number of blocks, with those that it no longer holds
        self.hit = 0  # number of blocks found at its admission
        self.hashed = 0  # leading blocks that have a hash, or need none
        self.last_state = -1  # in a group of states: the block of the step before the last

    def let_one_go(self) -> bool:
        """Let the first block go if other requests hold it, too; False if they may not."""
        block = self.blocks[0][self.start]
        if block is None or block.holders == 1 or len(self.blocks) > 1:
            return False
        block.holders -= 1
        self.start += 1
        return True

    # States (mamba_cache_mode "align"): a step writes the state of its last token. The block of the step before is its
    # input, so a request holds two blocks for a while. This is vLLM 0.30. In 0.26 the search for blocks to free ends at
    # the first gap. So asynchronous scheduling may hold the states of a long prefill for longer there.

    def add_state(self, blocks: int, checkpoint: bool = False) -> None:
        """Add the state of the last of `blocks` blocks, unless it is there.

        checkpoint: add the state of the block before, too
        """
        if blocks <= self.end:
            return
        if self.end:
            self.last_state = self.end - 1
        for states in self.blocks:
            states += [None] * (blocks - 1 - checkpoint - self.end)
            states += [Block() for _ in range(1 + checkpoint)]
        self.end = blocks

    def has_old_states(self, processed: int, size: int) -> bool:
        """True if `drop_states` may have states to drop."""
        return min((processed - 1) // size, self.end) > self.start or self._before_last(processed, size)

    def drop_states(self, processed: int, size: int) -> list[Block]:
        """Drop the states before that of the last of `processed` tokens; returns their blocks, the last one first."""
        end, last = min((processed - 1) // size, self.end), self.last_state
        places = [*range(end - 1, self.start - 1, -1), *([last] if self._before_last(processed, size) else [])]
        self.start = max(end, self.start)
        dropped = []
        for states in self.blocks:
            for place in places:
                block, states[place] = states[place], None
                if block is not None:
                    dropped.append(block)
        return dropped

    def _before_last(self, processed: int, size: int) -> bool:
        return 0 <= self.last_state < -(-processed // size) - 1


class Drops:
    """The blocks that steady requests free in a step, in order of service.

    requests: those that free blocks, in order
    clean, hashed: for each of them, the blocks without and with a hash that those before it free; at last the sums
    offsets: for each (request, group), the blocks with a hash that are freed before its own
    """

    __slots__ = ("clean", "hashed", "offsets", "requests")

    def __init__(self, drops: dict[int, list[int]], counts: Sequence[int], keeps: Sequence[bool]) -> None:
        self.requests = sorted(drops)
        self.clean, self.hashed = [0], [0]
        self.offsets: dict[tuple[int, int], int] = {}
        clean = hashed = 0
        for request in self.requests:
            for at in drops[request]:
                if keeps[at]:
                    self.offsets[request, at] = hashed
                    hashed += counts[at]
                else:
                    clean += counts[at]
            self.clean.append(clean)
            self.hashed.append(hashed)


class Phase:
    """The blocks that steady requests take and free in the steps with one remainder modulo the pool's cycle."""

    __slots__ = ("drops", "freed", "taken", "takes")

    def __init__(self) -> None:
        self.takes: dict[int, int] = {}  # request -> blocks
        self.taken = 0  # their sum
        self.drops: dict[int, list[int]] = {}  # request -> groups in which it frees a block
        self.freed: Drops | None = None  # the same in order of service; None: `drops` has changed


class FreeQueue:
    """The free blocks. clean: the number without a hash, which are handed out first; head: the place evicted next"""

    def __init__(self, blocks: int) -> None:
        self.clean = blocks
        self.head = 0
        self.missed_evicted = False  # true once a look-up came upon an evicted block
        self._end = 0  # the place of the block that is freed next
        self._gaps: list[tuple[int, int]] = []  # heap of the places [start, end) that hits have taken out
        # By step: the (place of the first, the first, the end of those queued together) of its drops.
        self._steps: dict[int, list[tuple[int, int, int, Drops]]] = {}
        self._queued_steps: deque[int] = deque()

    def add(self, blocks: int) -> int:
        """Queue blocks with a hash, and return the place of the first."""
        place = self._end
        self._end = place + blocks
        return place

    def remove(self, places: Sequence[int]) -> None:
        """Take blocks out for a hit. places: those of blocks that were freed one after the other, or rising ones"""
        if places[0] > places[-1]:
            heappush(self._gaps, (places[-1], places[0] + 1))
        else:
            for place in places:
                heappush(self._gaps, (place, place + 1))

    def pick(self, pieces: list[Piece], start: int, end: int) -> None:
        """Take the blocks [start, end) of a request out for a hit, each from the first piece that has it."""
        for i, piece in enumerate(pieces):
            run = piece.found(self.head)
            first, last = max(start, run.start), min(end, run.stop)
            if first < last:
                self.remove(piece.part(first, last).places)
                rests = [piece.part(run.start, first), piece.part(last, run.stop)]
                pieces[i : i + 1] = [rest for rest in rests if rest.numbers]
                self.pick(pieces, start, first)
                self.pick(pieces, last, end)
                return

    def take(self, blocks: int) -> None:
        """Hand out blocks, and evict where those without a hash do not suffice."""
        self.clean -= blocks
        if self.clean < 0:
            self.evict(-self.clean)
            self.clean = 0

    def evict(self, blocks: int) -> None:
        """Evict the blocks that were freed first."""
        head, gaps = self.head + blocks, self._gaps
        while gaps and gaps[0][0] < head:
            start, end = heappop(gaps)
            head += end - start
        self.head = head

    def has(self, copies: list[Block]) -> bool:
        """True if all groups find a copy of a block. Forgets the copies before it that none finds."""
        while copies:
            block = copies[0]
            if block.holders or block.place >= self.head:
                return True
            self.missed_evicted = True
            if block.last >= self.head:
                return any(block.holders or block.place >= self.head for block in copies)
            del copies[0]
        return False

    def found_to(self, shelf: list[list[Block]], start: int, end: int) -> int:
        """The end of the run of blocks that all groups find, from `start` on. shelf: the copies of each block"""
        for i in range(start, end):
            if not self.has(shelf[i]):
                return i
        return end

    def found_before(self, shelf: list[list[Block]], start: int, end: int, blocks: int) -> int:
        """The end of the last run of so many blocks that all groups find, or of any run from block 0 on.

        Block `start` and those after it up to `end` are found already.
        """
        for i in range(start - 1, -1, -1):
            if not self.has(shelf[i]):
                end = i
            elif end - i >= blocks:
                return end
        return end

    def oldest(self, shelf: list[list[Block]]) -> list[Block]:
        """The oldest copy of each block that all groups find. There is one."""
        head, blocks = self.head, []
        for copies in shelf:
            block = copies[0]
            if not block.holders and block.place < head:
                self.has(copies)
                block = next(copy for copy in copies if copy.holders or copy.place >= head)
            blocks.append(block)
        return blocks

    def add_drops(self, step: int, drops: Drops, start: int, end: int) -> None:
        """Queue the blocks [start, end) of those with a hash that steady requests free in a step."""
        if start == end:
            return
        while self._queued_steps:
            place, first, last, _ = self._steps[self._queued_steps[0]][-1]
            if place + last - first > self.head:
                break
            del self._steps[self._queued_steps.popleft()]
        if step not in self._steps:
            self._steps[step] = []
            self._queued_steps.append(step)
        self._steps[step].append((self.add(end - start), start, end, drops))

    def trail(self, pair: tuple[int, int], numbers: range, last_step: int, size: int) -> list[int]:
        """The places of the last of the blocks `numbers`, those that are not evicted, in order.

        The (request, group) freed one every `size` steps in the rhythm, up to `last_step`.
        """
        places: list[int] = []
        step = last_step
        for _ in numbers:
            place = self._place(pair, step)
            if place < self.head:
                break
            places.append(place)
            step -= size
        places.reverse()
        return places

    def _place(self, pair: tuple[int, int], step: int) -> int:
        for place, start, end, drops in self._steps.get(step, ()):
            offset = drops.offsets.get(pair, -1)
            if start <= offset < end:
                return place + offset - start
        return -1
