"""Multi-head latent attention (MLA) of one layer.

    part    = FLOPs of its key blocks / (BF16 peak / SMs * eff) + tile_seconds
    decode  = |latent bytes / (bandwidth * eff), rounds of parts * part|_8
              + absorbed_passes * queries' bytes / bandwidth
    prefill = attention of as many KV heads as query heads, + the projection of the latents that were computed earlier,
              + rows of heads * prefill_row_seconds
    seconds = launch + decode + prefill

A decoding request reads each token's latent once for all heads, which makes as many FLOPs a byte as a GEMM: with 128
heads the tensor cores are the limit. Kernels compute rows of at least TILE_HEADS heads. An SM takes a tile of them of
one request, or a part of it. FlashAttention 3 cuts requests as it does elsewhere. FlashMLA, which reads FP8, cuts them
so that all SMs have the same to do. Decode multiplies by the halves of kv_b_proj where prefill multiplies by the whole.
Both read it once, so that it is counted among the linears for all tokens alike (layers/attention/mla_attention.py).
Around decode, queries and outputs of a latent's width are written, joined and read for every head: with 20 heads and
256 requests that is 7% of a step of GLM-4.7-Flash. Around prefill, keys and values of every head are.
Sparse attention (a token indexer) reads `top_k` latents at most. Its indexer is counted as the product of its heads'
queries with all keys, in FP8. That is modelled; nothing was measured.
"""

from __future__ import annotations

import numpy as np

from fp8plan.model.architecture.parts import Attention, Indexer, LatentAttention
from fp8plan.model.cost.base import Array, Cost, StepBatch, norm2, norm8, times, traffic
from fp8plan.model.cost.mixers.attention import kv_write_cost, parts_of, prefill_cost
from fp8plan.model.cost.mixers.windows import last_tokens
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16, BF16_BYTES, FP32_BYTES, Precision
from fp8plan.model.profile.profile import Profile

TILE_HEADS = 64  # query rows of a tile in FlashMLA and FlashAttention 3 (csrc/flashmla; hopper/tile_size.h)
KEY_BLOCK = 64  # tokens
DEFAULT_TOP_K = 2048  # of DeepSeek-V3.2 and GLM-5, for layers that use another layer's choice


def latent_cost(
    batch: StepBatch, latent: LatentAttention, precision: Precision, tp: int, gpu: Gpu, profile: Profile
) -> Cost:
    """Seconds of MLA in one layer of each step, shape (steps,)."""
    prefix = f"mla.{precision.kv}"
    working = (batch.decode_requests + batch.prefill_tokens) > 0
    total = times(np.where(working, 1.0, 0.0), *profile.named(f"{prefix}.launch_seconds"))
    if latent.indexer:
        total = total + _index_cost(batch, latent.indexer, gpu, profile)
    read = read_by(batch, latent)
    decode = _decode(read, latent, precision, tp, gpu, profile)
    if not batch.prefill_tokens.any():
        return total + decode
    # Prefill is computed in BF16 whatever the cache holds. (mla/prefill)
    attention = Attention(latent.heads, latent.heads, qk_width(latent), latent.v_head_dim)
    earlier = (batch.prefill_kv_tokens - batch.prefill_tokens) * float(2 * latent.dequantised_elements(tp))
    projected = traffic(earlier, gpu.bf16_flops, profile.named("gemm.bf16.compute_efficiency"))
    rows = batch.prefill_tokens * float(latent.heads // tp)
    around = times(rows, *profile.named(f"{prefix}.prefill_row_seconds"))
    return total + decode + prefill_cost(read, attention, BF16, tp, gpu, profile) + projected + around


def _decode(
    read: StepBatch, latent: LatentAttention, precision: Precision, tp: int, gpu: Gpu, profile: Profile
) -> Cost:
    prefix = f"mla.{precision.kv}.decode"
    bytes_ = read.decode_kv_tokens * float(latent_bytes(latent, precision))
    tiles = read.decode_requests * float(_tiles(latent, tp))
    if precision.kv == "fp8":
        parts, rounds = tiles, tiles / gpu.sm_count
    else:
        parts = parts_of(read, tiles, gpu.sm_count)
        rounds = np.ceil(parts / gpu.sm_count)
    computed = read.decode_kv_tokens + read.decode_requests * (KEY_BLOCK / 2)
    flops = computed * decode_flops(latent, tp) / np.maximum(parts, 1)
    part = traffic(flops, gpu.bf16_flops / gpu.sm_count, profile.named(f"{prefix}_compute_efficiency"))
    part = part + times(np.ones_like(flops), *profile.named(f"{prefix}_tile_seconds"))
    memory = traffic(bytes_, gpu.memory_bandwidth, profile.named(f"{prefix}_bandwidth_efficiency"))
    queries = read.decode_requests * float(latent.heads // tp * _latent_width(latent) * BF16_BYTES)
    absorbed = times(queries / gpu.memory_bandwidth, *profile.named(f"mla.{precision.kv}.absorbed_passes"))
    return norm8(memory, part.scaled(rounds)) + absorbed


def _tiles(latent: LatentAttention, tp: int) -> int:
    """Tiles of one rank's heads."""
    return -(-(latent.heads // tp) // TILE_HEADS)


def latent_cache_cost(tokens: Array, latent: LatentAttention, precision: Precision, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of writing the latents of `tokens` in one layer, (steps,)."""
    return kv_write_cost(tokens, _latent_width(latent), precision, gpu, profile)


def read_by(batch: StepBatch, latent: LatentAttention) -> StepBatch:
    """The steps with the tokens that an indexer leaves to attention."""
    if latent.indexer:
        return last_tokens(batch, latent.indexer.top_k)
    return last_tokens(batch, DEFAULT_TOP_K) if latent.shares_index else batch


def latent_bytes(latent: LatentAttention, precision: Precision) -> int:
    """Bytes of one token's latent on each rank."""
    return _latent_width(latent) * precision.kv_element_bytes


def _latent_width(latent: LatentAttention) -> int:
    """Elements of one token's latent, and of one head's query in decode."""
    return latent.kv_lora_rank + latent.qk_rope_head_dim


def decode_flops(latent: LatentAttention, tp: int) -> int:
    """FLOPs of one decoded token on one latent, on one rank: q k^T over all of it, p v over its first part."""
    return 2 * _tiles(latent, tp) * TILE_HEADS * (2 * latent.kv_lora_rank + latent.qk_rope_head_dim)


def qk_width(latent: LatentAttention) -> int:
    """Elements of one head's query in prefill."""
    return latent.qk_nope_head_dim + latent.qk_rope_head_dim


def _index_cost(batch: StepBatch, indexer: Indexer, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of choosing the tokens; every rank does all of it."""
    pairs = batch.decode_kv_tokens + batch.prefill_pairs
    flops = pairs * float(2 * indexer.heads * indexer.head_dim)
    keys = (batch.decode_kv_tokens + batch.prefill_kv_tokens) * float(indexer.head_dim)
    found = norm2(
        traffic(flops, gpu.fp8_flops or gpu.bf16_flops, profile.named("mla.index.compute_efficiency")),
        traffic(keys, gpu.memory_bandwidth, profile.named("memory.sustained_efficiency")),
    )
    # The scores are written in float32, and read by the choice of the top k.
    scores = traffic(
        pairs * float(2 * FP32_BYTES), gpu.memory_bandwidth, profile.named("overhead.bandwidth_efficiency")
    )
    return found + scores + times(np.where(pairs > 0, 1.0, 0.0), *profile.named("mla.index.launch_seconds"))
