"""Attention of one step: paged decode and chunked prefill.

    decode  = |KV bytes / (bandwidth * eff), KV bytes / (SMs * sm_bandwidth), FLOPs / (peak * eff), tiles|_2
    prefill = |pairs * FLOPs / (peak * eff), (Q + O + KV) bytes / (bandwidth * eff)|_2
    seconds per layer = launch + decode + prefill

Why two bandwidths: FP8 KV does not halve the time. AIConfigurator 0.12's FlashAttention-3 decode tables give 3.0 of
4.8 TB/s on H200 and 2.6 of 3.35 on H100; one limit per SM (32 GB/s, conversion of E4M3 in the inner loop) beside the
same HBM efficiency as BF16 explains both GPUs as well (8.8%) as one free efficiency per GPU does. A backend without
such a limit has no `decode_sm_bandwidth` coefficient. `tiles` is the fixed work per (request, KV head), which decides
short contexts at large batch. Writing K and V, and quantising Q for FP8 KV, are inside `launch`: so they were timed.
Not modelled: imbalance between long and short requests within a batch.
"""

from __future__ import annotations

import numpy as np

from fp8plan.model.architecture import ModelShape
from fp8plan.model.batch import Array, StepBatch
from fp8plan.model.cost import Cost, norm2, traffic
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16_BYTES, Precision
from fp8plan.model.profile import Profile


def heads_per_rank(shape: ModelShape, tensor_parallel: int) -> tuple[int, int]:
    """Query and KV heads of one rank; KV heads are replicated when there are fewer of them than ranks."""
    return shape.num_attention_heads // tensor_parallel, max(1, shape.num_key_value_heads // tensor_parallel)


def kv_bytes_per_token(shape: ModelShape, precision: Precision, tensor_parallel: int) -> int:
    """K and V bytes of one token in one layer on one rank."""
    return 2 * heads_per_rank(shape, tensor_parallel)[1] * shape.head_dim * precision.kv_element_bytes


def flops_per_pair(shape: ModelShape, tensor_parallel: int) -> int:
    """FLOPs of one query-key pair in one layer on one rank: Q K^T and P V."""
    return 4 * heads_per_rank(shape, tensor_parallel)[0] * shape.head_dim


def attention_cost(
    batch: StepBatch, shape: ModelShape, precision: Precision, tensor_parallel: int, gpu: Gpu, profile: Profile
) -> Cost:
    """Seconds of attention in all layers of each step, shape (steps,)."""
    name = f"attention.{precision.kv}.launch_seconds"
    working = (batch.decode_requests + batch.prefill_tokens) > 0
    launch = np.where(working, profile.coefficient(name) * shape.num_layers, 0.0)
    total = Cost(launch, {name: launch}) + _decode(batch, shape, precision, tensor_parallel, gpu, profile)
    if not batch.prefill_tokens.any():
        return total
    return total + _prefill(batch, shape, precision, tensor_parallel, gpu, profile)


def _decode(b: StepBatch, shape: ModelShape, precision: Precision, tp: int, gpu: Gpu, profile: Profile) -> Cost:
    prefix = f"attention.{precision.kv}"
    read = b.decode_kv_tokens * float(kv_bytes_per_token(shape, precision, tp) * shape.num_layers)
    hbm, tile = f"{prefix}.decode_bandwidth_efficiency", f"{prefix}.decode_tile_seconds"
    tiles_per_request = heads_per_rank(shape, tp)[1] * shape.num_layers / gpu.sm_count
    busy = b.decode_requests * (tiles_per_request * profile.coefficient(tile))
    terms = [
        traffic(read, gpu.memory_bandwidth, (hbm, profile.coefficient(hbm))),
        _compute(b.decode_kv_tokens, shape, precision, tp, gpu, profile),
        Cost(busy, {tile: busy}),
    ]
    sm_limit = f"{prefix}.decode_sm_bandwidth"
    if sm_limit in profile.coefficients:
        terms.append(traffic(read, gpu.sm_count, (sm_limit, profile.coefficient(sm_limit))))
    return norm2(*terms)


def _prefill(b: StepBatch, shape: ModelShape, precision: Precision, tp: int, gpu: Gpu, profile: Profile) -> Cost:
    name = f"attention.{precision.kv}.prefill_bandwidth_efficiency"
    query_and_output = 2 * heads_per_rank(shape, tp)[0] * shape.head_dim * BF16_BYTES
    key_value = kv_bytes_per_token(shape, precision, tp)
    moved = b.prefill_tokens * float(query_and_output * shape.num_layers)
    moved = moved + b.prefill_kv_tokens * float(key_value * shape.num_layers)
    return norm2(
        _compute(b.prefill_pairs, shape, precision, tp, gpu, profile),
        traffic(moved, gpu.memory_bandwidth, (name, profile.coefficient(name))),
    )


def _compute(pairs: Array, shape: ModelShape, precision: Precision, tp: int, gpu: Gpu, profile: Profile) -> Cost:
    # The efficiency is of the BF16 peak for FP8 KV too: FA3's FP8 prefill is measured no faster than its BF16 one.
    name = f"attention.{precision.kv}.compute_efficiency"
    flops = pairs * float(flops_per_pair(shape, tp) * shape.num_layers)
    return traffic(flops, gpu.bf16_flops, (name, profile.coefficient(name)))
