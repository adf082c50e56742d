"""The counted pool: what is shared, what survives a release, what eviction takes first.
Its agreement with vLLM's block pool under load is tested through the scheduler."""

from __future__ import annotations

import numpy as np

from fp8plan.model.schedule.kv_pool import CachingPool, blocks_for

BLOCK = 16


def pool_of(blocks: int, prompts: list[int], prompt_ids: list[int]) -> CachingPool:
    return CachingPool(blocks, BLOCK, np.array(prompts), np.array(prompt_ids))


def start(pool: CachingPool, request: int, tokens: int) -> int:
    """Admit and compute a request of that many tokens; returns the blocks it hit."""
    hit, _ = pool.lookup(request, tokens)
    pool.admit(request, hit)
    pool.take(blocks_for(tokens, BLOCK) - hit)
    pool.computed(request, tokens)
    return hit


def stop(pool: CachingPool, request: int, tokens: int) -> None:
    pool.release(request, blocks_for(tokens, BLOCK), tokens)


def test_a_running_prompt_is_held_once_for_all_siblings() -> None:
    pool = pool_of(100, [40, 40, 40], [0, 0, 0])
    assert [start(pool, request, 40) for request in range(3)] == [0, 2, 2]
    assert pool.free == 100 - 2 - 3 * 1  # two full blocks together, one part-filled each
    for request in range(3):
        stop(pool, request, 40)
    assert pool.free == 100


def test_a_hit_leaves_one_token_to_compute() -> None:
    pool = pool_of(100, [32, 32], [0, 0])
    assert [start(pool, request, 32) for request in range(2)] == [0, 1]  # not both full blocks
    assert pool.free == 100 - 1 - 2


def test_a_resumed_sibling_finds_the_oldest_copy_of_its_last_prompt_block() -> None:
    pool = pool_of(100, [32, 32], [0, 0])
    start(pool, 0, 32)
    start(pool, 1, 32)
    stop(pool, 1, 48)  # it had generated a block's worth
    hit, in_queue = pool.lookup(1, 49)
    assert hit == 3
    assert in_queue == 1  # only its own response block: the copy found is the one that request 0 holds


def test_a_released_request_can_be_resumed_until_it_is_evicted_tail_first() -> None:
    pool = pool_of(20, [64, 64], [0, 1])
    start(pool, 0, 64)
    pool.take(6)  # it decodes to 160 tokens
    stop(pool, 0, 160)
    assert pool.lookup(0, 161) == (10, 10)
    pool.take(10 + 4)  # all clean blocks and four cached ones
    assert pool.lookup(0, 161) == (6, 6)


def test_blocks_that_are_not_full_are_reused_first() -> None:
    pool = pool_of(10, [20, 150], [0, 1])
    start(pool, 0, 20)
    stop(pool, 0, 20)  # one hashed block, one part-filled
    pool.take(9)
    assert pool.lookup(0, 21) == (1, 1)
    pool.take(1)
    assert pool.lookup(0, 21) == (0, 0)


def test_the_least_recently_freed_request_goes_first() -> None:
    pool = pool_of(12, [60, 60, 60], [0, 1, 2])
    for request in range(3):
        start(pool, request, 64)
    stop(pool, 1, 64)
    stop(pool, 0, 64)
    pool.take(3)
    assert [pool.lookup(request, 65)[0] for request in (0, 1)] == [4, 1]


def test_free_blocks_come_back_whatever_the_order() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 200, 12)[np.repeat(np.arange(12), 4)]
    pool = CachingPool(2000, BLOCK, prompts, np.repeat(np.arange(12), 4))
    running: dict[int, int] = {}
    for _ in range(3000):
        request = int(rng.integers(48))
        if request in running:
            stop(pool, request, running.pop(request))
        else:
            running[request] = int(prompts[request])
            start(pool, request, running[request])
        assert 0 <= pool.free <= 2000
    for request, tokens in running.items():
        stop(pool, request, tokens)
    assert pool.free == 2000
