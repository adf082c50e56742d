"""Attention of one step: paged decode and chunked prefill.

    wave    = |KV bytes of all SMs / (bandwidth * eff), KV bytes of one / sm_bandwidth + tile|_2
    decode  = |sum of waves, FLOPs / (peak * eff)|_2 + join, where requests were cut
    prefill = |pairs * FLOPs / (peak * eff), (Q + O + KV) bytes / (bandwidth * eff)|_2
    seconds per layer = launch + decode + prefill

Waves: an SM takes one KV head of one request, or a part of it, at a time (`_waves`). Without them the model missed
that a step of Qwen3-1.7B on an H200 takes 2.72, 2.58, 3.03, 2.91 and 3.35 ms with 6, 8, 10, 15 and 17 requests (with
them: 2.71, 2.65, 2.91, 2.89 and 3.28; benchmarks/steps_by_batch.py). How other backends cut is not known; their
parts fill the SMs evenly.
Why two bandwidths: FP8 KV does not halve the time. AIConfigurator 0.12's FlashAttention-3 decode tables give 3.0 of
4.8 TB/s on H200 and 2.6 of 3.35 on H100; one limit per SM (32 GB/s, conversion of E4M3 in the inner loop) beside the
same HBM efficiency as BF16 explains both GPUs as well (8.8%) as one free efficiency per GPU does. A backend without
such a limit has no `decode_sm_bandwidth` coefficient. `tile` is the fixed work of a part, which decides short contexts.
Writing K and V, and quantising Q for FP8 KV, are inside `launch`: so they were timed.
Not modelled: imbalance between long and short requests within a batch (FlashAttention 3 cuts the long ones smaller).
"""

from __future__ import annotations

import numpy as np

from fp8plan.model.architecture import ModelShape
from fp8plan.model.batch import Array, StepBatch
from fp8plan.model.cost import Cost, constant, norm2, traffic
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16_BYTES, Precision
from fp8plan.model.profile import Profile

FLASH_ATTENTION_3 = "flash_attn_3"
SHARE, KV_BLOCK = 1.1, 128  # of an SM's share, and tokens: how FlashAttention 3 cuts the KV of a request
MOST_CUTS = 32  # flash_attn_max_num_splits_for_cuda_graph of vLLM 0.26


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
    prefix, kv_heads = f"attention.{precision.kv}", heads_per_rank(shape, tp)[1]
    heads = b.decode_requests * float(kv_heads)
    cuts = profile.backend(prefix) == FLASH_ATTENTION_3
    parts, full, last = _waves(b, heads, gpu.sm_count) if cuts else (heads, heads / gpu.sm_count, np.zeros_like(heads))
    one = b.decode_kv_tokens * float(kv_bytes_per_token(shape, precision, tp)) / np.maximum(parts, 1)
    read = _wave(one, gpu.sm_count, prefix, gpu, profile).scaled(full)
    if cuts:
        read = read + _wave(one, last, prefix, gpu, profile).scaled(np.where(last > 0, 1.0, 0.0))
        join = f"{prefix}.decode_join_seconds"
        joined = np.where(parts > heads, profile.coefficient(join), 0.0)
        read = read + Cost(joined, {join: joined})
    compute = _compute(b.decode_kv_tokens, shape, precision, tp, gpu, profile)
    return norm2(read.scaled(shape.num_layers), compute)


def _waves(b: StepBatch, heads: Array, sm_count: int) -> tuple[Array, Array, Array]:
    """(parts the KV is cut into, full waves of them, parts in a last one that is not full), each of shape (steps,).

    A part is one KV head of one request. While they are few, FlashAttention 3 cuts each so that none has more than
    1.1 times an SM's share of the whole (prepare_varlen_num_blocks, hopper/flash_prepare_scheduler.cu), in whole
    blocks. Hence 6 requests take longer than 8, and 17 much longer than 16, on a model of 8 KV heads.
    """
    context = b.decode_kv_tokens / np.maximum(b.decode_requests, 1)
    cuts = np.minimum(np.ceil(sm_count / np.maximum(SHARE * heads, 1)), np.ceil(context / KV_BLOCK))
    parts = heads * np.clip(cuts, 1, MOST_CUTS)
    full = np.floor(parts / sm_count)
    return parts, full, parts - sm_count * full


def _wave(bytes_: Array, together: Array | int, prefix: str, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of one wave: `together` SMs take a part of `bytes_` each, as fast as one can or as HBM feeds them all."""
    hbm, sm, tile = (f"{prefix}.decode_{x}" for x in ("bandwidth_efficiency", "sm_bandwidth", "tile_seconds"))
    own = constant(tile, profile.coefficient(tile), bytes_)
    if sm in profile.coefficients:
        own = own + traffic(bytes_, 1.0, (sm, profile.coefficient(sm)))
    return norm2(traffic(bytes_ * together, gpu.memory_bandwidth, (hbm, profile.coefficient(hbm))), own)


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
