"""The seconds below which no step can be, by the datasheet: its bytes read once, and its FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fp8plan.model.architecture import Linear, ModelShape
from fp8plan.model.architecture.parts import Attention, Experts, LatentAttention
from fp8plan.model.cost.base import Array, StepBatch, tokens_of
from fp8plan.model.cost.linears.gemm import linear_dtype, peak_flops
from fp8plan.model.cost.linears.moe import expert_bytes, expert_flops
from fp8plan.model.cost.linears.routing import distinct_experts
from fp8plan.model.cost.mixers.of_model import bytes_read, flops, mixers_of
from fp8plan.model.hardware import Gpu
from fp8plan.model.limits import EngineLimits
from fp8plan.model.precision import BF16_BYTES, Precision


class Engine(Protocol):
    """An engine replica, as fp8plan.model.cost.step.StepModel has it: `layers` and `head` are those of one rank."""

    @property
    def shape(self) -> ModelShape: ...
    @property
    def gpu(self) -> Gpu: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def limits(self) -> EngineLimits: ...
    @property
    def layers(self) -> Sequence[Linear]: ...
    @property
    def head(self) -> Linear: ...


def bytes_bound(model: Engine, batch: StepBatch) -> Array:
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


def flops_bound(model: Engine, batch: StepBatch) -> Array:
    """Seconds of the FLOPs at the datasheet's peak of each dtype, shape (steps,)."""
    return np.asarray(sum(flops_by_kind(model, batch).values()))


def flops_by_kind(model: Engine, batch: StepBatch) -> dict[str, Array]:
    """ "bf16", "fp8", "bf16_experts" and "fp8_experts" -> seconds of the FLOPs in that dtype at the datasheet's peak,
    those of routed experts apart and without padding, shape (steps,).
    """
    tp, precision, shape, gpu = model.limits.tensor_parallel_size, model.precision, model.shape, model.gpu
    tokens = tokens_of(batch)
    per_token = dict.fromkeys(("bf16", "fp8", "bf16_experts", "fp8_experts"), 0.0)
    for x in model.layers:
        dtype = linear_dtype(x, precision)
        per_token[dtype.partition("_")[0]] += 2 * x.n * x.k * x.layers / peak_flops(gpu, dtype)
    for experts, number in shape.parts_of(Experts):
        routed = (
            experts.experts_per_token * number * expert_flops(experts, shape.hidden_size, model.limits.expert_slices)
        )
        peak = peak_flops(gpu, precision.gemm_dtype) * model.limits.expert_ranks
        per_token[f"{precision.gemm_dtype.partition('_')[0]}_experts"] += routed / peak
    seconds = {kind: tokens * each for kind, each in per_token.items()}
    seconds["bf16"] = seconds["bf16"] + batch.sampled_requests * (2 * model.head.n * model.head.k / gpu.bf16_flops)
    for mixer, number in mixers_of(shape):
        widened = gpu.stores_fp8_only or not isinstance(mixer, Attention | LatentAttention)
        dtype = "bf16" if widened else precision.kv
        seconds[dtype] = seconds[dtype] + flops(batch, mixer, tp) * number / peak_flops(gpu, dtype)
    return seconds
