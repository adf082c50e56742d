"""Mixers that keep a state for each request: gated delta nets, Mamba 2, short convolutions; one layer.

    decode  = bytes of the states, read and written / (bandwidth * eff)
    prefill = FLOPs of the scan / (BF16 peak * eff)
    seconds = launch + decode + prefill

A decode step is bound by its states, whatever the context. Prefill works on chunks of tokens with matrices of a chunk's
size, far below the tensor cores' peak.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np

from fp8plan.model.architecture.parts import DeltaNet, KimiDelta, Mamba2, ShortConv
from fp8plan.model.cost.base import Cost, StepBatch, times, traffic
from fp8plan.model.hardware import Gpu
from fp8plan.model.precision import BF16_BYTES
from fp8plan.model.profile.profile import Profile

Recurrent: TypeAlias = DeltaNet | KimiDelta | Mamba2 | ShortConv
KERNELS: Final = {DeltaNet: "delta_net", KimiDelta: "delta_net", Mamba2: "mamba2", ShortConv: "short_conv"}

DELTA_CHUNK = 64  # tokens: third_party/flash_linear_attention/ops (FLA_CHUNK_SIZE)
MAMBA_CHUNK = 256  # tokens: the default of mamba_chunk_size in configs


def recurrent_cost(batch: StepBatch, mixer: Recurrent, tp: int, gpu: Gpu, profile: Profile) -> Cost:
    """Seconds of one such layer of each step, shape (steps,)."""
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
    """FLOPs of one prefilled token in one layer on one rank: those of the state, and of the chunk that it stands in."""
    if isinstance(mixer, Mamba2):
        heads, groups = mixer.heads // tp, max(1, mixer.groups // tp)
        inner = heads * mixer.head_dim
        return 4 * inner * mixer.state_size + 2 * MAMBA_CHUNK * (groups * mixer.state_size + inner)
    if isinstance(mixer, KimiDelta):
        heads, key, value = mixer.heads // tp, mixer.head_dim, mixer.head_dim
    else:
        heads, key, value = mixer.value_heads // tp, mixer.key_dim, mixer.value_dim
    return heads * (4 * key * value + 4 * DELTA_CHUNK * (key + value))
