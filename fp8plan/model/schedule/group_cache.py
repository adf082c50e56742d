"""A pool of blocks that several KV-cache groups share, with prefix caching.

A hit is the longest that all groups have (vllm/v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator). Full
attention needs every block before its end, a window the blocks inside, and a state the last block. Windows and states
keep few blocks findable. vLLM 0.30 keeps those at the end of the prompt, and where another group's hit reached further
(prefix_cache_retention_interval = 0, its default). vLLM 0.26 keeps all (VLLM_PREFIX_CACHE_RETENTION_INTERVAL not set).

The blocks themselves are in `group_blocks`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from fp8plan.model.cost.base import IntArray
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec
from fp8plan.model.schedule.group_blocks import Block, FreeQueue, Piece, Span, Table
from fp8plan.model.schedule.group_pool import NEVER, GroupPool, skipped_tokens


class CachingGroupPool(GroupPool):
    """A pool with prefix caching. All groups have one block size."""

    def __init__(
        self,
        num_blocks: int,
        groups: tuple[Spec, ...],
        limits: EngineLimits,
        prompts: IntArray,
        prompt_ids: IntArray,
        retain_all: bool,
    ) -> None:
        requests = len(prompts)
        super().__init__(num_blocks, groups, limits, requests)
        self._size = size = groups[0].block_size
        self._retain_all = retain_all
        self._prompts: list[int] = prompts.tolist()
        self._prompt_ids: list[int] = prompt_ids.tolist()
        self._queue = FreeQueue(num_blocks)
        self._own: list[list[list[Piece]]] = [[[] for _ in range(requests)] for _ in groups]  # oldest first
        self._tables = [[Table() for _ in range(requests)] for _ in groups]
        self._full_prompts: list[int] = [prompt // size for prompt in self._prompts]  # full blocks
        blocks = dict(zip(self._prompt_ids, self._full_prompts, strict=True))
        # The findable copies of the blocks of each prompt, and of the states that a request adds; oldest first.
        self._prompt_copies: list[dict[int, list[list[Block]]]] = [
            {prompt: [[] for _ in range(full)] for prompt, full in blocks.items()} for _ in groups
        ]
        self._state_copies: list[dict[tuple[int, int], list[Block]]] = [{} for _ in groups]
        self._junction = [0] * requests  # tokens of another group's longer hit; 0: none
        self._hits: list[list[Block]] = []  # objects found by the last look-up, by group
        self._hit_first: list[int] = []  # the first block of the hit that each group needs
        self._hit_free: list[int] = []  # number of the hit's free blocks, by group
        self._new_states: list[list[Block]] = []  # the copies of states that this step computes
        self._alike = _alike(groups)
        self._states = [at for at, group in enumerate(groups) if group.kind == "state"]
        self._followed_groups = sorted([*self._windows, *self._states])
        self._reach = [1 if group.kind == "state" else -(-(group.window - 1) // size) for group in groups]
        few = [group.kind in ("sliding", "state") and not retain_all for group in groups]
        # Groups in which every full block can be found. In the others a few blocks can, or none.
        self._finds_all = [
            not (few[at] or (group.kind in ("sliding", "state") and not self._reach[at]))
            for at, group in enumerate(groups)
        ]
        self._finds_few = few
        self._drops_clean = not all(self._finds_all[at] for at in self._followed_groups)

    def begin_step(self) -> None:
        self._new_states.clear()

    # Requests that are not steady

    def needs(self, request: int, tokens: int) -> int:
        total, blocks = 0, -(-tokens // self._size)
        for at, group in enumerate(self._groups):
            more = blocks - self._tables[at][request].end
            if more > 0:
                total += 1 if group.kind == "state" else more
        return total

    def take(self, request: int, tokens: int) -> None:
        blocks = -(-tokens // self._size)
        for at, group in enumerate(self._groups):
            table = self._tables[at][request]
            more = blocks - table.end
            if more <= 0:
                continue
            if group.kind == "state":
                self._use(table.add_state(blocks))
                continue
            shared = min(blocks, self._full_prompts[request])
            table.blocks += [Block() for _ in range(len(table.blocks), shared)]
            table.end = blocks
            self._use(more)

    def cache(self, request: int, tokens: int) -> None:
        for at in range(len(self._groups)):
            self._hash(at, request, tokens)

    def lookup(self, request: int, tokens: int) -> int:
        size, hit, longest = self._size, tokens - 1, 0
        self._hit_first = [0] * len(self._groups)
        full: dict[int, int] = {}  # hits of full attention in tokens, by the first of equal groups
        simple = len(self._alike) == 2 and self._groups[self._alike[0][0]].keeps_all
        while True:
            current = hit
            for members in self._alike:
                first = members[0]
                if first in full:
                    current = min(current, full[first])
                    continue
                current = self._find(request, members, current) * size
                longest = max(longest, current)
                if self._groups[first].keeps_all:
                    full[first] = current
            if current >= hit:
                break
            hit = current
            if simple or len(self._groups) == 1:
                break
        self._note_hits(request, hit)
        self.shared_prefix = longest if longest > hit else 0
        if len(self._groups) > 1:
            self._junction[request] = self.shared_prefix
        return hit

    def admission_needs(self, request: int, tokens: int, hit: int, whole: bool) -> int:
        total, blocks, hits = 0, -(-tokens // self._size), hit // self._size
        for at, group in enumerate(self._groups):
            if group.kind == "state":
                copies = self._copies(at, request, hits - 1) if hits else None
                if any(copies is new for new in self._new_states):
                    return NEVER
                total += int(blocks > hits)
            else:
                wanted = min(blocks, self._caps[at]) if whole and self._caps[at] >= 0 else blocks
                total += max(wanted - hits, 0)
        free = sum(self._hit_free)
        if free:
            self.hit_freed_blocks = True
        return total + free

    def least_needs(self, request: int, tokens: int, hit: int) -> int:
        """Counts the request's own blocks, which are free or new. Others may hold all blocks of the prompt."""
        if self._states:
            return 0
        total, blocks, hits, shared = 0, -(-tokens // self._size), hit // self._size, self._full_prompts[request]
        for at, group in enumerate(self._groups):
            cap = self._caps[at]
            wanted = min(blocks, cap) if cap >= 0 else blocks
            if not group.window:
                least = blocks - shared
            elif group.kind == "chunked" or hits <= shared:
                least = wanted - hits
            else:
                least = wanted - max(shared, skipped_tokens(group, hit) // self._size)
                if hits > wanted:
                    least = min(least, self._reach[at])
            total += max(least, 0)
        return total

    def admit(self, request: int, hit: int) -> None:
        end, shared = hit // self._size, self._full_prompts[request]
        for at, group in enumerate(self._groups):
            table, first = self._tables[at][request], self._hit_first[at]
            for block in self._hits[at]:
                if not block.holders:
                    self._queue.remove(block)
                    self.free -= 1
                block.holders += 1
            shared_end = end if group.kind == "state" else min(end, shared)
            table.blocks = [None] * (shared_end - len(self._hits[at]))
            table.blocks += self._hits[at]
            table.start, table.end, table.hit, table.hashed = first, end, end, end
            own = max(first, shared)
            if end > own and group.kind != "state":
                self.free -= end - own
                wanted: Sequence[int] = range(own, end)
                for piece in self._own[at][request]:
                    if wanted:
                        wanted = piece.pick(wanted)
        self.changes += 1

    def release(self, request: int, hashed_tokens: int) -> None:
        for at in range(len(self._groups)):
            self._hash(at, request, hashed_tokens)
        for at, group in enumerate(self._groups):
            table = self._tables[at][request]
            if group.kind == "state":
                for block in reversed(table.blocks):
                    if block is not None:
                        self._let_go(block)
            else:
                self._free_before(at, request, table.end)
            self._tables[at][request] = Table()

    # Steady requests

    def serve(self, step: int) -> None:
        phase = step % self._cycle
        takes, followed = self._taken[phase], self._followed(step)
        in_turn = self._queue.clean < takes and self._drops_clean and (followed or self._dropped[phase])
        if self._states or in_turn:  # a block that comes free without a hash spares the next request an eviction
            rhythm = self._phases[phase]
            for request in sorted({*rhythm.takes, *rhythm.drops, *followed}):
                self.drop_due(request, step)
                self.take_due(request, step)
            return
        pairs, done = self._phases[phase].pairs(), 0
        for request in followed:
            end = bisect_left(pairs, (request,))
            self._drop_regular(step, pairs[done:end])
            self.drop_due(request, step)
            done = bisect_left(pairs, (request + 1,))
        self._drop_regular(step, pairs[done:] if done else pairs)
        self._use(takes)

    def take_due(self, request: int, step: int) -> None:
        blocks = self.takes_due(request, step)
        if blocks and self._states:
            end = (step + self._offset[request]) // self._size + 1
            blocks -= sum(1 - self._tables[at][request].add_state(end) for at in self._states)
        self._use(blocks)

    def _drop_regular(self, step: int, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        self.free += len(pairs)
        self.changes += 1
        kept = [pair for pair in pairs if self._finds_all[pair[1]]] if self._drops_clean else pairs
        self._queue.clean += len(pairs) - len(kept)
        if kept:
            self._queue.add_step(step, kept)

    def _set_held(self, at: int, request: int, start: int, end: int) -> None:
        table, group = self._tables[at][request], self._groups[at]
        if group.kind == "state":
            return
        table.end = end
        if start <= table.start:
            return
        if self._finds_all[at]:
            # The number of computed tokens at which the first block was freed.
            change = (table.start + 1) * self._size + group.window - 1 + self._lag
            numbers = range(table.start, start)
            trail = self._queue.trail((request, at), numbers, change - self._offset[request], self._size)
            if not trail.empty():
                self._own[at][request].append(trail)
        table.start = start

    def _start_of(self, at: int, request: int) -> int:
        return self._tables[at][request].start

    def _regular_from(self, at: int, request: int) -> int:
        junction = self._junction[request] // self._size if self._finds_few[at] else 0
        return max(self._full_prompts[request], self._tables[at][request].hit, junction)

    # Blocks

    def _use(self, blocks: int) -> None:
        self.free -= blocks
        self.changes += 1
        self.evictions += self._queue.take(blocks)

    def _let_go(self, block: Block) -> None:
        block.holders -= 1
        if block.holders:
            return
        self.free += 1
        self.changes += 1
        if block.copies is None:
            self._queue.clean += 1
        else:
            self._queue.add(block)

    def _drop(self, at: int, request: int, processed: int) -> None:
        table = self._tables[at][request]
        if self._groups[at].kind == "state":
            if table.has_old_states(processed, self._size):
                self._hash(at, request, processed)
                for block in table.drop_states(processed, self._size):
                    self._let_go(block)
            return
        end = skipped_tokens(self._groups[at], processed) // self._size
        if end > table.start:
            if end > table.hashed:
                self._hash(at, request, processed)
            self._free_before(at, request, end)

    def _free_before(self, at: int, request: int, end: int) -> None:
        """Free the blocks that a request holds before block `end`, the last one first."""
        table, shared = self._tables[at][request], self._full_prompts[request]
        own = max(table.start, shared)
        if end > own:
            self._free_own(at, request, own, end)
        for i in range(min(end, shared) - 1, table.start - 1, -1):
            block = table.blocks[i]
            if block is None:
                break
            table.blocks[i] = None
            if block.holders > 1:
                block.holders -= 1
            else:
                self._let_go(block)
        table.start = end

    def _free_own(self, at: int, request: int, start: int, end: int) -> None:
        table, pieces = self._tables[at][request], self._own[at][request]
        self.free += end - start
        self.changes += 1
        hashed = min(end, table.hashed)
        computed = self._findable(at, request, max(start, table.hit), hashed)
        hit = range(start, min(table.hit, hashed))
        self._queue.clean += end - start - len(computed) - len(hit)
        if computed:
            span = Span(computed)
            self._queue.add(span)
            pieces.append(span)
        if hit:  # a hit takes the oldest copies
            span = Span(hit)
            self._queue.add(span)
            pieces.insert(0, span)

    # Hashes

    def _copies(self, at: int, request: int, block: int) -> list[Block]:
        """The objects that hold a block's content and can be found, oldest first."""
        if block < self._full_prompts[request]:
            return self._prompt_copies[at][self._prompt_ids[request]][block]
        return self._state_copies[at].setdefault((request, block), [])

    def _hash(self, at: int, request: int, tokens: int) -> None:
        table = self._tables[at][request]
        end = tokens // self._size
        if end <= table.hashed:
            return
        state = self._groups[at].kind == "state"
        for i in self._findable(at, request, table.hashed, end if state else min(end, self._full_prompts[request])):
            block = table.blocks[i]
            if block is not None:
                block.copies = copies = self._copies(at, request, i)
                copies.append(block)
                if state:
                    self._new_states.append(copies)
        table.hashed = end
        self.changes += 1

    def _findable(self, at: int, request: int, start: int, end: int) -> Sequence[int]:
        """The blocks of [start, end) that get a hash (`reachable_block_mask`)."""
        if self._finds_all[at]:
            return range(start, end)
        if not self._finds_few[at]:
            return ()
        tails = {(self._prompts[request] - 1) // self._size, self._junction[request] // self._size}
        kept = {i for tail in tails for i in range(max(start, tail - self._reach[at]), min(end, tail))}
        return sorted(kept)

    # Hits

    def _find(self, request: int, members: list[int], tokens: int) -> int:
        """The longest hit in equal groups, in blocks, of at most `tokens` tokens."""
        group, most, shared = self._groups[members[0]], tokens // self._size, self._full_prompts[request]
        if group.kind == "sliding":
            return self._find_window(request, members, most)
        if group.kind == "state":
            while most and not all(self._copies(at, request, most - 1) for at in members):
                most -= 1
            return most
        i = skipped_tokens(group, tokens) // self._size
        for at in members:
            self._hit_first[at] = i
        for copies in zip(*self._shelves(request, members, i, min(most, shared)), strict=True):
            if not all(copies):
                return i
            i += 1
        while shared <= i < most:
            end = min(self._own_run(at, request, i) for at in members)
            if end == i:
                break
            i = min(end, most)
        return i

    def _shelves(self, request: int, members: Sequence[int], first: int, end: int) -> list[list[list[Block]]]:
        """The findable copies of the prompt's blocks [first, end), by group."""
        prompt = self._prompt_ids[request]
        return [self._prompt_copies[at][prompt][first:end] for at in members]

    def _own_run(self, at: int, request: int, start: int) -> int:
        """The end of the run of its own blocks that a request finds from block `start` on."""
        for piece in self._own[at][request]:
            numbers = piece.found()
            if start in numbers:
                return numbers.stop if isinstance(numbers, range) else start + 1
        return start

    def _own_found(self, at: int, request: int) -> set[int]:
        numbers: set[int] = set()
        return numbers.union(*(piece.found() for piece in self._own[at][request]))

    def _find_window(self, request: int, members: list[int], most: int) -> int:
        run, last, need, shared = 0, most, self._reach[members[0]], min(most, self._full_prompts[request])
        own: set[int] = set()
        if most > shared:
            own = set.intersection(*(self._own_found(at, request) for at in members))
        for i in sorted(own, reverse=True):
            if i < most:
                run = run + 1 if i == last - 1 else 1
                last = i
                if run >= need:
                    return i + run
        if last != shared:
            run = 0
        i = shared
        for copies in zip(*map(reversed, self._shelves(request, members, 0, shared)), strict=True):
            i -= 1
            run = run + 1 if all(copies) else 0
            if run and run >= need:
                return i + run
        return run

    def _note_hits(self, request: int, hit: int) -> None:
        end, shared = hit // self._size, self._full_prompts[request]
        self._hits, self._hit_free = [], []
        for at, group in enumerate(self._groups):
            state = group.kind == "state"
            first = max(end - 1, 0) if state else max(skipped_tokens(group, hit) // self._size, self._hit_first[at])
            self._hit_first[at] = first
            if state:
                objects = [self._copies(at, request, first)[0]] if end else []
                own = 0
            else:
                objects = [copies[0] for copies in self._shelves(request, [at], first, min(end, shared))[0]]
                own = max(end - max(first, shared), 0)
            self._hits.append(objects)
            self._hit_free.append(own + len([block for block in objects if not block.holders]))


def _alike(groups: tuple[Spec, ...]) -> list[list[int]]:
    """Indices of equal groups, which are looked up together; full attention first (`verify_and_split`)."""
    members: dict[Spec, list[int]] = {}
    for at, group in enumerate(groups):
        members.setdefault(group, []).append(at)
    return sorted(members.values(), key=lambda ids: not groups[ids[0]].keeps_all)
