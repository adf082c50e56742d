"""Timings of single kernels as observations: they must say what the step model says of the same work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.batch import StepBatch
from fp8plan.model.calibrate import Observations
from fp8plan.model.hardware import gpu
from fp8plan.model.kernel_rows import observe
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import precision
from fp8plan.model.profile import datasheet_profile
from fp8plan.model.step import StepModel

H200 = gpu("h200")
PROFILE = datasheet_profile(H200)
SHAPE = ModelShape.from_hf("Qwen/Qwen3-30B-A3B")
HEADS = {"heads": SHAPE.num_attention_heads, "kv_heads": SHAPE.num_key_value_heads, "head_dim": SHAPE.head_dim}
assert SHAPE.experts is not None
EXPERTS = {
    "experts": SHAPE.experts.num_experts,
    "top_k": SHAPE.experts.experts_per_token,
    "hidden": SHAPE.hidden_size,
    "inner": SHAPE.experts.intermediate_size,
}


def one(kernel: str, **quantities: Any) -> Observations:
    (observation,) = observe(pd.DataFrame({"kernel": kernel, "seconds": 1.0, **quantities}), H200)
    return observation


def step(name: str, part: str, **work: float) -> float:
    """Seconds of one part of a step of Qwen3-30B-A3B."""
    none = dict.fromkeys(StepBatch.__slots__, 0.0)
    batch = StepBatch(**{field: np.array([value]) for field, value in (none | work).items()})
    limits = EngineLimits.for_gpu(H200)
    return float(StepModel(SHAPE, H200, precision(name), limits, PROFILE).breakdown(batch)[part][0])


@pytest.mark.parametrize(("kv", "name"), [("bf16", "bf16"), ("fp8", "fp8_kv")])
def test_attention_costs_what_a_layer_of_the_step_costs(kv: str, name: str) -> None:
    decode = one(f"attention_decode.{kv}", batch=[64, 8], context=[1000, 3000], **HEADS).predict(PROFILE).seconds
    for seconds, (batch, context) in zip(decode, ((64, 1000), (8, 3000)), strict=True):
        whole = step(name, "attention", decode_requests=batch, decode_kv_tokens=batch * context)
        assert seconds == pytest.approx(whole / SHAPE.num_layers)
    (prefill,) = (
        one(f"attention_prefill.{kv}", chunks=[2], chunk=[512], context=[100], **HEADS).predict(PROFILE).seconds
    )
    pairs = 2 * sum(100 + i for i in range(1, 513))  # each token attends to the context, and up to itself
    work = {"prefill_tokens": 1024, "prefill_requests": 2, "prefill_kv_tokens": 2 * 612, "prefill_pairs": pairs}
    assert prefill == pytest.approx(step(name, "attention", **work) / SHAPE.num_layers)


@pytest.mark.parametrize("dtype", ["bf16", "fp8_block"])
def test_linears_and_experts_cost_what_those_of_the_step_cost(dtype: str) -> None:
    m = 64  # a captured CUDA graph, so nothing is padded
    linears = [x for x in SHAPE.linears() if x.quantised and x.name != "lm_head"]
    kernel = "gemm.bf16" if dtype == "bf16" else "linear.fp8_block"
    timed = one(kernel, m=[m] * len(linears), n=[x.n for x in linears], k=[x.k for x in linears])
    router = next(x for x in SHAPE.linears() if x.name == "router")
    seconds = float(timed.predict(PROFILE).seconds @ np.array([x.layers for x in linears]))
    seconds += float(one("gemm.bf16", m=[m], n=[router.n], k=[router.k]).predict(PROFILE).seconds[0]) * router.layers
    parts = ("gemm",) if dtype == "bf16" else ("gemm", "quantise")
    assert seconds == pytest.approx(sum(step(dtype, part, decode_requests=m, decode_kv_tokens=m) for part in parts))
    (moe,) = one(f"moe.{dtype}", tokens=[m], **EXPERTS).predict(PROFILE).seconds
    assert moe * SHAPE.num_layers == pytest.approx(step(dtype, "moe", decode_requests=m, decode_kv_tokens=m))


KERNELS: list[tuple[str, dict[str, Any]]] = [
    ("gemm.bf16", {"m": [1, 300, 5], "n": [4096, 1024, 4096], "k": [2048, 4096, 2048]}),
    ("linear.fp8_block", {"m": [1, 300, 5], "n": [4096, 1024, 4096], "k": [2048, 4096, 2048]}),
    ("attention_decode.fp8", {"batch": [1, 64, 8], "context": [100, 900, 5000], **HEADS}),
    ("attention_prefill.bf16", {"chunks": [1, 4, 2], "chunk": [100, 900, 5000], "context": [0, 0, 7], **HEADS}),
    ("moe.fp8_block", {"tokens": [1, 64, 2048], **EXPERTS}),
    ("all_reduce", {"gpus": [2, 4, 2], "bytes": [2048, 65536, 1 << 20]}),
]


@pytest.mark.parametrize(("kernel", "quantities"), KERNELS)
def test_partials_are_the_derivatives_by_log_coefficient(kernel: str, quantities: dict[str, Any]) -> None:
    observation = one(kernel, **quantities)
    cost, step = observation.predict(PROFILE), 1e-6
    assert cost.partials
    for name, partial in cost.partials.items():
        moved = replace(PROFILE, coefficients=PROFILE.coefficients | {name: PROFILE.coefficients[name] * np.exp(step)})
        slope = (observation.predict(moved).seconds - cost.seconds) / step
        assert slope == pytest.approx(partial, rel=1e-3, abs=1e-5 * cost.seconds.max())


def test_rows_of_one_shape_are_one_group_in_the_order_of_the_rows() -> None:
    observation = one(*KERNELS[0][:1], **KERNELS[0][1])
    assert observation.groups.tolist() == [0, 1, 0]
    alone = [one("gemm.bf16", m=[m], n=[n], k=[k]) for m, n, k in zip(*KERNELS[0][1].values(), strict=True)]
    assert observation.predict(PROFILE).seconds.tolist() == [x.predict(PROFILE).seconds[0] for x in alone]


def test_a_kernel_without_a_cost_function_is_named() -> None:
    for kernel in ("kv_write.bf16", "gemm.int4"):
        with pytest.raises(ConfigError, match=kernel):
            one(kernel, m=[1])


def test_quantisation_costs_what_a_step_s_does() -> None:
    """A linear layer is its GEMM and the quantisation of its input, so the difference is the quantisation alone."""
    sizes = {"m": [4, 512], "n": 4096, "k": 2048}
    whole, gemm = (one(f"{name}.fp8_block", **sizes).predict(PROFILE).seconds for name in ("linear", "gemm"))
    alone = one("quantise", m=[4, 512], k=2048).predict(PROFILE).seconds
    np.testing.assert_allclose(alone, whole - gemm)


def test_experts_that_were_really_hit_are_what_is_read() -> None:
    tokens = [64, 64, 64]
    even = one("moe.bf16", tokens=tokens, **EXPERTS).predict(PROFILE).seconds
    hit = one("moe.bf16", tokens=tokens, hit=[20.0, 60.0, 126.0], **EXPERTS).predict(PROFILE).seconds
    assert hit[0] < hit[1] < hit[2]
    assert hit[1] < even[0]  # 64 tokens that choose 8 of 128 at random hit 126
    assert hit[2] == pytest.approx(even[2], rel=0.01)
