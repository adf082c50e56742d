"""Shared experts: an MLP for every token, beside the routed experts.

Up to STREAM_TOKENS tokens vLLM runs it on a stream of its own, while the router and the routed experts run
(VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD; fused_moe/runner/shared_experts.py, 0.26). Routed experts then wait for
memory and leave SMs free, so that only the reading of its weights adds to the step: Qwen3.5-35B-A3B, which no fit has
seen, is predicted 0.5% too slow so on an H200 with 256 requests, and 3.9% with one after the other. With more tokens it
runs before them, as it does in families that vLLM builds without this (`Experts.shared_stream`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8plan.model.architecture import Linear
from fp8plan.model.architecture.parts import Experts
from fp8plan.model.cost.base import Array, Cost, traffic
from fp8plan.model.cost.host import activation_cost, runs_beside
from fp8plan.model.cost.linears.gemm import gemm_cost, quantise_cost
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import Precision
from fp8plan.model.profile.profile import Profile

STREAM_TOKENS = 256


def overlapped(linears: Sequence[Linear], gpu: Gpu, experts: Sequence[Experts]) -> list[Linear]:
    """The matrices of shared experts that can run beside the routed ones."""
    if not all(runs_beside(x, gpu) for x in experts):
        return []
    return [linear for linear in linears if linear.name.startswith("shared_")]


def shared_cost(m: Array, linears: Sequence[Linear], precision: Precision, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds that the `overlapped` matrices of all layers add to steps of m tokens, shape (steps,)."""
    alone = gemm_cost(m, linears, precision, gpu, profile)
    if precision.weights != "bf16":
        alone = alone + quantise_cost(m, linears, precision, gpu, profile)
    for linear in linears:
        if linear.name == "shared_down_proj":
            alone = alone + activation_cost(m, linear.k, gpu, profile).scaled(linear.layers)
    read = sum(precision.linear_bytes(x.n, x.k, x.quantised) * x.layers for x in linears)
    efficiency = profile.named(f"moe.{precision.gemm_dtype}.bandwidth_efficiency")
    beside = traffic(np.full(m.shape, float(read)), gpu.memory_bandwidth, efficiency)
    few = m <= STREAM_TOKENS
    return alone.scaled(np.where(few, 0.0, 1.0)) + beside.scaled(np.where(few, 1.0, 0.0))
