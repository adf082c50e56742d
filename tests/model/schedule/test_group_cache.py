"""The prefix cache of one group: what is shared, what survives a release, what eviction takes first.
Its agreement with vLLM's block pool under load is tested through the scheduler."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest

from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import CacheRules, Spec
from fp8plan.model.schedule.group_cache import CachingGroupPool

BLOCK = 16
LIMITS = EngineLimits(async_scheduling=False)


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


def pool_of(blocks: int, prompts: list[int], prompt_ids: list[int]) -> CachingGroupPool:
    groups = (Spec("full", BLOCK),)
    return CachingGroupPool(blocks, groups, LIMITS, np.array(prompts), np.array(prompt_ids), CacheRules())


def found(pool: CachingGroupPool, request: int, tokens: int) -> tuple[int, int]:
    """The blocks that a request of that many tokens finds, and those of them that are free."""
    hit = pool.lookup(request, tokens)
    hits = hit // BLOCK
    return hits, pool.admission_needs(request, hit, hit, False, False)


def start(pool: CachingGroupPool, request: int, tokens: int) -> int:
    """Admit and compute a request of that many tokens; returns the blocks it hit."""
    hits, _ = found(pool, request, tokens)
    pool.admit(request, hits * BLOCK)
    compute(pool, request, tokens)
    return hits


def compute(pool: CachingGroupPool, request: int, tokens: int) -> None:
    pool.take(request, tokens, False)
    pool.cache(request, tokens)


class ListedPool:
    """The same pool with every block listed, as vLLM keeps them: hashed free blocks behind the others."""

    def __init__(self, blocks: int, prompts: list[int], prompt_ids: list[int]) -> None:
        self.prompts, self.prompt_ids = prompts, prompt_ids
        self.queue = dict.fromkeys(range(blocks))
        self.hashes: dict[int, tuple[int, ...]] = {}
        self.cached: dict[tuple[int, ...], dict[int, None]] = {}  # hash -> its blocks, oldest first
        self.holders, self.held = [0] * blocks, dict[int, list[int]]()

    def hash_of(self, request: int, place: int) -> tuple[int, ...]:
        of_prompt = (place + 1) * BLOCK <= self.prompts[request]
        return (self.prompt_ids[request], place) if of_prompt else (-1, request, place)

    def hits(self, request: int, tokens: int) -> list[int]:
        found = [self.cached.get(self.hash_of(request, place)) for place in range((tokens - 1) // BLOCK)]
        return [next(iter(blocks)) for blocks in takewhile(bool, found) if blocks]

    def lookup(self, request: int, tokens: int) -> tuple[int, int]:
        hits = self.hits(request, tokens)
        return len(hits), sum(not self.holders[block] for block in hits)

    def take(self, request: int, blocks: int) -> None:
        for block in list(self.queue)[:blocks]:
            del self.queue[block]
            if block in self.hashes:
                del self.cached[self.hashes.pop(block)][block]
            self.holders[block] = 1
            self.held[request].append(block)

    def start(self, request: int, tokens: int) -> None:
        self.held[request] = self.hits(request, tokens)
        for block in self.held[request]:
            self.queue.pop(block, None)
            self.holders[block] += 1
        self.take(request, blocks_for(tokens) - len(self.held[request]))
        self.compute(request, tokens)

    def compute(self, request: int, tokens: int) -> None:
        for place, block in enumerate(self.held[request][: tokens // BLOCK]):
            key = self.hashes.setdefault(block, self.hash_of(request, place))
            self.cached.setdefault(key, {})[block] = None

    def stop(self, request: int, tokens: int) -> None:
        self.compute(request, tokens)
        for block in reversed(self.held.pop(request)):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.queue = {**self.queue, block: None} if block in self.hashes else {block: None, **self.queue}


@pytest.mark.parametrize("seed", range(20))
def test_counting_the_blocks_is_listing_them(seed: int) -> None:
    """In a tight pool: prompts that are shared or not, whole blocks or not; requests that decode, stop and resume."""
    rng = np.random.default_rng(seed)
    prompt_ids = np.repeat(range(5), [3, 1, 2, 1, 3]).tolist()
    sizes = rng.choice([8, 16, 17, 32, 33, 48, 50], 5)
    prompts = [int(sizes[number]) for number in prompt_ids]
    blocks = int(rng.integers(12, 30))
    pool, listed = pool_of(blocks, prompts, prompt_ids), ListedPool(blocks, prompts, prompt_ids)
    tokens, running = list(prompts), set[int]()
    for _ in range(300):
        request = int(rng.integers(len(prompts)))
        if request not in running:
            hit, in_queue = found(pool, request, tokens[request])
            if blocks_for(tokens[request]) - hit + in_queue <= pool.free:
                start(pool, request, tokens[request])
                listed.start(request, tokens[request])
                running.add(request)
        elif rng.random() < 0.5:
            running.remove(request)
            pool.release(request, tokens[request])
            listed.stop(request, tokens[request])
            tokens[request] += 1  # the last one was sampled and not computed
        else:
            longer = tokens[request] + int(rng.integers(1, 30))
            more = blocks_for(longer) - blocks_for(tokens[request])
            if more <= pool.free:
                pool.take(request, longer, False)
                listed.take(request, more)
                tokens[request] = longer
        assert pool.free == len(listed.queue)
        for waiting in set(range(len(prompts))) - running:
            seen = tokens[waiting] + int(rng.integers(2))
            assert found(pool, waiting, seen) == listed.lookup(waiting, seen)


def test_a_running_prompt_is_held_once_for_all_siblings() -> None:
    pool = pool_of(100, [40, 40, 40], [0, 0, 0])
    assert [start(pool, request, 40) for request in range(3)] == [0, 2, 2]
    assert pool.free == 100 - 2 - 3 * 1  # two full blocks together, one part-filled each
    for request in range(3):
        pool.release(request, 40)
    assert pool.free == 100


def test_a_hit_leaves_one_token_to_compute() -> None:
    pool = pool_of(100, [32, 32], [0, 0])
    assert [start(pool, request, 32) for request in range(2)] == [0, 1]  # not both full blocks
    assert pool.free == 100 - 1 - 2
    pool = pool_of(100, [64, 64], [0, 0])
    start(pool, 0, 64)
    assert [found(pool, 1, tokens) for tokens in (32, 33, 64)] == [(1, 0), (2, 0), (3, 0)]


def test_siblings_find_the_blocks_that_a_prefill_in_chunks_has_filled_so_far() -> None:
    pool = pool_of(100, [48, 48], [0, 0])
    hits = []
    start(pool, 0, 15)
    for tokens in (15, 16, 31, 32, 47, 48):
        compute(pool, 0, tokens)
        hits.append(found(pool, 1, 49))
    assert hits == [(0, 0), (1, 0), (1, 0), (2, 0), (2, 0), (3, 0)]


def test_a_resumed_sibling_finds_the_oldest_copy_of_its_last_prompt_block() -> None:
    pool = pool_of(100, [32, 32], [0, 0])
    start(pool, 0, 32)
    start(pool, 1, 32)
    compute(pool, 1, 48)  # it has generated a block's worth
    pool.release(1, 48)
    hit, in_queue = found(pool, 1, 49)
    assert hit == 3
    assert in_queue == 1  # only its own response block: the copy found is the one that request 0 holds


def test_a_released_request_can_be_resumed_until_it_is_evicted_tail_first() -> None:
    pool = pool_of(20, [64, 200], [0, 1])
    start(pool, 0, 64)
    pool.take(0, 160, False)
    pool.release(0, 160)
    assert found(pool, 0, 161) == (10, 10)
    start(pool, 1, 160)  # all clean blocks
    pool.take(1, 224, False)  # and four cached ones
    assert found(pool, 0, 161) == (6, 6)


def test_blocks_that_are_not_full_are_reused_first() -> None:
    pool = pool_of(10, [20, 160], [0, 1])
    start(pool, 0, 20)
    pool.release(0, 20)  # one hashed block, one part-filled
    start(pool, 1, 144)
    assert found(pool, 0, 21) == (1, 1)
    pool.take(1, 160, False)
    assert found(pool, 0, 21) == (0, 0)


def test_the_least_recently_freed_request_goes_first() -> None:
    pool = pool_of(12, [64, 64, 64], [0, 1, 2])
    for request in range(3):
        start(pool, request, 64)
    for request in (1, 0):
        pool.release(request, 64)
    pool.take(2, 64 + 3 * BLOCK, False)
    assert [found(pool, request, 65)[0] for request in (0, 1)] == [4, 1]


def test_free_blocks_come_back_whatever_the_order() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 200, 12)[np.repeat(np.arange(12), 4)].tolist()
    pool = pool_of(2000, prompts, np.repeat(np.arange(12), 4).tolist())
    running: dict[int, int] = {}
    for _ in range(3000):
        request = int(rng.integers(48))
        if request in running:
            pool.release(request, running.pop(request))
        else:
            running[request] = prompts[request]
            start(pool, request, running[request])
        assert 0 <= pool.free <= 2000
    for request, tokens in running.items():
        pool.release(request, tokens)
    assert pool.free == 2000
