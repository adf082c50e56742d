"""Trajectories of turns: against vLLM's own Scheduler in the loop of its engine, and what must hold without it."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from installed_vllm import VLLM
from runs_of_steps import assert_runs_add_up, total
from scheduled_batches import BLOCK, FAMILIES, blocks_for
from turn_batches import EQUAL_STEPS, Trace, batch_of, seconds_of, table, trace

from fp8plan.errors import CapacityError
from fp8plan.model.cost.base import QUANTITIES, FloatArray, IntArray
from fp8plan.model.cost.clock import Clock
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_specs import CacheRules
from fp8plan.model.schedule.rows import TYPES
from fp8plan.model.schedule.scheduler import Schedule, schedule
from fp8plan.model.turn_table import TurnTable
from fp8plan.model.workload import Batch
from fp8plan.version import has

COMPARED = (
    "prefill_tokens",
    "decode_requests",
    "cached_tokens",
    "queried_tokens",
    "hit_tokens",
    "used_blocks",
    "preemptions",
)
SEEDS = int(os.environ.get("FP8PLAN_TURN_SEEDS", "60"))  # odd ones are synchronous; `make fuzz` runs 600
QUICK = (0, 1, 3, 11, 12, 16, 21, 28, 45)  # preemptions, evictions, no caching, caps and equal times, with and without


def run(made: Trace, longest_run: int = 2**62) -> Schedule:
    rules = CacheRules.of(VLLM)._replace(retain_all=made.retain_all)
    return schedule(made.batch, made.pool, made.limits, longest_run, made.groups, rules, made.clock)


def seconds(plan: Schedule, clock: Clock) -> list[list[float]]:
    """The seconds of the steps of each row."""
    rows = zip(plan.steps.tolist(), *(getattr(plan, name).tolist() for name in QUANTITIES), strict=True)
    return [
        [seconds_of(clock, requests, tokens + step * requests, *prefill) for step in range(steps)]
        for steps, requests, tokens, *prefill in rows
    ]


def ends(plan: Schedule, clock: Clock) -> FloatArray:
    """The seconds from the start to the end of each row."""
    ended: FloatArray = np.cumsum(plan.idle_s + [sum(row) for row in seconds(plan, clock)])
    return ended


def assert_equals_vllm(made: Trace) -> None:
    import vllm_oracle

    real = vllm_oracle.run_turns(*made)
    simulated = run(made, longest_run=1)
    columns = {name: getattr(simulated, name) for name in COMPARED}
    if not made.limits.enable_prefix_caching:
        columns["queried_tokens"] = np.zeros_like(simulated.steps)  # vLLM counts no queries then
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    assert list(rows) == [step[: len(COMPARED)] for step in real]
    begins = ends(simulated, made.clock) - [step_s for (step_s,) in seconds(simulated, made.clock)]
    np.testing.assert_allclose(begins, [step.begin_s for step in real], rtol=1e-9, atol=1e-9)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.slow) for seed in range(SEEDS)]
)
def test_every_step_equals_vllms_scheduler(seed: int) -> None:
    assert_equals_vllm(trace(seed))


@pytest.mark.vllm
@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 2 else pytest.mark.slow) for n in range(20)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_several_groups_equals_vllms_scheduler(family: str, seed: int) -> None:
    if family.startswith("checkpoint") and not has(VLLM, "Mamba 2 has a checkpoint block"):
        pytest.skip("this vLLM has no checkpoint blocks")
    assert_equals_vllm(trace(seed, family))


@pytest.mark.vllm
@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in range(SEEDS)])
def test_every_step_with_dropped_tokens_equals_vllms_scheduler(seed: int) -> None:
    assert_equals_vllm(trace(seed, drops=True))


@pytest.mark.vllm
@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 1 else pytest.mark.slow) for n in range(20)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_several_groups_with_dropped_tokens_equals_vllms_scheduler(family: str, seed: int) -> None:
    if family.startswith("checkpoint") and not has(VLLM, "Mamba 2 has a checkpoint block"):
        pytest.skip("this vLLM has no checkpoint blocks")
    assert_equals_vllm(trace(seed, family, drops=True))


@pytest.mark.vllm
def test_windows_free_their_blocks_in_the_order_of_admission() -> None:
    """Several requests free a block of a window in one step. The order decides which one is evicted and missed."""
    assert_equals_vllm(trace(187, "all"))


traces = st.builds(trace, st.integers(1000, 10**6), st.sampled_from(["full", *sorted(FAMILIES)]), st.booleans())


def turn_ends(batch: Batch) -> tuple[IntArray, IntArray]:
    """For each turn: the tokens of its prompt, and the tokens that are computed at its end."""
    turns = batch.turns
    assert turns is not None
    counts, added = np.diff(turns.first), turns.generated - turns.dropped + turns.tool
    before = np.cumsum(added) - added
    prompts = np.repeat(batch.prompts - before[turns.first[:-1]], counts) + before
    return prompts, prompts + turns.generated - 1


@settings(max_examples=60, deadline=None)
@given(traces)
def test_tokens_are_conserved_and_limits_hold(made: Trace) -> None:
    batch, plan = made.batch, run(made)
    assert batch.turns is not None
    prompts, final = turn_ends(batch)
    assert plan.queried_tokens.sum() == prompts.sum()
    assert plan.hit_tokens.sum() <= plan.cached_tokens.sum()
    served = total(plan, "prefill_tokens") + total(plan, "decode_requests")
    assert served == final.sum() + plan.recomputed_tokens.sum() - plan.cached_tokens.sum()
    assert total(plan, "sampled_requests") == batch.responses.sum()
    assert plan.finished.sum() == len(batch.turns.generated)
    assert plan.used_blocks.max() <= made.pool
    assert plan.running.max() <= made.limits.max_num_seqs
    assert (plan.prefill_tokens + plan.decode_requests).max() <= made.limits.max_num_batched_tokens
    assert plan.away.min() >= 0
    if made.batch.turns.concurrent is not None:
        leaving = made.limits.async_scheduling * plan.running  # count as running and away
        assert (plan.running + plan.waiting + plan.away - leaving).max() <= made.batch.turns.concurrent


@settings(max_examples=60, deadline=None)
@given(traces)
def test_runs_of_steps_add_up_to_the_single_steps(made: Trace) -> None:
    single, runs = run(made, longest_run=1), run(made)
    first = assert_runs_add_up(runs, single)
    np.testing.assert_array_equal(runs.idle_s, np.add.reduceat(single.idle_s, first))
    np.testing.assert_array_equal(runs.again_tokens, np.add.reduceat(single.again_tokens, first))
    np.testing.assert_array_equal(runs.cached_tokens, np.add.reduceat(single.cached_tokens, first))
    last_rows = np.searchsorted(first, single.ended, side="right") - 1
    np.testing.assert_array_equal(runs.ended, last_rows)


@settings(max_examples=40, deadline=None)
@given(st.integers(1000, 10**6), st.booleans(), st.booleans())
def test_what_the_cache_has_lost_is_computed_again(seed: int, ample: bool, drops: bool) -> None:
    """Full blocks of earlier turns are found up to the first dropped token, or counted. With room for all, all are."""
    made = trace(seed, drops=drops)
    requests = len(made.batch.prompts)
    longest = int(blocks_for(np.array([made.batch.longest]))[0])
    made = made._replace(
        batch=made.batch._replace(prompt_ids=np.arange(requests)),
        limits=replace(made.limits, enable_prefix_caching=True),
        pool=longest * (requests if ample else min(requests, made.limits.max_num_seqs)),  # none is preempted
    )
    plan = run(made)
    assert made.batch.turns is not None
    prompts, final = turn_ends(made.batch)
    kept = np.minimum(np.where(made.batch.turns.dropped, prompts, final), np.append(prompts[1:], 0) - 1)
    same = kept // BLOCK * BLOCK
    goes_on = np.ones(len(final), dtype=bool)
    goes_on[made.batch.turns.first[1:] - 1] = False
    assert plan.num_preemptions == 0
    assert plan.cached_tokens.sum() + plan.again_tokens.sum() == same[goes_on].sum()
    assert plan.hit_tokens.sum() == plan.cached_tokens.sum()
    computed = total(plan, "prefill_tokens") + total(plan, "decode_requests")
    assert computed == final.sum() - plan.cached_tokens.sum()
    if ample:
        assert plan.again_tokens.sum() == 0


def test_without_prefix_caching_all_tokens_of_earlier_turns_are_computed_again() -> None:
    batch = batch_of([20], [0], table([(5, 10, 1.0), (5, 10, 1.0), (5, 0, 0.0)]))
    plan = schedule(batch, 100, EngineLimits(enable_prefix_caching=False), clock=EQUAL_STEPS)
    assert plan.again_tokens.sum() == 24 + 39
    assert plan.prefill_tokens.sum() == 20 + 35 + 50


def test_a_turn_finds_no_block_with_tokens_that_its_prompt_leaves_out() -> None:
    """Of the prompt's 20 tokens and the answer's 40, the first 16 and the last 20 are in the next prompt's blocks."""
    turns = table([(40, 5, 1.0), (40, 0, 0.0)])
    batch = batch_of([20], [0], turns._replace(dropped=np.array([20, 0])))
    plan = schedule(batch, 100, EngineLimits(), clock=EQUAL_STEPS)
    assert plan.prefill_tokens.tolist() == [20, 0, 29, 0]
    assert plan.hit_tokens.tolist() == [0, 0, 16, 0]
    assert plan.again_tokens.sum() == 0


@pytest.mark.vllm
def test_the_share_of_hits_leaves_out_requests_that_resume_as_vllms_metrics_do() -> None:
    import vllm_oracle

    made = trace(37)
    plan, steps = run(made), vllm_oracle.run_turns(*made)
    assert plan.num_preemptions
    share = plan.hit_tokens.sum() / plan.queried_tokens.sum()
    assert share == sum(step.hit_tokens for step in steps) / sum(step.queried_tokens for step in steps)
    with_resumed = plan.cached_tokens.sum() / (plan.cached_tokens.sum() + total(plan, "prefill_tokens"))
    assert abs(share - with_resumed) > 0.02


@settings(max_examples=60, deadline=None)
@given(traces)
def test_no_trajectory_ends_before_its_own_waits_and_steps(made: Trace) -> None:
    plan, turns = run(made), made.batch.turns
    assert turns is not None
    least = min(min(row) for row in seconds(plan, made.clock))
    own = np.add.reduceat(turns.wait_s + turns.generated * least, turns.first[:-1])
    assert (ends(plan, made.clock)[plan.ended] >= own * (1 - 1e-9)).all()


@settings(max_examples=40, deadline=None)
@given(traces)
def test_turns_without_a_second_one_are_a_closed_batch(made: Trace) -> None:
    closed = made.batch._replace(turns=None)
    single = made._replace(batch=closed._replace(turns=TurnTable.single(closed.responses)))
    rules = CacheRules.of(VLLM)._replace(retain_all=made.retain_all)
    expected = schedule(closed, made.pool, made.limits, groups=made.groups, rules=rules)
    plan = run(single)
    for name in (*TYPES, "ended"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name), name)


SLOT = EngineLimits(max_num_seqs=1, max_num_batched_tokens=64, async_scheduling=False)


def test_requests_are_served_in_order_of_arrival_and_equal_times_by_number() -> None:
    """Steps take a second. Number 1 has been waiting for its tool for longer, but both arrive at 5 s."""
    turns = table([(1, 1, 1.0), (1, 1, 2.0), (1, 0, 0.0)], [(1, 1, 3.0), (1, 0, 0.0)])
    plan = schedule(batch_of([10, 10], [0, 1], turns), 100, SLOT, clock=EQUAL_STEPS)
    assert plan.idle_s.tolist() == [0, 0, 0, 2, 0]
    assert plan.prefill_tokens.tolist() == [10, 10, 12, 14, 12]
    assert plan.ended.tolist() == [3, 4]
    later = table([(1, 1, 1.0), (1, 1, 2.5), (1, 0, 0.0)], [(1, 1, 3.0), (1, 0, 0.0)])
    plan = schedule(batch_of([10, 10], [0, 1], later), 100, SLOT, clock=EQUAL_STEPS)
    assert plan.ended.tolist() == [4, 3]


def test_asynchronous_scheduling_sees_an_arrival_one_step_later() -> None:
    """A request arrives at 2.5 s. Step 3 is scheduled at 3 s, or at 2 s, when step 1 ends."""
    batch = batch_of([10, 10], [0, 1], table([(9, 0, 0.0)], [(1, 4, 1.5), (1, 0, 0.0)]))
    for is_async, prefill in ((False, [20, 0, 0, 15]), (True, [20, 0, 0, 0, 15])):
        limits = EngineLimits(async_scheduling=is_async)
        plan = schedule(batch, 100, limits, longest_run=1, clock=EQUAL_STEPS)
        assert plan.prefill_tokens[: len(prefill)].tolist() == prefill
        assert plan.away.tolist()[: len(prefill) - 1] == [0] + [1] * (len(prefill) - 2)


def test_the_next_trajectory_begins_when_one_ends() -> None:
    turns = table([(2, 3, 4.0), (2, 0, 0.0)], *[[(2, 0, 0.0)]] * 3)
    limits = EngineLimits(async_scheduling=False)
    batch = batch_of([10] * 4, [0, 1, 2, 3], turns._replace(concurrent=2))
    plan = schedule(batch, 100, limits, 1, clock=EQUAL_STEPS)
    # Number 0 is away from 2 s to 6 s. One after another, the others take its place beside it.
    assert plan.prefill_tokens.tolist() == [20, 0, 10, 0, 10, 0, 15, 0]
    assert plan.away.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert plan.ended.tolist() == [7, 1, 3, 5]


def test_a_timed_schedule_holds_for_no_other_engine() -> None:
    batch = batch_of([10], [0], table([(2, 3, 4.0), (2, 0, 0.0)]))
    plan = schedule(batch, 100, EngineLimits(), clock=EQUAL_STEPS)
    assert not plan.holds_for(100, plan.groups)
    assert schedule(batch._replace(turns=None), 100, EngineLimits()).holds_for(100, plan.groups)


def test_a_trajectory_that_can_never_fit_is_an_error() -> None:
    batch = batch_of([100], [0], table([(30, 21, 1.0), (10, 0, 0.0)]))
    schedule(batch, 10, EngineLimits(), clock=EQUAL_STEPS)  # 160 tokens are stored: the last one is never read
    with pytest.raises(CapacityError, match=r"161 tokens.*needs 10 KV blocks.*pool has 9"):
        schedule(batch, 9, EngineLimits(), clock=EQUAL_STEPS)
