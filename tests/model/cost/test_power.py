"""The clock that the power limit leaves: laws of one step, and what was measured on an H200."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8plan.model.cost.base import StepBatch
from fp8plan.model.cost.bounds import bytes_bound, flops_bound, flops_by_kind
from fp8plan.model.cost.power import EXPERTS, IDLE, MATH, MEMORY, power_limit
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.profile.library import load_profile
from fp8plan.model.setup import EngineSetup

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
    st.lists(st.tuples(st.floats(1e-4, 0.1), st.floats(0, 1)), min_size=1, max_size=4),
    st.floats(250, 2000),
)
def test_a_step_at_the_limit_draws_the_limit(steps: list[tuple[float, float]], watts: float) -> None:
    engine, batch = step_model(watts=watts), decode(*range(64, 64 + len(steps)))
    seconds = np.array([s for s, _ in steps])
    sm = seconds * [share for _, share in steps]
    limit = power_limit(engine, batch, seconds, sm, PROFILE)
    use = {MEMORY: bytes_bound(engine, batch)}
    use |= {(MATH | EXPERTS)[kind]: x for kind, x in flops_by_kind(engine, batch).items()}
    joules = sum(PROFILE.coefficient(name) * x for name, x in use.items())
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
    watts = (IDLE, MEMORY, *MATH.values(), *EXPERTS.values())
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


def test_prompts_of_experts_run_at_the_clock_that_was_measured() -> None:
    """16,000 prompt tokens of 2,000 each, on an H200: families/held_out.jsonl, which no fit has seen."""
    tokens, chunks, nothing = np.array([16000.0]), np.array([8.0]), np.zeros(1)
    batch = StepBatch(nothing, nothing, tokens, chunks, tokens, tokens * 2001 / 2, chunks)
    for name in ("fp8plan/gpt-oss-20b-bf16", "moonshotai/Moonlight-16B-A3B-Instruct"):
        limit = step_model(name=name).timed(batch).limit
        assert limit is not None
        assert limit.clock.item() * 1980 == pytest.approx(1650, rel=0.12)


def test_a_profile_that_knows_no_experts_counts_them_as_gemms() -> None:
    model, batch = step_model(watts=550.0, name="Qwen/Qwen3-30B-A3B"), decode(512)
    kept = {name: value for name, value in PROFILE.coefficients.items() if name not in EXPERTS.values()}
    without = replace(model, profile=replace(PROFILE, coefficients=kept, log_covariance={}))
    as_gemms = {name: PROFILE.coefficients[MATH[kind.removesuffix("_experts")]] for kind, name in EXPERTS.items()}
    alike = replace(model, profile=replace(PROFILE, coefficients=kept | as_gemms, log_covariance={}))
    np.testing.assert_allclose(without.seconds(batch), alike.seconds(batch))
    assert (model.seconds(batch) > without.seconds(batch)).all()
