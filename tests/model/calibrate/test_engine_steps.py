"""Windows of measured steps: each holds the steps that ran in it, and costs what those cost."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import H200, PRIOR, batch_fields, nature, record, trace_of

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.calibrate.fit import FEWEST_STEPS, FRONT_END_WINDOW_S, WINDOW_S, overlap, read_traces, windows
from fp8plan.model.cost.base import Array, Cost, StepBatch
from fp8plan.model.cost.host import start_cost
from fp8plan.model.cost.step import StepModel
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import find_precision
from fp8plan.model.profile.profile import Profile
from fp8plan.model.rollout import rollout
from fp8plan.model.schedule.scheduler import Schedule, schedule
from fp8plan.model.validate.records import Record
from fp8plan.model.workload import Batch

# Long prompts are prefilled in chunks that give no token, few slots make requests wait, and a small pool preempts.
TIGHT = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "measured_kv_cache_tokens": 1024, "max_model_len": 700}


def planned_of(run: Record) -> Schedule:
    return schedule(run.batch, run.fields["measured_kv_cache_tokens"] // run.limits.block_size - 1, run.limits)


def trace(plan: Schedule, seconds: Array, **more: Any) -> dict[str, Any]:
    """The trace of an engine whose steps take `seconds`, which has one value for each row of the plan."""
    each = np.repeat(np.arange(len(plan.steps)), plan.steps)
    ends, given = np.cumsum(seconds[each]), plan.sampled_requests[each]
    return {"core_s": ends[given > 0].tolist(), "generation_tokens": given[given > 0].tolist()} | more


# Which steps a window holds

requests = st.tuples(st.integers(1, 150), st.integers(1, 40))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    prompts, responses = np.array(draw(st.lists(requests, min_size=1, max_size=8))).T
    most = draw(st.integers(1, 4))
    limits = EngineLimits(
        max_num_seqs=most,
        max_num_batched_tokens=draw(st.integers(most, 64)),
        async_scheduling=draw(st.booleans()),
        enable_prefix_caching=draw(st.booleans()),
    )
    return schedule(Batch(prompts, responses, np.arange(prompts.size)), draw(st.integers(12, 40)), limits)


@given(schedules(), st.lists(st.floats(0, 1), max_size=6))
def test_every_step_lies_in_one_window(plan: Schedule, cuts: list[float]) -> None:
    total = int((plan.steps * plan.sampled_requests).sum())
    edges = np.unique([0, *np.rint(np.array(cuts) * total), total])
    weights = overlap(plan, edges)
    assert weights.shape == (len(edges) - 1, len(plan.steps))
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=0), plan.steps)
    np.testing.assert_allclose(weights @ plan.sampled_requests, np.diff(edges), atol=1e-9)


@given(schedules(), st.floats(0, 1), st.floats(0, 1))
def test_two_windows_are_as_one_over_both(plan: Schedule, a: float, b: float) -> None:
    total = int((plan.steps * plan.sampled_requests).sum())
    low, high = sorted(np.rint(np.array([a, b]) * total))
    edges = np.unique([0, low, high, total])
    fine, whole = overlap(plan, edges), overlap(plan, np.array([0, total]))
    np.testing.assert_allclose(fine.sum(axis=0), whole[0])
    assert (np.diff([np.flatnonzero(row)[0] for row in fine]) >= 0).all()  # in the order of time


def test_a_step_that_gives_no_token_belongs_to_the_next_token() -> None:
    """One request at a time; the second is prefilled in three chunks that give nothing, then one that does."""
    limits = EngineLimits(max_num_seqs=1, max_num_batched_tokens=32, enable_prefix_caching=False)
    plan = schedule(Batch(np.array([20, 100]), np.array([5, 4]), np.arange(2)), 20, limits)
    silent = (plan.sampled_requests == 0) & (plan.prefill_tokens > 0)
    assert plan.steps[silent].sum() == 3
    first, second = overlap(plan, np.array([0, 5, 9]))
    assert first[silent].sum() == 0
    assert second[silent].sum() == 3
    early, late = overlap(plan, np.array([0, 6, 9]))  # an edge after the token that they lead to
    assert (early[silent].sum(), late[silent].sum()) == (3, 0)


def test_a_trace_without_its_last_line_still_holds_every_step() -> None:
    plan = schedule(Batch(np.array([16]), np.array([100]), np.arange(1)), 20, EngineLimits())
    weights = overlap(plan, np.array([0, 45, 90]))
    np.testing.assert_allclose(weights.sum(axis=0), plan.steps)
    np.testing.assert_allclose(weights @ plan.sampled_requests, [50, 50])


# How long they took


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([{}, TIGHT]))
def test_known_step_times_are_found_again(tmp_path_factory: Any, seed: int, limits: dict[str, Any]) -> None:
    run = record(tmp_path_factory.mktemp("run"), batch_fields(seed % 100, **limits))
    plan = planned_of(run)
    seconds = np.random.default_rng(seed).uniform(1e-3, 2e-2, len(plan.steps))
    found = windows(run, trace(plan, seconds))
    np.testing.assert_allclose(found.weights @ seconds, found.seconds)
    assert found.seconds.size > 1
    assert (found.seconds[:-1] >= WINDOW_S).all()
    assert (found.weights[:-1].sum(axis=1) >= FEWEST_STEPS).all()
    assert found.engine == "fp8plan/dense-50m bf16"


def test_the_pool_of_a_tight_run_preempts_and_prefills_in_silence(tmp_path: Path) -> None:
    """So that the test above has what it says."""
    plan = planned_of(record(tmp_path, batch_fields(0, **TIGHT)))
    assert plan.num_preemptions > 0
    assert ((plan.sampled_requests == 0) & (plan.prefill_tokens > 0)).any()


def test_the_engines_own_clock_goes_first(tmp_path: Path) -> None:
    run = record(tmp_path, batch_fields(1))
    plan = planned_of(run)
    seconds = np.full(len(plan.steps), 0.02)
    own = trace(plan, seconds)
    late = [x + 0.3 for x in own["core_s"]]
    both, front = windows(run, own | {"t_s": late}), windows(run, {**own, "core_s": None, "t_s": late})
    assert both.seconds.sum() == pytest.approx(own["core_s"][-1])
    assert front.seconds.sum() == pytest.approx(late[-1])
    assert both.seconds.size > front.seconds.size  # whose windows must be long
    assert front.seconds.size == 1 or front.seconds[0] >= FRONT_END_WINDOW_S


def test_steps_without_their_pool_are_refused(tmp_path: Path) -> None:
    run = record(tmp_path, batch_fields(1, measured_kv_cache_tokens=None))
    with pytest.raises(ConfigError, match="line 1: measured_kv_cache_tokens is missing"):
        windows(run, {"core_s": [1.0], "generation_tokens": [1]})


def test_traces_are_found_by_key_in_several_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with gzip.open(tmp_path / f"{name}.gz", "wt") as file:
            file.write("\n".join(json.dumps({"key": f"{name}{i}", "core_s": [i]}) for i in range(2)))
    found = read_traces(sorted(tmp_path.glob("*.gz")))
    assert {key: row["core_s"] for key, row in found.items()} == {"a0": [0], "a1": [1], "b0": [0], "b1": [1]}


# What they cost


@pytest.mark.parametrize("limits", [{}, TIGHT])
def test_windows_cost_what_the_gpu_takes_and_the_start_counts_once(tmp_path: Path, limits: dict[str, Any]) -> None:
    """As `nature` times single steps, less what a row of alike steps is off by taking their mean KV."""
    gpu, run = nature(3), record(tmp_path, batch_fields(2, longest=900 if not limits else 300, **limits))
    found = windows(run, trace_of(run, gpu))
    assert found.seconds.size > 1
    np.testing.assert_allclose(found.cost(gpu).seconds, found.seconds, rtol=2e-3)
    no_start = found.weights @ run.setup.step_model(gpu).cost(found.batch).seconds
    first = np.eye(1, found.seconds.size)[0]
    start = start_cost(24, int(run.batch.prompts.sum()), gpu).seconds[0]
    np.testing.assert_allclose(found.cost(gpu).seconds - no_start, start * first, atol=1e-9)


def test_windows_add_up_to_the_makespan_of_the_rollout(tmp_path: Path) -> None:
    run = record(tmp_path, batch_fields(2))
    found = windows(run, trace_of(run, nature(3)))
    makespan = rollout([planned_of(run)], run.setup.step_model(PRIOR)).makespan_s
    assert found.cost(PRIOR).seconds.sum() == pytest.approx(makespan)


def slopes(cost: Any, profile: Profile, names: list[str]) -> dict[str, Array]:
    """d seconds / d log(coefficient) by central differences, of what `cost` gives for a profile."""
    found, step = {}, 1e-5
    for name in names:
        up, down = (
            replace(profile, coefficients=profile.coefficients | {name: profile.coefficients[name] * np.exp(x)})
            for x in (step, -step)
        )
        found[name] = (cost(up).seconds - cost(down).seconds) / (2 * step)
    return found


def assert_partials(cost: Any, profile: Profile) -> None:
    here: Cost = cost(profile)
    expected = slopes(cost, profile, list(here.partials))
    for name, partial in here.partials.items():
        np.testing.assert_allclose(partial, expected[name], rtol=1e-4, atol=1e-7 * here.seconds.max(), err_msg=name)


@pytest.mark.parametrize("loop_s", [None, 5e-4])
def test_the_partials_of_windows_are_the_derivatives(tmp_path: Path, loop_s: float | None) -> None:
    run = record(tmp_path, batch_fields(2, precision="fp8_block+fp8_kv", host_loop_s=loop_s, **TIGHT))
    found = windows(run, trace_of(run, nature(3)))
    assert_partials(found.cost, nature(3, scale=0.5))


def steps(*rows: tuple[int, int, int]) -> StepBatch:
    """(decode requests, context of each, tokens of one prefill chunk) of each step."""
    decode, context, new = np.array(rows, dtype=np.int64).T
    chunks = np.minimum(new, 1)
    return StepBatch(decode, decode * context, new, chunks, new, new * (new + 1) // 2, decode + chunks)


HOST_BOUND, GPU_BOUND = (1, 100, 0), (512, 3000, 0)
MIXED = steps(HOST_BOUND, GPU_BOUND, (0, 1, 700), (64, 1000, 4000))


@pytest.mark.parametrize("name", ["bf16", "fp8_block", "fp8_kv", "fp8_block+fp8_kv"])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"async_scheduling": False}, marks=pytest.mark.slow), {"enforce_eager": True}]
)
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B"])
def test_a_steps_cost_is_its_seconds_with_their_derivatives(model: str, options: dict[str, bool], name: str) -> None:
    shape, limits = ModelShape.from_hf(model), EngineLimits(**options)

    def cost(profile: Profile) -> Cost:
        return StepModel(shape, H200, find_precision(name), limits, profile).cost(MIXED)

    profile = nature(5, scale=0.3)
    np.testing.assert_array_equal(
        cost(profile).seconds, StepModel(shape, H200, find_precision(name), limits, profile).seconds(MIXED)
    )
    assert_partials(cost, profile)


def test_a_step_depends_on_the_side_it_waits_for() -> None:
    slow_host = replace(PRIOR, coefficients=PRIOR.coefficients | {"host.step_seconds": 0.01})
    cost = StepModel(
        ModelShape.from_hf("Qwen/Qwen3-0.6B"), H200, find_precision("bf16"), EngineLimits(), slow_host
    ).cost(steps(HOST_BOUND, GPU_BOUND))
    host = sum(np.abs(v) for x, v in cost.partials.items() if x.startswith("host."))
    gpu = sum(np.abs(v) for x, v in cost.partials.items() if not x.startswith("host."))
    assert gpu[0] < 0.01 * host[0]
    assert host[1] < 0.01 * gpu[1]


def test_starting_costs_once_and_by_request_and_by_prompt_token() -> None:
    names = ("host.start_seconds", "host.arrival_seconds", "host.prompt_token_seconds")
    values = dict(zip(names, (0.5, 0.01, 1e-4), strict=True))
    profile = replace(PRIOR, coefficients=PRIOR.coefficients | values)
    cost = start_cost(7, 300, profile)
    assert cost.seconds == pytest.approx([0.5 + 0.07 + 0.03])
    partials = {name: float(values[0]) for name, values in cost.partials.items()}
    assert partials.pop("host.pace") == pytest.approx(0.6)
    assert partials == pytest.approx(dict(zip(names, (0.5, 0.07, 0.03), strict=True)))
    assert_partials(lambda x: start_cost(7, 300, x), profile)
