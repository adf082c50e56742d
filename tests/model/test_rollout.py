"""Laws of whole rollouts: a schedule timed by the cost model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8plan.model.architecture import ModelShape
from fp8plan.model.cost.base import StepBatch
from fp8plan.model.cost.power import bytes_bound, flops_bound
from fp8plan.model.cost.step import StepModel
from fp8plan.model.distributions import Fixed, LogNormal
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.memory.kv_plan import KvPlan, plan_kv_cache
from fp8plan.model.memory.kv_specs import KvRules, LayerCache
from fp8plan.model.memory.plan import memory_plan
from fp8plan.model.plan.choice import SpeedUp, speed_up
from fp8plan.model.precision import PRESETS, find_precision
from fp8plan.model.profile.library import load_profile, profiles_path
from fp8plan.model.profile.profile import SHARED_VARIANCE, Profile
from fp8plan.model.rollout import Rollout, rollout, schedules, step_batch
from fp8plan.model.schedule.scheduler import schedule
from fp8plan.model.validate.records import Record, read_records
from fp8plan.model.validate.validate import Simulated, simulated
from fp8plan.model.workload import Batch, Workload

H200 = find_gpu("h200")
MODELS = ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.2-1B")
LIMITS = EngineLimits()
AMPLE = 10**9


def step_model(name: str = MODELS[0], preset: str = "bf16", limits: EngineLimits = LIMITS) -> StepModel:
    return StepModel(ModelShape.from_hf(name), H200, find_precision(preset), limits, load_profile(H200)[0])


def makespan(batch: Batch, model: StepModel, pool: int = AMPLE) -> float:
    return rollout([schedule(batch, pool, model.limits)], model).makespan_s


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    prompts, samples = int(rng.integers(1, 20)), int(rng.integers(1, 6))
    prompt_ids = np.repeat(np.arange(prompts), samples)
    lengths = rng.integers(1, 3000, prompts)
    responses = np.clip(rng.lognormal(6, 1, len(prompt_ids)), 1, 4000).astype(np.int64)
    return Batch(lengths[prompt_ids], responses, prompt_ids)


def merged(one: Batch, other: Batch) -> Batch:
    ids = np.concatenate([one.prompt_ids, other.prompt_ids + one.prompt_ids.max() + 1])
    return Batch(np.concatenate([one.prompts, other.prompts]), np.concatenate([one.responses, other.responses]), ids)


@settings(max_examples=25, deadline=None)
@given(batches(), st.sampled_from(MODELS), st.sampled_from(list(PRESETS)))
def test_no_rollout_beats_its_bytes_or_its_flops(batch: Batch, name: str, preset: str) -> None:
    model = step_model(name, preset)
    plan = schedule(batch, AMPLE, LIMITS)
    time = rollout([plan], model).makespan_s
    work = step_batch(plan)
    assert time >= (bytes_bound(model, work) * plan.steps).sum()
    assert time >= (flops_bound(model, work) * plan.steps).sum()


@settings(max_examples=40, deadline=None)
@given(batches(), batches(), st.sampled_from(MODELS))
def test_merging_two_batches_costs_no_more_than_one_after_the_other(one: Batch, other: Batch, name: str) -> None:
    model = step_model(name)
    assert makespan(merged(one, other), model) <= makespan(one, model) + makespan(other, model)


@settings(max_examples=25, deadline=None)
@given(batches(), batches(), st.sampled_from(MODELS))
def test_merging_prefill_alone_costs_at_most_a_wave_more(one: Batch, other: Batch, name: str) -> None:
    """With one token per response nothing is saved by reading the weights once, and whole tiles and waves remain.

    Without CUDA graphs: small prefills have them, and their sum has not. The budget of tokens may leave a few for a
    step of their own, and the host launches it like any.
    """
    short = [batch._replace(responses=np.ones_like(batch.responses)) for batch in (one, other)]
    model = step_model(name, limits=EngineLimits(enforce_eager=True))
    few = StepBatch(*(np.array([x]) for x in (0, 0, 1, 1, 1, 1, 1)))
    left_over = model.seconds(few).item()
    assert makespan(merged(*short), model) <= 1.05 * sum(makespan(batch, model) for batch in short) + left_over


@settings(max_examples=40, deadline=None)
@given(batches(), batches())
def test_merging_two_batches_takes_no_more_steps_than_one_after_the_other(one: Batch, other: Batch) -> None:
    steps = [schedule(batch, AMPLE, LIMITS).num_steps for batch in (merged(one, other), one, other)]
    assert steps[0] <= steps[1] + steps[2]


@settings(max_examples=20, deadline=None)
@given(batches())
def test_the_mean_of_a_run_stands_for_its_steps(batch: Batch) -> None:
    """Nearly: attention cuts the KV of few requests in whole blocks, fewer at the start of a run than at its mean."""
    model = step_model()
    one_by_one = rollout([schedule(batch, AMPLE, LIMITS, longest_run=1)], model).makespan_s
    assert makespan(batch, model) == pytest.approx(one_by_one, rel=4e-3)


@settings(max_examples=20, deadline=None)
@given(batches(), st.integers(1, 6))
def test_replicas_share_the_work(batch: Batch, replicas: int) -> None:
    model = step_model()
    parts = [schedule(part, AMPLE, LIMITS) for part in batch.split(replicas)]
    together = rollout(parts, model)
    assert together.output_tokens == batch.responses.sum()
    assert together.makespan_s == max(rollout([part], model).makespan_s for part in parts)


def test_a_starved_pool_costs_time_and_recomputation() -> None:
    batch = Workload(32, 16, Fixed(500), LogNormal(1500, 0.8, 6000)).batch()
    model = step_model()
    ample, starved = (rollout([schedule(batch, pool, LIMITS)], model) for pool in (AMPLE, 12_000))
    assert ample.preemptions == ample.recomputed_tokens == 0
    assert starved.preemptions > 10
    assert starved.recomputed_tokens > 0
    assert starved.makespan_s > ample.makespan_s
    assert starved.timeline.used_blocks.max() <= 12_000


def test_tail_fraction() -> None:
    model = step_model()
    level = Batch(np.full(64, 100), np.full(64, 400), np.arange(64))
    assert rollout([schedule(level, AMPLE, LIMITS)], model).tail_fraction == 0
    one_long = level._replace(responses=np.array([400] * 63 + [4000]))
    assert rollout([schedule(one_long, AMPLE, LIMITS)], model).tail_fraction > 0.8


def test_the_interval_holds_the_makespan_and_the_timeline_ends_with_it() -> None:
    batch = Workload(8, 4, Fixed(200), LogNormal(600, 0.8, 2000)).batch()
    result = rollout([schedule(batch, AMPLE, LIMITS)], step_model())
    assert result.makespan_low_s < result.makespan_s < result.makespan_high_s
    assert result.timeline.seconds[-1] == pytest.approx(result.makespan_s)
    assert result.timeline.output_tokens.sum() == result.output_tokens == batch.responses.sum()
    assert np.all(np.diff(result.timeline.seconds) > 0)


@pytest.mark.parametrize("limits", [LIMITS, EngineLimits(async_scheduling=False)])
def test_the_gradient_of_the_makespan_is_that_of_finite_differences(limits: EngineLimits) -> None:
    batch, model = Workload(8, 4, Fixed(200), LogNormal(600, 0.8, 2000)).batch(), step_model(limits=limits)
    plans, small = [schedule(batch, AMPLE, limits)], 1e-5
    found = rollout(plans, model)
    for name, value in model.profile.coefficients.items():
        changed = replace(model.profile, coefficients=model.profile.coefficients | {name: value * (1 - small)})
        moved = rollout(plans, replace(model, profile=changed)).makespan_s
        slope = np.log(moved / found.makespan_s) / np.log1p(-small)
        assert found.log_gradient.get(name, 0.0) == pytest.approx(slope, abs=2e-3), name
    assert sum(abs(x) for x in found.log_gradient.values()) > 0.5


def interval(baseline: Rollout, other: Rollout, profile: Profile, tensor_parallel: int) -> tuple[Any, Any]:
    """The interval of a speed-up on one layout."""
    cut = (tensor_parallel, False)
    gain: SpeedUp = speed_up(*(replace(run, cut=cut) for run in (baseline, other)), profile)
    return gain.low, gain.high


def test_what_both_precisions_share_does_not_widen_their_speed_up() -> None:
    """The coefficients that move bf16 move fp8_kv too: the interval of the ratio is narrower than the makespans'."""
    batch = Workload(8, 4, Fixed(200), LogNormal(600, 0.8, 2000)).batch()
    plans = [schedule(batch, AMPLE, LIMITS)]
    bf16, fp8 = (rollout(plans, step_model(preset=name)) for name in ("bf16", "fp8_block"))
    profile = step_model().profile
    low, high = interval(bf16, fp8, profile, 1)
    speedup = bf16.makespan_s / fp8.makespan_s
    assert low < speedup < high
    assert speedup**2 == pytest.approx(low * high)
    naive = np.hypot(*(np.log(x.makespan_high_s / x.makespan_low_s) for x in (bf16, fp8)))
    assert np.log(high / low) < 0.8 * naive
    assert interval(bf16, bf16, profile, 1) == (1, 1)
    assert interval(bf16, replace(bf16), replace(profile, model_error=0), 1) == pytest.approx((1, 1))
    assert interval(bf16, fp8, profile, 8) == pytest.approx((low, high))  # both have the layout's error


@pytest.fixture(scope="module")
def measured_speedups() -> list[tuple[float, float, float, float]]:
    """(log error of bf16, log error of the other precision, log of what was measured over predicted, half-width), of
    rollouts whose host was not slow: that is an error in common.
    """
    found = []
    profile = load_profile(H200, "0.26.0")[0]
    groups: dict[str, list[tuple[Record, Simulated]]] = {}
    for record in read_records(profiles_path() / "h200_sxm/vllm-0.26.0/validation/rollouts.jsonl"):
        if (record.fields.get("host_slowdown") or 1) < 1.75:
            groups.setdefault(record.group, []).append((record, simulated(record, profile)))
    for rows in groups.values():
        bf16 = [row for row in rows if row[0].fields["precision"] == "bf16"]
        if not bf16:
            continue
        seconds, base = np.median([record.seconds for record, _ in bf16]), bf16[0][1].rollout
        for record, predicted in (row for row in rows if row[0].fields["precision"] != "bf16"):
            other = predicted.rollout
            low, high = interval(base, other, predicted.model.profile, 1)  # with the error of the record's host
            errors = np.log(base.makespan_s / seconds), np.log(other.makespan_s / record.seconds)
            found.append((*errors, errors[1] - errors[0], np.log(high / low) / 2))
    return found


def test_nine_of_ten_measured_speed_ups_lie_in_their_interval(
    measured_speedups: list[tuple[float, float, float, float]],
) -> None:
    base, other, apart, halfwidth = np.array(measured_speedups).T
    assert apart.size == 65
    assert 0.88 <= np.mean(np.abs(apart) <= halfwidth) <= 0.985  # all but one at most
    assert np.median(halfwidth) < 0.05
    assert np.corrcoef(base, other)[0, 1] == pytest.approx(SHARED_VARIANCE, abs=0.12)  # its standard error


def pool_of(blocks: int) -> KvPlan:
    return plan_kv_cache([LayerCache("full", 4096)] * 36, KvRules.of(LIMITS, 4096), num_blocks=blocks + 1)


@settings(max_examples=25, deadline=None)
@given(batches(), st.lists(st.integers(600, 20_000), min_size=2, max_size=4))
def test_a_schedule_taken_over_from_a_larger_pool_is_the_one_this_pool_has(batch: Batch, pools: list[int]) -> None:
    larger = None
    for pool in sorted(pools, reverse=True):
        (shared,) = larger = schedules([batch], pool_of(pool), LIMITS, larger)
        own = schedule(batch, pool, LIMITS)
        np.testing.assert_array_equal(shared.used_blocks, own.used_blocks)
        np.testing.assert_array_equal(shared.steps, own.steps)


def test_a_schedule_of_other_groups_is_not_taken_over() -> None:
    """FP8 doubles the blocks of a model with recurrent layers."""
    batch = Workload(2, 2, Fixed(100), Fixed(50)).batch()
    layers, rules = [LayerCache("full", 4096), LayerCache("state", state_bytes=70_000)], KvRules.of(LIMITS, 4096)
    bf16 = plan_kv_cache(layers, replace(rules, enable_prefix_caching=False), num_blocks=500)
    fp8 = plan_kv_cache([LayerCache("full", 2048), layers[1]], bf16.rules, num_blocks=500)
    limits = replace(LIMITS, enable_prefix_caching=False)
    first = schedules([batch], bf16, limits)
    assert schedules([batch], bf16, limits, first)[0] is first[0]
    other = schedules([batch], fp8, limits, first)[0]
    assert other is not first[0]
    assert [group.block_size for group in other.groups if group.kind == "full"] == [48]


def test_a_starved_schedule_is_not_made_twice_for_one_pool() -> None:
    batch = Workload(8, 8, Fixed(100), LogNormal(600, 0.8, 2000)).batch()
    (first,) = schedules([batch], pool_of(300), LIMITS)
    assert first.num_preemptions > 0
    (again,) = schedules([batch], pool_of(300), LIMITS, [first])
    assert again is first
    (other,) = schedules([batch], pool_of(299), LIMITS, [first])
    assert other is not first


def test_fp8_kv_ends_the_preemption_that_bf16_suffers() -> None:
    batch = Workload(32, 16, Fixed(1024), LogNormal(6000, 0.9, 20480)).batch()
    limits = replace(LIMITS, max_model_len=batch.longest)
    shape = ModelShape.from_hf("Qwen/Qwen3-8B")
    found = {}
    for preset in ("bf16", "fp8_kv"):
        pool = memory_plan(shape, find_precision(preset), H200, limits).usable_blocks
        found[preset] = rollout([schedule(batch, pool, limits)], step_model(preset=preset, limits=limits))
    assert found["bf16"].preemptions > found["fp8_kv"].preemptions == 0
    assert found["bf16"].makespan_s / found["fp8_kv"].makespan_s > 1.2
