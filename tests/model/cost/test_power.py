"""The clock that the power limit leaves: laws of one step, and what was measured on an H200."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.model.cost.base import StepBatch
from fp8plan.model.cost.bounds import bytes_bound, flops_bound, flops_by_kind
from fp8plan.model.cost.power import EXPERTS, IDLE, MATH, MEMORY, RECURRENT, Load, power_limit, uses
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.profile.library import load_profile, profiles_path
from fp8plan.model.setup import EngineSetup
from fp8plan.model.validate.records import read_records

H200 = find_gpu("h200")
PROFILE = load_profile(H200, "0.26.0")[0]


def step_model(precision: str = "bf16", watts: float | None = 700.0, name: str = "Qwen/Qwen3-8B") -> StepModel:
    model = EngineSetup(name, "h200", precision, EngineLimits(max_model_len=8192)).step_model(PROFILE)
    return replace(model, gpu=replace(H200, power_limit_watts=watts))


def decode(*requests: int, context: int = 300) -> StepBatch:
    count = np.array(requests, dtype=np.float64)
    nothing = np.zeros(count.size)
    return StepBatch(count, count * context, nothing, nothing, nothing, nothing, count)


@given(
    st.lists(st.tuples(st.floats(1e-4, 0.1), st.floats(0, 1), st.floats(0, 0.5)), min_size=1, max_size=4),
    st.floats(250, 2000),
)
def test_a_step_at_the_limit_draws_the_limit(steps: list[tuple[float, float, float]], watts: float) -> None:
    engine, batch = step_model(watts=watts), decode(*range(64, 64 + len(steps)))
    seconds = np.array([s for s, *_ in steps])
    sm, streamed = (seconds * [x[part] for x in steps] for part in (1, 2))
    load = Load(seconds, sm, streamed, recurrent=0.3 * sm)
    limit = power_limit(engine, batch, load, PROFILE)
    joules = sum(PROFILE.coefficient(name) * x for name, x in uses(engine, batch, load).items())
    free = PROFILE.coefficient(IDLE) + joules / seconds
    if limit is None:
        assert (free <= watts * (1 + 1e-9)).all()
        return
    longer = limit.of(seconds, np.clip(sm, 1e-3 * seconds, seconds))
    drawn = PROFILE.coefficient(IDLE) * limit.clock + joules / longer
    assert ((limit.clock == 1) == (free <= watts)).all()
    held = (limit.clock < 1) & (limit.clock > 0.4)
    np.testing.assert_allclose(drawn[held], watts, rtol=1e-6)
    assert (longer >= seconds).all()
    assert ((limit.slope > 0) & (limit.slope <= 1)).all()


def test_without_a_limit_steps_are_at_their_highest_clock() -> None:
    batch = decode(2, 256, 512, context=100)
    free, held = step_model(watts=None), step_model(watts=650.0)
    assert free.timed(batch).limit is None
    assert (held.seconds(batch) > free.seconds(batch)).tolist() == [False, True, True]
    np.testing.assert_allclose(held.cost(batch).seconds, held.seconds(batch))
    np.testing.assert_allclose(sum(held.breakdown(batch).values()), held.seconds(batch))


def test_fp8_kv_speeds_up_what_is_not_attention() -> None:
    """Half the bytes leave watts for the SMs: 512 short requests on an H200 were 1.03x as fast (profile's power/)."""
    batch = decode(512, context=330)
    bf16, fp8 = (step_model(precision).breakdown(batch) for precision in ("bf16", "fp8_kv"))
    free = (step_model(precision, watts=None).breakdown(batch) for precision in ("bf16", "fp8_kv"))
    assert fp8["gemm"] < 0.98 * bf16["gemm"]
    np.testing.assert_allclose(*(x["gemm"] for x in free))
    assert sum(fp8.values()) < sum(bf16.values())


@pytest.mark.parametrize(("model_name", "limit"), [("Qwen/Qwen3-8B", 550.0), ("Qwen/Qwen3-30B-A3B", 450.0)])
@pytest.mark.parametrize("precision", ["bf16", "fp8_block+fp8_kv"])
def test_partials_by_finite_differences(precision: str, model_name: str, limit: float) -> None:
    model, batch, small = step_model(precision, limit, model_name), decode(200, 512), 1e-6
    cost = model.cost(batch)
    assert model.timed(batch).limit is not None
    watts = (IDLE, MEMORY, RECURRENT, *MATH.values(), *EXPERTS.values())
    dtype = "bf16" if precision == "bf16" else "fp8"
    assert (np.abs(cost.partials[EXPERTS[f"{dtype}_experts"]]).max() > 0) == ("A3B" in model_name)
    for name in ("gemm.bf16.compute_efficiency", "overhead.layer_seconds", *watts):
        value = PROFILE.coefficients[name]
        sides = [
            replace(model, profile=replace(PROFILE, coefficients=PROFILE.coefficients | {name: value * np.exp(s)}))
            for s in (small, -small)
        ]
        slope = (sides[0].seconds(batch) - sides[1].seconds(batch)) / (2 * small)
        assert (np.abs(cost.partials[name] - slope) < 0.04 * cost.seconds).all()  # the share of SMs moves, too


def test_bounds_by_kind_add_up() -> None:
    for precision in ("bf16", "fp8_block", "fp8_kv", "fp8_block+fp8_kv"):
        model, batch = step_model(precision, name="Qwen/Qwen3-30B-A3B"), decode(64, 256)
        found = flops_by_kind(model, batch)
        np.testing.assert_allclose(sum(found.values()), flops_bound(model, batch))
        assert (found["fp8"] > 0).all() == (precision != "bf16")
        assert (found["fp8_experts"] > 0).all() == ("fp8_block" in precision)
        assert (found["bf16_experts"] > 0).all() == ("fp8_block" not in precision)


def test_prompts_run_at_the_clock_that_was_measured() -> None:
    """Steps of 16,000 prompt tokens on an H200, by families/held_out.jsonl, which no fit has seen.

    The worst is Moonlight in BF16: 1,650 MHz, where 1,847 are predicted.
    """
    tokens, chunks, nothing = np.array([16000.0]), np.array([8.0]), np.zeros(1)
    batch = StepBatch(nothing, nothing, tokens, chunks, tokens, tokens * 2001 / 2, chunks)
    errors = []
    for record in read_records(profiles_path() / "h200_sxm/vllm-0.26.0/families/held_out.jsonl"):
        if record.fields["workload"] == "prefill" and record.fields["tensor_parallel"] == 1:
            limit = record.setup.step_model(PROFILE).timed(batch).limit
            clock = 1.0 if limit is None else limit.clock.item()
            errors.append(clock * 1980 / record.fields["sm_mhz"] - 1)
    assert len(errors) > 10
    assert np.median(np.abs(errors)) < 0.06
    assert np.max(np.abs(errors)) < 0.13


def test_activations_that_small_kernels_move_are_bytes() -> None:
    """By hand: a layer of Qwen3-8B reads and writes tokens of 4,096 elements in BF16 many times, its caches once."""
    model, nothing = step_model(), np.zeros(1)
    one, two = (
        StepBatch(nothing, nothing, tokens, np.ones(1), tokens, tokens * tokens / 2, np.ones(1))
        for tokens in (np.array([8192.0]), np.array([16384.0]))
    )
    streamed = (model.load(two).streamed - model.load(one).streamed) * H200.memory_bandwidth / 8192
    per_layer = streamed.item() / (36 * 2 * 4096)  # passes over the hidden state
    assert 10 < per_layer < 40
    assert model.load(one).seconds.item() > model.load(one).sm.item() > 0
    used = uses(model, one, model.load(one))
    assert used[MEMORY] > bytes_bound(model, one)
    assert set(used) == {MEMORY, RECURRENT, *MATH.values(), *EXPERTS.values()}
    assert (used[MATH["bf16"]] == flops_by_kind(model, one)["bf16"]).all()


def test_a_profile_that_knows_no_experts_counts_them_as_gemms() -> None:
    model, batch = step_model(watts=550.0, name="Qwen/Qwen3-30B-A3B"), decode(512)
    kept = {name: value for name, value in PROFILE.coefficients.items() if name not in EXPERTS.values()}
    without = replace(model, profile=replace(PROFILE, coefficients=kept, log_covariance={}))
    as_gemms = {name: PROFILE.coefficients[MATH[kind.removesuffix("_experts")]] for kind, name in EXPERTS.items()}
    alike = replace(model, profile=replace(PROFILE, coefficients=kept | as_gemms, log_covariance={}))
    np.testing.assert_allclose(without.seconds(batch), alike.seconds(batch))
    assert (model.seconds(batch) > without.seconds(batch)).all()
