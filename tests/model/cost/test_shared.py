"""Shared experts: beside the routed ones on a stream of their own, or before them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fp8plan.model.architecture import Linear, ModelShape
from fp8plan.model.architecture.parts import Experts
from fp8plan.model.cost.gemm import gemm_cost, overlapped, quantise_cost, shared_cost
from fp8plan.model.hardware import find_gpu
from fp8plan.model.precision import BF16, FP8_BLOCK, Precision
from fp8plan.model.profile.library import load_profile

H200 = find_gpu("h200")
PROFILE = load_profile(H200)[0]
M = np.array([1, 256, 257, 4096])


def found(name: str, card: str = "h200") -> list[str]:
    shape = ModelShape.from_hf(name)
    return [x.name for x in overlapped(shape.linears(), find_gpu(card), [x for x, _ in shape.parts_of(Experts)])]


def test_which_families_have_a_stream_for_them() -> None:
    """Granite's shared MLP is no part of vLLM's fused experts; Qwen3-30B-A3B has none; a CPU has no streams."""
    assert found("Qwen/Qwen3.5-35B-A3B") == ["shared_expert_gate", "shared_gate_up_proj", "shared_down_proj"]
    assert found("Qwen/Qwen3.5-35B-A3B", "cpu") == []
    assert found("ibm-granite/granite-4.0-h-small") == found("Qwen/Qwen3-30B-A3B") == []


def test_experts_of_one_family_without_a_stream_hold_all_back() -> None:
    shape = ModelShape.from_hf("Qwen/Qwen3.5-35B-A3B")
    experts = next(x for x, _ in shape.parts_of(Experts))
    both = [experts, replace(experts, shared_stream=False)]
    assert overlapped(shape.linears(), H200, both) == overlapped(shape.linears(), H200, both[1:]) == []


@pytest.mark.parametrize(("precision", "bytes_"), [(BF16, 2 * 1572864), (FP8_BLOCK, 1572864 + 4 * 96)])
def test_the_seconds_on_both_sides_of_256_tokens(precision: Precision, bytes_: float) -> None:
    """Gate and up are 1024 x 1024, down is 1024 x 512, in 40 layers; each FP8 block of 128 x 128 has a scale."""
    sizes = [("shared_gate_up_proj", 1024, 1024, True), ("shared_down_proj", 1024, 512, True)]
    linears = [Linear(name, n, k, 40, quantised, False) for name, n, k, quantised in sizes]
    linears.append(Linear("shared_expert_gate", 1, 1024, 40, False, False))
    cost = shared_cost(M, linears, precision, H200, PROFILE)

    name = f"moe.{'bf16' if precision is BF16 else 'fp8_block'}.bandwidth_efficiency"
    beside = 40 * (bytes_ + 2 * 1024) / (H200.memory_bandwidth * PROFILE.coefficient(name))
    moved = M * 3 * 512 * 2 / (H200.memory_bandwidth * PROFILE.coefficient("overhead.bandwidth_efficiency"))
    before = gemm_cost(M, linears, precision, H200, PROFILE) + quantise_cost(M, linears, precision, H200, PROFILE)
    alone = before.seconds + 40 * (moved + PROFILE.coefficient("activation.launch_seconds"))
    np.testing.assert_allclose(cost.seconds, [beside, beside, *alone[2:]], rtol=1e-12)
    np.testing.assert_allclose(cost.partials[name], [-beside, -beside, 0, 0], rtol=1e-12)


@pytest.mark.parametrize("precision", [BF16, FP8_BLOCK])
def test_up_to_256_tokens_only_their_weights_are_read(precision: Precision) -> None:
    linears = [x for x in ModelShape.from_hf("Qwen/Qwen3.5-35B-A3B").linears() if x.name.startswith("shared_")]
    cost = shared_cost(M, linears, precision, H200, PROFILE)
    read = sum(precision.linear_bytes(x.n, x.k, x.quantised) * x.layers for x in linears) / H200.memory_bandwidth
    alone = gemm_cost(M, linears, precision, H200, PROFILE).seconds
    assert cost.seconds[0] == cost.seconds[1]
    assert read < cost.seconds[1] < 1.3 * read < 0.5 * alone[1]
    assert (cost.seconds[2:] > alone[2:]).all()  # with the activation between
    assert set(cost.partials) > {f"moe.{precision.gemm_dtype}.bandwidth_efficiency", "activation.launch_seconds"}
