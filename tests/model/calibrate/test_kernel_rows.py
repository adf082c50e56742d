"""Timings of single kernels as observations: they must say what the step model says of the same work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fp8plan.errors import ConfigError
from fp8plan.model.architecture import ModelShape
from fp8plan.model.calibrate.fit import Observations
from fp8plan.model.calibrate.kernel_rows import LONG_S, hull, layer_residuals, observe, read_rows
from fp8plan.model.cost.base import QUANTITIES, StepBatch
from fp8plan.model.cost.gemm import gemm_cost
from fp8plan.model.cost.power import CLOCK, MEMORY
from fp8plan.model.cost.step import StepModel
from fp8plan.model.hardware import find_gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import find_precision
from fp8plan.model.profile.library import datasheet_profile

H200 = find_gpu("h200")
_DATASHEET = datasheet_profile(H200)
# As kernels are timed: an engine's clock is lower, and so is what its memory gives.
PROFILE = replace(_DATASHEET, coefficients=_DATASHEET.coefficients | {CLOCK: 1.0, MEMORY: 1.0})
SHAPE = ModelShape.from_hf("Qwen/Qwen3-30B-A3B")
HEADS = {"heads": 32, "kv_heads": 4, "head_dim": 128}
EXPERTS = {"experts": 128, "top_k": 8, "hidden": 2048, "inner": 768}


def one(kernel: str, **quantities: Any) -> Observations:
    (observation,) = observe(pd.DataFrame({"kernel": kernel, "seconds": 1.0, **quantities}), H200)
    return observation


def step(name: str, part: str, **work: float) -> float:
    """Seconds of one part of a step of Qwen3-30B-A3B."""
    none = dict.fromkeys(QUANTITIES, 0.0)
    batch = StepBatch(**{field: np.array([value]) for field, value in (none | work).items()})
    limits = EngineLimits.for_gpu(H200)
    return float(StepModel(SHAPE, H200, find_precision(name), limits, PROFILE).timed(batch).breakdown()[part][0])


@pytest.mark.parametrize(("kv", "name"), [("bf16", "bf16"), ("fp8", "fp8_kv")])
def test_attention_costs_what_a_layer_of_the_step_costs(kv: str, name: str) -> None:
    """Contexts that end in the middle of a key block, as those of a step do on average; whole blocks cost less."""
    contexts = [7 * 128 + 64, 20 * 128 + 64, 20 * 128]
    decode = one(f"attention_decode.{kv}", batch=[64, 8, 8], context=contexts, **HEADS).predict(PROFILE).seconds
    wholes = [
        step(name, "attention", decode_requests=batch, decode_kv_tokens=batch * context) / SHAPE.num_layers
        for batch, context in zip((64, 8, 8), contexts, strict=True)
    ]
    assert decode[:2] == pytest.approx(wholes[:2])
    assert decode[2] < wholes[2]
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
    ("kv_write.fp8", {"tokens": [1, 64, 2048], **HEADS}),
    ("quantise_query.fp8", {"tokens": [1, 64, 2048], **HEADS}),
    ("norm", {"m": [1, 64, 2048], "hidden": [2048, 4096, 2048]}),
    ("rotary", {"m": [1, 64, 2048], **HEADS}),
    ("activation", {"m": [1, 64, 2048], "inner": [6144, 12288, 6144]}),
    ("sampling.v1", {"m": [1, 64, 512], "vocabulary": [32000, 151936, 151936]}),
    ("sampling.v2", {"m": [1, 64, 512], "vocabulary": [32000, 151936, 151936]}),
    ("all_reduce", {"gpus": [2, 4, 2], "bytes": [2048, 65536, 1 << 20]}),
]


@pytest.mark.parametrize(("kernel", "quantities"), KERNELS)
def test_partials_are_the_derivatives_by_log_coefficient(kernel: str, quantities: dict[str, Any]) -> None:
    observation = one(kernel, **quantities)
    cost, step = observation.predict(PROFILE), -1e-6  # down: an efficiency is at most 1
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
    for kernel in ("attention_mixed.bf16", "gemm.int4", "gemm.v1", "sampling"):
        with pytest.raises(ConfigError, match=kernel):
            one(kernel, m=[1])


def test_quantisation_costs_what_a_step_s_does() -> None:
    """A linear layer is its GEMM and the quantisation of its input, so the difference is the quantisation alone."""
    sizes = {"m": [4, 512], "n": 4096, "k": 2048}
    whole, gemm = (one(f"{name}.fp8_block", **sizes).predict(PROFILE).seconds for name in ("linear", "gemm"))
    alone = one("quantise", m=[4, 512], k=2048).predict(PROFILE).seconds
    np.testing.assert_allclose(alone, whole - gemm)


def test_small_kernels_and_the_sampler_cost_what_those_of_the_step_cost() -> None:
    m = 64
    work = {"decode_requests": m, "decode_kv_tokens": m, "sampled_requests": m}
    seconds = {
        name: one(name, m=[m], **sizes).predict(PROFILE).seconds.item()
        for name, sizes in {
            "norm": {"hidden": SHAPE.hidden_size},
            "rotary": HEADS,
            "sampling.v2": {"vocabulary": SHAPE.vocab_size},
        }.items()
    }
    coefficient = PROFILE.coefficient
    layer = 2 * seconds["norm"] + seconds["rotary"] + coefficient("overhead.layer_seconds")
    assert step("bf16", "overhead", **work) == pytest.approx(layer * SHAPE.num_layers)
    sampled = seconds["sampling.v2"] + coefficient("overhead.step_seconds")
    assert step("bf16", "sampling", **work) == pytest.approx(sampled)
    written = one("kv_write.fp8", tokens=[m], **HEADS), one("quantise_query.fp8", tokens=[m], **HEADS)
    both = sum(x.predict(PROFILE).seconds.item() for x in written)
    assert step("fp8_kv", "kv_write", **work) == pytest.approx(both * SHAPE.num_layers)


def test_samplers_launched_one_by_one_are_not_fitted(tmp_path: Path) -> None:
    row = {"kernel": "sampling.v2", "m": 8, "vocabulary": 32000, "seconds": 1e-4}
    rows = [row | {"mode": mode} for mode in ("graph", "eager")] + [
        {"kernel": "norm", "m": 1, "hidden": 8, "seconds": 1e-6}
    ]
    pd.DataFrame(rows).to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    assert read_rows(tmp_path / "rows.jsonl").kernel.tolist() == ["sampling.v2", "norm"]


def test_long_rows_of_math_run_at_the_sustained_clock() -> None:
    """The same GEMM, once so long that the power cap lowers the clock: bound by math, it is slower by as much."""
    sizes = {"m": [8192, 8192], "n": 8192, "k": 8192}
    rows = pd.DataFrame({"kernel": "gemm.bf16", "seconds": [LONG_S / 2, LONG_S * 2], **sizes})
    slow = replace(PROFILE, coefficients=PROFILE.coefficients | {CLOCK: 0.8, "gemm.bf16.wave_seconds": 1e-12})
    (observation,) = observe(rows, H200)
    cost = observation.predict(slow)
    assert cost.seconds[1] == pytest.approx(cost.seconds[0] / 0.8, rel=0.01)
    assert cost.partials[CLOCK][0] == 0
    assert cost.partials[CLOCK][1] == pytest.approx(-cost.seconds[1], rel=0.02)


def test_experts_that_were_really_hit_are_what_is_read() -> None:
    tokens = [64, 64, 64]
    even = one("moe.bf16", tokens=tokens, **EXPERTS).predict(PROFILE).seconds
    hit = one("moe.bf16", tokens=tokens, hit=[20.0, 60.0, 126.0], **EXPERTS).predict(PROFILE).seconds
    assert hit[0] < hit[1] < hit[2]
    assert hit[1] < even[0]  # 64 tokens that choose 8 of 128 at random hit 126
    assert hit[2] == pytest.approx(even[2], rel=0.01)


def test_what_the_coefficients_miss_of_a_layer_is_what_steps_of_it_take_more() -> None:
    """A GEMM timed 20% above its prediction at few rows, 10% below at many: so the model's GEMM is, and no other."""
    rows = [1, 2, 4, 8, 16, 32, 64, 128]
    ratio = np.array([1.2] * 4 + [0.9] * 4)
    for kernel, dtype in (("gemm.bf16", "bf16"), ("linear.fp8_block", "fp8_block")):
        linear = next(x for x in SHAPE.linears() if x.name == "o_proj")
        timed = pd.DataFrame({"kernel": kernel, "seconds": 1.0, "m": rows, "n": linear.n, "k": linear.k, "skew": None})
        (expected,) = observe(timed, H200)
        quantise = one("quantise", m=rows, k=linear.k).predict(PROFILE).seconds if dtype == "fp8_block" else 0.0
        seconds = (expected.predict(PROFILE).seconds - quantise) * ratio + quantise
        layers = layer_residuals(timed.assign(seconds=seconds), H200, PROFILE)
        assert list(layers) == [f"gemm.{dtype}"]
        known = replace(PROFILE, layers=layers)
        m = np.array([1, 64])
        other = next(x for x in SHAPE.linears() if x.name == "qkv_proj")
        for x, factor in ((linear, [1.2, 0.9]), (other, [1, 1])):
            plain, moved = (gemm_cost(m, [x], find_precision(dtype), H200, p).seconds for p in (PROFILE, known))
            np.testing.assert_allclose(moved / plain, factor, rtol=1e-3)
        assert observe(timed, H200)[0].predict(known).seconds.tolist() == expected.predict(PROFILE).seconds.tolist()


def test_experts_timed_for_even_routing_are_a_layer_and_few_rows_are_not() -> None:
    tokens = [1, 2, 4, 8, 16, 32, 64, 128]
    even = pd.DataFrame({"kernel": "moe.bf16", "seconds": 1.0, "tokens": tokens, **EXPERTS, "skew": "even"})
    seconds = observe(even, H200)[0].predict(PROFILE).seconds
    skewed = even.assign(seconds=5 * seconds, skew="power law")
    timed = pd.concat([even.assign(seconds=1.1 * seconds), skewed], ignore_index=True)
    ((name, table),) = layer_residuals(timed, H200, PROFILE)["moe.bf16"].items()
    assert name == "128x8x2048x768"
    assert table == [tokens, pytest.approx([np.log(1.1)] * 8, abs=1e-4)]
    assert layer_residuals(even.assign(seconds=seconds)[:7], H200, PROFILE) == {"moe.bf16": {}}


def test_the_hull_says_what_was_timed_as_steps_name_it() -> None:
    chunks = {"chunks": [1, 4], "chunk": [512, 64], "context": [9, 0]} | HEADS
    timed = [
        {"kernel": "gemm.fp8_block", "m": [32, 64], "n": 4096, "k": 512},
        {"kernel": "linear.fp8_block", "m": [1, 48], "n": 1024, "k": 2048},
        {"kernel": ["sampling.v1", "sampling.v2"], "m": [1, 1024], "vocabulary": 32000},
        {"kernel": "attention_prefill.fp8", **chunks},
    ]
    rows = pd.concat([pd.DataFrame(x | {"seconds": 1.0}) for x in timed], ignore_index=True)
    assert hull(rows) == {
        "gemm.fp8_block": {"m": (1, 64), "n": (1024, 4096), "k": (512, 2048)},
        "sampling": {"sampled_requests": (1, 1024)},
        "attention_prefill.fp8": {
            "prefill_tokens": (256, 512),
            "prefill_requests": (1, 4),
            "prefill_kv_tokens": (256, 521),
            "prefill_pairs": (4 * 64 * 65 / 2, 512 * 9 + 512 * 513 / 2),
        },
    }
