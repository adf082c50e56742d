"""A pool of blocks that several KV-cache groups share, with prefix caching, block by block.

What vLLM does with one group more (vllm/v1/core/kv_cache_coordinator.py, HybridKVCacheCoordinator): a hit is the
longest that all groups have. Full attention needs every block before it, a window only those in the window, a state
the one that stands there. Windows and states keep few blocks findable: vLLM 0.30 those at the end of the prompt and
where another group's hit reached further (prefix_cache_retention_interval = 0, its default), vLLM 0.26 all of them
(VLLM_PREFIX_CACHE_RETENTION_INTERVAL is not set).

Free blocks without a hash are only counted. Those with one are a queue, least recently freed first.
"""

from __future__ import annotations

from collections import OrderedDict

from fp8plan.model.cost.base import IntArray
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import Spec
from fp8plan.model.schedule.group_pool import NEVER, GroupPool
from fp8plan.model.schedule.groups import skipped_tokens


class Block:
    """One block. key: what it holds, if it can be found; -1 if it cannot."""

    __slots__ = ("holders", "key")

    def __init__(self) -> None:
        self.holders = 0
        self.key = -1


class Table:
    """The blocks of one request in one group, None where a block was freed or never needed."""

    __slots__ = ("blocks", "dropped", "hashed", "last_state")

    def __init__(self) -> None:
        self.blocks: list[Block | None] = []
        self.hashed = 0  # blocks from the start that have been given their hash, or need none
        self.dropped = 0  # blocks from the start that are known to be None
        self.last_state = -1  # of a state: the block of the step before the last


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
        self._size = groups[0].block_size
        self._retain_all = retain_all
        self._prompts: list[int] = prompts.tolist()
        self._prompt_ids: list[int] = prompt_ids.tolist()
        self._contents = max(self._prompt_ids, default=-1) + 1 + requests  # prompts, and what each request adds
        self._clean = num_blocks  # free blocks without a hash
        self._queue: OrderedDict[Block, None] = OrderedDict()
        self._found: dict[int, list[Block]] = {}  # by key, oldest first
        self._tables = [[Table() for _ in range(requests)] for _ in groups]
        self._junction = [0] * requests  # how far another group's hit reached beyond the common one
        self._hits: list[list[Block | None]] = []  # of the last look-up, by group
        self._new_states: set[int] = set()  # keys of states that this step computes
        self._alike = _alike(groups)

    def begin_step(self) -> None:
        self._new_states.clear()

    def drop(self, request: int, processed: int) -> None:
        for at, group in enumerate(self._groups):
            if group.kind == "state":
                self._drop_states(at, request, processed)
            elif group.window:
                table = self._tables[at][request]
                end = min(skipped_tokens(group, processed) // self._size, len(table.blocks))
                if end > table.dropped:
                    self._hash(at, request, processed)
                    self._free_range(table, end)

    def needs(self, request: int, tokens: int) -> int:
        total, blocks = 0, -(-tokens // self._size)
        for at, group in enumerate(self._groups):
            more = blocks - len(self._tables[at][request].blocks)
            if more > 0:
                total += 1 if group.kind == "state" else more
        return total

    def take(self, request: int, tokens: int) -> None:
        blocks = -(-tokens // self._size)
        for at, group in enumerate(self._groups):
            table = self._tables[at][request]
            if group.kind == "state":
                self._take_state(table, blocks)
                continue
            while len(table.blocks) < blocks:
                table.blocks.append(self._new())

    def cache(self, request: int, tokens: int) -> None:
        for at in range(len(self._groups)):
            self._hash(at, request, tokens)

    def lookup(self, request: int, tokens: int) -> int:
        self._hits = [[] for _ in self._groups]
        size, hit, longest = self._size, tokens - 1, 0
        simple = len(self._alike) == 2 and self._groups[self._alike[0][0]].kind in ("full", "latent")
        looked: set[int] = set()
        while True:
            current = hit
            for members in self._alike:
                first = members[0]
                kind = self._groups[first].kind
                if kind in ("full", "latent") and first in looked:
                    current = min(current, len(self._hits[first]) * size)
                    continue
                looked.add(first)
                self._find(request, members, current // size, current)
                current = len(self._hits[first]) * size
                longest = max(longest, current)
            if current >= hit:
                break
            hit = current
            if simple or len(self._groups) == 1:
                break
        for members in self._alike:
            if self._groups[members[0]].kind in ("full", "latent"):
                for at in members:
                    del self._hits[at][hit // size :]
        self.shared_prefix = longest if longest > hit else 0
        if len(self._groups) > 1:
            self._junction[request] = self.shared_prefix
        return hit

    def admission_needs(self, request: int, tokens: int, hit: int, whole: bool) -> int:
        total, blocks = 0, -(-tokens // self._size)
        for at, group in enumerate(self._groups):
            hits = self._hits[at]
            if group.kind == "state":
                if hits and (last := hits[-1]) is not None and last.key in self._new_states:
                    return NEVER
                first = 0
                more = 1 if blocks > len(hits) else 0
            else:
                first = skipped_tokens(group, hit) // self._size
                wanted = blocks
                if whole and 0 <= self._caps[at] < wanted:
                    wanted = self._caps[at]
                more = max(wanted - max(first, len(hits)), 0)
            free = sum(block is not None and not block.holders for block in hits[first:])
            if free:
                self.hit_freed_blocks = True
            total += more + free
        return total

    def admit(self, request: int, hit: int) -> None:
        for at, group in enumerate(self._groups):
            table, hits = self._tables[at][request], self._hits[at]
            start = (hit - 1) // self._size if group.kind == "state" else skipped_tokens(group, hit) // self._size
            if start > 0:
                table.blocks = [None] * start
                hits = hits[start:]
            for block in hits:
                if block is not None:
                    if not block.holders:
                        del self._queue[block]
                        self.free -= 1
                    block.holders += 1
            table.blocks.extend(hits)
            table.hashed = len(table.blocks)
        self.changes += 1

    def release(self, request: int, hashed_tokens: int) -> None:
        for at in range(len(self._groups)):
            self._hash(at, request, hashed_tokens)
        for tables in self._tables:
            for block in reversed(tables[request].blocks):
                if block is not None:
                    self._let_go(block)
            tables[request] = Table()

    # Blocks

    def _new(self) -> Block:
        self.free -= 1
        self.changes += 1
        if self._clean:
            self._clean -= 1
            block = Block()
        else:
            block, _ = self._queue.popitem(last=False)
            self.evictions += 1
            copies = self._found[block.key]
            copies.remove(block)
            if not copies:
                del self._found[block.key]
            block.key = -1
        block.holders = 1
        return block

    def _let_go(self, block: Block) -> None:
        block.holders -= 1
        if block.holders:
            return
        self.free += 1
        self.changes += 1
        if block.key < 0:
            self._clean += 1
        else:
            self._queue[block] = None

    def _free_range(self, table: Table, end: int) -> None:
        for i in range(end - 1, table.dropped - 1, -1):
            block = table.blocks[i]
            if block is None:
                break
            table.blocks[i] = None
            self._let_go(block)
        table.dropped = end

    # Hashes

    def _key(self, at: int, request: int, block: int) -> int:
        content = self._prompt_ids[request]
        if (block + 1) * self._size > self._prompts[request]:
            content = self._contents - 1 - request
        return (block * len(self._groups) + at) * self._contents + content

    def _hash(self, at: int, request: int, tokens: int) -> None:
        table = self._tables[at][request]
        end = tokens // self._size
        if end <= table.hashed:
            return
        state = self._groups[at].kind == "state"
        for i in self._findable(at, request, table.hashed, end):
            block = table.blocks[i]
            if block is not None:
                block.key = key = self._key(at, request, i)
                self._found.setdefault(key, []).append(block)
                if state:
                    self._new_states.add(key)
        table.hashed = end
        self.changes += 1

    def _findable(self, at: int, request: int, start: int, end: int) -> list[int]:
        """Those of the blocks [start, end) that get a hash (`reachable_block_mask`)."""
        group = self._groups[at]
        need = 1 if group.kind == "state" else -(-(group.window - 1) // self._size)
        if group.kind not in ("sliding", "state") or (self._retain_all and need):
            return list(range(start, end))
        if self._retain_all:
            return []
        tails = {(self._prompts[request] - 1) // self._size, self._junction[request] // self._size}
        kept = {i for tail in tails for i in range(max(start, tail - need), min(end, tail))}
        return sorted(kept)

    def _copies(self, request: int, members: list[int], block: int) -> list[Block]:
        """The oldest copy of a block in each of these groups; empty if one has none."""
        found: list[Block] = []
        for at in members:
            copies = self._found.get(self._key(at, request, block))
            if not copies:
                return []
            found.append(copies[0])
        return found

    def _find(self, request: int, members: list[int], most: int, tokens: int) -> None:
        """Note the longest hit of at most `most` blocks, `tokens` tokens, of groups of one kind."""
        group = self._groups[members[0]]
        if group.kind == "sliding":
            self._find_window(request, members, most, -(-(group.window - 1) // self._size))
            return
        if group.kind == "state":
            for i in range(most - 1, -1, -1):
                if copies := self._copies(request, members, i):
                    for at, block in zip(members, copies, strict=True):
                        self._hits[at] = [None] * i + [block]
                    return
            for at in members:
                self._hits[at] = []
            return
        start = skipped_tokens(group, tokens) // self._size
        for at in members:
            self._hits[at] = [None] * start
        for i in range(start, most):
            copies = self._copies(request, members, i)
            if not copies:
                return
            for at, block in zip(members, copies, strict=True):
                self._hits[at].append(block)

    def _find_window(self, request: int, members: list[int], most: int, need: int) -> None:
        hits: list[list[Block | None]] = [[None] * most for _ in members]
        run = 0
        for i in range(most - 1, -1, -1):
            copies = self._copies(request, members, i)
            if not copies:
                run = 0
                continue
            for blocks, block in zip(hits, copies, strict=True):
                blocks[i] = block
            run += 1
            if run >= need:
                for blocks in hits:
                    del blocks[i + run :]
                break
        else:
            for blocks in hits:
                del blocks[run:]
        for at, blocks in zip(members, hits, strict=True):
            self._hits[at] = blocks

    # States (mamba_cache_mode "align"): a step writes the state of its last token. The block of the step before is
    # its input, so a request holds two blocks for a while. This is vLLM 0.30. In 0.26 the search for blocks to free
    # ends at the first gap, so under asynchronous scheduling the states of a long prefill may be held for longer.

    def _take_state(self, table: Table, blocks: int) -> None:
        held = len(table.blocks)
        if blocks > held:
            if held:
                table.last_state = held - 1
            table.blocks.extend([None] * (blocks - 1 - held))
            table.blocks.append(self._new())

    def _drop_states(self, at: int, request: int, processed: int) -> None:
        table = self._tables[at][request]
        end = min((processed - 1) // self._size, len(table.blocks))
        last = table.last_state
        before_last = 0 <= last < -(-processed // self._size) - 1
        if end <= table.dropped and not before_last:
            return
        self._hash(at, request, processed)
        for i in range(end - 1, table.dropped - 1, -1):
            self._free_state(table, i)
        table.dropped = max(end, table.dropped)
        if before_last:
            self._free_state(table, last)

    def _free_state(self, table: Table, i: int) -> None:
        block = table.blocks[i]
        if block is not None:
            table.blocks[i] = None
            self._let_go(block)


def _alike(groups: tuple[Spec, ...]) -> list[list[int]]:
    """Indices of equal groups, which are looked up together; full attention first (`verify_and_split`)."""
    members: dict[Spec, list[int]] = {}
    for at, group in enumerate(groups):
        members.setdefault(group, []).append(at)
    return sorted(members.values(), key=lambda ids: groups[ids[0]].kind not in ("full", "latent"))
