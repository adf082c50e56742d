"""The seconds below which no step can be, by the datasheet: its bytes read once, and its FLOPs."""

from __future__ import annotations

import numpy as np

from fp8plan.model.architecture.parts import Attention, Experts, LatentAttention
from fp8plan.model.cost.base import Array, StepBatch
from fp8plan.model.cost.linears.gemm import linear_dtype, peak_flops
from fp8plan.model.cost.linears.moe import expert_bytes, expert_flops
from fp8plan.model.cost.linears.routing import distinct_experts
from fp8plan.model.cost.mixers.of_model import bytes_read, flops, mixers_of
from fp8plan.model.cost.step import StepModel, tokens_of
from fp8plan.model.precision import BF16_BYTES


def bytes_bound(model: StepModel, batch: StepBatch) -> Array:
    """Seconds of reading weights and caches once at the datasheet's bandwidth, shape (steps,)."""
    tp, precision, shape = model.limits.tensor_parallel_size, model.precision, model.shape
    tokens = tokens_of(batch)
    weights = sum(precision.linear_bytes(x.n, x.k, x.quantised) * x.layers for x in model.layers)
    read = np.where(tokens > 0, float(weights), 0.0)
    read = read + np.where(batch.sampled_requests > 0, model.head.n * model.head.k * float(BF16_BYTES), 0.0)
    for mixer, number in mixers_of(shape):
        read = read + bytes_read(batch, mixer, precision, tp) * number
    for experts, number in shape.parts_of(Experts):
        one = expert_bytes(experts, shape.hidden_size, precision, model.limits.expert_slices) * number
        read = read + distinct_experts(tokens, experts) * (one / model.limits.expert_ranks)
    return np.asarray(read / model.gpu.memory_bandwidth)


def flops_bound(model: StepModel, batch: StepBatch) -> Array:
    """Seconds of the FLOPs at the datasheet's peak of each dtype, shape (steps,)."""
    tp, precision, shape, gpu = model.limits.tensor_parallel_size, model.precision, model.shape, model.gpu
    tokens = tokens_of(batch)
    per_token = sum(2 * x.n * x.k * x.layers / peak_flops(gpu, linear_dtype(x, precision)) for x in model.layers)
    for experts, number in shape.parts_of(Experts):
        routed = (
            experts.experts_per_token * number * expert_flops(experts, shape.hidden_size, model.limits.expert_slices)
        )
        per_token += routed / model.limits.expert_ranks / peak_flops(gpu, precision.gemm_dtype)
    seconds = tokens * per_token + batch.sampled_requests * (2 * model.head.n * model.head.k / gpu.bf16_flops)
    for mixer, number in mixers_of(shape):
        dtype = precision.kv if isinstance(mixer, Attention | LatentAttention) else "bf16"
        seconds = seconds + flops(batch, mixer, tp) * number / peak_flops(gpu, dtype)
    return np.asarray(seconds)
