"""The simulator against vLLM's own Scheduler, step by step, and what must hold without it.

A schedule is made in C where a compiler is; test_compiled.py holds C against the reference in Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runs_of_steps import assert_runs_add_up, total
from scheduled_batches import BLOCK, ENDED_PREEMPTED, IDLE_PREEMPTION, blocks_for, random_case, tight_case

from fp8plan.errors import CapacityError
from fp8plan.model.limits import EngineLimits
from fp8plan.model.schedule.scheduler import compiled, schedule
from fp8plan.model.workload import Batch

COMPARED = ("prefill_tokens", "decode_requests", "used_blocks", "preemptions")
QUICK = (1, 2, 3, 5, 8, 9, 15)  # seeds of `make test`: others take seconds, or repeat these
TIGHT_SEEDS = int(os.environ.get("FP8PLAN_TIGHT_SEEDS", "80"))  # `make fuzz` runs 2,000


def evicted_hits_case() -> tuple[Batch, int, EngineLimits]:
    """At step 1203 the head of the queue fits, though it did not before and less is free: the blocks it would have
    taken out of the free queue have been evicted, and its first chunk needs only as many as the budget has tokens for.
    """
    prompts = np.array([224, 273, 190, 292, 62, 250, 276, 34, 39, 212, 77]).repeat(2)
    responses = [133, 120, 197, 60, 165, 15, 96, 139, 114, 9, 92, 190, 170, 83, 103, 190, 110, 89, 110, 71, 176, 21]
    limits = EngineLimits(max_num_seqs=6, max_num_batched_tokens=16, scheduler_reserve_full_isl=False)
    return Batch(prompts, np.array(responses), np.arange(11).repeat(2)), 30, limits


def assert_equals_vllm(batch: Batch, pool: int, limits: EngineLimits) -> None:
    import vllm_oracle

    real = vllm_oracle.run(*batch, pool, limits)
    simulated = schedule(batch, pool, limits, longest_run=1)
    rows = zip(*(getattr(simulated, column).tolist() for column in COMPARED), strict=True)
    assert list(rows) == [tuple(step) for step in real]


@pytest.mark.vllm
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "seed", [IDLE_PREEMPTION, *(pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in range(36))]
)
def test_every_step_equals_vllms_scheduler(seed: int, async_scheduling: bool) -> None:
    assert_equals_vllm(*random_case(seed, async_scheduling))


@pytest.mark.vllm
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "seed",
    [ENDED_PREEMPTED, *(pytest.param(n, marks=() if n < 20 else pytest.mark.slow) for n in range(TIGHT_SEEDS))],
)
def test_every_step_in_a_tight_pool_equals_vllms_scheduler(seed: int, async_scheduling: bool) -> None:
    assert_equals_vllm(*tight_case(seed, async_scheduling))


@pytest.mark.vllm
def test_a_head_whose_hits_are_evicted_is_admitted_as_vllm_does() -> None:
    assert_equals_vllm(*evicted_hits_case())


def test_a_first_chunk_fits_once_the_blocks_it_would_have_hit_are_evicted() -> None:
    batch, pool, limits = evicted_hits_case()
    assert schedule(batch, pool, limits).num_preemptions == 94  # as in vLLM; 92 if the head had to wait for more


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, for a process that has compiled nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.cache_clear()
    yield tmp_path
    compiled.cache_clear()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_c_code_is_compiled_once(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled() is not None
    (library,) = (cache_folder / "fp8plan").iterdir()
    compiled.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)  # which a second compilation would call
    assert compiled() is not None
    assert [*(cache_folder / "fp8plan").iterdir()] == [library]


@pytest.mark.parametrize("compiler", ["", "false", "no-such-compiler"])
def test_without_a_compiler_the_reference_makes_the_schedule(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    batch, pool, limits = random_case(100, async_scheduling=True)
    expected = schedule(batch, pool, limits)
    compiled.cache_clear()
    shutil.rmtree(cache_folder / "fp8plan", ignore_errors=True)
    monkeypatch.setenv("CC", compiler)
    assert compiled() is None
    np.testing.assert_array_equal(schedule(batch, pool, limits).used_blocks, expected.used_blocks)


def test_a_cache_folder_that_cannot_be_written_to_is_no_error(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache_folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder / "file"))
    assert compiled() is None


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(100, 124))
def test_runs_of_steps_add_up_to_the_single_steps(seed: int, async_scheduling: bool) -> None:
    batch, pool, limits = random_case(seed, async_scheduling)
    single = schedule(batch, pool, limits, longest_run=1)
    runs = schedule(batch, pool, limits)
    assert len(runs.steps) < single.num_steps or runs.num_steps < 3
    assert_runs_add_up(runs, single)
    grown = runs.decode_kv_tokens * runs.steps + runs.decode_requests * runs.steps * (runs.steps - 1) // 2
    assert grown.sum() == single.decode_kv_tokens.sum()


@st.composite
def cases(draw: st.DrawFn, starved: bool = True) -> tuple[Batch, int, EngineLimits]:
    batch, pool, limits = random_case(draw(st.integers(1000, 10**6)), draw(st.booleans()))
    if not starved:
        pool = int(blocks_for(batch.prompts + batch.responses - 1).sum())
    return batch, pool, limits


@settings(max_examples=60, deadline=None)
@given(cases())
@example(random_case(IDLE_PREEMPTION, async_scheduling=True))
def test_tokens_are_conserved(case: tuple[Batch, int, EngineLimits]) -> None:
    batch, pool, limits = case
    plan = schedule(batch, pool, limits)
    served = total(plan, "prefill_tokens") + total(plan, "decode_requests")
    wanted = int((batch.prompts + batch.responses - 1).sum())
    assert served == wanted + plan.recomputed_tokens.sum() - plan.cached_tokens.sum()
    assert total(plan, "sampled_requests") == batch.responses.sum()
    assert plan.finished.sum() == len(batch.prompts)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_limits_hold_in_every_step(case: tuple[Batch, int, EngineLimits]) -> None:
    batch, pool, limits = case
    plan = schedule(batch, pool, limits)
    assert plan.used_blocks.max() <= pool
    assert plan.running.max() <= limits.max_num_seqs
    assert (plan.prefill_tokens + plan.decode_requests).max() <= limits.max_num_batched_tokens


@settings(max_examples=40, deadline=None)
@given(cases(starved=False))
def test_a_pool_that_holds_everything_preempts_nothing(case: tuple[Batch, int, EngineLimits]) -> None:
    batch, pool, limits = case
    plan = schedule(batch, pool, limits)
    assert plan.num_preemptions == 0
    assert plan.recomputed_tokens.sum() == 0


@settings(max_examples=40, deadline=None)
@given(cases())
def test_no_request_ends_before_its_own_steps(case: tuple[Batch, int, EngineLimits]) -> None:
    batch, pool, limits = case
    limits = replace(limits, enable_prefix_caching=False)
    plan = schedule(batch, pool, limits)
    own = -(-batch.prompts // limits.max_num_batched_tokens) + batch.responses - 1
    assert plan.num_steps >= own.max()


@settings(max_examples=40, deadline=None)
@given(cases(starved=False), st.integers(0, 10**6))
def test_blocks_wanted_is_a_pool_with_the_same_schedule(case: tuple[Batch, int, EngineLimits], more: int) -> None:
    batch, pool, limits = case
    plan = schedule(batch, pool, limits)
    if plan.blocks_wanted is None:
        return
    smaller = schedule(batch, plan.blocks_wanted + more % (pool - plan.blocks_wanted + 1), limits)
    for column in ("steps", "prefill_tokens", "decode_requests", "used_blocks"):
        np.testing.assert_array_equal(getattr(plan, column), getattr(smaller, column))


def test_a_head_that_had_to_wait_leaves_it_open_which_pool_gives_the_same_schedule() -> None:
    batch, pool, limits = random_case(230, True)
    plan = schedule(batch, pool, limits)
    assert plan.num_preemptions == 0
    assert plan.blocks_wanted is None
    assert schedule(batch, 2 * pool, limits).num_steps < plan.num_steps


def test_a_preemption_in_a_step_that_serves_nobody_is_counted() -> None:
    """The first request has ended, but holds its blocks for a step more: the second finds none and preempts itself."""
    batch = Batch(np.array([20, 21]), np.array([12, 20]), np.arange(2))  # 31 and 40 tokens are stored: 2 and 3 blocks
    plan = schedule(batch, 4, EngineLimits(enable_prefix_caching=False, async_scheduling=True))
    assert plan.num_preemptions == 1
    assert plan.recomputed_tokens.sum() == 32
    assert not plan.holds_for(5, plan.groups)  # which preempts nothing


def test_siblings_prefill_their_prompt_once() -> None:
    batch = Batch(np.full(8, 165), np.full(8, 4), np.zeros(8, dtype=np.int64))
    plan = schedule(batch, 1000, EngineLimits())
    assert plan.prefill_tokens.sum() == 165 + 7 * (165 % BLOCK)
    assert plan.cached_tokens.sum() == 7 * (165 - 165 % BLOCK)


def test_asynchronous_scheduling_frees_a_slot_one_step_later() -> None:
    batch = Batch(np.full(2, 10), np.full(2, 5), np.arange(2))
    alone = EngineLimits(max_num_seqs=1, async_scheduling=False)
    assert schedule(batch, 100, alone).num_steps == 5 + 5
    # In the lag between the two no request runs, and a step without tokens costs nothing.
    assert schedule(batch, 100, replace(alone, async_scheduling=True)).num_steps == 5 + 5
    pair = Batch(np.full(4, 10), np.array([5, 9, 5, 5]), np.arange(4))
    two = EngineLimits(max_num_seqs=2, async_scheduling=False)
    assert schedule(pair, 100, two).num_steps + 1 == schedule(pair, 100, replace(two, async_scheduling=True)).num_steps


@pytest.mark.vllm
def test_more_blocks_can_mean_more_preemptions_in_vllm_too() -> None:
    """A larger pool admits more requests, which then get in each other's way."""
    import vllm_oracle

    batch = Batch(np.array([6, 32, 20]), np.array([53, 54, 64]), np.arange(3))
    limits = EngineLimits(enable_prefix_caching=False, async_scheduling=False)
    real = [sum(step.preemptions for step in vllm_oracle.run(*batch, pool, limits)) for pool in (7, 8)]
    assert real == [schedule(batch, pool, limits).num_preemptions for pool in (7, 8)]
    assert real[1] > real[0]


def test_a_request_that_can_never_fit_is_an_error() -> None:
    batch = Batch(np.array([100]), np.array([61]), np.array([0]))
    schedule(batch, 10, EngineLimits())  # 160 tokens are stored: the last one is never read
    with pytest.raises(CapacityError, match=r"161 tokens.*needs 10 KV blocks.*pool has 9"):
        schedule(batch, 9, EngineLimits())
