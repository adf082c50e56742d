"""Softmax attention of one layer: paged decode, chunked prefill, and what is written to the KV cache before.

    part    = bytes of its key blocks / sm_bandwidth + their tokens * token_seconds + tile_seconds (+ wide heads)
    decode  = |KV bytes of all / (bandwidth * eff), rounds of parts * part|_8 + join, where requests were cut
    prefill = (tiles / SMs * mean tile + TAIL * longest tile) + ceil(tiles / SMs) * tile_seconds
              tile = its pairs * (FLOPs of a pair / (peak / SMs * eff) + pair_seconds) (+ wide heads)
    seconds = launch + decode + prefill

Decode: an SM takes one KV head of one request, or a part of it, at a time (`parts_of`). Without rounds the model missed
that a step of Qwen3-1.7B on an H200 takes 2.72, 2.58, 3.03, 2.91 and 3.35 ms with 6, 8, 10, 15 and 17 requests
(benchmarks/steps_by_batch.py). How other backends cut is not known; their parts fill the SMs evenly.
An SM computes whole key blocks (`key_block`), half a block more than is read on average, and half another one where
attention has a window, which begins anywhere in a block.
Why limits of an SM: FP8 KV does not halve the time, on no Hopper GPU. Converting E4M3 in the inner loop costs an SM its
time, per byte and per token: heads of 64 are slower per byte. `tile` is the fixed work of a part, which decides short
contexts. A backend without such limits has no `decode_sm_bandwidth` and no `decode_token_seconds`. On Ampere, where
nobody timed FP8 KV, the datasheet's `decode_sm_bandwidth` is a guess (its source says from what) with a wide band.
Wide heads: beyond 128 elements FlashAttention 3 has kernels of their own, which take longer for a token than its bytes
say, above all with FP8 KV. Gemma 3 12B (256) on an H200 decodes 256 requests in 25 ms with BF16 KV, and in 27 with FP8.
Prefill: a tile is TILE_ROWS query rows of one KV head, all query heads of its group packed together. The softmax of a
pair takes time that does not depend on the head's size (`pair_seconds`).
A window or a chunk leaves less to read (`windows.seen`); what is read takes as long as elsewhere.
Not modelled: imbalance between long and short requests within a batch. With lognormal contexts (sigma 0.8) decode
attention takes 6% longer with BF16 KV and 12% with FP8 than with equal ones (medians of profiles/h200_sxm's rows; 15
and 29% with 32 to 128 requests). Nor the logits' soft cap and sinks.

The KV tokens that attention reads of a step where it sees the last tokens only, or those of a chunk.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fp8plan.model.architecture.mixers import kv_heads_of_rank
from fp8plan.model.architecture.parts import Attention
from fp8plan.model.cost.base import (
    READS,
    Array,
    Cost,
    StepBatch,
    WindowReads,
    norm8,
    streaming_cost,
    times,
    traffic,
    zero,
)
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16_BYTES, FP8_BYTES, Precision
from fp8plan.model.profile.library import WIDE_HEADS
from fp8plan.model.profile.profile import Profile


def seen(batch: StepBatch, attention: Attention) -> StepBatch:
    """The steps with what the attention's window or chunk leaves of their KV tokens and pairs."""
    if attention.window:
        return _left(batch, "sliding", attention.window)
    if attention.chunk:
        return _left(batch, "chunked", attention.chunk)
    return batch


def last_tokens(batch: StepBatch, number: int) -> StepBatch:
    """The steps where each query reads `number` tokens at most, as if the requests of a step were equally long."""
    return _with(batch, _of_equal_requests(batch, "sliding", number))


def _left(batch: StepBatch, kind: str, window: int) -> StepBatch:
    known = (reads for reads in batch.windows if (reads.kind, reads.window) == (kind, window))
    return _with(batch, next(known, None) or _of_equal_requests(batch, kind, window))


def _with(batch: StepBatch, reads: WindowReads) -> StepBatch:
    return replace(batch, **{name: getattr(reads, name) for name in READS})


def _of_equal_requests(batch: StepBatch, kind: str, window: int) -> WindowReads:
    """The reads that a window leaves if all decoding requests of a step are equally long, and all its chunks."""
    requests, chunks = np.maximum(batch.decode_requests, 1), np.maximum(batch.prefill_requests, 1)
    context, after = batch.decode_kv_tokens / requests, batch.prefill_kv_tokens / chunks
    before = after - batch.prefill_tokens / chunks
    if kind == "sliding":
        decode, read = np.minimum(context, window), after - np.maximum(before - window + 1, 0)
    else:  # a token of a long request stands anywhere in its chunk
        decode = np.where(context > window, (window + 1) / 2, context)
        read = after - before // window * window
    pairs = _pairs_below(kind, window, after) - _pairs_below(kind, window, before)
    return WindowReads(kind, window, decode * batch.decode_requests, read * batch.prefill_requests, pairs * chunks)


def _pairs_below(kind: str, window: int, position: Array) -> Array:
    """Query-key pairs of the queries before a position."""
    if kind == "sliding":
        growing = np.minimum(position, window)
        return np.asarray(growing * (growing + 1) / 2 + (position - growing) * window)
    rest = position % window
    return np.asarray(position // window * (window * (window + 1) / 2) + rest * (rest + 1) / 2)


FLASH_ATTENTION_3 = "flash_attn_3"
SHARE, KV_BLOCK = 1.1, 128  # of an SM's share, and tokens: how FlashAttention 3 cuts the KV of a request
MOST_CUTS = 32  # flash_attn_max_num_splits_for_cuda_graph of vLLM 0.26
TILE_ROWS = 128
TAIL = 0.12  # of the longest tile, for which the other SMs wait at the end: fitted to profiles/h200_sxm
NARROW, WIDE = 128, 256  # elements of a head: of FlashAttention 3's common kernels at most, and of its widest
UNEVEN_GROUP = 1.06  # a group that does not divide a tile is loaded row by row: 4% (BF16) and 7% (FP8) there too


def heads_per_rank(attention: Attention, tensor_parallel: int) -> tuple[int, int]:
    """Query and KV heads of one rank; KV heads are replicated when there are fewer of them than ranks."""
    return attention.heads // tensor_parallel, kv_heads_of_rank(attention.kv_heads, tensor_parallel)


def kv_bytes_per_token(attention: Attention, precision: Precision, tensor_parallel: int) -> int:
    """K and V bytes of one token in one layer on one rank."""
    width = attention.head_dim + attention.value_dim
    return heads_per_rank(attention, tensor_parallel)[1] * width * precision.kv_element_bytes


def flops_per_pair(attention: Attention, tensor_parallel: int) -> int:
    """FLOPs of one query-key pair in one layer on one rank: Q K^T and P V."""
    return 2 * heads_per_rank(attention, tensor_parallel)[0] * (attention.head_dim + attention.value_dim)


def key_block(head_dim: int) -> int:
    """Keys that FlashAttention 3 computes at once on paged KV (tile_size_fwd_sm90, hopper/tile_size.h).

    That file has 160 for FP8. But with 160 the timings of profiles/h200_sxm fit worse (2.6% instead of 2.0%), so it is
    taken to be as in BF16.
    """
    return 128 if head_dim <= 128 else 96 if head_dim <= 192 else 80


def attention_cost(
    batch: StepBatch,
    attention: Attention,
    precision: Precision,
    tensor_parallel: int,
    gpu: Gpu,
    profile: Profile,
    edge: Array | None = None,
) -> Cost:
    """Seconds of attention in one layer of each step, shape (steps,).

    edge: tokens of each decoding request's key blocks beyond those read, where that is known, shape (steps,); None: as
          for contexts of any length
    """
    name = f"attention.{precision.kv}.launch_seconds"
    working = (batch.decode_requests + batch.prefill_tokens) > 0
    read = seen(batch, attention)
    total = times(np.where(working, 1.0, 0.0), *profile.named(name))
    if edge is None:
        edge = np.full(working.shape, key_block(attention.head_dim) * (1.0 if attention.window else 0.5))
    total = total + _decode(read, edge, attention, precision, tensor_parallel, gpu, profile)
    if not batch.prefill_tokens.any():
        return total
    return total + prefill_cost(read, attention, precision, tensor_parallel, gpu, profile)


def cache_cost(tokens: Array, attention: Attention, precision: Precision, tp: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of writing K and V of `tokens` to one layer's cache and, for FP8 KV, quantising their Q, (steps,). On a
    GPU without FP8 tensor cores Q stays in BF16."""
    query, kv_heads = heads_per_rank(attention, tp)
    width = 0 if attention.shares_kv else kv_heads * (attention.head_dim + attention.value_dim)
    cost = kv_write_cost(tokens, width, precision, gpu, profile) if width else Cost(np.zeros(tokens.shape), {})
    if precision.kv == "fp8" and not gpu.stores_fp8_only:
        cost = cost + quantise_query_cost(tokens, query * attention.head_dim, gpu, profile)
    return cost


def kv_write_cost(tokens: Array, width: int, precision: Precision, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of writing keys and values, of `width` elements together, in one layer; they come in BF16."""
    bytes_per_token = width * (BF16_BYTES + precision.kv_element_bytes)
    return _streaming(f"kv_write.{precision.kv}", tokens, bytes_per_token, gpu, profile)


def quantise_query_cost(tokens: Array, width: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of quantising Q of `width` elements to E4M3, in one layer."""
    return _streaming("quantise_query", tokens, width * (BF16_BYTES + FP8_BYTES), gpu, profile)


def _streaming(name: str, tokens: Array, bytes_per_token: float, gpu: Gpu, profile: Profile) -> Cost:
    names = f"{name}.launch_seconds", f"{name}.bandwidth_efficiency"
    return streaming_cost(tokens, bytes_per_token, names, gpu, profile)


def _decode(
    b: StepBatch, edge: Array, attention: Attention, precision: Precision, tp: int, gpu: Gpu, profile: Profile
) -> Cost:
    prefix, kv_heads = f"attention.{precision.kv}", heads_per_rank(attention, tp)[1]

    def coefficient(part: str) -> tuple[str, float]:
        return profile.named(f"{prefix}.decode_{part}")

    heads = b.decode_requests * float(kv_heads)
    cuts = profile.backend(prefix) == FLASH_ATTENTION_3
    parts = parts_of(b, heads, gpu.sm_count) if cuts else heads
    rounds = np.ceil(parts / gpu.sm_count) if cuts else parts / gpu.sm_count
    bytes_ = b.decode_kv_tokens * float(kv_bytes_per_token(attention, precision, tp))
    computed = b.decode_kv_tokens + b.decode_requests * edge if cuts else b.decode_kv_tokens
    share = kv_heads * computed / np.maximum(parts, 1)  # tokens of one part
    each = (attention.head_dim + attention.value_dim) * float(precision.kv_element_bytes)
    part = times(np.ones_like(share), *coefficient("tile_seconds"))
    if f"{prefix}.decode_sm_bandwidth" in profile.coefficients:
        part = part + traffic(share * each, 1.0, coefficient("sm_bandwidth"))
    if f"{prefix}.decode_token_seconds" in profile.coefficients:
        part = part + times(share, *coefficient("token_seconds"))
    part = part + _wide_cost(share * (attention.head_dim / WIDE), "decode_token", attention, precision, profile)
    read = norm8(traffic(bytes_, gpu.memory_bandwidth, coefficient("bandwidth_efficiency")), part.scaled(rounds))
    if cuts:
        read = read + times(np.where(parts > heads, 1.0, 0.0), *coefficient("join_seconds"))
    return read


def parts_of(b: StepBatch, heads: Array, sm_count: int) -> Array:
    """The number of parts that the KV is cut into, shape (steps,).

    A part is one KV head of one request. While they are few, FlashAttention 3 cuts each so that none has more than
    1.1 times an SM's share of the whole (prepare_varlen_num_blocks, hopper/flash_prepare_scheduler.cu), in whole
    blocks. Hence 6 requests take longer than 8, and 17 much longer than 16, on a model of 8 KV heads.
    """
    context = b.decode_kv_tokens / np.maximum(b.decode_requests, 1)
    cuts = np.minimum(np.ceil(sm_count / np.maximum(SHARE * heads, 1)), np.ceil(context / KV_BLOCK))
    return np.asarray(heads * np.clip(cuts, 1, MOST_CUTS))


def prefill_cost(b: StepBatch, attention: Attention, precision: Precision, tp: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of prefill attention in one layer. The chunks of one step count as equally long."""
    prefix, (heads, kv_heads) = f"attention.{precision.kv}", heads_per_rank(attention, tp)
    efficiency, pair, tile = (
        f"{prefix}.{x}" for x in ("compute_efficiency", "prefill_pair_seconds", "prefill_tile_seconds")
    )
    group, chunks = heads / kv_heads, np.maximum(b.prefill_requests, 1)
    tokens = np.maximum(b.prefill_tokens, 1)
    tiles = b.prefill_requests * kv_heads * np.ceil(tokens / chunks * group / TILE_ROWS)
    depth = b.prefill_pairs / tokens + (KV_BLOCK + TILE_ROWS / group) / 2  # the causal edge is computed in whole tiles
    longest = b.prefill_kv_tokens / chunks + KV_BLOCK / 2
    if attention.window:  # a tile reads what its first row sees, up to its last row
        longest = np.minimum(longest, attention.window + TILE_ROWS / group + KV_BLOCK / 2)
    pairs = TILE_ROWS * (tiles / gpu.sm_count * depth + np.where(tiles > 0, TAIL * longest, 0.0))
    pairs = pairs * (1.0 if TILE_ROWS % group == 0 else UNEVEN_GROUP)
    # The efficiency is of the BF16 peak for FP8 KV too: FA3's FP8 prefill is measured no faster than its BF16 one.
    peak = gpu.bf16_flops / gpu.sm_count
    cost = traffic(pairs * 2 * (attention.head_dim + attention.value_dim), peak, profile.named(efficiency))
    beyond = (attention.head_dim - NARROW) / (WIDE - NARROW)
    cost = cost + _wide_cost(pairs * beyond, "prefill_pair", attention, precision, profile)
    return cost + times(pairs, *profile.named(pair)) + times(np.ceil(tiles / gpu.sm_count), *profile.named(tile))


def _wide_cost(count: Array, part: str, attention: Attention, precision: Precision, profile: Profile) -> Cost:
    """Extra seconds of FlashAttention 3's kernels for wide heads; zero for other heads, and where the profile has no
    such coefficient.

    count: tokens or pairs, each as a share of one of a head of WIDE elements

    In AIConfigurator's tables of an H200 (vLLM 0.24) a token of a head of 64, 128, 192 and 256 takes an SM 7.7, 11.9,
    23.0 and 29.2 ns in BF16, 6.6, 11.0, 27.2 and 33.4 ns in FP8. Without this it would be 16.2 and 20.4, 14.4 and 18.1:
    the difference grows as the head. FP8 prefill takes 1.2 and 1.5 times as long as without, which grows as what is
    beyond NARROW. BF16 prefill, also that of MLA, takes as long as without, and has no such coefficient.
    """
    name = f"{wide_kernel(precision)}.{part}_seconds"
    if attention.head_dim <= NARROW or name not in profile.coefficients:
        return zero(count)
    return times(count, *profile.named(name))


def wide_kernel(precision: Precision) -> str:
    """The prefix of the coefficients of wide heads."""
    return f"{WIDE_HEADS}{precision.kv}"
