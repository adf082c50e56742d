"""The mixers of a model together: which function prices which, and the sum over all layers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fp8plan.model.architecture import ModelShape
from fp8plan.model.architecture.parts import Attention, LatentAttention, Mixer, ShortConv, TokenPart
from fp8plan.model.cost.base import Array, Cost, StepBatch, times, zero
from fp8plan.model.cost.mixers.attention import (
    FLASH_ATTENTION_3,
    NARROW,
    attention_cost,
    cache_cost,
    flops_per_pair,
    kv_bytes_per_token,
    wide_kernel,
)
from fp8plan.model.cost.mixers.latent import (
    decode_flops,
    latent_bytes,
    latent_cache_cost,
    latent_cost,
    qk_width,
    read_by,
)
from fp8plan.model.cost.mixers.recurrent import KERNELS, Recurrent, recurrent_cost, scan_flops, state_bytes
from fp8plan.model.cost.mixers.windows import seen
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import Precision
from fp8plan.model.profile.profile import Profile

SCHEDULE = "attention_schedule"


def mixers_of(shape: ModelShape) -> Iterator[tuple[Mixer, int]]:
    """The distinct mixers of a model and how often they occur."""
    return ((part, number) for part, number in shape.counted if not isinstance(part, TokenPart))


def mixer_costs(
    batch: StepBatch, shape: ModelShape, precision: Precision, tp: int, gpu: Gpu, profile: Profile
) -> dict[str, Cost]:
    """Seconds of the mixers of all layers of each step, without their linears: "attention" looks back at tokens,
    "recurrent" keeps a state. Each of shape (steps,).
    """
    found: dict[str, Cost] = {}
    for mixer, number in mixers_of(shape):
        if isinstance(mixer, Attention):
            name, one = "attention", attention_cost(batch, mixer, precision, tp, gpu, profile)
        elif isinstance(mixer, LatentAttention):
            name, one = "attention", latent_cost(batch, mixer, precision, tp, gpu, profile)
        else:
            name, one = "recurrent", recurrent_cost(batch, mixer, tp, gpu, profile)
        one = one.scaled(number)
        found[name] = found[name] + one if name in found else one
    if number := unscheduled_layers(shape, precision, profile):
        working = (batch.decode_requests + batch.prefill_tokens) > 0
        planned = times(np.where(working, float(number), 0.0), *profile.named(f"{SCHEDULE}.launch_seconds"))
        found["attention"] = found["attention"] + planned
    return found


def unscheduled_layers(shape: ModelShape, precision: Precision, profile: Profile) -> int:
    """The layers whose attention plans its own parts, in a kernel before it.

    vLLM plans FlashAttention 3 once a step where all layers have the same window, and else leaves it to each layer
    (aot_schedule in v1/attention/backends/flash_attn.py). 24 layers of gpt-oss on an H200: 2.4 us each.
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
        total = total + latent_cache_cost(m, latent, precision, gpu, profile).scaled(number)
    return total


def kernels_of(shape: ModelShape, precision: Precision) -> set[str]:
    """The kernels of a model's mixers, as coefficients begin."""
    found = set()
    for mixer, _ in mixers_of(shape):
        if isinstance(mixer, Attention):
            found.add(f"attention.{precision.kv}")
            if mixer.head_dim > NARROW:
                found.add(wide_kernel(precision))
        elif isinstance(mixer, LatentAttention):
            found |= {f"mla.{precision.kv}"} | ({"mla.index"} if mixer.indexer else set())
        else:
            found.add(KERNELS[type(mixer)])
    return found


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
        return (read.decode_kv_tokens + read.prefill_pairs) * float(flops_per_pair(mixer, tp))
    if isinstance(mixer, LatentAttention):
        read, heads = read_by(batch, mixer), mixer.heads // tp
        prefill = read.prefill_pairs * float(2 * heads * (qk_width(mixer) + mixer.v_head_dim))
        return prefill + read.decode_kv_tokens * float(decode_flops(mixer, tp))
    return _scanned(batch, mixer, tp)


def _scanned(batch: StepBatch, mixer: Recurrent, tp: int) -> Array:
    if isinstance(mixer, ShortConv):
        return np.zeros(batch.prefill_tokens.shape)
    return batch.prefill_tokens * float(scan_flops(mixer, tp))
