"""A pool of blocks that several KV-cache groups share, with prefix caching.

A hit is the longest that all groups have (vllm/v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator). Full
attention needs every block before its end, a window the blocks inside, and a state the last block. Windows and states
keep few blocks findable. vLLM 0.30 keeps those at the end of the prompt, and where another group's hit reached further
(prefix_cache_retention_interval = 0, its default). vLLM 0.26 keeps all (VLLM_PREFIX_CACHE_RETENTION_INTERVAL not set).

The blocks themselves are in `group_blocks`.
"""

from __future__ import annotations

from fp8plan.model.cost.base import IntArray
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import CacheRules, Spec
from fp8plan.model.schedule.group_blocks import Block, Piece, Table, queued_piece
from fp8plan.model.schedule.group_pool import NEVER, GroupPool, skipped_tokens


class CachingGroupPool(GroupPool):
    """A pool with prefix caching. All groups have one block size.

    The first of equal groups loses its blocks before the others, so they find all that it finds. Only it is looked up.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: tuple[Spec, ...],
        limits: EngineLimits,
        prompts: IntArray,
        prompt_ids: IntArray,
        rules: CacheRules,
    ) -> None:
        requests = len(prompts)
        super().__init__(num_blocks, groups, limits, requests)
        self._alone = len(groups) == 1
        groups = tuple(self._groups)
        self._size = size = groups[0].block_size
        self._prompts: list[int] = prompts.tolist()
        self._prompt_ids: list[int] = prompt_ids.tolist()
        # The lists of objects in a table. Equal groups share one, until they lose different copies of prompt blocks.
        self._lists = [self._counts[at] if group.kind == "state" else 1 for at, group in enumerate(groups)]
        self._tables = [[Table(lists) for _ in range(requests)] for lists in self._lists]
        self._full_prompts: list[int] = [prompt // size for prompt in self._prompts]  # full blocks
        blocks = dict(zip(self._prompt_ids, self._full_prompts, strict=True))
        # By group and equal group: each request's pieces in the queue, oldest first.
        self._own: list[list[dict[int, list[Piece]]]] = [[{} for _ in range(count)] for count in self._counts]
        # By group, prompt, and list as in a table: the findable copies of each block of the prompt, oldest first.
        self._prompt_copies: list[dict[int, list[list[list[Block]]]]] = [
            {prompt: [[[] for _ in range(full)] for _ in range(lists)] for prompt, full in blocks.items()}
            for lists in self._lists
        ]
        # By group and equal group: the same of the states that a request adds.
        self._state_copies: list[list[dict[tuple[int, int], list[Block]]]] = [
            [{} for _ in range(count)] for count in self._counts
        ]
        self._junction = [0] * requests  # tokens of another group's longer hit; 0: none
        self._looked_up = (-1, 0, 0)  # the last look-up: the request, its tokens, and the pool's changes
        self._hit = 0  # its result
        self._hits: list[list[list[Block]]] = []  # the objects that it found, by group and equal group; []: not noted
        self._hit_first: list[int] = []  # the first block of the hit that each group needs
        self._hit_free = 0  # number of the hit's free blocks
        self._new_states: list[list[Block]] = []  # the copies of states that this step computes
        self._first_equal = [groups.index(group) for group in groups]
        # The groups that are looked up, full attention first (`verify_and_split`). Of equal ones only the first.
        self._searched = sorted(set(self._first_equal), key=lambda at: (not groups[at].keeps_all, at))
        self._states = [at for at, group in enumerate(groups) if group.kind == "state"]
        self._followed_groups = sorted([*self._windows, *self._states])
        self._reach = [1 if group.kind == "state" else -(-(group.window - 1) // size) for group in groups]
        few = [group.kind in ("sliding", "state") and not rules.retain_all for group in groups]
        # Groups in which every full block can be found. In the others a few blocks can, or none.
        self._keeps = [
            not (few[at] or (group.kind in ("sliding", "state") and not self._reach[at]))
            for at, group in enumerate(groups)
        ]
        self._finds_few = few
        self._frees_clean = not all(self._keeps[at] for at in self._followed_groups)

    def begin_step(self, step: int) -> None:
        self._new_states.clear()

    # Requests that are not steady

    def needs(self, request: int, tokens: int, checkpoint: bool) -> int:
        total, blocks = 0, -(-tokens // self._size)
        for at, group in enumerate(self._groups):
            more = blocks - self._tables[at][request].end
            if more > 0:
                total += (1 + checkpoint if group.kind == "state" else more) * self._counts[at]
        return total

    def take(self, request: int, tokens: int, checkpoint: bool) -> None:
        self._use(self.needs(request, tokens, checkpoint))
        blocks = -(-tokens // self._size)
        shared = min(blocks, self._full_prompts[request])
        for at, group in enumerate(self._groups):
            table = self._tables[at][request]
            if group.kind == "state":
                table.add_state(blocks, checkpoint)
            elif blocks > table.end:
                for objects in table.blocks:
                    objects += [Block() for _ in range(len(objects), shared)]
                table.end = blocks

    def cache(self, request: int, tokens: int) -> None:
        for at in range(len(self._groups)):
            self._hash(at, request, tokens)

    def lookup(self, request: int, tokens: int) -> int:
        looked_up = (request, tokens, self.changes)
        if looked_up != self._looked_up:
            self._hit = self._look_up(request, tokens)
            self._looked_up = looked_up
        return self._hit

    def _look_up(self, request: int, tokens: int) -> int:
        size, hit, longest = self._size, tokens - 1, 0
        self._hit_first = [0] * len(self._groups)
        full: dict[int, int] = {}  # hits of full attention in tokens
        simple = len(self._searched) == 2 and self._groups[self._searched[0]].keeps_all
        while True:
            current = hit
            for at in self._searched:
                if at in full:
                    current = min(current, full[at])
                    continue
                current = self._find(request, at, current) * size
                longest = max(longest, current)
                if self._groups[at].keeps_all:
                    full[at] = current
            if current >= hit:
                break
            hit = current
            if simple or self._alone:
                break
        self._hits.clear()
        self.shared_prefix = longest if longest > hit else 0
        if not self._alone:
            self._junction[request] = self.shared_prefix
        return hit

    def admission_needs(self, request: int, tokens: int, hit: int, whole: bool, checkpoint: bool) -> int:
        total, blocks, hits = 0, -(-tokens // self._size), hit // self._size
        for at, group in enumerate(self._groups):
            if group.kind == "state":
                copies = self._copies(at, 0, request, hits - 1) if hits else None
                if any(copies is new for new in self._new_states):
                    return NEVER
                total += (1 + checkpoint) * self._counts[at]  # a hit leaves a token to compute
            else:
                wanted = min(blocks, self._caps[at]) if whole and self._caps[at] >= 0 else blocks
                total += max(wanted - hits, 0) * self._counts[at]
        if total > self.free:
            return total
        if not self._hits:
            self._note_hits(request, hit)
        if self._hit_free:
            self.hit_freed_blocks = True
        return total + self._hit_free

    def least_needs(self, request: int, tokens: int, hit: int) -> int:
        """Counts the request's own blocks, which are free or new. Others may hold the prompt's blocks in the hit."""
        if self._states:
            return 0
        total, blocks, hits, shared = 0, -(-tokens // self._size), hit // self._size, self._full_prompts[request]
        for at, group in enumerate(self._groups):
            wanted = min(blocks, self._caps[at]) if self._caps[at] >= 0 else blocks
            if group.kind != "sliding" or hits <= shared:
                least = wanted - (hits if group.window else min(hits, shared))
            else:
                least = wanted - max(shared, skipped_tokens(group, hit) // self._size)
                if hits > wanted:
                    least = min(least, self._reach[at])
            total += max(least, 0) * self._counts[at]
        return total

    def admit(self, request: int, hit: int) -> None:
        end, shared, queue = hit // self._size, self._full_prompts[request], self._queue
        for at, group in enumerate(self._groups):
            table, first = self._tables[at][request], self._hit_first[at]
            state = group.kind == "state"
            count = self._counts[at] // len(self._hits[at])
            table.blocks = []
            for hits in self._hits[at]:
                for block in hits:
                    if not block.holders:
                        queue.remove(block.places(count))
                    block.holders += 1
                objects: list[Block | None] = [None] * ((end if state else min(end, shared)) - len(hits))
                objects += hits
                table.blocks.append(objects)
            own = end if state else max(first, shared)
            if own < end:
                for pieces in self._own[at]:
                    queue.pick(pieces[request], own, end)
            table.start, table.end, table.hit, table.hashed = first, end, end, end
        self.free -= self._hit_free
        self.changes += 1

    def release(self, request: int, hashed_tokens: int) -> None:
        for at in range(len(self._groups)):
            self._hash(at, request, hashed_tokens)
        for at, group in enumerate(self._groups):
            table = self._tables[at][request]
            if group.kind == "state":
                for states in table.blocks:
                    for block in reversed(states):
                        if block is not None:
                            self._let_go(block)
            else:
                self._free_before(at, request, table.end)
            self._tables[at][request] = Table(self._lists[at])

    # Steady requests

    def start(self, request: int, step: int, computed: int, in_flight: int) -> None:
        for at in self._followed_groups:
            junction = self._junction[request] // self._size if self._finds_few[at] else 0
            self._regular_from[at][request] = max(self._full_prompts[request], self._tables[at][request].hit, junction)
        super().start(request, step, computed, in_flight)

    def _add_states(self, request: int, step: int) -> None:
        for at in self._states:
            self._tables[at][request].add_state((step + self._offset[request]) // self._size + 1)

    def _set_held(self, at: int, request: int, start: int, end: int) -> None:
        table, group = self._tables[at][request], self._groups[at]
        if group.kind == "state":
            return
        table.end = end
        if start <= table.start:
            return
        if self._keeps[at]:
            # The number of computed tokens at which the last block was freed.
            change = start * self._size + group.window - 1 + self._lag
            numbers = range(table.start, start)
            places = self._queue.trail((request, at), numbers, change - self._offset[request], self._size)
            if places:
                numbers = numbers[len(numbers) - len(places) :]
                for i, own in enumerate(self._own[at]):
                    own.setdefault(request, []).append(Piece(numbers, [place + i for place in places]))
        table.start = start

    def _start_of(self, at: int, request: int) -> int:
        return self._tables[at][request].start

    # Blocks

    def _let_go(self, block: Block) -> None:
        block.holders -= 1
        if block.holders:
            return
        self.free += 1
        self.changes += 1
        if block.hashed:
            block.place = block.last = self._queue.add(1)
        else:
            self._queue.clean += 1

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
            if end > table.start + 1 or end > self._full_prompts[request] or not table.let_one_go():
                self._free_before(at, request, end)

    def _free_before(self, at: int, request: int, end: int) -> None:
        """Free the blocks that a request holds before block `end`, the last one first."""
        table, shared, queue = self._tables[at][request], self._full_prompts[request], self._queue
        own, hashed, runs = max(table.start, shared), min(end, table.hashed), []
        if own < end:
            runs = self._findable(at, request, max(own, table.hit), hashed)
            runs.reverse()
            if own < min(table.hit, hashed):
                runs.append(range(own, min(table.hit, hashed)))
        queued = sum([len(run) for run in runs])
        count = self._counts[at] // len(table.blocks)
        for i, objects in enumerate(table.blocks):
            clean, gone = max(end - own, 0) - queued, []
            for block in reversed(objects[table.start : min(end, shared)]):
                if block is not None:
                    block.holders -= 1
                    if not block.holders:
                        if block.hashed:
                            gone.append(block)
                        else:
                            clean += 1
            stride = queued + len(gone)  # each equal group frees all of its blocks before the next one
            place = queue.add(stride * count)
            for run in runs:
                for equal in range(count):
                    pieces = self._own[at][i + equal].setdefault(request, [])
                    piece = queued_piece(run, place + equal * stride)
                    pieces.insert(0 if run.start < table.hit else len(pieces), piece)  # a hit takes the oldest copies
                place += len(run)
            for block in gone:
                block.place, block.last = place, place + (count - 1) * stride
                place += 1
            if clean or stride:
                self.free += stride * count
                self._free_clean(clean * count)
        table.start = end

    def _separate(self, at: int, prompt: int) -> None:
        """Give equal groups blocks of their own for a prompt, because they have lost different copies of them."""
        count = self._counts[at]
        parts: dict[Block, list[Block]] = {}
        shelf = self._prompt_copies[at][prompt][0]
        tables = [self._tables[at][request] for request, other in enumerate(self._prompt_ids) if other == prompt]
        held = [block for table in tables for block in table.blocks[0] if block is not None]
        for block in [*held, *[block for copies in shelf for block in copies]]:
            if block not in parts:
                parts[block] = block.split(count)
        for table in tables:
            table.blocks = [
                [None if block is None else parts[block][i] for block in table.blocks[0]] for i in range(count)
            ]
        self._prompt_copies[at][prompt] = [
            [[parts[block][i] for block in copies] for copies in shelf] for i in range(count)
        ]

    # Hashes

    def _copies(self, at: int, i: int, request: int, block: int) -> list[Block]:
        """The objects that hold a block's content and can be found, oldest first."""
        if block < self._full_prompts[request]:
            return self._prompt_copies[at][self._prompt_ids[request]][i][block]
        return self._state_copies[at][i].setdefault((request, block), [])

    def _hash(self, at: int, request: int, tokens: int) -> None:
        table = self._tables[at][request]
        end = tokens // self._size
        if end <= table.hashed:
            return
        state = self._groups[at].kind == "state"
        last = end if state else min(end, self._full_prompts[request])
        for numbers in self._findable(at, request, table.hashed, last):
            for i, objects in enumerate(table.blocks):
                for number in numbers:
                    block = objects[number]
                    if block is not None:
                        block.hashed = True
                        copies = self._copies(at, i, request, number)
                        copies.append(block)
                        if state:
                            self._new_states.append(copies)
        table.hashed = end
        self.changes += 1

    def _findable(self, at: int, request: int, start: int, end: int) -> list[range]:
        """The blocks of [start, end) that get a hash (`reachable_block_mask`), in runs."""
        if self._keeps[at]:
            return [range(start, end)] if start < end else []
        if not self._finds_few[at]:
            return []
        runs: list[range] = []
        tails = {(self._prompts[request] - 1) // self._size, self._junction[request] // self._size}
        for tail in sorted(tails):
            first = max(start, tail - self._reach[at], runs[-1].stop if runs else 0)
            if first < min(end, tail):
                runs.append(range(first, min(end, tail)))
        return runs

    # Hits

    def _find(self, request: int, at: int, tokens: int) -> int:
        """The longest hit in a group, in blocks, of at most `tokens` tokens."""
        group, most, shared = self._groups[at], tokens // self._size, self._full_prompts[request]
        if group.kind == "sliding":
            return self._find_window(request, at, most)
        if group.kind == "state":
            while most and not self._queue.has(self._copies(at, 0, request, most - 1)):
                most -= 1
            return most
        self._hit_first[at] = i = skipped_tokens(group, tokens) // self._size
        if i < min(most, shared):
            i = self._queue.found_to(self._shelves(request, at)[0], i, min(most, shared))
        while shared <= i < most:
            end = max([run.stop for run in self._own_found(at, request) if i in run], default=i)
            if end == i:
                break
            i = min(end, most)
        return i

    def _shelves(self, request: int, at: int) -> list[list[list[Block]]]:
        """The copies of each block of the prompt, for each list of objects in a table."""
        return self._prompt_copies[at][self._prompt_ids[request]]

    def _own_found(self, at: int, request: int) -> list[range]:
        """The runs of its own blocks that a request finds."""
        head = self._queue.head
        return [piece.found(head) for piece in self._own[at][0].get(request, ())]

    def _find_window(self, request: int, at: int, most: int) -> int:
        need, shared = self._reach[at], min(most, self._full_prompts[request])
        first = end = most  # the blocks [first, end) are found
        if most > shared:
            for run in sorted(self._own_found(at, request), key=lambda run: run.stop, reverse=True):
                stop = min(run.stop, most)
                if run.start >= stop:
                    continue
                if stop < first:
                    end = stop
                first = min(first, run.start)
                if end - first >= need:
                    return end
        if first != shared:
            end = shared
        return self._queue.found_before(self._shelves(request, at)[0], shared, end, need)

    def _note_hits(self, request: int, hit: int) -> None:
        """Note the blocks of the last look-up."""
        end, shared, oldest = hit // self._size, self._full_prompts[request], self._queue.oldest
        self._hit_free = 0
        for at, group in enumerate(self._groups):
            count = self._counts[at]
            if group.kind == "state":
                first = max(end - 1, 0)
                hits = [oldest([self._copies(at, i, request, first)] if end else []) for i in range(count)]
            else:
                first = max(skipped_tokens(group, hit) // self._size, self._hit_first[self._first_equal[at]])
                self._hit_free += max(end - max(first, shared), 0) * count
                shelves = [shelf[first : min(end, shared)] for shelf in self._shelves(request, at)]
                hits = [oldest(shelf) for shelf in shelves]
                if len(hits) < count and [copies[0] for copies in shelves[0]] != hits[0]:
                    self._separate(at, self._prompt_ids[request])
                    hits = [oldest(shelf[first : min(end, shared)]) for shelf in self._shelves(request, at)]
            self._hit_first[at] = first
            self._hits.append(hits)
            free = sum([len([block for block in blocks if not block.holders]) for blocks in hits])
            self._hit_free += free * (count // len(hits))
