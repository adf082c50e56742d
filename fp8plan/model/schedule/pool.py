"""A pool of KV blocks that groups of layers share, with vLLM's prefix cache. Every block is an object, as in vLLM.

One block of a group is one page: `block_size` tokens of each of its layers, or one recurrent state of each
(vllm/v1/core/single_type_kv_cache_manager.py). The calls have the order of vLLM's `allocate_slots`
(vllm/v1/core/kv_cache_manager.py). Blocks out of the window are freed first, even if the request then cannot be served.
After that, all groups together must find their new blocks.

States follow vLLM's mamba_cache_mode (MambaModelConfig in vllm/model_executor/models/config.py). Without prefix caching
the mode is "none", and a request holds one block whatever it computes. With prefix caching it is "align", and prefill
goes in whole blocks. A step then writes the state of its last token, and the block of the step before is its input. So
a request holds two blocks, and under asynchronous scheduling one more in flight. With checkpoint blocks (from 0.32) a
prefill is not cut at its last whole block: its last chunk keeps that state in one block more. The mode "all", a state
for every block, is not modelled. 0.26 searches for blocks to free up to the first gap. So asynchronous scheduling may
hold the states of a long prefill for longer there.

A hit is the longest that all groups have (vllm/v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator). Full
attention needs every block before its end, a window the blocks inside, and a state the last block. Windows and states
keep few blocks findable. vLLM 0.30 keeps those at the end of the prompt, and where another group's hit reached further
(prefix_cache_retention_interval = 0, its default). vLLM 0.26 keeps all (VLLM_PREFIX_CACHE_RETENTION_INTERVAL not set).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict

from fp8plan.errors import CapacityError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import CacheRules, Spec, admission_cap
from fp8plan.model.schedule.windows import next_change, skipped_tokens

NEVER = 2**62  # blocks that no pool has


def too_few_blocks(num_blocks: int) -> CapacityError:
    """The error of a request that does not find the blocks that it needs in a pool that it has to itself."""
    return CapacityError(
        f"the pool has {num_blocks} KV blocks, and a request that has it to itself does not find the ones it needs; "
        "raise gpu_memory_utilization or tensor_parallel_size, or use an FP8 precision"
    )


class Block:
    """A block of one group that a request holds, or that has a hash.

    copies: the blocks with its content that can be found, itself included, oldest first; None: it has no hash
    """

    __slots__ = ("copies", "evicted", "holders")

    def __init__(self) -> None:
        self.holders = 1
        self.copies: list[Block] | None = None
        self.evicted = False


class Table:
    """The blocks of one request in one group, by number; None where one was never needed, or was freed.

    start:      the first block that it holds
    hashed:     leading blocks that have a hash, or need none
    last_state: in a group of states: the block of the step before the last
    """

    __slots__ = ("blocks", "hashed", "last_state", "start")

    def __init__(self) -> None:
        self.blocks: list[Block | None] = []
        self.start = self.hashed = 0
        self.last_state = -1

    def drop(self, end: int) -> list[Block]:
        """Drop the blocks before block `end`, and return them, the last one first."""
        dropped = self._taken_out(range(end - 1, self.start - 1, -1))
        self.start = end
        return dropped

    def add_state(self, blocks: int, checkpoint: bool) -> None:
        """Add the state of the last of `blocks` blocks. checkpoint: and the state of the block before"""
        if self.blocks:
            self.last_state = len(self.blocks) - 1
        self.blocks += [None] * (blocks - 1 - checkpoint - len(self.blocks))
        self.blocks += [Block() for _ in range(1 + checkpoint)]

    def has_old_states(self, processed: int, size: int) -> bool:
        """True if `drop_states` may have states to drop."""
        return min((processed - 1) // size, len(self.blocks)) > self.start or self._before_last(processed, size)

    def drop_states(self, processed: int, size: int) -> list[Block]:
        """Drop the states before that of the last of `processed` tokens, and return them, the last one first."""
        end = min((processed - 1) // size, len(self.blocks))
        dropped = self._taken_out(range(end - 1, self.start - 1, -1))
        if self._before_last(processed, size):
            dropped += self._taken_out(range(self.last_state, self.last_state + 1))
        self.start = max(end, self.start)
        return dropped

    def _before_last(self, processed: int, size: int) -> bool:
        return 0 <= self.last_state < -(-processed // size) - 1

    def _taken_out(self, numbers: range) -> list[Block]:
        blocks = [self.blocks[number] for number in numbers]
        for number in numbers:
            self.blocks[number] = None
        return [block for block in blocks if block is not None]


class Pool:
    """The blocks that the scheduler hands out. `free` counts those that are left.

    Free blocks without a hash are only counted, and handed out first. The others are evicted in the order in which they
    came free. Requests find the full blocks of their prompt, and their own ones when they resume or go on with a turn.

    A request that decodes is steady from `start` to `stop`: each step computes one token. It is looked at only in the
    steps in which its blocks change.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: tuple[Spec, ...],
        limits: EngineLimits,
        prompts: list[int],
        prompt_ids: list[int],
        rules: CacheRules,
    ) -> None:
        requests, size = len(prompts), groups[0].block_size
        self.free = num_blocks
        self.changes = 0  # counted, so that no admission is tried again without one
        self.hit_freed_blocks = self.missed_evicted = False  # true once a look-up came upon a freed or evicted block
        self.shared_prefix = 0  # tokens of one group's longer hit in the last look-up; 0: none
        self._clean = num_blocks  # free blocks without a hash
        self._queue = OrderedDict[Block, None]()  # the other free blocks, the one that is evicted next at first
        self._groups, self._caching, self._size = groups, limits.enable_prefix_caching, size
        self._caps = [admission_cap(group, limits) for group in groups]
        self._tables = [[Table() for _ in prompts] for _ in groups]
        self._prompts, self._prompt_ids = prompts, prompt_ids
        self._full_prompts = [prompt // size for prompt in prompts]  # full blocks of the first turn's prompt
        # By group and content: the blocks that can be found, oldest first.
        self._copies = [defaultdict[tuple[int, int], list[Block]](list) for _ in groups]
        self._junction = [0] * requests  # tokens of another group's longer hit; 0: none
        self._hit_first = [0] * len(groups)  # the first block that each group's part of the last hit may have
        self._new_states: list[list[Block]] = []  # the copies of states that this step computes
        # The groups that are looked up, full attention first (`verify_and_split`). Of equal ones only the first: it
        # loses its blocks before the others, so they find all that it finds.
        self._first_equal = [groups.index(group) for group in groups]
        self._searched = sorted(set(self._first_equal), key=lambda at: (not groups[at].keeps_all, at))
        self._states = [at for at, group in enumerate(groups) if group.kind == "state" and self._caching]
        self._freed_early = sorted([*self._states, *(at for at, group in enumerate(groups) if group.window)])
        self._reach = [1 if group.kind == "state" else -(-(group.window - 1) // size) for group in groups]
        # Groups in which a few blocks can be found; in the others every full one.
        self._finds_few = [group.kind in ("sliding", "state") and not rules.retain_all for group in groups]
        self._lag = int(limits.async_scheduling)
        self._distinct = [groups[at] for at in self._searched]
        # Size -> the groups with blocks of that size that a decoding request fills.
        self._growing = Counter(group.block_size for group in groups if self._caching or group.kind != "state")
        self._offset = [0] * requests  # a steady request has computed step + offset tokens
        self._since = [-1] * requests  # the step in which it became steady
        self._in_flight = [0] * requests  # its tokens in flight in that step
        self._calendar = defaultdict[int, list[int]](list)  # step -> steady requests; outdated where _event differs
        self._admitted = [0] * requests  # grows with each admission
        self._event = [-1] * requests  # the next step in which a steady request's blocks may change

    def begin_step(self, step: int) -> None:
        """Forget what was computed in the step before."""
        if self._new_states:
            self.changes += 1  # a request that hit them may be admitted now
            self._new_states.clear()

    def begin_turn(self, request: int, prompt: int, kept: int, computed: int) -> None:
        """Note the tokens of a trajectory's next prompt, of which the first `kept` are still the same.

        The blocks of `computed` tokens beyond are found no more. Those that have a hash wait for eviction.
        """
        self._prompts[request] = prompt
        for number in range(kept // self._size, computed // self._size):
            for copies in self._copies:
                copies.pop((~request, number), None)

    # Blocks of a request

    def drop(self, request: int, processed: int) -> None:
        """Free the blocks that no token after the first `processed` ones reads."""
        for at in self._freed_early:
            group, table, dropped = self._groups[at], self._tables[at][request], list[Block]()
            if at in self._states and table.has_old_states(processed, self._size):
                self._hash(at, request, processed)
                dropped = table.drop_states(processed, self._size)
            elif group.window:
                end = skipped_tokens(group, processed) // group.block_size
                if end > table.start:
                    if end > table.hashed:
                        self._hash(at, request, processed)
                    dropped = table.drop(end)
            for block in dropped:
                self._let_go(block)

    def needs(self, request: int, tokens: int, checkpoint: bool) -> int:
        """The new blocks that a running request needs to hold that many tokens.

        checkpoint: with a state inside the chunk (`State._has_checkpoint`)
        """
        total = 0
        for at, group in enumerate(self._groups):
            more = self._blocks(group, tokens) - len(self._tables[at][request].blocks)
            if more > 0:
                total += 1 + checkpoint if at in self._states else more
        return total

    def take(self, request: int, tokens: int, checkpoint: bool) -> None:
        """Hand out the blocks that `needs` counts."""
        self._hand_out(self.needs(request, tokens, checkpoint))
        for at, group in enumerate(self._groups):
            table, blocks = self._tables[at][request], self._blocks(group, tokens)
            if blocks <= len(table.blocks):
                continue
            if at in self._states:
                table.add_state(blocks, checkpoint)
            else:
                table.blocks += [Block() for _ in range(blocks - len(table.blocks))]

    def cache(self, request: int, tokens: int) -> None:
        """Note that the first `tokens` tokens are computed: their full blocks become findable."""
        for at in range(len(self._groups)):
            self._hash(at, request, tokens)

    def release(self, request: int, hashed_tokens: int) -> None:
        """Free all blocks of a request; those that its first `hashed_tokens` tokens fill have a hash."""
        self.cache(request, hashed_tokens)
        for tables in self._tables:
            for block in tables[request].drop(len(tables[request].blocks)):
                self._let_go(block)
            tables[request] = Table()

    def _blocks(self, group: Spec, tokens: int) -> int:
        return 1 if group.kind == "state" and not self._caching else -(-tokens // group.block_size)

    def _hand_out(self, blocks: int) -> None:
        if blocks:
            self.free -= blocks
            self.changes += 1
            for _ in range(blocks - self._clean):
                self._queue.popitem(last=False)[0].evicted = True
            self._clean = max(self._clean - blocks, 0)

    def _let_go(self, block: Block) -> None:
        block.holders -= 1
        if block.holders:
            return
        self.free += 1
        self.changes += 1
        if block.copies is None:
            self._clean += 1
        else:
            self._queue[block] = None

    # Admission

    def lookup(self, request: int, tokens: int) -> int:
        """The tokens of a request, out of that many, that are cached in every group."""
        if not self._caching:
            return 0
        hit, longest, searched = tokens - 1, 0, self._searched
        self._hit_first = [0] * len(self._groups)
        beside_full = len(searched) == 2 and self._groups[searched[0]].keeps_all
        while True:
            current = hit
            for at in searched:
                current = self._find(at, request, current) * self._size
                longest = max(longest, current)
            if current >= hit:
                break
            hit = current
            if beside_full or len(self._groups) == 1:
                break
            searched = [at for at in searched if not self._groups[at].keeps_all]  # it has all before what it found
        self.shared_prefix = longest if longest > hit else 0
        self._junction[request] = self.shared_prefix
        return hit

    def admission_needs(self, request: int, tokens: int, hit: int, whole: bool, checkpoint: bool) -> int:
        """Free blocks needed to admit the request looked up last; if there are too few, a lower bound.

        whole: for its whole prompt
        """
        total, hits = 0, hit // self._size
        for at, group in enumerate(self._groups):
            if at in self._states:
                if hits and any(self._same(at, request, hits - 1) is new for new in self._new_states):
                    return NEVER
                total += 1 + checkpoint  # a hit leaves a token to compute
                continue
            blocks = self._blocks(group, tokens)
            if whole and self._caps[at] >= 0:
                blocks = min(blocks, self._caps[at])
            total += max(blocks - hits, 0)
        if total > self.free:
            return total
        free = sum(not block.holders for blocks in self._hit_blocks(request, hit) for block in blocks)
        if free:
            self.hit_freed_blocks = True
        return total + free

    def admit(self, request: int, hit: int) -> None:
        """Hold the blocks that the last look-up hit."""
        for tables, blocks in zip(self._tables, self._hit_blocks(request, hit), strict=True):
            table, end = tables[request], hit // self._size
            for block in blocks:
                if not block.holders:
                    del self._queue[block]
                    self.free -= 1
                block.holders += 1
            table.start, table.hashed = end - len(blocks), end
            table.blocks = [None] * table.start
            table.blocks += blocks
        self.changes += 1
        self._admitted[request] = self.changes

    def _hit_blocks(self, request: int, hit: int) -> list[list[Block]]:
        """The blocks that each group needs of the last look-up's hit."""
        end, blocks = hit // self._size, []
        for at, group in enumerate(self._groups):
            if group.kind == "state":
                first = max(end - 1, 0)
            else:
                first = max(skipped_tokens(group, hit) // self._size, self._hit_first[self._first_equal[at]])
            oldest = [self._oldest(at, request, number) for number in range(first, end)]
            blocks.append([block for block in oldest if block is not None])
        return blocks

    def _find(self, at: int, request: int, tokens: int) -> int:
        """The longest hit in a group, in blocks, of at most `tokens` tokens."""
        group, end = self._groups[at], tokens // self._size
        if group.kind in ("sliding", "state"):
            most = end
            for number in range(most - 1, -1, -1):
                if self._oldest(at, request, number) is None:
                    end = number
                elif end - number >= self._reach[at]:
                    break
            return end
        number = self._hit_first[at] = skipped_tokens(group, tokens) // self._size
        while number < end and self._oldest(at, request, number) is not None:
            number += 1
        return number

    # Hashes

    def _same(self, at: int, request: int, number: int) -> list[Block]:
        """The blocks with the content of a request's block that can be found, oldest first."""
        of_prompt = number < self._full_prompts[request]
        return self._copies[at][self._prompt_ids[request] if of_prompt else ~request, number]

    def _oldest(self, at: int, request: int, number: int) -> Block | None:
        """The oldest findable block with the content of a request's block; None if there is none."""
        copies = self._same(at, request, number)
        while copies and copies[0].evicted:
            self.missed_evicted = True
            del copies[0]
        return copies[0] if copies else None

    def _hash(self, at: int, request: int, tokens: int) -> None:
        """Make the full blocks of the first `tokens` tokens findable, or those of them that are kept so."""
        table, end = self._tables[at][request], tokens // self._size
        if not self._caching or end <= table.hashed:
            return
        for number in self._findable(at, request, table.hashed, end):
            block = table.blocks[number]
            if block is not None:
                block.copies = self._same(at, request, number)
                block.copies.append(block)
                if at in self._states:
                    self._new_states.append(block.copies)
        table.hashed = end
        self.changes += 1

    def _findable(self, at: int, request: int, start: int, end: int) -> list[int]:
        """The blocks of [start, end) that get a hash (`reachable_block_mask`)."""
        reach = self._reach[at]
        if not self._finds_few[at]:
            return [*range(start, end)] if reach or self._groups[at].kind != "sliding" else []
        tails = ((self._prompts[request] - 1) // self._size, self._junction[request] // self._size)
        return [number for number in range(start, end) if any(tail - reach <= number < tail for tail in tails)]

    # Steady requests

    def start(self, request: int, step: int, computed: int, in_flight: int) -> None:
        """Let a request decode from `step` on. in_flight: its computed tokens that are not yet processed"""
        self._offset[request] = computed - step
        self._since[request], self._in_flight[request] = step, in_flight
        self._follow(request, step)

    def stop(self, request: int) -> None:
        """End the steady decoding of a request."""
        self._event[request] = -1

    def due(self, step: int) -> list[int]:
        """The steady requests whose blocks may change in a step, in order of admission."""
        due = {request for request in self._calendar.get(step, ()) if self._event[request] == step}
        return sorted(due, key=self._admitted.__getitem__)

    def takes(self, step: int) -> int:
        """The new blocks that all steady requests together need in a step."""
        return sum([self.takes_due(request, step) for request in self.due(step)])

    def serve(self, step: int) -> None:
        """Serve all steady requests in a step in which they find their blocks."""
        for request in self.due(step):
            self.drop_due(request, step)
            self.take_due(request, step)

    def drop_due(self, request: int, step: int) -> None:
        """Free the blocks that a steady request frees in a step."""
        first = step == self._since[request]
        computed = step + self._offset[request]
        self.drop(request, computed - (self._in_flight[request] if first else self._lag))
        if first and self._lag:
            self._follow(request, step + 1)  # tokens in flight before it decoded are processed then
        else:
            change = min([next_change(group, computed, self._lag) for group in self._distinct])
            self._follow(request, change - self._offset[request])

    def takes_due(self, request: int, step: int) -> int:
        """The new blocks that a steady request needs in a step."""
        computed = step + self._offset[request]
        return sum([groups for size, groups in self._growing.items() if computed % size == 0])

    def take_due(self, request: int, step: int) -> None:
        """Hand out the blocks that `takes_due` counts."""
        if self.takes_due(request, step):
            self.take(request, step + self._offset[request] + 1, False)

    def _follow(self, request: int, step: int) -> None:
        self._event[request] = step
        self._calendar[step].append(request)
