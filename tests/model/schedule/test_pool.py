"""The prefix cache of one group: what is shared, what survives a release, what eviction takes first.
Its agreement with vLLM's block pool under load is tested through the scheduler."""

from __future__ import annotations

import numpy as np

from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import CacheRules, Spec
from fp8plan.model.schedule.pool import Pool

BLOCK = 16
LIMITS = EngineLimits(async_scheduling=False)


def pool_of(blocks: int, prompts: list[int], prompt_ids: list[int]) -> Pool:
    groups = (Spec("full", BLOCK),)
    return Pool(blocks, groups, LIMITS, prompts, prompt_ids, CacheRules())


def found(pool: Pool, request: int, tokens: int) -> tuple[int, int]:
    """The blocks that a request of that many tokens finds, and those of them that are free."""
    hit = pool.lookup(request, tokens)
    hits = hit // BLOCK
    return hits, pool.admission_needs(request, hit, hit, False, False)


def start(pool: Pool, request: int, tokens: int) -> int:
    """Admit and compute a request of that many tokens; returns the blocks it hit."""
    hits, _ = found(pool, request, tokens)
    pool.admit(request, hits * BLOCK)
    compute(pool, request, tokens)
    return hits


def compute(pool: Pool, request: int, tokens: int) -> None:
    pool.take(request, tokens, False)
    pool.cache(request, tokens)


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
