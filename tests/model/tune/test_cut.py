"""Rollouts that are cut: what has ended, what the others have so far, and steps whose responses go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.profile.library import load_profile
from fp8plan.model.rollout import clocks, rollout, schedules
from fp8plan.model.setup import EngineSetup
from fp8plan.model.tune.cut import beside, bias, cut_after, drawn, partial_rollouts
from fp8plan.model.workload import Batch, Workload

H200 = find_gpu("h200")
PROFILE = load_profile(H200, "0.26.0")[0]


def engine(batch: Batch, **limits: Any) -> EngineSetup:
    settled = EngineLimits(**limits).holding(batch.longest)
    return EngineSetup("Qwen/Qwen3-0.6B", H200, "bf16", settled, engine_version="0.26.0")


def batch_of(*responses: int) -> Batch:
    return Batch(np.full(len(responses), 10), np.array(responses), np.arange(len(responses)))


def cut_of(wanted: int, batch: Batch, **limits: Any) -> Any:
    setup = engine(batch, **limits)
    batches = batch.split(setup.limits.data_parallel_size)
    planned = schedules(batches, setup.memory().kv, setup.limits)
    return cut_after(wanted, batches, planned, setup.step_model(PROFILE)), planned, setup.step_model(PROFILE)


def test_a_cut_keeps_the_first_to_end_and_counts_the_tokens_of_the_others() -> None:
    cut, _, model = cut_of(3, batch_of(5, 20, 3, 7))
    assert cut.ended.tolist() == [True, False, True, True]
    assert cut.generated.tolist() == [5, 7, 3, 7]  # all decode from the first step on, so the long one has 7
    as_if_all_ended, planned, _ = cut_of(4, batch_of(5, 7, 3, 7))
    assert cut.rollout.makespan_s == pytest.approx(as_if_all_ended.rollout.makespan_s)
    whole, planned, model = cut_of(4, batch_of(5, 20, 3, 7))
    assert whole.ended.all()
    assert whole.rollout.makespan_s == pytest.approx(rollout(planned, model).makespan_s)
    assert cut.rollout.output_tokens == 22


def test_a_request_that_waits_has_no_tokens() -> None:
    cut, *_ = cut_of(2, batch_of(5, 9, 4, 30), max_num_seqs=2)
    assert cut.ended.tolist() == [True, True, False, False] or cut.ended.tolist() == [True, False, True, False]
    assert cut.generated[3] == 0


def test_replicas_are_cut_at_the_same_moment() -> None:
    cut, planned, model = cut_of(3, batch_of(5, 20, 4, 30), data_parallel_size=2)
    assert cut.ended.tolist() == [True, True, True, False]
    ends = clocks([planned], model)[0]
    moment = ends[0][-1]  # the first replica ends with its response of 20
    assert cut.rollout.makespan_s == pytest.approx(moment)
    assert 19 <= cut.generated[3] <= 22


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 39), st.booleans())
def test_the_tokens_of_all_requests_add_up(seed: int, wanted: int, starved: bool) -> None:
    batch = Workload(10, 4, Fixed(40), LogNormal(100, 1.0, 600), seed).batch()
    limits = {"num_gpu_blocks": 60} if starved else {}
    cut, planned, model = cut_of(wanted, batch, max_num_seqs=16, **limits)
    (plan,), (ends,) = planned, clocks([planned], model)[0]
    rows = int(np.searchsorted(ends, cut.rollout.makespan_s * (1 + 1e-9), side="right"))
    made = int((plan.steps * plan.sampled_requests)[:rows].sum())
    assert cut.ended.sum() >= wanted
    assert (cut.generated[cut.ended] == batch.responses[cut.ended]).all()
    assert (cut.generated[~cut.ended] < batch.responses[~cut.ended]).all()
    if plan.num_preemptions == 0:
        assert cut.generated.sum() == made
    assert cut.generated.sum() <= made


@pytest.mark.vllm
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", [pytest.param(n, marks=() if n < 6 else pytest.mark.slow) for n in range(12)])
def test_a_cut_is_where_vllms_scheduler_is_when_as_many_have_ended(seed: int, async_scheduling: bool) -> None:
    import vllm_oracle

    batch = Workload(9, 4, LogNormal(60, 0.8, 200), LogNormal(80, 1.0, 300), seed).batch()
    pool = 10**4 if seed % 3 else 70
    setup = engine(batch, max_num_seqs=14, num_gpu_blocks=pool, async_scheduling=async_scheduling)
    served: list[list[int]] = []
    vllm_oracle.run(*batch, pool, setup.limits, served=served)
    made = np.zeros((len(served) + 1, len(batch.prompts)), dtype=np.int64)
    for step, requests in enumerate(served):
        made[step + 1] = made[step]
        made[step + 1, requests] += 1
    planned = schedules([batch], setup.memory().kv, setup.limits)
    for wanted in (1, 9, 20, 36):
        ended_at = int(np.argmax((made == batch.responses).sum(axis=1) >= wanted))
        cut = cut_after(wanted, [batch], planned, setup.step_model(PROFILE))
        np.testing.assert_array_equal(cut.ended, made[ended_at] == batch.responses)
        if planned[0].num_preemptions == 0:
            np.testing.assert_array_equal(cut.generated, made[ended_at])
        assert (cut.generated <= made[ended_at]).all()


@pytest.mark.parametrize("model", ["google/gemma-3-12b-it", "Qwen/Qwen3-0.6B"])
def test_a_row_is_cut_between_its_steps(model: str) -> None:
    batch = Batch(np.full(2, 1500), np.array([400, 900]), np.arange(2))
    setup = replace(engine(batch, data_parallel_size=2), model=model)
    planned, kv = [], setup.memory().kv
    for alone in batch.split(2):
        planned += schedules([alone], kv, setup.limits)
    step_model = setup.step_model(PROFILE)
    cut = cut_after(1, batch.split(2), planned, step_model)
    assert cut.generated[0] == 400
    assert 395 <= cut.generated[1] <= 400
    first = rollout(planned[:1], step_model).makespan_s
    assert cut.rollout.makespan_s == pytest.approx(first, rel=0.01)
    assert cut.rollout.output_tokens == cut.generated.sum()


def test_the_bias_of_what_is_kept() -> None:
    lengths = np.array([1, 2, 3, 10, 4, 4, 4, 4, 4, 4])
    lost = bias(lengths, lengths < 10)
    assert lost.mean_shift == pytest.approx(30 / 9 / 4 - 1)
    assert lost.long_lost == 1
    assert bias(lengths, lengths > 0) == type(lost)(0.0, 0.0)


def test_drawn_prompts_are_the_batchs_own() -> None:
    batch = Workload(5, 3, LogNormal(50, 1.0, 200), LogNormal(50, 1.0, 200)).batch()
    more = drawn(batch, 32, seed=1)
    assert np.bincount(more.prompt_ids).tolist() == [3] * 10 + [2]
    first = {(*batch.prompts[batch.prompt_ids == i], *batch.responses[batch.prompt_ids == i]) for i in range(5)}
    assert {(*more.prompts[more.prompt_ids == i], *more.responses[more.prompt_ids == i]) for i in range(5)} == first
    both = beside(batch, drawn(batch, 4, seed=1))
    assert both.prompt_ids.tolist() == [*batch.prompt_ids, 5, 5, 5, 6]
    assert len(drawn(batch, 0, seed=0).prompts) == 0


def test_partial_rollouts_of_one_length_are_whole_rollouts() -> None:
    batch = Workload(8, 4, Fixed(40), Fixed(100)).batch()
    setup = engine(batch)
    kv, model = setup.memory().kv, setup.step_model(PROFILE)
    steps = partial_rollouts(batch, 0.0, setup, kv, model)
    assert steps.seconds == pytest.approx(rollout(schedules([batch], kv, setup.limits), model).makespan_s, rel=1e-3)
    assert (steps.old_share, steps.age, steps.most_age) == (0, 0, 0)
    assert (steps.lag, steps.most_lag) == (1, 1)  # the trainer has gone one version ahead


def test_partial_rollouts_make_as_many_tokens_a_step_and_some_are_old() -> None:
    batch = Workload(30, 8, Fixed(40), LogNormal(300, 1.0, 3000)).batch()
    setup = engine(batch, data_parallel_size=2)
    kv, model = setup.memory().kv, setup.step_model(PROFILE)
    whole = rollout(schedules(batch.split(2), kv, setup.limits), model).makespan_s
    few, many = (partial_rollouts(batch, share, setup, kv, model) for share in (0.05, 0.5))
    assert few.seconds < whole
    assert 0 < few.old_share < many.old_share < 1
    assert 1 <= few.age <= few.most_age
    assert few.lag == pytest.approx(1 + few.old_share * few.age)
    assert few.most_lag == 1 + few.most_age
    assert few.rollout.output_tokens == pytest.approx(batch.responses.sum(), rel=0.2)


def test_a_request_that_goes_on_computes_its_tokens_again() -> None:
    batch = batch_of(*[10] * 9, 400)
    setup = engine(batch)
    kv, model = setup.memory().kv, setup.step_model(PROFILE)
    steps = partial_rollouts(batch, 0.1, setup, kv, model)
    shorter = replace(setup.limits, max_model_len=None)
    assert shorter.holding(batch.longest) == setup.limits  # no request outgrew the longest
    assert steps.old_share > 0.3
