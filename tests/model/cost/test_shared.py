"""Shared experts: beside the routed ones on a stream of their own, or before them."""

from __future__ import annotations

import numpy as np
import pytest

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Experts
from fp8plan.model.cost.gemm import gemm_cost, overlapped, shared_cost
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
