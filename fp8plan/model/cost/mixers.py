"""The mixers of a model: the sum over all layers, latent attention, and mixers that keep a state.

Multi-head latent attention (MLA) of one layer:

    part    = FLOPs of its key blocks / (BF16 peak / SMs * eff) + tile_seconds
    decode  = |latent bytes / (bandwidth * eff), rounds of parts * part|_8
              + absorbed_passes * queries' bytes / bandwidth
    prefill = attention with as many KV heads as query heads, + the projection of the latents computed earlier,
              + rows of heads * prefill_row_seconds
    seconds = launch + decode + prefill

A decoding request reads each token's latent once for all heads, so with 128 heads the tensor cores are the limit. An SM
takes a tile of at least TILE_HEADS heads of one request, or a part of it. FlashAttention 3 cuts requests as elsewhere.
FlashMLA, which reads FP8, gives all SMs the same work. Decode multiplies by the halves of kv_b_proj, prefill by the
whole. Both read it once, so it counts among the linears for all tokens (layers/attention/mla_attention.py).
Around decode, queries and outputs of a latent's width are written, joined and read for every head. Around prefill the
same happens to keys and values.
Sparse attention (a token indexer) reads at most `top_k` latents. Its indexer is modelled as the product of its heads'
queries with all keys, in FP8: not measured.

Mixers that keep a state for each request (gated delta nets, Mamba 2, short convolutions), one layer:

    decode  = bytes of the states, read and written / (bandwidth * eff)
    prefill = FLOPs of the scan / (BF16 peak * eff)
    seconds = launch + decode + prefill

The states bound a decode step, whatever the context. Prefill works on chunks of tokens with matrices of a chunk's
size, far below the tensor cores' peak.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import (
    Attention,
    DeltaNet,
    Indexer,
    KimiDelta,
    LatentAttention,
    Mamba2,
    Mixer,
    ShortConv,
)
from fp8plan.model.attention_backend import Backend, kernels
from fp8plan.model.cost.attention import (
    FLASH_ATTENTION_3,
    NARROW,
    attention_cost,
    cache_cost,
    flops_per_pair,
    kv_bytes_per_token,
    kv_write_cost,
    last_tokens,
    parts_of,
    prefill_cost,
    seen,
    wide_kernel,
)
from fp8plan.model.cost.base import Array, Cost, StepBatch, p_norm, times, traffic, zero
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16, BF16_BYTES, FP32_BYTES, Precision
from fp8plan.model.profile.profile import Profile

Recurrent: TypeAlias = DeltaNet | KimiDelta | Mamba2 | ShortConv
KERNELS: Final = {DeltaNet: "delta_net", KimiDelta: "delta_net", Mamba2: "mamba2", ShortConv: "short_conv"}

DELTA_CHUNK = 64  # tokens: third_party/flash_linear_attention/ops (FLA_CHUNK_SIZE)
MAMBA_CHUNK = 256  # tokens: the default of mamba_chunk_size in configs


def recurrent_cost(batch: StepBatch, mixer: Recurrent, tp: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of one layer with a state in each step, shape (steps,)."""
    kernel = KERNELS[type(mixer)]
    working = (batch.decode_requests + batch.prefill_tokens) > 0
    total = times(np.where(working, 1.0, 0.0), *profile.named(f"{kernel}.launch_seconds"))
    moved = batch.decode_requests * float(2 * state_bytes(mixer, tp))
    total = total + traffic(moved, gpu.memory_bandwidth, profile.named(f"{kernel}.bandwidth_efficiency"))
    if not batch.prefill_tokens.any():
        return total
    if isinstance(mixer, ShortConv):
        moved = batch.prefill_tokens * float(4 * mixer.width // tp * BF16_BYTES)  # three in, one out
        return total + traffic(moved, gpu.memory_bandwidth, profile.named(f"{kernel}.bandwidth_efficiency"))
    scanned = batch.prefill_tokens * float(scan_flops(mixer, tp))
    return total + traffic(scanned, gpu.bf16_flops, profile.named(f"{kernel}.compute_efficiency"))


def state_bytes(mixer: Recurrent, tp: int) -> int:
    """Bytes of one request's state in one layer on one rank."""
    return sum(cache.state_bytes for cache in mixer.caches(tp))


def scan_flops(mixer: DeltaNet | KimiDelta | Mamba2, tp: int) -> int:
    """FLOPs of one prefilled token in one layer on one rank: those of the state, and those of its chunk."""
    if isinstance(mixer, Mamba2):
        heads, groups = mixer.heads // tp, max(1, mixer.groups // tp)
        inner = heads * mixer.head_dim
        return 4 * inner * mixer.state_size + 2 * MAMBA_CHUNK * (groups * mixer.state_size + inner)
    if isinstance(mixer, KimiDelta):
        heads, key, value = mixer.heads // tp, mixer.head_dim, mixer.head_dim
    else:
        heads, key, value = mixer.value_heads // tp, mixer.key_dim, mixer.value_dim
    return heads * (4 * key * value + 4 * DELTA_CHUNK * (key + value))


TILE_HEADS = 64  # query rows of a tile in FlashMLA and FlashAttention 3 (csrc/flashmla; hopper/tile_size.h)
KEY_BLOCK = 64  # tokens
DEFAULT_TOP_K = 2048  # DeepSeek-V3.2's and GLM-5's, for layers that use another layer's choice


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
    # Prefill computes in BF16 for any dtype of the cache (mla/prefill).
    attention = Attention(latent.heads, latent.heads, latent.query_width, latent.v_head_dim)
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
    tiles = read.decode_requests * float(_tiles(latent, tp, read.queries))
    if precision.kv == "fp8":
        parts, rounds = tiles, tiles / gpu.sm_count
    else:
        parts = parts_of(read, tiles, gpu.sm_count)
        rounds = np.ceil(parts / gpu.sm_count)
    computed = read.decode_kv_tokens + read.decode_requests * (KEY_BLOCK / 2)
    flops = computed * decode_flops(latent, tp, read.queries) / np.maximum(parts, 1)
    part = traffic(flops, gpu.bf16_flops / gpu.sm_count, profile.named(f"{prefix}_compute_efficiency"))
    part = part + times(np.ones_like(flops), *profile.named(f"{prefix}_tile_seconds"))
    memory = traffic(bytes_, gpu.memory_bandwidth, profile.named(f"{prefix}_bandwidth_efficiency"))
    queries = read.decode_requests * float(read.queries * (latent.heads // tp) * latent.latent_width * BF16_BYTES)
    absorbed = times(queries / gpu.memory_bandwidth, *profile.named(f"mla.{precision.kv}.absorbed_passes"))
    return p_norm(8, memory, part.scaled(rounds)) + absorbed


def _tiles(latent: LatentAttention, tp: int, queries: int) -> int:
    """Tiles of one rank's heads, for that many query tokens."""
    return -(-queries * (latent.heads // tp) // TILE_HEADS)


def read_by(batch: StepBatch, latent: LatentAttention) -> StepBatch:
    """The steps with the tokens that an indexer leaves to attention."""
    if latent.indexer:
        return last_tokens(batch, latent.indexer.top_k)
    return last_tokens(batch, DEFAULT_TOP_K) if latent.shares_index else batch


def latent_bytes(latent: LatentAttention, precision: Precision) -> int:
    """Bytes of one token's latent on each rank."""
    return latent.latent_width * precision.kv_element_bytes


def decode_flops(latent: LatentAttention, tp: int, queries: int = 1) -> int:
    """FLOPs of a request's query tokens on one latent, on one rank: q k^T over all of it, p v over its first part."""
    return 2 * _tiles(latent, tp, queries) * TILE_HEADS * (latent.kv_lora_rank + latent.latent_width)


def _index_cost(batch: StepBatch, indexer: Indexer, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of the choice of tokens. Every rank makes the whole choice."""
    pairs = batch.decode_kv_tokens * batch.queries + batch.prefill_pairs
    flops = pairs * float(2 * indexer.heads * indexer.head_dim)
    keys = (batch.decode_kv_tokens + batch.prefill_kv_tokens) * float(indexer.head_dim)
    product = p_norm(
        2,
        traffic(flops, gpu.fp8_flops or gpu.bf16_flops, profile.named("mla.index.compute_efficiency")),
        traffic(keys, gpu.memory_bandwidth, profile.named("memory.sustained_efficiency")),
    )
    # Scores are written in float32, and read to choose the top k.
    scores = traffic(
        pairs * float(2 * FP32_BYTES), gpu.memory_bandwidth, profile.named("overhead.bandwidth_efficiency")
    )
    return product + scores + times(np.where(pairs > 0, 1.0, 0.0), *profile.named("mla.index.launch_seconds"))


SCHEDULE = "attention_schedule"


def mixer_costs(
    batch: StepBatch, shape: ModelShape, precision: Precision, tp: int, gpu: Gpu, profile: Profile
) -> dict[str, Cost]:
    """Seconds of the mixers of all layers in each step, without their linears, each of shape (steps,).

    "attention" looks back at tokens, "recurrent" keeps a state.
    """
    costs: dict[str, Cost] = {}
    used = kernels(gpu, precision, shape) if precision.kv == "fp8" else {}
    for mixer, number in shape.mixers:
        if isinstance(mixer, Attention):
            triton = used.get(mixer) == Backend.TRITON_ATTN
            name, cost = "attention", attention_cost(batch, mixer, precision, tp, gpu, profile, triton=triton)
        elif isinstance(mixer, LatentAttention):
            name, cost = "attention", latent_cost(batch, mixer, precision, tp, gpu, profile)
        else:
            name, cost = "recurrent", recurrent_cost(batch, mixer, tp, gpu, profile)
        cost = cost.scaled(number)
        costs[name] = costs[name] + cost if name in costs else cost
    if number := unscheduled_layers(shape, precision, profile):
        working = (batch.decode_requests + batch.prefill_tokens) > 0
        planned = times(np.where(working, float(number), 0.0), *profile.named(f"{SCHEDULE}.launch_seconds"))
        costs["attention"] = costs["attention"] + planned
    return costs


def unscheduled_layers(shape: ModelShape, precision: Precision, profile: Profile) -> int:
    """The number of layers whose attention plans its own parts, in a kernel before it.

    vLLM plans FlashAttention 3 once per step if all layers have the same window, else in each layer (aot_schedule in
    v1/attention/backends/flash_attn.py).
    """
    parts = shape.parts_of(Attention)
    if len({attention.window for attention, _ in parts}) < 2:
        return 0
    backend = profile.kernel_backends.get(f"attention.{precision.kv}")
    return sum(number for _, number in parts) if backend == FLASH_ATTENTION_3 else 0


def caches_cost(m: Array, shape: ModelShape, precision: Precision, tp: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of writing `m` tokens to the KV caches of all layers, shape (steps,)."""
    total = zero(m)
    for attention, number in shape.parts_of(Attention):
        total = total + cache_cost(m, attention, precision, tp, gpu, profile).scaled(number)
    for latent, number in shape.parts_of(LatentAttention):
        total = total + kv_write_cost(m, latent.latent_width, precision, gpu, profile).scaled(number)
    return total


def kernels_of(shape: ModelShape, precision: Precision) -> set[str]:
    """The kernels of a model's mixers, as prefixes of coefficients."""
    kernels = set()
    for mixer, _ in shape.mixers:
        if isinstance(mixer, Attention):
            kernels.add(f"attention.{precision.kv}")
            if mixer.head_dim > NARROW:
                kernels.add(wide_kernel(precision))
        elif isinstance(mixer, LatentAttention):
            kernels.add(f"mla.{precision.kv}")
            if mixer.indexer:
                kernels.add("mla.index")
        else:
            kernels.add(KERNELS[type(mixer)])
    return kernels


def bytes_read(batch: StepBatch, mixer: Mixer, precision: Precision, tp: int) -> Array:
    """The least bytes that one layer's mixer reads from its cache in each step, shape (steps,)."""
    if isinstance(mixer, Attention):
        read, each = seen(batch, mixer), kv_bytes_per_token(mixer, precision, tp)
    elif isinstance(mixer, LatentAttention):
        read, each = read_by(batch, mixer), latent_bytes(mixer, precision)
    else:
        return batch.decode_requests * float(state_bytes(mixer, tp))
    return np.asarray((read.decode_kv_tokens + read.prefill_kv_tokens) * float(each))


def flops(batch: StepBatch, mixer: Mixer, tp: int) -> Array:
    """FLOPs of one layer's mixer without its linears, shape (steps,)."""
    if isinstance(mixer, Attention):
        read = seen(batch, mixer)
        return (read.decode_kv_tokens * read.queries + read.prefill_pairs) * float(flops_per_pair(mixer, tp))
    if isinstance(mixer, LatentAttention):
        read, heads = read_by(batch, mixer), mixer.heads // tp
        prefill = read.prefill_pairs * float(2 * heads * (mixer.query_width + mixer.v_head_dim))
        return prefill + read.decode_kv_tokens * float(decode_flops(mixer, tp, read.queries))
    return batch.prefill_tokens * (0.0 if isinstance(mixer, ShortConv) else float(scan_flops(mixer, tp)))
