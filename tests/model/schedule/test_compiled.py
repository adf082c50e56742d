"""The scheduler in C against the reference in Python: every output of a schedule is the same, to the bit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scheduled_batches import (
    ENDED_PREEMPTED,
    FAMILIES,
    IDLE_PREEMPTION,
    blocks_needed,
    case,
    random_case,
    tight_case,
)
from turn_batches import random_clock, trace

from fp8plan.errors import CapacityError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import CacheRules, Spec, windows_of
from fp8plan.model.schedule import scheduler
from fp8plan.model.schedule.scheduler import Case, Run, run_compiled, run_reference
from fp8plan.model.workload import Batch

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

SEEDS = int(os.environ.get("FP8PLAN_COMPILED_SEEDS", "300"))  # `make fuzz` runs 5,000
QUICK = (*range(40), 59, 92)  # seeds of `make test`; in the last two, requests do not arrive in order of number
RULES = [CacheRules.of(version) for version in ("0.26.0", "0.30.0", "0.32.0", "0.33.0")]
ENDLESS = 2**62
FULL = (Spec("full", 16),)


def small_work(
    prompts: list[int],
    responses: list[int],
    prompt_ids: list[int],
    groups: list[Spec],
    pool: int,
    slots: int,
    budget: int,
    asynchronous: bool = False,
    reserve_full_prompt: bool = False,
    version: str = "0.33.0",
) -> Case:
    """A batch with prefix caching. budget: tokens of a step"""
    limits = EngineLimits(
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        enable_prefix_caching=True,
        async_scheduling=asynchronous,
        scheduler_reserve_full_isl=reserve_full_prompt,
    )
    batch = Batch(*(np.array(column) for column in (prompts, responses, prompt_ids)))
    return Case(batch, pool, limits, tuple(groups), CacheRules.of(version))


def sliding(window: int) -> Spec:
    return Spec("sliding", 16, window)


# Cases that hardly a random batch has. Each was shrunk from one in thousands, and none does without its numbers.
RARE = {
    # Full attention hits more than the window of a preempted request. The window then keeps the blocks at that hit's
    # end, so it may free the blocks before it only one by one.
    "a longer hit ends in the response": small_work(
        [7, 23, 23], [11, 27, 11], [0, 1, 1], [sliding(16), *FULL], 8, 2, 32
    ),
    # A window frees its blocks at the prompt's end and those at a longer hit's end at once. The latter are evicted
    # first.
    "two runs of kept blocks are freed": small_work(
        [20, 4, 56], [78, 78, 62], [0, 1, 2], [sliding(100), *FULL], 35, 3, 98
    ),
    # A request has several copies of its blocks, because a hit was cut short by the windows. It frees the hit ones.
    "a hit's copies are freed beside newer ones": small_work(
        [41, 8], [105, 56], [0, 1], [*3 * [sliding(64)], *FULL], 37, 2, 8
    ),
    # A response ended in the step before, and its last token would fill a block. The request is preempted.
    "a full last block of an ended request": small_work(
        [37, 35, 35], [29, 14, 1], [0, 1, 1], [sliding(2), *FULL], 10, 2, 4, asynchronous=True
    ),
    # The same, where the response has blocks of its own.
    "full blocks of an ended request": small_work(
        [57, 57, 27, 27],
        [137, 136, 71, 1],
        [0, 0, 1, 1],
        [*FULL, *2 * [Spec("chunked", 16, 200)]],
        64,
        3,
        18,
        asynchronous=True,
    ),
    # Each of two windows cuts the other's hit, and no group of full attention ends the search after one round.
    "windows without full attention": small_work([21], [1], [0], [Spec("chunked", 16, 16), sliding(16)], 4, 1, 10),
    # Full attention is looked up once. A window and a chunk then cut the hit in turn, below what it found.
    "two groups cut the hit of full attention": small_work(
        [25, 12], [141, 87], [0, 1], [Spec("chunked", 16, 64), *FULL, sliding(64)], 26, 5, 14
    ),
    # A window's hit in the response is longer than the most blocks that the check of the whole prompt asks for.
    "a hit beyond the admission cap": small_work(
        [146, 72, 72, 72, 90, 90],
        [22, 17, 17, 16, 10, 8],
        [0, 1, 1, 1, 2, 2],
        [sliding(32), *FULL],
        44,
        6,
        17,
        reserve_full_prompt=True,
    ),
    # A look-up comes upon an evicted block of a shared prompt. Nothing else shows that a larger pool would be faster.
    "an evicted block is missed": small_work(
        [9, 9, 9, 9, 153, 153, 153], [9, 9, 9, 9, 8, 8, 1], [0, 0, 0, 1, 2, 2, 2], [Spec("chunked", 16, 17)], 10, 6, 81
    ),
    # vLLM 0.26 keeps every block of a window. Requests that decode free theirs with a hash, and one hits them again.
    "blocks freed while decoding are hit": small_work(
        [303, 273, 273], [115, 97, 97], [0, 1, 1], [*FULL, sliding(16)], 63, 3, 15, asynchronous=True, version="0.26.0"
    ),
}


def work_of(seed: int) -> Case:
    """Families take turns, with groups in any order. A third of the pools are roomy, and every tenth batch is large."""
    rng = np.random.default_rng([seed, 63])
    family, asynchronous = sorted(FAMILIES)[seed % len(FAMILIES)], bool(rng.random() < 0.5)
    made, rules = case(seed, family, asynchronous), RULES[int(rng.integers(len(RULES)))]
    batch, pool, limits = made.batch, made.pool, made.limits
    groups = tuple(made.groups[i] for i in rng.permutation(len(made.groups)))
    if seed % 10 == 9:
        batch, _, limits = random_case(int(rng.integers(10**6)), asynchronous)
        groups = tuple(group._replace(block_size=16) for group in groups)
        pool = int(sum(blocks_needed(batch, group, limits) for group in groups) * rng.uniform(1, 12))
        return Case(batch, pool, limits, groups, rules)
    if rng.random() < 1 / 3:
        pool = int(pool * rng.uniform(1, 12))
    return Case(batch, pool, limits, groups, rules)


def turns_of(seed: int) -> Case:
    """Trajectories of turns on a pool of each family in turn, with groups in any order, and mostly a random clock.

    Every other round of the families has prompts that leave out tokens.
    """
    rng = np.random.default_rng([seed, 66])
    families = ["full", *sorted(FAMILIES)]
    made = trace(seed, families[seed % len(families)], drops=seed // len(families) % 2 == 1)
    groups = tuple(made.groups[i] for i in rng.permutation(len(made.groups)))
    clock = made.clock
    if rng.random() < 0.8:
        clock = random_clock(rng, made.limits, len(windows_of(groups)))
    rules = RULES[int(rng.integers(len(RULES)))]
    return Case(made.batch, made.pool, made.limits, groups, rules, clock)


def outcome(run: Any, work: Case, longest: int) -> Run | str:
    """A simulated batch, or the error."""
    try:
        made: Run = run(work, longest)
        return made
    except CapacityError as error:
        return str(error)


def assert_same(work: Case) -> None:
    for longest in (1, ENDLESS):
        in_c, reference = outcome(run_compiled, work, longest), outcome(run_reference, work, longest)
        if isinstance(in_c, str) or isinstance(reference, str):
            assert in_c == reference
            continue
        assert in_c is not None
        assert in_c.columns.keys() == reference.columns.keys()
        for name, column in reference.columns.items():
            np.testing.assert_array_equal(in_c.columns[name], column, name)
        np.testing.assert_array_equal(in_c.ended, reference.ended)
        if work.clock is None:  # a schedule of turns holds for its own pool alone
            assert in_c.pool_mattered == reference.pool_mattered
            assert in_c.pool_mattered or in_c.least_free == reference.least_free
        for one, other in zip(in_c.windows, reference.windows, strict=True):
            assert (one.kind, one.window) == (other.kind, other.window)
            np.testing.assert_array_equal(one.decode_kv_tokens, other.decode_kv_tokens)
            np.testing.assert_array_equal(one.prefill_kv_tokens, other.prefill_kv_tokens)
            np.testing.assert_array_equal(one.prefill_pairs, other.prefill_pairs)


seeds = pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.slow) for seed in range(SEEDS)]
)


@seeds
def test_c_gives_the_references_schedule_of_groups(seed: int) -> None:
    assert_same(work_of(seed))


@seeds
def test_c_gives_the_references_schedule_of_turns(seed: int) -> None:
    assert_same(turns_of(seed))


@pytest.mark.parametrize("name", RARE)
def test_c_gives_the_references_schedule_of_rare_cases(name: str) -> None:
    assert_same(RARE[name])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("make", [random_case, tight_case])
def test_c_gives_the_references_schedule_of_one_group(make: Any, asynchronous: bool) -> None:
    for seed in (*QUICK, IDLE_PREEMPTION, ENDED_PREEMPTED):
        assert_same(Case(*make(seed, asynchronous), FULL, RULES[seed % len(RULES)]))


def test_the_row_that_ended_a_request_counts_it() -> None:
    work = Case(*random_case(1, True), FULL, RULES[-1])
    made = run_compiled(work, ENDLESS)
    assert made is not None
    ended = np.bincount(made.ended, minlength=len(made.columns["steps"]))
    np.testing.assert_array_equal(ended, made.columns["finished"])


def test_a_request_that_does_not_find_its_blocks_is_the_same_error() -> None:
    """vLLM's cap leaves out that a chunk of attention may not begin with a block, so it would preempt for ever."""
    limits = EngineLimits(max_num_seqs=1, max_num_batched_tokens=7, enable_prefix_caching=False, async_scheduling=False)
    batch = Batch(np.array([100]), np.array([9]), np.array([0]))
    work = Case(batch, 2, limits, (Spec("chunked", 16, 24),), RULES[-1])
    with pytest.raises(CapacityError, match=r"the pool has 2 KV blocks, and a request that has it to itself") as error:
        run_reference(work, 1)
    assert outcome(run_compiled, work, 1) == str(error.value)


def test_no_request_gives_no_row() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert_same(Case(Batch(nothing, nothing, nothing), 10, EngineLimits(), FULL, RULES[-1]))


def test_the_c_code_has_no_warning() -> None:
    source = Path(scheduler.__file__).with_name("c") / "scheduler.c"
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
