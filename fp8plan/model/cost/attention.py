"""Softmax attention of one layer: paged decode, chunked prefill, and the writes to the KV cache before them.

    part    = bytes of its key blocks / sm_bandwidth + their tokens * token_seconds + tile_seconds (+ wide heads)
    decode  = |KV bytes of all / (bandwidth * eff), rounds of parts * part|_8 + join, where requests were cut
    prefill = (tiles / SMs * mean tile + TAIL * longest tile) + ceil(tiles / SMs) * tile_seconds
              tile = its pairs * (FLOPs of a pair / (peak / SMs * eff) + pair_seconds) (+ wide heads)
    seconds = launch + decode + prefill

Decode: in each round an SM takes one KV head of one request (a tile), or a part of it (`parts_of`).
Other backends than FlashAttention 3 are assumed to fill the SMs.
An SM computes whole key blocks (`key_block`): on average half a block more than it reads. A window begins anywhere in a
block, and adds another half.
Limits of an SM: converting E4M3 in the inner loop takes time per byte and per token, so FP8 KV does not halve the time
on Hopper. `tile_seconds` is the fixed work of a part, which decides short contexts. A backend without such limits has
no `decode_sm_bandwidth` and no `decode_token_seconds`. On Ampere the datasheet's `decode_sm_bandwidth` is a guess.
Wide heads: beyond 128 elements FlashAttention 3 has other kernels, whose tokens take longer than their bytes suggest.
Prefill: a tile is TILE_ROWS query rows of one KV head, with all query heads of its group packed together. The softmax
of a pair takes the same time for any size of head (`pair_seconds`).
A window or a chunk leaves fewer tokens to read (`seen`).
Not modelled: imbalance between long and short requests of a batch (profiles/README.md), the soft cap, and sinks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fp8plan.model.architecture.parts import Attention
from fp8plan.model.attention_backend import TRITON_DECODE
from fp8plan.model.cost.base import (
    READS,
    Array,
    Cost,
    StepBatch,
    WindowReads,
    p_norm,
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
    """The steps with the KV tokens and pairs that the attention's window or chunk leaves."""
    if attention.window:
        return _left(batch, "sliding", attention.window)
    if attention.chunk:
        return _left(batch, "chunked", attention.chunk)
    return batch


def last_tokens(batch: StepBatch, number: int) -> StepBatch:
    """The steps with queries that read at most `number` tokens, as if all requests of a step were equally long."""
    return _with(batch, _of_equal_requests(batch, "sliding", number))


def _left(batch: StepBatch, kind: str, window: int) -> StepBatch:
    known = (reads for reads in batch.windows if (reads.kind, reads.window) == (kind, window))
    return _with(batch, next(known, None) or _of_equal_requests(batch, kind, window))


def _with(batch: StepBatch, reads: WindowReads) -> StepBatch:
    return replace(batch, **{name: getattr(reads, name) for name in READS})


def _of_equal_requests(batch: StepBatch, kind: str, window: int) -> WindowReads:
    """The reads within a window, as if all decoding requests of a step were equally long, and all chunks too."""
    requests, chunks = np.maximum(batch.decode_requests, 1), np.maximum(batch.prefill_requests, 1)
    context, after = batch.decode_kv_tokens / requests, batch.prefill_kv_tokens / chunks
    before = after - batch.prefill_tokens / chunks
    if kind == "sliding":
        decode, read = np.minimum(context, window), after - np.maximum(before - window + 1, 0)
    else:  # in a long request, a token is anywhere in its chunk
        decode = np.where(context > window, (window + 1) / 2, context)
        read = after - before // window * window
    pairs = _pairs_below(kind, window, after) - _pairs_below(kind, window, before)
    return WindowReads(kind, window, decode * batch.decode_requests, read * batch.prefill_requests, pairs * chunks)


def _pairs_below(kind: str, window: int, position: Array) -> Array:
    """Query-key pairs of the queries before a position."""
    if kind == "sliding":
        growing = np.minimum(position, window)
        return np.asarray(growing * (growing + 1) / 2 + (position - growing) * window)
    remainder = position % window
    return np.asarray(position // window * (window * (window + 1) / 2) + remainder * (remainder + 1) / 2)


FLASH_ATTENTION_3 = "flash_attn_3"
SHARE, KV_BLOCK = 1.1, 128  # FlashAttention 3 cuts a request's KV at this share of an SM's work, in blocks of tokens
MOST_CUTS = 32  # flash_attn_max_num_splits_for_cuda_graph (vllm/config/attention.py)
TILE_ROWS = 128
TAIL = 0.12  # share of the longest tile for which other SMs wait at the end: fitted to profiles/h200_sxm
NARROW, WIDE = 128, 256  # most elements of a head in FlashAttention 3's common kernels, and in its widest
UNEVEN_GROUP = 1.06  # a group that does not divide a tile is loaded row by row: 4% (BF16) and 7% (FP8)


def kv_bytes_per_token(attention: Attention, precision: Precision, tensor_parallel: int) -> int:
    """K and V bytes of one token in one layer on one rank."""
    width = attention.head_dim + attention.value_dim
    return attention.heads_of_rank(tensor_parallel)[1] * width * precision.kv_element_bytes


def flops_per_pair(attention: Attention, tensor_parallel: int) -> int:
    """FLOPs of one query-key pair in one layer on one rank: Q K^T and P V."""
    return 2 * attention.heads_of_rank(tensor_parallel)[0] * (attention.head_dim + attention.value_dim)


def key_block(head_dim: int) -> int:
    """Keys that FlashAttention 3 computes at once on paged KV (tile_size_fwd_sm90, hopper/tile_size.h).

    The file has 160 for FP8, but BF16's sizes fit the timings of profiles/h200_sxm better.
    """
    if head_dim <= 128:
        return 128
    return 96 if head_dim <= 192 else 80


def attention_cost(
    batch: StepBatch,
    attention: Attention,
    precision: Precision,
    tensor_parallel: int,
    gpu: Gpu,
    profile: Profile,
    edge: Array | None = None,
    triton: bool = False,
) -> Cost:
    """Seconds of attention in one layer of each step, shape (steps,).

    edge: tokens that a decoding request computes beyond those it reads, shape (steps,); None: the mean over all lengths
    triton: Triton's kernel reads an FP8 cache that the profile's reads elsewhere
    """
    working, read = (batch.decode_requests + batch.prefill_tokens) > 0, seen(batch, attention)
    total = times(np.where(working, 1.0, 0.0), *profile.named(f"attention.{precision.kv}.launch_seconds"))
    if edge is None:
        edge = np.full(working.shape, key_block(attention.head_dim) * (1.0 if attention.window else 0.5))
    decode = _decode(read, edge, attention, precision, tensor_parallel, gpu, profile)
    total = total + (decode.scaled(TRITON_DECODE) if triton else decode)
    if batch.prefill_tokens.any():
        total = total + prefill_cost(read, attention, precision, tensor_parallel, gpu, profile)
    return total


def cache_cost(tokens: Array, attention: Attention, precision: Precision, tp: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of writing K and V of `tokens` to one layer's cache, (steps,).

    With FP8 KV the tokens' Q is quantised too, except on a GPU without FP8 tensor cores.
    """
    query, kv_heads = attention.heads_of_rank(tp)
    width = 0 if attention.shares_kv else kv_heads * (attention.head_dim + attention.value_dim)
    cost = kv_write_cost(tokens, width, precision, gpu, profile) if width else Cost(np.zeros(tokens.shape), {})
    if precision.kv == "fp8" and not gpu.stores_fp8_only:
        cost = cost + quantise_query_cost(tokens, query * attention.head_dim, gpu, profile)
    return cost


def kv_write_cost(tokens: Array, width: int, precision: Precision, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of writing K and V, read in BF16, in one layer. width: elements of both together"""
    bytes_per_token = width * (BF16_BYTES + precision.kv_element_bytes)
    return streaming_cost(f"kv_write.{precision.kv}", tokens, bytes_per_token, gpu, profile)


def quantise_query_cost(tokens: Array, width: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of quantising Q of `width` elements to E4M3, in one layer."""
    return streaming_cost("quantise_query", tokens, width * (BF16_BYTES + FP8_BYTES), gpu, profile)


def _decode(
    b: StepBatch, edge: Array, attention: Attention, precision: Precision, tp: int, gpu: Gpu, profile: Profile
) -> Cost:
    prefix, (query_heads, kv_heads) = f"attention.{precision.kv}", attention.heads_of_rank(tp)

    def coefficient(part: str) -> tuple[str, float]:
        return profile.named(f"{prefix}.decode_{part}")

    tiles = kv_heads * -(-query_heads // kv_heads * b.queries // TILE_ROWS)  # of a request
    heads = b.decode_requests * float(tiles)
    cuts = profile.backend(prefix) == FLASH_ATTENTION_3
    parts = parts_of(b, heads, gpu.sm_count) if cuts else heads
    rounds = np.ceil(parts / gpu.sm_count) if cuts else parts / gpu.sm_count
    bytes_ = b.decode_kv_tokens * float(kv_bytes_per_token(attention, precision, tp))
    computed = b.decode_kv_tokens + b.decode_requests * edge if cuts else b.decode_kv_tokens
    share = tiles * computed / np.maximum(parts, 1)  # tokens of one part
    each = (attention.head_dim + attention.value_dim) * float(precision.kv_element_bytes)
    part = times(np.ones_like(share), *coefficient("tile_seconds"))
    if f"{prefix}.decode_sm_bandwidth" in profile.coefficients:
        part = part + traffic(share * each, 1.0, coefficient("sm_bandwidth"))
    if f"{prefix}.decode_token_seconds" in profile.coefficients:
        part = part + times(share, *coefficient("token_seconds"))
    part = part + _wide_cost(share * (attention.head_dim / WIDE), "decode_token", attention, precision, profile)
    read = p_norm(8, traffic(bytes_, gpu.memory_bandwidth, coefficient("bandwidth_efficiency")), part.scaled(rounds))
    if cuts:
        read = read + times(np.where(parts > heads, 1.0, 0.0), *coefficient("join_seconds"))
    return read


def parts_of(b: StepBatch, heads: Array, sm_count: int) -> Array:
    """The number of parts that the KV is cut into, shape (steps,).

    A part is one KV head of one request. If these are few, FlashAttention 3 cuts them in whole blocks. No part then has
    more than 1.1 times an SM's share (prepare_varlen_num_blocks, hopper/flash_prepare_scheduler.cu). So 6 requests take
    longer than 8 on a model of 8 KV heads.
    """
    context = b.decode_kv_tokens / np.maximum(b.decode_requests, 1)
    cuts = np.minimum(np.ceil(sm_count / np.maximum(SHARE * heads, 1)), np.ceil(context / KV_BLOCK))
    return np.asarray(heads * np.clip(cuts, 1, MOST_CUTS))


def prefill_cost(b: StepBatch, attention: Attention, precision: Precision, tp: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of prefill attention in one layer. The chunks of one step count as equally long."""
    prefix, (heads, kv_heads) = f"attention.{precision.kv}", attention.heads_of_rank(tp)
    efficiency, pair, tile = (
        f"{prefix}.{x}" for x in ("compute_efficiency", "prefill_pair_seconds", "prefill_tile_seconds")
    )
    group, chunks = heads / kv_heads, np.maximum(b.prefill_requests, 1)
    tokens = np.maximum(b.prefill_tokens, 1)
    tiles = b.prefill_requests * kv_heads * np.ceil(tokens / chunks * group / TILE_ROWS)
    depth = b.prefill_pairs / tokens + (KV_BLOCK + TILE_ROWS / group) / 2  # the causal edge is computed in whole tiles
    longest = b.prefill_kv_tokens / chunks + KV_BLOCK / 2
    if attention.window:  # a tile reads from the first token of its first row to its last row
        longest = np.minimum(longest, attention.window + TILE_ROWS / group + KV_BLOCK / 2)
    pairs = TILE_ROWS * (tiles / gpu.sm_count * depth + np.where(tiles > 0, TAIL * longest, 0.0))
    pairs = pairs * (1.0 if TILE_ROWS % group == 0 else UNEVEN_GROUP)
    # The BF16 peak for FP8 KV too, as FlashAttention 3's FP8 prefill is no faster.
    peak = gpu.bf16_flops / gpu.sm_count
    cost = traffic(pairs * 2 * (attention.head_dim + attention.value_dim), peak, profile.named(efficiency))
    beyond = (attention.head_dim - NARROW) / (WIDE - NARROW)
    cost = cost + _wide_cost(pairs * beyond, "prefill_pair", attention, precision, profile)
    return cost + times(pairs, *profile.named(pair)) + times(np.ceil(tiles / gpu.sm_count), *profile.named(tile))


def _wide_cost(count: Array, part: str, attention: Attention, precision: Precision, profile: Profile) -> Cost:
    """Extra seconds of FlashAttention 3's kernels for wide heads; zero for other heads or without the coefficient.

    count: tokens or pairs, scaled so that those of a head of WIDE elements count whole

    In AIConfigurator's tables of an H200 (vLLM 0.24) a decoded token's extra time grows with the size of the head. That
    of FP8 prefill grows with the elements beyond NARROW. BF16 prefill, with MLA too, has none.
    """
    name = f"{wide_kernel(precision)}.{part}_seconds"
    if attention.head_dim <= NARROW or name not in profile.coefficients:
        return zero(count)
    return times(count, *profile.named(name))


def wide_kernel(precision: Precision) -> str:
    """The prefix of the coefficients of wide heads."""
    return f"{WIDE_HEADS}{precision.kv}"
